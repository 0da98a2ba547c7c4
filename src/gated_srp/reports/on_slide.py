"""Patches and the slide image they come from: do they belong together, what lies under them, which stand out.

Shapes: L patches, S side of a tile.
"""

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from gated_srp.errors import UserError
from gated_srp.files import write_image
from gated_srp.reports.heatmap import Canvas
from gated_srp.reports.values import Patches, PatchMap
from gated_srp.slides.reader import SlideImage, SlideInfo

_TILE = 144  # pixels of a tile on a contact sheet
_CAPTION = 16


def find_image(patches: Patches, given: Path | None) -> Path | None:
    """The slide that was named, else the one the feature file names, if it is there."""
    noted = patches.header.wsi_path
    return given or (noted if noted is not None and noted.is_file() else None)


def placed(patches: Patches, info: SlideInfo) -> Patches:
    """The patches in level-0 pixels of this image; refused where it cannot be theirs."""
    header = patches.header
    if header.unit == "um":
        if not info.mpp:
            raise UserError(
                f"{header.path}: positions are in microns, and {info.path} does not say how large its pixels are. "
                "Draw without the slide."
            )
        patches = replace(patches, corners=patches.corners / info.mpp, side=patches.side / info.mpp)
    if header.level0_size and header.unit == "px" and header.level0_size != info.size:
        raise UserError(
            f"{header.path}: its slide has {header.level0_size[0]} x {header.level0_size[1]} pixels, but {info.path} has "
            f"{info.size[0]} x {info.size[1]}. Name the image that was extracted, at full resolution."
        )
    reach = patches.corners.max(0) + patches.side / 2
    if (reach > info.size).any() or (patches.corners.min(0) < -patches.side).any():
        raise UserError(
            f"{header.path}: patches lie beyond {info.path} ({info.size[0]} x {info.size[1]} pixels). It is another slide, or a "
            "smaller export of it; name the image that was extracted."
        )
    return patches


def overview(patches: Patches, image: Path) -> tuple[Patches, np.ndarray, Canvas]:
    """The patches on the image, the image itself small, and the canvas of both."""
    with SlideImage(image) as slide:
        here = placed(patches, slide.info)
        canvas = Canvas.around(replace(here, corners=here.corners.clip(0, None)), slide.info.size)
        picture = slide.overview(canvas.scale)
        return here, picture, replace(canvas, size=(picture.shape[1], picture.shape[0]))


def contact_sheet(patches: Patches, one: PatchMap, image: Path, *, count: int = 12) -> Image.Image:
    """The patches with the highest and the lowest values, each with its value and position."""
    known = np.flatnonzero(np.isfinite(one.values))
    order = known[np.argsort(one.values[known], kind="stable")]
    count = min(count, len(order))
    columns = min(6, count)
    rows = math.ceil(count / columns)
    groups = (("highest", order[::-1][:count]), ("lowest", order[:count]))
    step, block = (_TILE + 6, _TILE + _CAPTION + 6), 24 + rows * (_TILE + _CAPTION + 6)
    sheet = Image.new("RGB", (columns * step[0] + 6, 2 * block + 6), "white")
    pen, font = ImageDraw.Draw(sheet), ImageFont.load_default()
    with SlideImage(image) as slide:
        here = placed(patches, slide.info)
        for group, (name, chosen) in enumerate(groups):
            pen.text((6, group * block + 6), f"{name}: {_plain(one.title)}", "black", font)
            for place, row in enumerate(chosen):
                left, top = 6 + place % columns * step[0], group * block + 24 + place // columns * step[1]
                sheet.paste(_tile(slide, here.corners[row], here.side), (left, top))
                x, y = here.corners[row]
                pen.text((left, top + _TILE + 2), f"{one.values[row]:.3g}  ({x:.0f}, {y:.0f})", "black", font)
    return sheet


def write_contact_sheet(patches: Patches, one: PatchMap, image: Path, path: Path) -> None:
    write_image(contact_sheet(patches, one, image), path)


def _tile(slide: SlideImage, corner: np.ndarray, side: float) -> Image.Image:
    level = slide.best_level(max(1.0, side / _TILE))
    read = max(1, round(side / slide.info.downsamples[level]))
    pixels = slide.read(round(corner[0]), round(corner[1]), level=level, size=(read, read))
    return Image.fromarray(pixels).resize((_TILE, _TILE), Image.Resampling.LANCZOS)


def _plain(text: str) -> str:
    """Pillow's built-in font knows Latin alone."""
    return text.replace("−", "-").replace("\n", " ").encode("latin-1", "replace").decode("latin-1")
