"""Where the tissue is: saturation above Otsu's threshold on an overview, cleaned.

Shapes: h, w rows and columns of the overview.
"""

from dataclasses import dataclass

import numpy as np
from PIL import Image, ImageDraw
from scipy import ndimage

_LEAST, _MOST = 12, 32  # of 255: noise on blank glass stays below the first, pale stroma and fat lie above the second
_JOINED = 4  # pixels: strands this near to each other are one piece, as in fat or loose stroma
_DARK = 30  # ink and shadow at the slide's edge: too dark for its saturation to mean anything


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


def preview(overview: np.ndarray, tissue: TissueMask, coords: np.ndarray, side: float) -> Image.Image:
    """The overview with the tissue's outline (green) and the patches that are kept (blue)."""
    picture = overview.copy()
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
