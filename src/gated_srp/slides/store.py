"""Feature files as they are written: TRIDENT's layout, or AtlasPatch's. A file is there whole or not at all.

Shapes: N patches, D width of the features.
"""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from gated_srp.errors import UserError
from gated_srp.files import whole_hdf5
from gated_srp.slides.tiles import TilePlan, Tiling

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

    def settings(self) -> dict[str, Any]:
        """All settings that decide the features; a file made with others is refused."""
        tiling = self.tiling
        return {
            "patch_size": tiling.size,
            "target_magnification": tiling.magnification,
            "overlap": tiling.overlap,
            "tissue": tiling.tissue,
            "mpp": self.mpp,
            "weights": self.weights,
            "resampling": self.resampling,
        }


class Trident:
    """<out>/20x_256px_0px_overlap/features_<encoder>/<slide>.h5"""

    def __init__(self, out: Path) -> None:
        self.out = out

    def path(self, job: Job) -> Path:
        return self.out / job.tiling.folder / f"features_{job.encoder}" / f"{job.slide.stem}.h5"

    def picture(self, job: Job) -> Path:
        return self.out / job.tiling.folder / "visualization" / f"{job.slide.stem}.jpg"

    def features(self, job: Job) -> str:
        """The name of the dataset."""
        return "features"

    def made_with(self, job: Job) -> dict[str, Any] | None:
        """Settings of the existing features; None where there are none."""
        path = self.path(job)
        if not path.is_file():
            return None
        try:
            with h5py.File(path, "r") as file:
                if self.features(job) not in file:
                    return None
                noted = file[self.features(job)].attrs.get("gated_srp")
                return {} if noted is None else dict(json.loads(noted))
        except (OSError, ValueError) as error:
            cure = "Remove it; the slide is then extracted again."
            raise UserError(f"cannot be read ({error})", where=path, cure=cure) from None

    @contextmanager
    def writing(self, job: Job, plan: TilePlan) -> Iterator[h5py.Dataset]:
        """The rows to fill. The new file replaces the one that is there at the end if nothing was raised."""
        count = len(plan.coords)
        with whole_hdf5(self.path(job)) as file:
            self.begin(file, job, plan)
            chunks = (min(_ROWS, count), job.width) if count else None
            rows = file.create_dataset(self.features(job), (count, job.width), "float32", chunks=chunks)
            rows.attrs["gated_srp"] = json.dumps(job.settings(), sort_keys=True)
            self.name(rows, job)
            yield rows

    def begin(self, file: h5py.File, job: Job, plan: TilePlan) -> None:
        """Everything but the features."""
        coords = file.create_dataset("coords", data=plan.coords)
        coords.attrs.update({**_geometry(plan), "name": job.slide.stem, "savetodir": "None"})
        file.attrs.update(_about(plan))

    def name(self, rows: h5py.Dataset, job: Job) -> None:
        rows.attrs.update({"name": job.slide.stem, "savetodir": "None", "encoder": job.encoder})


class AtlasPatch(Trident):
    """<out>/patches/<slide>.h5 with /features/<encoder>: several encoders share the file's patches."""

    def path(self, job: Job) -> Path:
        return self.out / "patches" / f"{job.slide.stem}.h5"

    def picture(self, job: Job) -> Path:
        return self.out / "visualization" / f"{job.slide.stem}.jpg"

    def features(self, job: Job) -> str:
        return f"features/{job.encoder}"

    def begin(self, file: h5py.File, job: Job, plan: TilePlan) -> None:
        read = np.full((len(plan.coords), 2), plan.footprint.read), np.full((len(plan.coords), 1), plan.footprint.level)
        table = np.concatenate([plan.coords, *read], 1).astype(np.int32)  # (N, 5)
        if self.path(job).is_file():
            _copy_others(self.path(job), file, table, job)
        else:
            file["coords"] = table
            file.attrs.update({**_geometry(plan), **_about(plan), "num_patches": len(table)})
            file.attrs["filename"] = job.slide.name

    def name(self, rows: h5py.Dataset, job: Job) -> None:
        """Its name is that of the encoder."""


LAYOUTS: Mapping[str, type[Trident]] = {"trident": Trident, "atlaspatch": AtlasPatch}


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


def _about(plan: TilePlan) -> dict[str, Any]:
    """Of the slide: its path, by which `heatmap` finds it again, and microns per pixel."""
    known = {"wsi_path": str(plan.info.path.resolve()), "mpp": plan.info.mpp, "vendor": plan.info.vendor}
    return {key: value for key, value in known.items() if value is not None}


def _copy_others(there: Path, file: h5py.File, table: np.ndarray, job: Job) -> None:
    """Features of other encoders move into the new file; they must belong to the same patches."""
    with h5py.File(there, "r") as old:
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
