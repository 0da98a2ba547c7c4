"""Masks as polygons: binary or label pictures (PNG, TIFF) of a whole slide at any scale.

Shapes: h and w rows and columns of a mask.
"""

import warnings
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from gated_srp.bounded import try_out
from gated_srp.data.annotation_files import Drawing, Parsed, broken
from gated_srp.errors import UserError

if TYPE_CHECKING:
    from PIL.Image import Image

_PIXELS, _PAGE = 2**27, 2**25  # of a mask; of the level that is taken of a pyramid
_PIECES = 500_000  # runs of pixels
_CLASSES = 64  # values: more are a picture
_COLOURS = 2**40  # where red, green and blue as one number begin: beyond every label
_PLAUSIBLE = (0.02, 500.0)  # microns per pixel; beyond, it is a print resolution


def parse_mask(path: Path, size: tuple[int, int] | None, mpp: float | None) -> Parsed:
    """A binary or label mask at any scale: level-0 pixels by the slide's ``size``, else by both files' microns per pixel."""
    import shapely

    try:
        try_out(read_mask, path)
        labels, whole, own = read_mask(path)  # (h, w)
    except UserError as error:
        raise error.changed(where=str(path), kind="annotations") from None
    except Exception as error:  # a damaged picture shows as anything
        raise UserError(
            f"cannot be read as a mask ({' '.join(str(error).split())[:100]})",
            where=path,
            cure="Export it again.",
            kind="annotations",
        ) from None
    across, down = _scales((labels.shape[1], labels.shape[0]), whole, own, size, mpp, path)
    values = [value for value in np.unique(labels).tolist() if value]
    parsed = Parsed()
    for value in values:
        boxes = _runs(labels == value, path) * (across, down, across, down)
        # A name says nothing of what else is on the slide, but for `mask`, to which a mask of any one value answers.
        value_name = f"#{value - _COLOURS:06x}" if value >= _COLOURS else str(value)
        name, also = (
            (value_name, "mask" if len(values) == 1 else "") if values not in ([1], [255]) else ("mask", value_name)
        )
        parsed.drawings.append(Drawing(name, shapely.union_all(shapely.box(*boxes.T)), also=also))
    return parsed


def read_mask(path: Path) -> tuple[np.ndarray, tuple[int, int], float | None]:
    """Labels (h, w) of the level that is taken, the size of the largest level, microns per pixel of the latter where they are known."""
    from PIL import Image, PngImagePlugin, TiffImagePlugin

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with path.open("rb") as file:
            tiff = file.read(4)[:2] in (b"II", b"MM")
        opened: Image.Image = (TiffImagePlugin.TiffImageFile if tiff else PngImagePlugin.PngImageFile)(path)
        with opened as image:
            whole, own = image.size, _mpp_of(image)
            pages = []
            for number in range(min(getattr(image, "n_frames", 1), 64)):
                try:
                    image.seek(number)
                except (Image.DecompressionBombError, EOFError):  # a level too large to be read at once
                    continue
                if image.width * image.height <= _PIXELS and _alike(image.size, whole):
                    pages.append((image.width * image.height > _PAGE, -image.width * image.height, number))
            if not pages:
                raise broken(
                    "a mask too large to be read", "Save it as a pyramid, or smaller: 1/16 of the slide suffices."
                )
            coarse = [page for page in pages if not page[0]]
            image.seek(min(coarse or pages)[2])
            return _labels(image), whole, own


def _alike(level: tuple[int, int], whole: tuple[int, int]) -> bool:
    across, down = whole[0] / level[0], whole[1] / level[1]
    return abs(across - down) <= 2 * max(across / level[0], down / level[1]) + 1e-9


def _mpp_of(image: "Image") -> float | None:
    dots = image.info.get("dpi")
    try:
        found = 25400 / float(dots[0])  # type: ignore[index]
    except (TypeError, ValueError, ZeroDivisionError, IndexError):
        return None
    return found if _PLAUSIBLE[0] <= found <= _PLAUSIBLE[1] else None


def _labels(image: "Image") -> np.ndarray:
    """Whole numbers (h, w), 0 for nothing; a colour that is no grey is a number from `_COLOURS` on."""
    pixels = np.asarray(image)
    if pixels.ndim == 3:
        pixels = pixels[..., : 3 if pixels.shape[2] > 2 else 1].astype(np.int64)
        if pixels.shape[2] == 3:
            grey = (pixels == pixels[..., :1]).all(-1)
            pixels = np.where(grey, pixels[..., 0], pixels @ np.array([65536, 256, 1]) + _COLOURS)
        else:
            pixels = pixels[..., 0]
    if len(found := np.unique(pixels)) > _CLASSES or not np.isfinite(pixels).all():
        what = f"a picture of {len(found)} colours; a mask has at most {_CLASSES} values"
        raise broken(what, "Save labels without compression losses.")
    if len(
        cut := found[found != found.astype(np.int64)]
    ):  # a map of probabilities, of which whole numbers would keep the ones alone
        what = f"a mask with values that are not whole numbers, such as {cut[0]:g}"
        raise broken(what, "Save labels: 0 for nothing, 1, 2, ... for the classes.")
    return pixels.astype(np.int64)


def _scales(
    shape: tuple[int, int],
    whole: tuple[int, int],
    own: float | None,
    size: tuple[int, int] | None,
    mpp: float | None,
    path: Path,
) -> tuple[float, float]:
    """Level-0 pixels per pixel of the mask, across and down."""
    if size is not None:
        across, down = size[0] / whole[0], size[1] / whole[1]
        if abs(across / down - 1) > 0.01 + 1.5 / min(whole):
            raise UserError(
                f"a mask of {whole[0]} x {whole[1]} pixels cannot be of a slide of {size[0]} x {size[1]}: "
                f"{across:.4g} times across, {down:.4g} times down",
                where=path,
                cure="Save the mask of the whole slide, not cropped.",
                kind="annotations",
            )
    elif own and mpp:
        across = down = own / mpp
    else:
        raise UserError(
            "neither the slide's size nor the mask's microns per pixel are known, so its scale is not",
            where=path,
            cure="Use outlines (GeoJSON), or feature files that say the slide's size.",
            kind="annotations",
        )
    return across * whole[0] / shape[0], down * whole[1] / shape[1]


def _runs(cells: np.ndarray, path: Path) -> np.ndarray:
    """Boxes (x0, y0, x1, y1) that cover the true cells (h, w): runs of a row, one box where they repeat in the rows below."""
    steps = np.diff(np.pad(cells.astype(np.int8), ((0, 0), (1, 1))), axis=1)
    (rows, starts), ends = np.nonzero(steps == 1), np.nonzero(steps == -1)[1]
    order = np.lexsort((rows, ends, starts))
    rows, starts, ends = rows[order], starts[order], ends[order]
    first = np.ones(len(rows), bool)
    first[1:] = (np.diff(rows) != 1) | (np.diff(starts) != 0) | (np.diff(ends) != 0)
    if first.sum() > _PIECES:
        raise UserError("a mask of single pixels", where=path, cure="Smooth it first.", kind="annotations")
    last = np.append(np.flatnonzero(first)[1:], len(rows)) - 1
    return np.stack([starts[first], rows[first], ends[first], rows[last] + 1], 1).astype(np.float64)
