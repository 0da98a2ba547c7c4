"""Slides in OME-Zarr (OME-NGFF 0.4 and 0.5): a folder with one array per level of the pyramid, read through the package zarr.

Taken are images of three channels of 8 bits (RGB) with axes t, c, z, y, x in any order, t and z of length one or absent; of what
bioformats2raw writes, series 0. A chunk that is missing would be read as black: it is an error.
"""

import json
import math
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from gated_srp.errors import UserError

_NOTES = (".zattrs", "zarr.json")  # of zarr 2 and 3
_NO_CHUNKS = {".zarray", ".zattrs", ".zgroup", ".zmetadata", "zarr.json"}
_MICRONS = {"micrometer": 1.0, "nanometer": 1e-3, "millimeter": 1e3}
_LARGEST = 2**24  # bytes of a note


def is_ome_zarr(path: Path) -> bool:
    """Whether a folder is an image in OME-Zarr, by what it says of its levels."""
    return (
        path.suffix == ".zarr"
        and path.is_dir()
        and any(key in _notes(path) for key in ("multiscales", "bioformats2raw.layout"))
    )


def _notes(folder: Path) -> dict[str, Any]:
    """The attributes of a group; those of version 0.5 lie below ``ome``."""
    for name in _NOTES:
        with suppress(OSError, ValueError, RecursionError):
            if (folder / name).stat().st_size <= _LARGEST:
                found = json.loads((folder / name).read_text(encoding="utf-8"))
                found = found.get("attributes", {}) if name == "zarr.json" else found
                return {**found, **found.get("ome", {})} if isinstance(found, dict) else {}
    return {}


class OmeZarr:
    """An open image, with the attributes of an OpenSlide object that `SlideImage` asks for."""

    def __init__(self, path: str) -> None:
        try:
            import zarr
        except ModuleNotFoundError:
            cure = "Install it with: pip install zarr"
            raise UserError(
                "reading OME-Zarr needs the package zarr", where=path, cure=cure, kind="needs_package"
            ) from None
        root = Path(path)
        root = root if "multiscales" in _notes(root) else root / "0"  # bioformats2raw: one folder per series
        image = _notes(root)["multiscales"][0]
        axes = [axis["name"] for axis in image["axes"]]
        self._axes = tuple(axes.index(name) for name in ("y", "x", "c"))
        self.levels, scales = [], []
        for one in image["datasets"]:
            place = (root / one["path"]).resolve()
            if not place.is_relative_to(root.resolve()):
                raise ValueError(f"its level {one['path']!r} lies outside of it")
            array = zarr.open_array(str(place), mode="r")
            if len(array.shape) != len(axes) or array.dtype != np.uint8 or array.shape[self._axes[2]] != 3:
                raise ValueError(
                    f"expected 8-bit RGB, found {array.dtype} of shape {array.shape} with axes {''.join(axes)}"
                )
            if math.prod(array.shape) != math.prod(array.shape[axis] for axis in self._axes):
                raise ValueError(f"expected one plane, found axes {''.join(axes)} of lengths {array.shape}")
            steps = getattr(array, "shards", None) or array.chunks  # zarr 2 has no shards
            chunks = math.prod(-(-size // max(1, step)) for size, step in zip(array.shape, steps, strict=True))
            there = sum(file.is_file() and file.name not in _NO_CHUNKS for file in place.rglob("*"))
            if there < chunks:
                raise ValueError(f"level {one['path']!r} lacks {chunks - there:,} of its {chunks:,} chunks")
            self.levels.append(array)
            scales.append(_scale(one, self._axes[1]) * _scale(image, self._axes[1]))
        sizes = [(array.shape[self._axes[1]], array.shape[self._axes[0]]) for array in self.levels]
        self.dimensions = sizes[0]
        self.level_downsamples = [(sizes[0][0] / width + sizes[0][1] / height) / 2 for width, height in sizes]
        unit = next(axis.get("unit", "") for axis in image["axes"] if axis["name"] == "x")
        self.properties = {"openslide.vendor": "ome-zarr"}
        if unit in _MICRONS and scales[0] > 0:
            self.properties["openslide.mpp-x"] = str(scales[0] * _MICRONS[unit])
        for number, array in enumerate(self.levels):
            for side, axis in (("height", self._axes[0]), ("width", self._axes[1])):
                self.properties[f"openslide.level[{number}].tile-{side}"] = str(array.chunks[axis])

    def read_region(self, location: tuple[int, int], level: int, size: tuple[int, int]) -> Image.Image:
        """RGBA of a level, from level-0 pixels on; transparent where the image has none."""
        array, down = self.levels[level], self.level_downsamples[level]
        left, top = (round(place / down) for place in location)
        out = np.zeros((size[1], size[0], 4), np.uint8)
        rows = slice(max(0, top), min(array.shape[self._axes[0]], top + size[1]))
        columns = slice(max(0, left), min(array.shape[self._axes[1]], left + size[0]))
        if rows.start < rows.stop and columns.start < columns.stop:
            where: list[Any] = [0] * len(array.shape)
            y, x, c = self._axes
            where[y], where[x], where[c] = rows, columns, slice(None)
            kept = sorted(self._axes)  # the axes that are left, in the array's order
            pixels = np.asarray(array[tuple(where)]).transpose([kept.index(axis) for axis in self._axes])
            inside = out[rows.start - top : rows.stop - top, columns.start - left : columns.stop - left]
            inside[..., :3], inside[..., 3] = pixels, 255
        return Image.fromarray(out, "RGBA")

    def close(self) -> None:
        """Nothing stays open."""


def _scale(one: dict[str, Any], axis: int) -> float:
    """Of an axis; 1 where none is given."""
    steps = [step for step in one.get("coordinateTransformations", ()) if step.get("type") == "scale"]
    return math.prod(float(step["scale"][axis]) for step in steps)
