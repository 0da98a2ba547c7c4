"""Which patches of a slide are read, and how: one lattice over the whole slide, in level-0 pixels.

Shapes: N patches, S side of a patch in pixels as the encoder gets it.
"""

import math
import os
import signal
from dataclasses import dataclass
from functools import lru_cache
from multiprocessing import parent_process
from pathlib import Path
from threading import Thread

import numpy as np
from PIL import Image

from gated_srp.errors import UserError
from gated_srp.files import write_image
from gated_srp.slides.reader import SlideError, SlideImage, SlideInfo, nominal_magnification
from gated_srp.slides.tissue import TissueMask, find_tissue, preview

_SAME = 0.02  # relative difference of two magnifications that are one: no resampling
_OVERVIEW_UM = 4.0  # microns a pixel of the overview on which tissue is found
_OVERVIEW_SIDE = 4096  # its longest side at most
_LARGEST = 1 << 16  # pixels of a patch's side


@dataclass(frozen=True, kw_only=True)
class Tiling:
    """How a cohort's slides are cut. ``tissue``: least share of tissue in a patch that is kept."""

    size: int
    magnification: float = 20.0
    overlap: int = 0
    tissue: float = 0.25

    def __post_init__(self) -> None:
        if not 8 <= self.size <= _LARGEST or not 0 <= self.overlap < self.size:
            raise UserError(f"patch size {self.size} with overlap {self.overlap}: expected 8 or more, overlap smaller.")
        if not 0 < self.magnification < math.inf or not 0 <= self.tissue <= 1:
            raise UserError(
                f"magnification {self.magnification}, tissue share {self.tissue}: expected above 0, and 0 to 1."
            )

    @property
    def folder(self) -> str:
        """TRIDENT's name for it.

        >>> Tiling(size=256).folder, Tiling(size=512, magnification=2.5, overlap=64).folder
        ('20x_256px_0px_overlap', '2.5x_512px_64px_overlap')
        """
        return f"{self.magnification:g}x_{self.size}px_{self.overlap}px_overlap"


@dataclass(frozen=True)
class Footprint:
    """How a patch is read: ``side`` level-0 pixels every ``stride``, from ``level``, ``read`` pixels of it a side."""

    side: int
    stride: int
    level: int
    read: int


@dataclass(frozen=True)
class TilePlan:
    """The patches of one slide: top-left corners ``coords`` (N, 2) in level-0 pixels, row by row."""

    info: SlideInfo
    magnification: float  # nominal, of level 0, as used
    footprint: Footprint
    tiling: Tiling
    coords: np.ndarray


def footprint(info: SlideInfo, tiling: Tiling, magnification: float) -> Footprint:
    """Where the slide has a level within 2 % of the wanted magnification its pixels are taken as they are."""
    ratio = magnification / tiling.magnification
    if ratio < 1 - _SAME:
        raise SlideError(
            info.path,
            f"scanned at {magnification:g}x, asked for {tiling.magnification:g}x: the detail does not exist. "
            "Choose --magnification no higher than the slide's, or correct its --mpp.",
        )
    near = min(range(len(info.downsamples)), key=lambda i: abs(info.downsamples[i] / ratio - 1))
    if abs(info.downsamples[near] / ratio - 1) <= _SAME:
        ratio, level, read = info.downsamples[near], near, tiling.size
    else:
        finer = [i for i, down in enumerate(info.downsamples) if down <= ratio]
        level = max(finer, default=0)
        read = max(1, round(tiling.size * ratio / info.downsamples[level]))
    return Footprint(round(tiling.size * ratio), round((tiling.size - tiling.overlap) * ratio), level, read)


def lattice(size: tuple[int, int], side: int, stride: int) -> np.ndarray:
    """Corners (N, 2) of every patch that lies wholly on the slide, row by row, from the slide's own corner.

    >>> lattice((1000, 600), 256, 256).tolist()
    [[0, 0], [256, 0], [512, 0], [0, 256], [256, 256], [512, 256]]
    """
    columns, rows = (np.arange(max(0, (length - side) // stride + 1)) * stride for length in size)
    return np.stack(np.meshgrid(columns, rows), -1).reshape(-1, 2).astype(np.int64)


def plan_slide(path: Path, tiling: Tiling, *, mpp: float | None = None, picture: Path | None = None) -> TilePlan:
    """Find the tissue and lay the patches. ``mpp`` overrules the slide; ``picture``: where to write a preview."""
    with SlideImage(path) as slide:
        info = slide.info
        magnification = nominal_magnification(mpp) if mpp else info.magnification
        if magnification is None:
            raise SlideError(
                info.path,
                "says neither its magnification nor microns a pixel. Give it: --mpp 0.25 (for every slide asked for), or "
                "--mpp FILE.csv with the columns wsi and mpp.",
            )
        where = footprint(info, tiling, magnification)
        microns = mpp or info.mpp or 10 / magnification
        scale = max(1.0, _OVERVIEW_UM / microns, max(info.size) / _OVERVIEW_SIDE)
        scale = min(scale, max(1.0, where.side / 8))  # small patches need a finer mask
        overview = slide.overview(scale)
    patch = (where.side / scale) ** 2  # pixels of the overview a patch
    tissue = TissueMask(find_tissue(overview, smallest=patch / 2, largest_hole=patch), scale)
    coords = lattice(info.size, where.side, where.stride)
    coords = coords[tissue.fraction(coords, where.side) >= max(tiling.tissue, 1e-9)] if len(coords) else coords
    if picture is not None:
        write_image(preview(overview, tissue, coords, where.side), picture)
    return TilePlan(info, magnification, where, tiling, coords)


def read_tiles(path: Path, where: Footprint, size: int, coords: np.ndarray) -> np.ndarray:
    """Patches as bytes (N, S, S, 3), in a process that keeps the slide open between calls."""
    slide = _kept_open(path)
    tiles = np.empty((len(coords), size, size, 3), np.uint8)
    for tile, (x, y) in zip(tiles, coords.tolist(), strict=True):
        pixels = slide.read(x, y, level=where.level, size=(where.read, where.read))
        if where.read != size:
            pixels = np.asarray(Image.fromarray(pixels).resize((size, size), Image.Resampling.BICUBIC))
        tile[...] = pixels
    return tiles


def begin_reading() -> None:
    """For a reading process: Ctrl-C is its parent's to handle, and it ends when the parent does, however that ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    Thread(target=_leave_with_parent, daemon=True).start()


def _leave_with_parent() -> None:
    parent = parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


@lru_cache(maxsize=2)
def _kept_open(path: Path) -> SlideImage:
    return SlideImage(path)
