"""Feature files as they are written: TRIDENT's layout, or AtlasPatch's. A file is there whole or not at all.

Shapes: N patches, D width of the features.
"""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import h5py
import numpy as np
from PIL import Image

from gated_srp.bounded import try_out
from gated_srp.data.files.containers import opened
from gated_srp.errors import UserError, counted
from gated_srp.files import full_hash, sampled_hash, whole, whole_hdf5, write_json
from gated_srp.slides.reader import SlideError, SlideInfo, slide_name
from gated_srp.slides.tiles import TilePlan, Tiling

if TYPE_CHECKING:
    from gated_srp.data.regions import Regions

_COUNT = "patches.json"  # in a folder of patch images: it is whole
_CUT = ("patch_size", "target_magnification", "overlap", "tissue", "mpp", "regions", "exclude_pen")
_ROWS = 64  # of a chunk: it must fit into HDF5's cache of 1 MB, or each batch rewrites it


@dataclass(frozen=True)
class Job:
    """What is extracted into one file. ``weights``: the name of the weight file, where one was given."""

    slide: Path
    tiling: Tiling
    encoder: str
    width: int
    mpp: float | None = None
    weights: str | None = None
    resampling: str | None = None
    normalisation: str | None = None
    regions: "Regions | None" = None

    @property
    def name(self) -> str:
        return slide_name(self.slide)

    def settings(self) -> dict[str, Any]:
        """All settings that decide the features; a file made with others is refused."""
        tiling = self.tiling
        # Not recorded where nothing was drawn: such files are as those of versions that knew no regions.
        drawn: dict[str, Any] = {} if self.regions is None else {"regions": _drawn(self.regions, self.name)}
        drawn |= {"exclude_pen": True} if tiling.exclude_pen else {}
        return {
            "patch_size": tiling.size,
            "target_magnification": tiling.magnification,
            "overlap": tiling.overlap,
            "tissue": tiling.tissue,
            "mpp": self.mpp,
            "weights": self.weights,
            "resampling": self.resampling,
            "normalisation": self.normalisation,
            **drawn,
        }


def _drawn(regions: "Regions", slide: str) -> dict[str, Any]:
    """The rule, and the content of the slide's file of annotations, by which it is known again."""
    file = regions.file_of(slide)
    return {**regions.rule, "sha256": None if file is None else full_hash(file)}


class Trident:
    """<out>/20x_256px_0px_overlap/features_<encoder>/<slide>.h5"""

    def __init__(self, out: Path) -> None:
        self.out = out

    def path(self, job: Job) -> Path:
        return self.out / job.tiling.folder / f"features_{job.encoder}" / f"{job.name}.h5"

    def picture(self, job: Job) -> Path:
        return self.out / job.tiling.folder / "visualization" / f"{job.name}.jpg"

    def images(self, job: Job) -> Path:
        """The folder of a slide's patches as images."""
        return self.picture(job).parent.with_name("patch_images") / job.name

    def has_images(self, job: Job) -> bool:
        """Whether all are there, cut with the same settings; those of the encoder do not matter."""
        try:
            said = json.loads((self.images(job) / _COUNT).read_text(encoding="utf-8"))
            wanted = json.loads(json.dumps(job.settings()))
            same = all(said.get(key) == wanted.get(key) for key in _CUT)
            return same and said["patches"] == sum(1 for _ in self.images(job).glob("*.png"))
        except (OSError, ValueError, LookupError, AttributeError):  # not there, or somebody else's
            return False

    def begin_images(self, job: Job, coords: np.ndarray) -> None:
        """Images of other patches in the folder, of another extraction, are refused: nothing is removed, nothing mixed."""
        names = {f"{x}_{y}.png" for x, y in coords.tolist()}
        others = sum(path.name not in names for path in self.images(job).glob("*.png"))
        if others:
            what = f"{self.images(job)} has {counted(others, 'image')} of other patches than those asked for"
            cure = "Choose another -o, or remove that folder to have it written again."
            raise SlideError(job.slide, what, cure=cure, kind="other_settings")

    def finish_images(self, job: Job, count: int) -> None:
        """All are written: say how many, and with which settings."""
        write_json(self.images(job) / _COUNT, {"patches": count, **job.settings()})

    def features(self, job: Job) -> str:
        """The name of the dataset."""
        return "features"

    def made_with(self, job: Job) -> dict[str, Any] | None:
        """Settings of the existing features and, as ``slide``, what is known of their slide; None where there are none."""
        path = self.path(job)
        if not path.is_file():
            return None
        with _existing(path) as file:
            return _made_with(file, self.features(job)) if self.features(job) in file else None

    @contextmanager
    def writing(self, job: Job, plan: TilePlan, encoder: Mapping[str, str]) -> Iterator[h5py.Dataset]:
        """The rows to fill. The new file replaces the one that is there at the end if nothing was raised.

        ``encoder``: what else the file says of how it was made, the hash of the encoder's weights among it.
        """
        count = len(plan.coords)
        with whole_hdf5(self.path(job)) as file:
            self.begin(file, job, plan)
            chunks = (min(_ROWS, count), job.width) if count else None
            rows = file.create_dataset(self.features(job), (count, job.width), "float32", chunks=chunks)
            made = {**job.settings(), **encoder, "slide": identity(plan.info)}
            rows.attrs["gated_srp"] = json.dumps(made, sort_keys=True)
            self.name(rows, job)
            yield rows

    def begin(self, file: h5py.File, job: Job, plan: TilePlan) -> None:
        """Everything but the features."""
        coords = file.create_dataset("coords", data=plan.coords)
        coords.attrs.update({**_geometry(plan), "name": job.name, "savetodir": "None"})
        file.attrs.update(_about(plan, job))

    def name(self, rows: h5py.Dataset, job: Job) -> None:
        rows.attrs.update({"name": job.name, "savetodir": "None", "encoder": job.encoder})


class AtlasPatch(Trident):
    """<out>/patches/<slide>.h5 with /features/<encoder>: several encoders share the file's patches."""

    def path(self, job: Job) -> Path:
        return self.out / "patches" / f"{job.name}.h5"

    def picture(self, job: Job) -> Path:
        return self.out / "visualization" / f"{job.name}.jpg"

    def features(self, job: Job) -> str:
        return f"features/{job.encoder}"

    def begin(self, file: h5py.File, job: Job, plan: TilePlan) -> None:
        read = np.full((len(plan.coords), 2), plan.footprint.read), np.full((len(plan.coords), 1), plan.footprint.level)
        table = np.concatenate([plan.coords, *read], 1).astype(np.int32)  # (N, 5)
        if self.path(job).is_file():
            _copy_others(self.path(job), file, table, job, identity(plan.info))
        else:
            file["coords"] = table
            file.attrs.update({**_geometry(plan), **_about(plan, job), "num_patches": len(table)})
            file.attrs["filename"] = job.slide.name

    def name(self, rows: h5py.Dataset, job: Job) -> None:
        """Its name is that of the encoder."""


LAYOUTS: Mapping[str, type[Trident]] = {"trident": Trident, "atlaspatch": AtlasPatch}


def write_patches(tiles: np.ndarray, coords: np.ndarray, folder: Path) -> None:
    """Tiles (N, S, S, 3) as X_Y.png."""
    for tile, (x, y) in zip(tiles, coords.tolist(), strict=True):
        with whole(folder / f"{x}_{y}.png", sync=False) as draft:
            Image.fromarray(tile).save(draft, "PNG")


# Which slide -----------------------------------------------------------------------------------------------------------


def identity(slide: SlideInfo) -> dict[str, Any]:
    """By which a slide is known again wherever it lies: its size, blocks from all over its content, its levels."""
    path = slide.path.resolve()
    data = path.with_suffix("")  # MIRAX: the image itself is in the folder beside
    files = [path, *([data] if path.suffix.lower() == ".mrxs" and data.is_dir() else [])]
    return {
        "path": str(path),
        "bytes": path.stat().st_size,
        "blocks": "".join(sampled_hash(file) for file in files)[-32:],
        "levels": [[round(side / down) for side in slide.size] for down in slide.downsamples],
        "size": list(slide.size),
    }


def refuse_other_slide(file: Path, made: Mapping[str, Any], slide: Mapping[str, Any]) -> None:
    """The features of a file must be of this slide; ``made``: the identity that it records, or the part of it that is known."""
    if any(made[key] != slide[key] for key in ("bytes", "blocks", "levels", "size") if key in made):
        raise UserError(
            f"holds the features of another slide of the same name: {_words(made)}, asked for {_words(slide)}",
            where=file,
            cure="Choose another -o, or remove the file to have it made again.",
            kind="other_slide",
        )


def refuse_other(file: Path, made: Mapping[str, Any], slide: SlideInfo, *, known_scale: bool) -> None:
    """Features that are there must be of this slide, and of the scale that is read now.

    Earlier versions believed the objective where a slide says another size of its pixels: such features must not mix with new ones.
    """
    refuse_other_slide(file, made["slide"], identity(slide))
    if slide.notes and not known_scale and made["scanned"] not in (None, slide.magnification):
        raise UserError(
            f"was extracted as of {made['scanned']:g}x. The slide {slide.notes[0].what}",
            where=file,
            cure="Choose another -o, or remove the file to have it made again.",
            kind="other_settings",
        )


def _words(slide: Mapping[str, Any]) -> str:
    size = f"{slide['bytes']:,} bytes, " if "bytes" in slide else ""
    return f"{slide.get('path', 'a slide')} ({size}{slide['size'][0]} x {slide['size'][1]})"


def _geometry(plan: TilePlan) -> dict[str, Any]:
    tiling = plan.tiling
    return {
        "patch_size": tiling.size,
        "patch_size_level0": plan.footprint.side,
        "level0_magnification": plan.magnification,
        "target_magnification": tiling.magnification,
        "overlap": tiling.overlap,
        "level0_width": plan.info.size[0],
        "level0_height": plan.info.size[1],
    }


@contextmanager
def _existing(path: Path) -> Iterator[h5py.File]:
    """A file that is there already, whoever wrote it: tried out before, and whatever is wrong with it is an error that names it."""
    try:
        try_out(_look_through, path)
        with opened(path), h5py.File(path, "r") as file:
            yield file
    except UserError:
        raise
    except Exception as error:  # damage shows as anything
        what = f"cannot be read ({type(error).__name__}: {' '.join(str(error).split())[:200]})"
        raise UserError(
            what, where=path, cure="Remove it; the slide is then extracted again.", kind="damaged"
        ) from error


def _look_through(path: Path) -> None:
    """All that is read of a file but its features, under the helper's bounds."""
    with h5py.File(path, "r") as file:
        inside = file.get("features", {})
        for name in ("features",) if isinstance(inside, h5py.Dataset) else (f"features/{name}" for name in inside):
            _made_with(file, name)
        file["coords"][:, :2]


def _made_with(file: h5py.File, features: str) -> dict[str, Any]:
    """Settings of an array of features, with what is known of the slide."""
    made = dict(json.loads(file[features].attrs.get("gated_srp", "{}")))
    made["scanned"] = {**file.attrs, **file["coords"].attrs}.get("level0_magnification")
    if not isinstance(made.setdefault("slide", _known(file)), dict):
        raise ValueError("its slide is described by something else")
    return made


def _known(file: h5py.File) -> dict[str, Any]:
    """What a file without an identity says of its slide all the same: its path and the size of its largest level."""
    said = {**file.attrs, **file["coords"].attrs}
    path: dict[str, Any] = {"path": str(said["wsi_path"])} if "wsi_path" in said else {}
    if "level0_width" in said and "level0_height" in said:
        path["size"] = [int(said["level0_width"]), int(said["level0_height"])]
    return path


def _about(plan: TilePlan, job: Job) -> dict[str, Any]:
    """Of the slide: its path, by which `heatmap` finds it again, and microns per pixel: those that were given, else its own."""
    known = {"wsi_path": str(plan.info.path.resolve()), "mpp": job.mpp or plan.info.mpp, "vendor": plan.info.vendor}
    return {key: value for key, value in known.items() if value is not None}


def _copy_others(there: Path, file: h5py.File, table: np.ndarray, job: Job, slide: Mapping[str, Any]) -> None:
    """Features of other encoders move into the new file; they must belong to the same slide and patches."""
    with _existing(there) as old:
        for name in old.get("features", ()):
            refuse_other_slide(there, _made_with(old, f"features/{name}")["slide"], slide)
        if old["coords"].shape != table.shape or not np.array_equal(old["coords"][:, :2], table[:, :2]):
            raise UserError(
                "holds other patches than those asked for (size, magnification, overlap or tissue differ, and one file has one "
                "set of patches)",
                where=there,
                cure="Choose another -o, or the TRIDENT layout.",
                kind="other_settings",
            )
        file.attrs.update(dict(old.attrs))
        for name in old:
            if name != "features":
                old.copy(name, file)
        for name in old.get("features", ()):
            if name != job.encoder:
                old.copy(f"features/{name}", file.require_group("features"))
