"""Files that belong together: positions stored beside the features, and which files of a folder are bags at all."""

import os
from collections.abc import Iterator
from pathlib import Path

from gated_srp.data.bag import BagError
from gated_srp.data.files.encoders import canonical, encoder_of_folder
from gated_srp.data.files.opening import CONTAINERS, opened
from gated_srp.errors import UserError

_POSITION_FOLDERS = ("patches", "coords", "coordinates")
_NOT_FEATURES = {
    "coords",
    "coordinates",
    "labels",
    "patch_labels",
    "inst_labels",
}  # torchmil: one array a file, told apart by the folder
_PAIRS = {"pt_files": "h5_files", "feats_pt": "feats_h5"}


def position_files(path: Path) -> Iterator[Path]:
    """Existing files that may hold the positions of this bag's patches, the likeliest first."""
    stem = path.stem
    yield from _existing(path.with_name(f"{stem}.index.npz"), path.with_name(f"{stem}_patches.h5"))
    if path.suffix.lower() != ".h5":
        yield from _existing(path.with_suffix(".h5"))
    up = path.parent.parent
    if pair := _PAIRS.get(path.parent.name):
        yield from _existing(up / pair / f"{stem}.h5")
    for level in (path.parent, up, up.parent):
        for folder in _POSITION_FOLDERS:
            here = level / folder
            if here != path.parent:
                yield from _existing(
                    *(here / name for name in (f"{stem}_patches.h5", f"{stem}.h5", f"{stem}.npy", f"{stem}.npz"))
                )


def _existing(*paths: Path) -> Iterator[Path]:
    return (path for path in paths if path.is_file())


def find_bags(folder: str | Path, *, encoder: str | None = None) -> list[Path]:
    """All feature files below a folder, sorted; positions without features and other sidecars are left out.

    Links to folders are followed, each real folder once. ``encoder`` leaves out folders that name another one.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise UserError(f"{folder}: no such folder. Expected a folder of feature files ({', '.join(CONTAINERS)}).")
    wanted = canonical(encoder) if encoder else None
    return sorted(
        path
        for path in _walk(folder)
        if _is_bag(path) and (wanted is None or encoder_of_folder(path) in (None, wanted))
    )


def _walk(folder: Path) -> Iterator[Path]:
    seen: set[tuple[int, int]] = set()
    for here, folders, files in os.walk(folder, followlinks=True):
        info = os.stat(here)
        if (info.st_dev, info.st_ino) in seen:
            folders.clear()
            continue
        seen.add((info.st_dev, info.st_ino))
        yield from (Path(here, name) for name in files)
        yield from (Path(here, name) for name in folders if name.endswith(".zarr"))
        folders[:] = sorted(name for name in folders if not name.startswith(".") and not name.endswith(".zarr"))


def _is_bag(path: Path) -> bool:
    ending, home = path.suffix.lower(), path.parent.name
    if ending not in CONTAINERS or path.name.startswith(".") or path.name.endswith(".index.npz"):
        return False
    if ending == ".npy" and home in _NOT_FEATURES:
        return False
    if home in _PAIRS and (path.parent.parent / _PAIRS[home] / f"{path.stem}.h5").is_file():
        return False  # the same features with their positions
    if not path.exists():  # a dangling link; one that loops is kept, to be named
        return path.is_symlink() and _loops(path)
    # AtlasPatch keeps features in patches/, CLAM keeps positions there: only the content tells.
    doubtful = home in _POSITION_FOLDERS or path.stem.endswith("_patches")
    return not doubtful or ending == ".zarr" or not _positions_alone(path)


def _loops(path: Path) -> bool:
    try:
        os.stat(path)
    except OSError as error:
        return not isinstance(error, FileNotFoundError)
    return False


def _positions_alone(path: Path) -> bool:
    try:
        with opened(path) as file:
            names = file.names()
    except BagError:
        return False  # broken: to be named
    return bool(names) and {name.split("/")[0] for name in names} <= {"coords", "coordinates", "passports", "imgs"}
