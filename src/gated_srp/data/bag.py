"""A slide file becomes a `Bag`: the features and positions of its patches.

Shapes: N patches, C channels.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from gated_srp.errors import Note, UserError

Unit = Literal["px", "um"]
_ROWS = 2048  # checked at once
_SAME = 0.1  # relative difference: scanners of one magnification differ by some per cent


def same_stride(first: float, second: float) -> bool:
    """Whether two distances, in one unit, are of patches of one magnification.

    >>> same_stride(128.0, 121.3), same_stride(128.0, 256.0)
    (True, False)
    """
    return math.isclose(first, second, rel_tol=_SAME)


class BagError(UserError):
    """A feature file that cannot be used; ``kind`` is the machine-readable reason, for reports over many files.

    Kinds: missing, symlink_loop, unreadable, zero_bytes, not_hdf5, not_zip, not_torch, unknown_format, truncated,
    unsafe_pickle, external_link, oversized, missing_filter, needs_package, locked, no_features, no_coords,
    several_encoders, wrong_encoder, slide_embedding, wrong_rank, wrong_dtype, wrong_size (of an image), row_mismatch,
    bad_coords, no_stride, empty, endless, crash (the library that reads it does not survive it, see `gated_srp.bounded`).
    """

    def __init__(
        self,
        what: str,
        *,
        where: str | PathLike[str],
        cure: str = "",
        kind: str = "unreadable",
        found: Sequence[str] = (),
    ) -> None:
        super().__init__(what, where=where, cure=cure, kind=kind)
        self.path = Path(where)  # the feature file; `where` may name the slide as well
        self.found = tuple(found)  # what the file offers instead: names of encoders


@dataclass(frozen=True, eq=False, kw_only=True)
class BagHeader:
    """All that a feature file says about a slide, the feature array itself excepted."""

    path: Path
    shape: tuple[int, int]  # (N, C) of the features
    dtype: torch.dtype  # of the features as a Bag has them
    coords: Tensor  # (N, 2) x and y of each patch's top-left corner: int64 level-0 pixels, or float64 microns
    stride: float  # distance between neighbouring patches, in the unit of coords
    stride_source: str  # where the stride comes from and whether the coordinates agree
    unit: Unit
    encoder: str | None  # canonical name
    patch_size_level0: float | None = None  # side of a patch in level-0 pixels; with overlap larger than the stride
    wsi_path: Path | None = None  # the slide image, as the extractor noted it
    level0_size: tuple[int, int] | None = None  # width and height of the slide image
    mpp: float | None = None  # microns per pixel of level 0
    magnification: float | None = None  # of level 0
    warnings: tuple[Note, ...] = ()

    @property
    def stride_known(self) -> bool:
        """Not where 1 stands for it: one patch, and nothing declared (`files.stride`)."""
        return len(self.coords) > 1 or self.stride != 1.0

    @property
    def stride_um(self) -> float | None:
        """The stride in microns: exact, or by the nominal size of a pixel (40x: 0.25); None where the file does not say.

        The nominal size comes first: tools read a scan by its magnification, so that strides of one setting are one number.
        """
        if self.unit == "um" or not self.stride_known:
            return self.stride if self.stride_known else None
        pixel = 10 / self.magnification if self.magnification else self.mpp
        return self.stride * pixel if pixel else None


@dataclass(frozen=True, eq=False, kw_only=True)
class Bag(BagHeader):
    """One slide: row i of ``features`` belongs to the patch at ``coords[i]``."""

    features: Tensor  # (N, C) as stored: float16, bfloat16 or float32; float64 becomes float32

    def nonfinite_rows(self) -> Tensor:
        """Numbers of the rows that hold NaN or infinity, (number of them,)."""
        bad = []
        for start, part in enumerate(self.features.split(_ROWS)):  # all at once would need room for another copy
            if not all(map(torch.isfinite, torch.aminmax(part))):  # NaN is both; a tenth of the time of isfinite
                bad.append((~torch.isfinite(part).all(1)).nonzero().flatten() + start * _ROWS)
        return torch.cat(bad) if bad else torch.empty(0, dtype=torch.int64)
