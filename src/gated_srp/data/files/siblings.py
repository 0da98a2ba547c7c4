"""What lies around a feature file: positions of its patches beside it, other files of its folder, and the encoder that these name.

Shapes: N patches.
"""

import json
import os
import re
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gated_srp.data.bag import BagError
from gated_srp.data.files.containers import CONTAINERS, Container, opened
from gated_srp.errors import Note, UserError, counted
from gated_srp.files import as_stored

SLIDE_IMAGES = (".svs", ".tif", ".tiff", ".ndpi", ".mrxs", ".scn", ".dcm", ".vms", ".vmu", ".svslide", ".bif", ".czi")

_POSITION_FOLDERS = ("patches", "coords", "coordinates")
_LABELS = {"labels", "patch_labels", "inst_labels"}  # torchmil keeps one array per file; the folder says which
_OF_RUNS = ("model.safetensors", "state.pt")  # what our own runs leave
_PAIRS = {"pt_files": "h5_files", "feats_pt": "feats_h5"}
_COORDS = ("coords", "coordinates")
_ENDS = ("_patches.h5", ".h5", ".npy", ".npz", ".index.npz")  # of a file of positions, after the slide's name
_EMBEDDINGS = "slide_features"  # begins TRIDENT's folders of one vector per slide
_HDF5 = (".h5", ".hdf5")
_LARGEST = 2**53  # beyond it a float coordinate is no whole number

Places = list[tuple[str, dict[str, Any]]]  # places and the attributes found there


class Positions(NamedTuple):
    values: Tensor  # (N, 2), int64 where whole
    places: Places
    centres: bool = False  # of patches, instead of corners
    microns: bool = False
    side: float | None = None  # of a patch, where the file holds bounds


def position_files(path: Path, coords: Path | None = None) -> Iterator[Path]:
    """Existing files that may hold the positions of this bag's patches, the likeliest first; ``coords``: in this folder alone."""
    for place in _position_places(path, coords):
        file = place if place.isascii() else str(as_stored(place))
        if os.path.isfile(file):
            yield Path(file)


def _position_places(path: Path, coords: Path | None) -> Iterator[str]:
    """As text: every reading of a bag asks for dozens of places, and a `Path` costs more than looking whether a file is there."""
    stem, home, up = path.stem, path.parent, path.parent.parent
    if coords is not None:
        homes = (str(coords), *(os.path.join(coords, folder) for folder in _POSITION_FOLDERS))
        yield from (os.path.join(here, f"{stem}{end}") for here in homes for end in _ENDS)
        return
    yield from (os.path.join(home, f"{stem}.index.npz"), os.path.join(home, f"{stem}_patches.h5"))
    if path.suffix.lower() != ".h5":
        yield str(path.with_suffix(".h5"))
    if pair := _PAIRS.get(home.name):
        yield os.path.join(up, pair, f"{stem}.h5")
    for level in (home, up, up.parent):
        for folder in _POSITION_FOLDERS:
            here = os.path.join(level, folder)
            if os.path.isdir(here) and Path(here) != home:  # most are not there, and need no look for each file in them
                yield from (os.path.join(here, f"{stem}{end}") for end in _ENDS[:4])


def read_positions(
    file: Container, names: Sequence[str], coords_key: str | None, coords: Path | None = None
) -> Positions:
    """Positions from the file itself, else from a file beside it; from the folder ``coords`` alone where one is named."""
    if coords_key:
        name = coords_key if coords_key in names or file.has(coords_key) else None
    else:
        name = next((n for n in _COORDS if n in names), None)
    if name is not None and coords is None:
        return _tidy(file, name, [("coords", file.attrs(name))])
    for beside in () if coords_key and coords is None else position_files(file.path, coords):
        try:
            with opened(beside) as other:
                found = _beside(other, coords_key)
        except BagError as error:
            what = f"its positions cannot be read: {error.where}: {error.what}"
            raise file.error(error.kind, what, error.cure) from error
        if found:
            return found
    stem = file.path.stem
    if coords is not None:
        what = f"no positions in {coords} (looked for {', '.join(f'{stem}{end}' for end in _ENDS)})"
        raise file.error("no_coords", what, "Correct `coords`, or leave the slide out with `exclude`.")
    raise file.error(
        "no_coords",
        f"no '{coords_key or 'coords'}' (found: {', '.join(names) or 'nothing'}), and no positions beside it "
        f"({stem}.index.npz, h5_files/{stem}.h5, patches/{stem}_patches.h5, patches/{stem}.h5)",
        "Gated SRP needs patch positions; name their folder with `coords` (--coords), the key with coords_key, or extract again.",
    )


def _beside(other: Container, coords_key: str | None) -> Positions | None:
    names = other.names()
    if other.path.name.endswith(".index.npz"):
        # slideflow's index of a bag; with `locations` it is a TFRecord's, whose arr_0 are byte offsets.
        if "arr_0" not in names or "locations" in names:
            return None
        return _tidy(other, "arr_0", [("coords", {})])._replace(centres=True)
    lone = ("features", "arr_0") if other.path.suffix in (".npy", ".npz") else ()  # the folder says what the array is
    name = next((n for n in (coords_key, *_COORDS, *lone) if n in names), None)
    if name is None:
        return None
    where = other.path.name
    return _tidy(other, name, [(f"coords of {where}", other.attrs(name)), (f"root of {where}", other.attrs())])


def _tidy(file: Container, name: str, places: Places) -> Positions:
    """x and y of each patch from (N, 2), (N, 4) bounds, (N, 5) of AtlasPatch, with or without a batch axis."""
    shape, dtype = file.spec(name)
    rows = shape[1:] if len(shape) == 3 and shape[0] == 1 else shape
    if rows == (0,):
        return Positions(torch.zeros(0, 2, dtype=torch.int64), places)
    if len(rows) != 2 or rows[1] not in (2, 4, 5) or dtype == torch.bool:
        what = f"'{name}' has shape {shape}, expected (N, 2): x and y of each patch"
        raise file.error("bad_coords", what, "Name the right array: coords_key.")
    table = file.read(name).reshape(rows)
    side = float((table[:, 2] - table[:, 0]).median()) if rows[1] == 4 and len(table) else None
    values = table[:, :2].contiguous()  # (N, 2)
    if not bool((values.abs() < _LARGEST).all()):  # NaN is not smaller either
        what = f"'{name}' holds positions that are not finite or beyond any slide"
        raise file.error("bad_coords", what, "Drop those patches, or extract again.")
    if values.is_floating_point():
        values = values.double()
        values = values.long() if bool((values == values.round()).all()) else values
    return Positions(values, places, side=side if side and side > 0 else None)


# Feature files of a folder -------------------------------------------------------------------------------------------


class Folder(NamedTuple):
    """The feature files below a folder, sorted, and the slide embeddings among them that were left out."""

    bags: list[Path]
    embeddings: list[Path]


def find_bags(folder: str | Path, *, encoder: str | None = None) -> list[Path]:
    """All feature files below a folder, sorted; positions without features, slide embeddings and other sidecars are left out.

    Links to folders are followed, each real folder once. ``encoder`` leaves out folders that name another one.
    """
    return look_into(folder, encoder=encoder).bags


def look_into(folder: str | Path, *, encoder: str | None = None) -> Folder:
    """As `find_bags`, with what a user should be told was left out."""
    folder = as_stored(folder)
    if not folder.is_dir():
        cure = f"Expected a folder of feature files ({', '.join(CONTAINERS)})."
        raise UserError("no such folder", where=folder, cure=cure, kind="missing")
    files = sorted(filter(_may_be_bag, _walk(folder)))
    embeddings = [path for path in files if path.parent.name.startswith(_EMBEDDINGS)]
    files = [path for path in files if not path.parent.name.startswith(_EMBEDDINGS)]
    arrays = {path.stem for path in files if path.suffix.lower() not in _HDF5}
    bags = {path for path in files if not (_doubtful(path, arrays) and _positions_alone(path))}
    bags -= {path for path in bags if path.suffix.lower() not in _HDF5 and bags.intersection(_twins(path))}
    wanted = (path for path in bags if not encoder or may_be_same(encoder_of_folder(path) or encoder, encoder))
    return Folder(sorted(wanted), embeddings)


def embeddings_left_out(embeddings: Sequence[Path]) -> tuple[Note, ...]:
    """What to say of them, if there are any."""
    if not embeddings:
        return ()
    folders = sorted({path.parent.name for path in embeddings})
    what = f"{counted(len(embeddings), 'slide embedding')}, one vector per slide, left out ({', '.join(folders)})"
    return (Note("note", "slide_embeddings", what, cure="Nothing to do: Gated SRP reads features of patches."),)


def nothing_found(folder: str | Path, *, encoder: str | None = None) -> UserError:
    """Why no feature file was found in a folder, and what to do."""
    cure = "Point at the folder of an extraction (.h5, .pt, .npz, ...), or at a cohort.yaml."
    found = look_into(folder)
    if encoder and found.bags:
        names = sorted({name for path in found.bags if (name := encoder_of_folder(path))})
        what = f"no feature file of {encoder} in it, but {len(found.bags)} of {', '.join(names)}"
        return UserError(what, where=folder, cure="Correct `encoder`, or point `features` elsewhere.", kind="missing")
    if found.embeddings:
        several = "s" if len(found.embeddings) > 1 else ""
        what = f"{len(found.embeddings)} slide embedding{several}, one vector per slide, but no features of patches"
        cure = "Gated SRP needs patches; point at the folder of patch features."
        return UserError(what, where=folder, cure=cure, kind="slide_embedding")
    if images := sum(path.suffix.lower() in SLIDE_IMAGES for path in _walk(Path(folder))):
        what = f"{counted(images, 'slide image')}, but no feature file in it"
        cure = f"Make them with `gated-srp extract {folder} -o feats/ --encoder NAME`, then point at feats/."
    else:
        what = "no feature file in it"
    return UserError(what, where=folder, cure=cure, kind="missing")


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


def _may_be_bag(path: Path) -> bool:
    """By its name alone."""
    ending, home = path.suffix.lower(), path.parent.name
    if ending not in CONTAINERS or path.name.startswith(".") or path.name.endswith(".index.npz"):
        return False
    if path.name in _OF_RUNS and (path.parent / "config.yaml").is_file():
        return False
    if home in _LABELS or (ending == ".npy" and home in _POSITION_FOLDERS):
        return False
    try:
        path.stat()
    except FileNotFoundError:  # a dangling link
        return False
    except OSError:  # a link that loops is kept, so that it is reported
        return path.is_symlink()
    return True


def _doubtful(path: Path, arrays: set[str]) -> bool:
    """Whether only the content shows if there are features: AtlasPatch has them in patches/, CLAM positions; h5_files hold either."""
    if path.suffix.lower() == ".zarr":
        return False
    beside = path.suffix.lower() in _HDF5 and path.stem in arrays
    return beside or path.parent.name in _POSITION_FOLDERS or path.stem.endswith("_patches")


def _twins(path: Path) -> Iterator[Path]:
    """HDF5 files that hold the same features with their positions."""
    yield path.with_suffix(".h5")
    if pair := _PAIRS.get(path.parent.name):
        yield path.parent.parent / pair / f"{path.stem}.h5"


def _positions_alone(path: Path) -> bool:
    try:
        with opened(path) as file:
            return only_positions(file.names())
    except BagError:
        return False  # broken: kept, so that it is reported


def only_positions(names: Sequence[str]) -> bool:
    """Whether arrays of these names are positions, and no features."""
    tops = {name.split("/")[0] for name in names}
    return bool(tops & set(_COORDS)) and tops <= {*_COORDS, "passports", "imgs"}


# Encoder names: every tool spells them differently, and a width does not identify one (1536: UNI-v2, GigaPath, H-optimus)

# canonical name: (widths it is known to give, other spellings). Case, dashes, dots and spaces do not matter.
_TABLE: dict[str, tuple[tuple[int, ...], str]] = {
    "uni_v1": ((1024,), "uni uni1 uni_1"),
    "uni_v2": ((1536,), "uni2 uni2_h uni_2 uni_v2_h univ2"),
    "conch_v1": ((512,), "conch conch1"),
    "conch_v15": ((768,), "conch1_5 conch_v1_5 conchv1_5 conch_1_5"),
    "virchow": ((2560, 1280), "virchow_v1 virchow_full virchow1"),
    "virchow2": ((2560, 1280), "virchow_v2 virchow2_full"),
    "gigapath": ((1536,), "prov_gigapath"),
    "hoptimus0": ((1536,), "h_optimus_0 hoptimus h_optimus h_optimus0 hoptimus_0"),
    "hoptimus1": ((1536,), "h_optimus_1 h_optimus1 hoptimus_1"),
    "phikon": ((768,), "phikon_v1"),
    "phikon_v2": ((1024,), "phikon2"),
    "ctranspath": ((768,), "chief_ctranspath"),
    "resnet50": ((1024, 2048), "resnet50_trunc resnet_50"),
    "medsiglip_448": ((1152,), "medsiglip med_siglip medsiglip448"),
    "vit_b16_torchvision": ((768,), "torchvision_vit_b_16"),  # AtlasPatch's vit_b_16, IMAGENET1K_V1
    "vit_b16_google": ((768,), "google_vit_base_patch16_224"),
    "vit_b16_timm": ((768,), "vit_base_patch16_224 timm_vit_base_patch16_224"),
    "vit_b16": ((768,), "vit_b_16 vit_base_patch16 vitb16 vit_base"),
    "efficientnet_lite0": ((1280,), "tf_efficientnet_lite0 efficientnet_lite_0"),
}
_EXACT = {"vit_b_16": "vit_b16_torchvision"}  # with these very characters: "ViT-B/16" says less
# Version 0.2 had one name for them; its files, configs and cards may mean any.
_OLD = {"vit_b16": ("vit_b16_torchvision", "vit_b16_google", "vit_b16_timm")}
_NAMES = {spelling: name for name, (_, others) in _TABLE.items() for spelling in (name, *others.split())}
_CODE_HASH = re.compile(r"-[0-9a-f]{8}$")  # STAMP's folder: <extractor>-<hash of its code>
_ENCODER_FOLDER = re.compile(r"^(?:slide_features_|features_|feats_|extracted-)(?P<name>.+)$")


def canonical(name: str) -> str:
    """The name this package uses; a name that the table lacks comes back tidied, never guessed.

    >>> canonical("UNI2-h"), canonical("prov-gigapath"), canonical("MyEncoder v3")
    ('uni_v2', 'gigapath', 'myencoder_v3')
    """
    plain = _CODE_HASH.sub("", name.strip().lower())
    tidy = re.sub(r"[^a-z0-9]+", "_", plain).strip("_")
    return _EXACT.get(plain) or _NAMES.get(tidy, tidy)


def models_of(name: str) -> tuple[str, ...]:
    """The canonical names that a name can mean: one, except for the old names of several models."""
    return _OLD.get(canonical(name), (canonical(name),))


def may_be_same(one: str, other: str) -> bool:
    """Whether two names can mean one encoder.

    >>> may_be_same("vit_b_16", "google/vit-base-patch16-224"), may_be_same("vit_b_16", "vit_b16")
    (False, True)
    """
    return bool(set(models_of(one)) & set(models_of(other)))


def about_old_name(*names: str) -> str:
    """What to say where one of the names is an old one of several models; else empty."""
    of = {name: models_of(name) for name in names if len(models_of(name)) > 1}
    return "".join(
        f"; {canonical(name)!r} is an old name of {', '.join(them[:-1])} and {them[-1]}" for name, them in of.items()
    )


def is_known(name: str) -> bool:
    """Whether the table has this encoder under any spelling."""
    return canonical(name) in _TABLE


def known_widths(name: str) -> tuple[int, ...]:
    """Feature widths the encoder is known to give; empty where it is unknown."""
    return _TABLE.get(canonical(name), ((), ""))[0]


def encoder_of_folder(path: Path) -> str | None:
    """The encoder that a feature file's folders name (``features_uni_v2``, STAMP's ``uni2-0f3ab21c``), or None.

    A folder's name is weak evidence: what the file says and what the caller says come first.

    >>> encoder_of_folder(Path("job/20x_256px_0px_overlap/features_uni_v2/s1.h5"))
    'uni_v2'
    """
    for folder, above in pairwise((*path.parts[-2:-5:-1], "")):
        named = _ENCODER_FOLDER.match(folder)
        name = named["name"] if named else folder
        # A name that the table lacks is believed in TRIDENT's tree alone: feats_h5 or features_2024 name no encoder.
        if is_known(name) or (named and above.endswith("px_overlap")):
            return canonical(name)
    try:  # slideflow names the class of the extractor, such as ``...CTransPathFeatures``
        extractor = json.loads((path.parent / "bags_config.json").read_text("utf-8"))["extractor"]["class"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    name = str(extractor).rsplit(".", 1)[-1].removesuffix("Features")
    return canonical(name) if is_known(name) else None
