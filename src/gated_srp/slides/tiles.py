"""Which patches of a slide are read, and how: one lattice over the whole slide, in level-0 pixels, kept where there is tissue.

Shapes: N patches, S side of a patch in pixels as the encoder gets it; h, w rows and columns of the overview.
"""

import math
import os
import signal
from dataclasses import dataclass
from functools import lru_cache
from io import BytesIO
from multiprocessing import parent_process
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING

import numpy as np
from PIL import Image, ImageDraw
from scipy import ndimage

from gated_srp.errors import Note, UserError, counted, joined
from gated_srp.files import as_stored, write_image
from gated_srp.slides.reader import SlideError, SlideImage, SlideInfo, nominal_magnification, slide_name

if TYPE_CHECKING:
    from gated_srp.data.regions import Regions

_SAME = 0.02  # relative difference of two magnifications that are one: no resampling
_OVERVIEW_UM = 4.0  # microns per pixel of the overview on which tissue is found
_OVERVIEW_SIDE = 4096  # its longest side at most
_LARGEST = 1 << 16  # pixels of a patch's side
_LEAST, _MOST = 12, 32  # of 255: noise on blank glass stays below the first, pale stroma and fat lie above the second
_JOINED = 4  # pixels: strands this near to each other are one piece, as in fat or loose stroma
# Ink, of 255 where nothing else is said
_GREENER = 18  # by which green exceeds red
_INK_SATURATION = 0.2  # least, as a share
_BLACK, _NEUTRAL = 80, 30  # brighter, or more coloured: not black ink
_STROKE_UM = 60.0  # microns of a square that a stroke fills at least
_INKED = 0.05  # share of a patch from which on ink leaves it out
_DARK = 30  # ink and shadow at the slide's edge: too dark for saturation to mean anything


@dataclass(frozen=True, kw_only=True)
class Tiling:
    """How a cohort's slides are cut. ``tissue``: least share of tissue in a patch that is kept; ``exclude_pen``: without ink."""

    size: int
    magnification: float = 20.0
    overlap: int = 0
    tissue: float = 0.25
    exclude_pen: bool = False

    def __post_init__(self) -> None:
        if not 8 <= self.size <= _LARGEST or not 0 <= self.overlap < self.size:
            where = f"patch size {self.size} with overlap {self.overlap}"
            raise UserError("expected 8 or more, overlap smaller.", where=where)
        if not 0 < self.magnification < math.inf or not 0 <= self.tissue <= 1:
            where = f"magnification {self.magnification}, tissue share {self.tissue}"
            raise UserError("expected above 0, and 0 to 1.", where=where)

    @property
    def folder(self) -> str:
        """TRIDENT's name for it.

        >>> Tiling(size=256).folder, Tiling(size=512, magnification=2.5, overlap=64).folder
        ('20x_256px_0px_overlap', '2.5x_512px_64px_overlap')
        """
        return f"{self.magnification:g}x_{self.size}px_{self.overlap}px_overlap"


@dataclass(frozen=True)
class Footprint:
    """How a patch is read: ``side`` level-0 pixels every ``stride``; from ``level``, ``read`` x ``read`` of its pixels."""

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
    notes: tuple[Note, ...] = ()


def footprint(info: SlideInfo, tiling: Tiling, magnification: float) -> Footprint:
    """Where the slide has a level within 2 % of the wanted magnification its pixels are taken as they are."""
    ratio = magnification / tiling.magnification
    if ratio < 1 - _SAME:
        raise SlideError(
            info.path,
            f"scanned at {magnification:g}x, asked for {tiling.magnification:g}x: the detail does not exist",
            cure="Choose --magnification no higher than the slide's, or correct its --mpp.",
            kind="low_magnification",
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


def plan_slide(
    path: Path,
    tiling: Tiling,
    *,
    mpp: float | None = None,
    picture: Path | None = None,
    regions: "Regions | None" = None,
) -> TilePlan:
    """Find the tissue and lay the patches. ``mpp`` overrules the slide; ``picture``: where to write a preview.

    ``regions``: of the patches of tissue those inside or outside what was drawn are kept.
    """
    with SlideImage(path) as slide:
        info = slide.info
        magnification = nominal_magnification(mpp) if mpp else info.magnification
        if magnification is None:
            slide.read(0, 0, level=0, size=(1, 1))  # if it cannot be read at all, that is the first thing to know
            raise SlideError(
                info.path,
                "says neither its magnification nor its microns per pixel",
                cure="Set the latter, e.g. --mpp 0.25; for several slides `extract` also takes a CSV with the columns wsi and mpp.",
                kind="no_magnification",
            )
        where = footprint(info, tiling, magnification)
        microns = mpp or info.mpp or 10 / magnification
        scale = max(1.0, _OVERVIEW_UM / microns, max(info.size) / _OVERVIEW_SIDE)
        scale = min(scale, max(1.0, where.side / 8))  # small patches need a finer mask
        overview = slide.overview(scale)
    patch = (where.side / scale) ** 2  # pixels of the overview per patch
    tissue = TissueMask(find_tissue(overview, smallest=patch / 2, largest_hole=patch), scale)
    coords = lattice(info.size, where.side, where.stride)
    coords = coords[tissue.fraction(coords, where.side) >= max(tiling.tissue, 1e-9)] if len(coords) else coords
    notes = () if mpp else info.notes
    pen = None
    if tiling.exclude_pen:
        pen = TissueMask(find_pen(overview, microns=microns * scale), scale)
        clean = coords[pen.fraction(coords, where.side) < _INKED] if len(coords) else coords
        if lost := len(coords) - len(clean):
            said = f"{lost} of {counted(len(coords), 'patch')} left out for ink of a pen"
            notes += (Note("note", "pen", said, (str(path),)),)
        coords = clean
    if regions is not None:
        coords, more = _within(regions, info, coords, where.side, microns)
        notes += more
    if picture is not None:
        write_image(preview(overview, tissue, coords, where.side, pen), picture)
    return TilePlan(info, magnification, where, tiling, coords, notes)


def _within(
    regions: "Regions", info: SlideInfo, coords: np.ndarray, side: int, microns: float
) -> tuple[np.ndarray, tuple[Note, ...]]:
    """The patches that the regions keep, and what to say of a slide that nobody drew on."""
    from gated_srp.data.annotations import (
        qupath_crops,
        read_annotations,
    )  # not above: readers of tiles do without torch

    try:
        file = regions.needed(slide_name(info.path))
        if file is None:
            note = Note("warning", "regions", "no file of annotations: the whole slide is used", (str(info.path),))
            return coords, (note,)
        drawn = read_annotations(file, size=info.size, side=side, mpp=microns)
        kept = coords[regions.inside(drawn, coords, side)]
        if len(coords) and not len(kept):
            raise regions.nothing_left(len(coords), drawn.classes, info.path)
    except UserError as error:  # of this slide alone: others go on
        raise SlideError(info.path, joined(error.what, error.where), cure=error.cure, kind=error.kind) from None
    return kept, qupath_crops(file, info.path, info.bounds)


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
    """In a reading process: leave Ctrl-C to the parent, and end when the parent ends, for whatever reason."""
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


# Tissue: saturation above Otsu's threshold on an overview, cleaned -----------------------------------------------------


@dataclass(frozen=True)
class TissueMask:
    """True where there is tissue, (h, w); a pixel covers ``scale`` level-0 pixels."""

    mask: np.ndarray
    scale: float

    def fraction(self, coords: np.ndarray, side: float) -> np.ndarray:
        """Share of tissue under squares of ``side`` level-0 pixels with top-left corners ``coords`` (N, 2): (N,)."""
        table = np.pad(self.mask.astype(np.int64).cumsum(0).cumsum(1), ((1, 0), (1, 0)))  # (h + 1, w + 1)
        limits = np.array(self.mask.shape[::-1])
        low = np.floor(coords / self.scale).astype(np.int64).clip(0, limits - 1)
        high = np.ceil((coords + side) / self.scale).astype(np.int64).clip(low + 1, limits)
        (x0, y0), (x1, y1) = low.T, high.T
        covered = table[y1, x1] - table[y0, x1] - table[y1, x0] + table[y0, x0]
        share: np.ndarray = covered / ((x1 - x0) * (y1 - y0))
        return share


def find_tissue(overview: np.ndarray, *, smallest: float, largest_hole: float) -> np.ndarray:
    """The mask (h, w) of an RGB overview: pieces below ``smallest`` pixels go, holes up to ``largest_hole`` are filled."""
    saturation = ndimage.median_filter(_saturation(overview), size=5, mode="nearest")
    coloured = saturation > np.clip(otsu(saturation), _LEAST, _MOST)
    disc = ndimage.generate_binary_structure(2, 1)
    # Closing next to the frame would erode it: the frame is continued outwards first.
    inner = (slice(_JOINED + 1, -_JOINED - 1),) * 2
    mask = ndimage.binary_closing(np.pad(coloured, _JOINED + 1, mode="edge"), disc, iterations=_JOINED)[inner]
    mask = ndimage.binary_opening(mask, disc, iterations=2)
    mask = _without_small(mask, smallest)
    return ~_without_small(~mask, largest_hole)


def find_pen(overview: np.ndarray, *, microns: float) -> np.ndarray:
    """Ink of a marker on an RGB overview of H&E (``microns`` per pixel): the mask (h, w), with a margin for soft edges.

    Haematoxylin and eosin both take out green more than red, so where green is stronger than red it is neither: blue, cyan and green
    ink. Black ink is dark and has no colour. Spots smaller than any stroke do not count. Red, orange and violet ink look as stained
    tissue does and are not found; carbon pigment and dark shadows may be taken for black ink; other stains than H&E may be blue or green.

    >>> tissue, ink = np.full((9, 9, 3), (170, 90, 150), np.uint8), np.full((9, 9, 3), (30, 90, 170), np.uint8)
    >>> find_pen(tissue, microns=30).any(), find_pen(ink, microns=30).all()
    (np.False_, np.True_)
    """
    red, green, blue = (
        ndimage.median_filter(overview[..., i], size=3, mode="nearest").astype(np.int32) for i in range(3)
    )
    most, least = np.maximum(np.maximum(red, green), blue), np.minimum(np.minimum(red, green), blue)
    coloured = (green - red >= _GREENER) & (most - least >= _INK_SATURATION * most)
    black = (most < _BLACK) & (most - least < _NEUTRAL)
    strokes = _without_small(coloured | black, (_STROKE_UM / microns) ** 2)
    disc = ndimage.generate_binary_structure(2, 1)
    grown: np.ndarray = ndimage.binary_dilation(strokes, disc, iterations=2)
    return grown


def otsu(values: np.ndarray) -> int:
    """Otsu's threshold of bytes: values above it are the upper class.

    >>> otsu(np.array([10, 11, 12, 200, 201], np.uint8)) in range(12, 200)
    True
    """
    counts = np.bincount(values.ravel(), minlength=256).astype(np.float64)
    below = counts.cumsum()
    sums = (counts * np.arange(256)).cumsum()
    above = below[-1] - below
    with np.errstate(divide="ignore", invalid="ignore"):
        between = (sums[-1] * below / below[-1] - sums) ** 2 / (below * above)
    between = np.where((below > 0) & (above > 0), between, -1.0)
    best = np.flatnonzero(between == between.max())
    return int(best.mean())  # a gap between the classes gives a plateau: its middle


def preview(
    overview: np.ndarray, tissue: TissueMask, coords: np.ndarray, side: float, ink: TissueMask | None = None
) -> Image.Image:
    """The overview with the tissue's outline (green), the patches that are kept (blue), and ink that was looked for (orange)."""
    picture = overview.copy()
    if ink is not None:
        picture[ink.mask ^ ndimage.binary_erosion(ink.mask, iterations=2)] = (240, 130, 0)
    picture[tissue.mask ^ ndimage.binary_erosion(tissue.mask, border_value=1)] = (0, 160, 60)
    image = Image.fromarray(picture)
    pen = ImageDraw.Draw(image)
    for x, y in coords / tissue.scale:
        pen.rectangle((x, y, x + side / tissue.scale, y + side / tissue.scale), outline=(30, 60, 200))
    return image


def _saturation(rgb: np.ndarray) -> np.ndarray:
    """HSV saturation as bytes (h, w)."""
    most, least = rgb.max(-1).astype(np.int32), rgb.min(-1).astype(np.int32)
    value = (most - least) * 255 // np.maximum(most, 1)
    return np.where(most < _DARK, 0, value).astype(np.uint8)


def _without_small(mask: np.ndarray, smallest: float) -> np.ndarray:
    labels, count = ndimage.label(mask, np.ones((3, 3)))
    if not count:
        return mask
    sizes = np.bincount(labels.ravel())
    keep = sizes >= smallest
    keep[0] = False
    kept: np.ndarray = keep[labels]
    return kept


# Photographs, cut as slides are ----------------------------------------------------------------------------------------

PHOTOGRAPHS = (".jpg", ".jpeg", ".png", ".bmp", ".webp")
_FEWEST = 4  # least patches of a photograph: there must be neighbours, and others to compare with


def find_photographs(folder: Path) -> list[Path]:
    """Image files of a folder and those below it."""
    folder = as_stored(folder)
    if not folder.is_dir():
        cure = f"Expected a folder of photographs ({', '.join(PHOTOGRAPHS)})."
        raise UserError("no such folder", where=folder, cure=cure)
    found = sorted(p for p in folder.rglob("*") if p.suffix.lower() in PHOTOGRAPHS and not p.name.startswith("."))
    if not found:
        what = f"no photographs (endings {', '.join(PHOTOGRAPHS)})"
        raise UserError(what, where=folder, cure="Point at the folder that has them.")
    return found


def cut_photograph(path: Path, size: int) -> tuple[np.ndarray, np.ndarray]:
    """Patches that do not overlap, (N, S, S, 3) bytes, and their corners (N, 2)."""
    try:
        # in memory: PIL asks a file for as many bytes as a chunk claims to have
        with Image.open(BytesIO(path.read_bytes())) as opened:
            pixels = np.asarray(opened.convert("RGB"))
    except Exception as error:  # damage shows as anything: a decoder's, a parser's error
        what = f"cannot be read as a picture ({type(error).__name__}: {' '.join(str(error).split())[:200]})"
        raise UserError(what, where=path, cure="Save it again, or take it out of the folder.") from None
    corners = lattice((pixels.shape[1], pixels.shape[0]), size, size)
    if len(corners) < _FEWEST:
        given = f"{pixels.shape[1]} x {pixels.shape[0]} pixels give {counted(len(corners), 'patch')} of {size}"
        cure = "Use larger photographs, or a smaller --size."
        raise UserError(f"{given}, fewer than {_FEWEST}", where=path, cure=cure)
    return np.stack([pixels[y : y + size, x : x + size] for x, y in corners.tolist()]), corners
