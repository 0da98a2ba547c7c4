"""A slide as square tiles at powers of two, as zooming viewers ask for them, and single patches with what lies around them."""

import math
from io import BytesIO
from threading import Lock

import numpy as np
from PIL import Image

from gated_srp.errors import UserError
from gated_srp.slides.reader import SlideImage, SlideInfo

SIDE = 256  # pixels of a tile
PATCH = 224  # pixels of a patch on the strip
_AROUND = 0.5  # of a patch's side that is shown on each side of it
_LARGEST = 4096 * 4096  # pixels read at once: a slide without a pyramid has no small levels
_WHOLE = 10  # the level, of at most 1024 pixels a side, that is read once: it and coarser ones are cut from memory


def levels(size: tuple[int, int]) -> int:
    """The number of the level at full resolution; each one below has half the pixels of a side.

    >>> levels((2220, 2967)), levels((256, 200))
    (12, 8)
    """
    return math.ceil(math.log2(max(*size, 2)))


def grid(size: tuple[int, int], level: int) -> tuple[int, int]:
    """Columns and rows of tiles of a level."""
    scale = 2.0 ** (levels(size) - level)
    columns, rows = (max(1, math.ceil(extent / scale / SIDE)) for extent in size)
    return columns, rows


class TileReader:
    """JPEG tiles of one slide. Several threads may ask: one of them reads at a time."""

    def __init__(self, slide: SlideImage) -> None:
        self.slide = slide
        self._lock = Lock()
        self._small: Image.Image | None = None

    @property
    def info(self) -> SlideInfo:
        return self.slide.info

    def tile(self, level: int, column: int, row: int) -> bytes:
        """One tile; the last ones of a row or column are smaller. A tile that the slide does not have is refused."""
        columns, rows = grid(self.info.size, level) if 0 <= level <= levels(self.info.size) else (0, 0)
        if not (0 <= column < columns and 0 <= row < rows):
            raise UserError(f"no tile {level}/{column}_{row}", where=self.info.path, kind="missing")
        scale = 2.0 ** (levels(self.info.size) - level)
        x, y = column * SIDE * scale, row * SIDE * scale
        extent = min(SIDE * scale, self.info.size[0] - x), min(SIDE * scale, self.info.size[1] - y)
        whole = self.whole() if level <= _WHOLE else None
        if whole is None:
            return self._jpeg(x, y, extent, scale)
        across = 2.0 ** (min(_WHOLE, levels(self.info.size)) - level)  # pixels of the whole to one of the tile
        left, top = (place * SIDE * across for place in (column, row))
        right, low = min(left + SIDE * across, whole.width), min(top + SIDE * across, whole.height)
        shown = (math.ceil((right - left) / across), math.ceil((low - top) / across))
        return _encoded(whole.resize(shown, Image.Resampling.BOX, box=(left, top, right, low)))

    def whole(self) -> Image.Image | None:
        """The slide at level `_WHOLE`; None where that would mean to read a slide without small levels."""
        scale = 2.0 ** max(0, levels(self.info.size) - _WHOLE)
        down = self.info.downsamples[self.slide.best_level(scale)]
        if math.prod(self.info.size) / down**2 > _LARGEST:
            return None
        with self._lock:
            if self._small is None:
                self._small = Image.fromarray(self.slide.overview(scale))
            return self._small

    def patch(self, corner: np.ndarray, side: float) -> bytes:
        """One patch at its own resolution with half a patch around it, in a square of `PATCH` pixels for the patch itself."""
        around = _AROUND * side
        scale = max(1.0, side / PATCH)
        return self._jpeg(corner[0] - around, corner[1] - around, (side + 2 * around,) * 2, scale)

    def _jpeg(self, x: float, y: float, extent: tuple[float, float], scale: float) -> bytes:
        level = self.slide.best_level(scale)
        down = self.info.downsamples[level]
        width, height = (max(1, math.ceil(side / down)) for side in extent)
        if width * height > _LARGEST:
            raise UserError(
                "this slide has no small levels, and a tile of it is too large to read", where=self.info.path
            )
        with self._lock:
            pixels = self.slide.read(round(x), round(y), level=level, size=(width, height))
        shown = tuple(max(1, math.ceil(side / scale)) for side in extent)
        return _encoded(Image.fromarray(pixels).resize((shown[0], shown[1]), Image.Resampling.BOX))


def _encoded(image: Image.Image) -> bytes:
    buffer = BytesIO()
    image.save(buffer, "JPEG", quality=82)
    return buffer.getvalue()
