"""Numbers of patches as pixels: where a patch lies on a canvas or a slide, and which colour a value has. `pictures` draws them.

Shapes: L patches, h and w rows and columns of the canvas.
"""

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from gated_srp.data.matching import slide_stem
from gated_srp.errors import Note, UserError, counted
from gated_srp.files import as_stored
from gated_srp.reports.maps import SHUT, Patches, PatchMap
from gated_srp.slides.ome_zarr import is_ome_zarr
from gated_srp.slides.reader import ENDINGS, SlideImage, SlideInfo, slide_name
from gated_srp.srp.coefficient import regimes

_LONGEST = 1400  # pixels of a canvas's longer side
_OPACITY = 0.55
_TISSUE = 0.7  # of the darkness of tissue, under colours
LIGHT = 0.8  # opacity of the colours on glass, and so on the colour bar: tissue must show through the darkest
_FLAT = 0.02  # of the slide's mean: differences below it are nothing
_REGIMES = (
    "amplifies",
    "leaves mostly as is (within ±0.5)",
    "projects out",
    "reflects",
)  # in the order of `srp.coefficient.regimes`


# Where: rectangles of a slide as pixels of a picture ------------------------------------------------------------------


@dataclass(frozen=True)
class Canvas:
    """A picture of ``size`` (w, h) pixels that starts at ``origin`` of the slide, ``scale`` level-0 pixels per pixel."""

    origin: tuple[float, float]
    scale: float
    size: tuple[int, int]

    @classmethod
    def around(cls, patches: Patches, size: tuple[int, int] | None = None) -> "Canvas":
        """Of the whole slide where its size is known, else of the patches."""
        low = np.zeros(2) if size else patches.corners.min(0)
        high = patches.corners.max(0) + patches.side
        high = np.maximum(np.array(size, float), high) if size else high
        scale = max((high - low).max() / _LONGEST, 1e-9)
        scale = max(scale, patches.side / 64)  # few patches need no large picture
        width, height = (max(1, math.ceil(extent / scale)) for extent in high - low)
        return cls((float(low[0]), float(low[1])), float(scale), (width, height))

    def paint(self, patches: Patches, values: np.ndarray) -> np.ndarray:
        """(h, w): each patch's value on the pixels of its square, the mean where squares overlap, NaN elsewhere.

        A square's edges are rounded to pixels, so squares that touch leave no gap and share no pixel.
        """
        known = np.isfinite(values)
        corners = (patches.corners[known] - self.origin) / self.scale
        limits = np.array(self.size)
        low = np.floor(corners + 0.5).astype(np.int64).clip(0, limits - 1)
        high = np.floor(corners + patches.side / self.scale + 0.5).astype(np.int64).clip(low + 1, limits)
        (x0, y0), (x1, y1) = low.T, high.T
        sums, counts = (np.zeros((self.size[1] + 1, self.size[0] + 1)) for _ in range(2))
        for table, what in ((sums, values[known].astype(np.float64)), (counts, np.ones(int(known.sum())))):
            # Corners of rectangles, summed along both axes, fill the rectangles: no loop over patches.
            for y, x, sign in ((y0, x0, 1), (y0, x1, -1), (y1, x0, -1), (y1, x1, 1)):
                np.add.at(table, (y, x), sign * what)
            np.cumsum(np.cumsum(table, 0, out=table), 1, out=table)
        covered = counts.round()[:-1, :-1] > 0
        out = np.full(covered.shape, np.nan)
        out[covered] = sums[:-1, :-1][covered] / counts[:-1, :-1][covered]
        return out


def place_of_images(wsi: str | Path | None, slides: int) -> Path | None:
    """What was named as ``wsi``, for `find_image`: it must be there, and a folder where there are several slides."""
    place = None if wsi is None else as_stored(wsi)
    if place is not None and not place.exists():
        raise UserError(
            "no such file or folder", where=f"--wsi {wsi}", cure="Name the slide image, or the folder of the images."
        )
    if place is not None and slides > 1 and (not place.is_dir() or is_ome_zarr(place)):
        cure = "Name the folder of the images, or one feature file."
        raise UserError(f"one image for the {slides} slides", where=f"--wsi {wsi}", cure=cure)
    return place


def no_image(wsi: str | Path, *slides: str) -> Note:
    """Of slides without an image in the folder that was named."""
    return Note("note", "no_image", f"no slide image below {wsi}, drawn without", slides[:5])


def find_image(patches: Patches, given: Path | None) -> Path | None:
    """The slide image that was named, or the slide's own in the folder that was named.

    A feature file may name any path: that is believed only where it lies in that folder.
    """
    given = given and as_stored(given)
    if given is None or not given.is_dir() or given.suffix.lower() in ENDINGS or is_ome_zarr(given):
        return given
    home, noted = given.resolve(), patches.header.wsi_path
    stem = slide_stem(patches.header.path)
    if noted is not None and (place := (home / noted).resolve()).is_relative_to(home) and _is_image(place):
        return place
    # Files of a DICOM series are numbered, so a name like 3.dcm says nothing: their folder's does.
    names = {stem, *([image_name(Path(noted))] if noted is not None and Path(noted).suffix.lower() != ".dcm" else [])}
    endings = (*ENDINGS, ".zarr")
    paths = (path for path in sorted(home.rglob("*")) if path.suffix.lower() in endings)
    return next((path for path in paths if image_name(path) in names and _is_image(path)), None)


def _is_image(path: Path) -> bool:
    return path.is_file() or is_ome_zarr(path)


def image_name(path: Path) -> str:
    """The name under which the features of an image are stored, without what follows a slide's name."""
    return slide_name(path) if path.suffix.lower() in (".dcm", ".zarr") else slide_stem(path)


def in_image_pixels(patches: Patches, info: SlideInfo) -> Patches:
    """The patches in level-0 pixels of this image; an image that cannot be theirs is refused."""
    header = patches.header
    if header.unit == "um":
        if not info.mpp:
            raise UserError(
                f"positions are in microns, and {info.path} does not say how large its pixels are",
                where=header.path,
                cure="Draw without the slide.",
            )
        patches = replace(patches, corners=patches.corners / info.mpp, side=patches.side / info.mpp)
        header = replace(header, unit="px", coords=header.coords / info.mpp, level0_size=None)
    size = f"{info.size[0]} x {info.size[1]}"
    if header.level0_size and header.unit == "px" and header.level0_size != info.size:
        own = f"{header.level0_size[0]} x {header.level0_size[1]}"
        raise UserError(
            f"its slide has {own} pixels, but {info.path} has {size}",
            where=header.path,
            cure="Name the image that was extracted, at full resolution.",
        )
    reach = patches.corners.max(0) + patches.side / 2
    if (reach > info.size).any() or (patches.corners.min(0) < -patches.side).any():
        raise UserError(
            f"patches lie beyond {info.path} ({size} pixels). It is another slide, or a smaller export of it",
            where=header.path,
            cure="Name the image that was extracted.",
        )
    mpp, magnification = header.mpp or info.mpp, header.magnification or info.magnification
    header = replace(header, mpp=mpp, magnification=magnification, wsi_path=header.wsi_path or info.path)
    return replace(patches, header=header, bounds=info.bounds)


def overview(patches: Patches, image: Path) -> tuple[Patches, np.ndarray, Canvas]:
    """The patches in the image's pixels, the image itself made small, and the canvas of both."""
    with SlideImage(image) as slide:
        here = in_image_pixels(patches, slide.info)
        canvas = Canvas.around(replace(here, corners=here.corners.clip(0, None)), slide.info.size)
        picture = slide.overview(canvas.scale)
        return here, picture, replace(canvas, size=(picture.shape[1], picture.shape[0]))


# How: values as colours -----------------------------------------------------------------------------------------------


# Neither lies red on eosin, and both can be told apart without colour vision for red and green.
_AROUND, _UP = "PuOr_r", "viridis"
_MULTIPLES = 16.0  # times the slide's mean, up and down, that the colours of attention span
_CHANGE = 1.0  # of the slide's mean, up and down, that the colours of a change span


@dataclass(frozen=True, eq=False)
class Scaled:
    """Values as places on a colour map: (L,) in 0 to 1; ``ticks`` say which value a place means.

    ``label``: of the colour bar. ``beyond``: share of patches below and above what the colours span.
    """

    places: np.ndarray
    ticks: tuple[tuple[float, str], ...]
    colours: str
    label: str
    beyond: tuple[float, float] = (0.0, 0.0)

    @property
    def signed(self) -> bool:
        """Whether the middle of the colours is nothing."""
        return self.colours == _AROUND


def scaled_map(one: PatchMap, *, percentile: bool = False) -> Scaled:
    """A map on its fixed scale; with ``percentile`` the colours stretch to the slide, which the label says."""
    if not np.isfinite(one.values).any():
        raise UserError("no patch has a finite value. Nothing can be drawn.", where=one.title)
    if percentile:
        return by_percentile(one.shown, signed=one.signed)
    if one.unit is not None:
        return as_change(one.shown, one.unit) if one.signed else as_multiples(one.shown, one.unit)
    if one.regimes:
        return as_beta(one.values, one.limit or 2.0)
    label = one.title.partition(": ")[2] or "values"  # homogeneity: mean cosine to the neighbours
    return replace(linear(one.shown, one.limit or 1.0, one.signed), label=label)


def linear(values: np.ndarray, limit: float, signed: bool) -> Scaled:
    """From 0, or where ``signed`` from -limit, to limit."""
    low = -limit if signed else 0.0
    ticks = tuple((float(p), f"{low + p * (limit - low):.3g}") for p in np.linspace(0, 1, 5))
    places, beyond = _placed((values - low) / (limit - low))
    return Scaled(places, ticks, _AROUND if signed else _UP, "values", beyond)


def as_beta(values: np.ndarray, limit: float) -> Scaled:
    """From -limit to limit, what the gate can reach, with the borders of the regimes on the bar."""
    plain = linear(values, limit, signed=True)
    marks = [(b / limit / 2 + 0.5, f"{b:g}") for b in (-0.5, 0.5, 1.0, 1.5, 2.0) if abs(b) < limit * 0.93]
    ends = [plain.ticks[0], plain.ticks[2], plain.ticks[4]]
    return replace(plain, ticks=tuple(sorted([*ends, *marks])), label="beta, over the whole range of the gate")


def as_multiples(values: np.ndarray, unit: float) -> Scaled:
    """Multiples of the slide's mean on a logarithmic scale: a flat map has the colour of 1 everywhere."""
    most = math.log2(_MULTIPLES)
    with np.errstate(divide="ignore"):
        places, beyond = _placed(np.log2(values / (unit or 1.0)) / most / 2 + 0.5)
    shown = [(-4, "1/16"), (-2, "1/4"), (-1, "1/2"), (0, "1"), (1, "2"), (2, "4"), (4, "16")]
    ticks = tuple((power / most / 2 + 0.5, text) for power, text in shown)
    return Scaled(places, ticks, _AROUND, "times the mean of the slide", beyond)


def as_change(values: np.ndarray, unit: float) -> Scaled:
    """Differences as shares of the slide's mean."""
    plain = linear(values / (unit or 1.0), _CHANGE, signed=True)
    shares = [(place, float(text)) for place, text in plain.ticks]
    ticks = tuple((place, f"{100 * share:+.0f} %" if share else "0") for place, share in shares)
    return replace(plain, ticks=ticks, label="share of the slide's mean")


def by_percentile(values: np.ndarray, *, signed: bool = False) -> Scaled:
    """Linear from the 1st to the 99th percentile of the slide, around zero where ``signed``."""
    low, high = np.nanpercentile(values, [1, 99])
    if signed:
        high = float(np.nanpercentile(np.abs(values), 99)) or float(np.nanmax(np.abs(values))) or 1.0
        low = -high
    spread = high - low or 1.0
    shown = np.linspace(0, 1, 6 if not signed else 5)
    ticks = tuple(zip(shown.tolist(), distinct_labels(low + shown * spread), strict=True))
    places, beyond = _placed((values - low) / spread)
    return Scaled(places, ticks, _AROUND if signed else _UP, "stretched to this slide: percentiles 1 to 99", beyond)


def _placed(places: np.ndarray) -> tuple[np.ndarray, tuple[float, float]]:
    known = places[np.isfinite(places) | np.isinf(places)]
    slack = 1e-6  # of rounding
    below, above = float((known < -slack).mean()), float((known > 1 + slack).mean())
    return places.clip(0, 1), (below, above)


def distinct_labels(values: np.ndarray) -> list[str]:
    """Numbers with three digits, or with as many more as they need to differ.

    >>> distinct_labels(np.array([0.0, 0.25, 1.0])), distinct_labels(np.array([0.01541, 0.01542, 0.016]))
    (['0', '0.25', '1'], ['0.01541', '0.01542', '0.016'])
    """
    for digits in range(3, 7):
        labels = [f"{value:.{digits}g}" for value in values.tolist()]
        if len(set(labels)) == len(np.unique(values)):
            break
    return labels


def describe_spread(values: np.ndarray) -> str:
    """How uneven a map is.

    >>> describe_spread(np.array([1.0, 1.0, 4.0])), describe_spread(np.zeros(3)), describe_spread(np.array([1.0, 1.001]))
    ('lowest 0.5, highest 2 times the mean of the slide', 'zero everywhere', 'the same everywhere, within 0.1 %')
    """
    low, mean, high = np.nanmin(values), np.nanmean(values), np.nanmax(values)
    if not mean:
        return "zero everywhere"
    if abs(high - low) < _FLAT * abs(mean):
        return f"the same everywhere, within {abs(high - low) / abs(mean):.1%}".replace("%", " %")
    least, most = distinct_labels(np.array([low, high]) / mean)
    return f"lowest {least}, highest {most} times the mean of the slide"


def is_quiet(one: PatchMap) -> bool:
    """Whether next to nothing happens in a map: gates that are shut, a change or a spread below 2 % of the slide's mean."""
    if one.regimes:
        return bool(np.nanmax(np.abs(one.values)) < SHUT)
    most = np.nanmax(np.abs(one.shown)) if one.signed else np.nanmax(one.shown) - np.nanmin(one.shown)
    return one.shut or (one.unit is not None and bool(most <= _FLAT * one.unit))


def describe(one: PatchMap) -> str:
    """What a map says in numbers, in one line; a map in which nothing happens says so.

    >>> describe(PatchMap("change", "", np.array([0.0, 1e-5]), signed=True, unit=0.1))
    'nothing changes: at most 0.01 % of the mean of the slide'
    """
    size = np.abs(one.values)
    if one.regimes:
        quiet = f"nothing happens: beta is at most {np.nanmax(size):.2g}; " if is_quiet(one) else ""
        return f"{quiet}mean {np.nanmean(one.values):+.2g}; {regime_shares(one.values)}"
    if one.unit is None:
        return "lowest {}, highest {}".format(*distinct_labels(np.array([np.nanmin(one.shown), np.nanmax(one.shown)])))
    if not one.signed:
        return describe_spread(one.shown)
    shares = (100 * float(one_size) / (one.unit or 1.0) for one_size in (np.nanmax(size), np.nanmean(size)))
    most, mean = (f"{share:.0f} %" if share >= 10 else f"{share:.2g} %" for share in shares)
    if is_quiet(one):
        return f"nothing changes: at most {most} of the mean of the slide"
    return f"at most {most}, on average {mean} of the mean of the slide"


def past_the_bar(scaled: Scaled) -> str:
    """How many patches lie beyond the colours, to be added to `describe`; empty where none does.

    >>> past_the_bar(linear(np.array([0.5, 1.5, 2.0]), 1.0, signed=False))
    '; 2 patches lie beyond the colours'
    """
    past = round(sum(scaled.beyond) * int(np.isfinite(scaled.places).sum()))
    return f"; {counted(past, 'patch')} {'lies' if past == 1 else 'lie'} beyond the colours" if past else ""


def regime_shares(values: np.ndarray) -> str:
    """The share of patches in each regime.

    >>> regime_shares(np.array([-0.7, 0.0, 0.1, 0.9]))
    'amplifies 25 %, leaves mostly as is (within ±0.5) 50 %, projects out 25 %, reflects 0 %'
    """
    masks = regimes(torch.from_numpy(values[np.isfinite(values)])).values()
    parts = [f"{name} {mask.double().mean():.0%}" for name, mask in zip(_REGIMES, masks, strict=True)]
    return ", ".join(parts).replace("%", " %")


def colour(places: np.ndarray, colours: Any, background: np.ndarray | None, *, stain: bool = False) -> np.ndarray:
    """(h, w) places, NaN where there is no patch -> (h, w, 3) bytes: the colours, darkened by the tissue in grey where there is a slide.

    On white glass they are those of the colour bar, and the white of a diverging map shows the tissue alone. ``stain``: blended with
    the tissue in its own colours instead.
    """
    bare = np.isnan(places)[..., None]
    picture: np.ndarray = colours(np.where(bare[..., 0], 0.0, places), bytes=True)[..., :3]
    if background is None:
        return np.where(bare, np.uint8(235), picture)
    if stain:
        mixed = (picture * np.float32(_OPACITY) + background * np.float32(1 - _OPACITY)).round().astype(np.uint8)
        return np.where(bare, background, mixed)
    grey = in_grey(background)
    light = 255 - (255 - picture) * np.float32(LIGHT)
    return np.where(bare, grey, (light * (grey / np.float32(255))).round().astype(np.uint8))


def in_grey(picture: np.ndarray) -> np.ndarray:
    """(h, w, 3) bytes in grey and lighter, so that colours show on it."""
    light = picture @ np.array([0.299, 0.587, 0.114], np.float32)  # (h, w)
    light = 255 - (255 - light) * np.float32(_TISSUE)
    return light.round().astype(np.uint8)[..., None].repeat(3, -1)
