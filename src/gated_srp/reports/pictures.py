"""Pictures of maps: the maps of one slide, slides beside methods, and sheets of single patches.

Shapes: L patches, h and w rows and columns of a canvas.
"""

import math
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from gated_srp.data.annotations import Annotations
from gated_srp.data.bag import BagHeader
from gated_srp.errors import counted
from gated_srp.files import whole
from gated_srp.reports.draw import LIGHT, Canvas, Scaled, colour, describe, in_image_pixels, past_the_bar, scaled_map
from gated_srp.reports.maps import Patches, PatchMap
from gated_srp.slides.reader import SlideImage

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Overlay = Literal["grey", "stain", "contour"]
_LINES = ("#000000", "#0072B2", "#D55E00", "#009E73", "#CC79A7")  # of outlines
_PLAIN: dict[Any, Any] = {"text.parse_math": False}  # a name may have dollars
_DPI = 160
_PATCH = 224  # least pixels of a patch on a sheet
_LARGEST = 448
_CONTEXT = 0.25  # of a patch's side, shown around it on each side
_CAPTION, _GAP = 34, 12
_SMALL = 24  # pixels of a patch on a map that has no room for its number


# Maps of one slide ----------------------------------------------------------------------------------------------------


def draw_maps(maps: Sequence[tuple[str, Patches, PatchMap]], path: Path, **settings: Any) -> None:
    """`figure_of_maps` to a PNG."""
    from matplotlib import rc_context

    with rc_context(_PLAIN):
        figure = figure_of_maps(maps, **settings)  # before anything is written: it may refuse
        with whole(path) as draft:
            figure.savefig(draft, dpi=_DPI, format="png")


def figure_of_maps(
    maps: Sequence[tuple[str, Patches, PatchMap]],
    *,
    title: str,
    slide: tuple[np.ndarray, Canvas] | None = None,
    percentile: bool = False,
    overlay: Overlay = "grey",
    numbers: Mapping[int, int] | None = None,
    drawn: Annotations | None = None,
) -> "Figure":
    """One panel per map (with a heading of its own), over the slide's overview where there is one.

    ``overlay``: over the tissue in grey, over the tissue in its own colours, or as outlines over the latter. ``numbers``: row of a patch
    to the number it has on the contact sheet, written on the first map. ``drawn``: regions whose outlines are shown.
    """
    from matplotlib.figure import Figure

    columns = min(len(maps), 4)
    rows = math.ceil(len(maps) / columns)
    header = maps[0][1].header
    canvas = slide[1] if slide else Canvas.around(maps[0][1], header.level0_size)
    tall = min(max(canvas.size[1] / canvas.size[0], 0.45), 2.2)
    figure = Figure(figsize=(6.4 * columns, (4.9 * tall + 0.8) * rows + 0.5), layout="constrained")
    for place, (heading, patches, one) in enumerate(maps, 1):
        axes = figure.add_subplot(rows, columns, place)
        scaled = scaled_map(one, percentile=percentile)
        _paint(axes, patches, scaled, canvas, None if slide is None else slide[0], overlay)
        _add_bar(figure, axes, scaled, light=slide is not None and overlay == "grey")
        _add_scale(axes, canvas, header)
        if drawn is not None:
            _add_outlines(axes, drawn, legend=place == 1)
        if place == 1 and numbers:
            small = patches.side / canvas.scale < _SMALL
            _add_numbers(axes, patches, numbers, framed=overlay != "contour" or small, beside=small)
        axes.set_xlabel(_wrapped(describe(one) + past_the_bar(scaled), 80), fontsize=8)
        axes.set_title(_wrapped(heading, 62), fontsize=9)
    figure.suptitle(_wrapped(title, 56 * columns), fontsize=10)
    figure.supxlabel(_wrapped(describe_slide(header, maps[0][1].side), 84 * columns), fontsize=8, color="#444444")
    return figure


def _paint(
    axes: "Axes", patches: Patches, scaled: Scaled, canvas: Canvas, background: np.ndarray | None, overlay: Overlay
) -> None:
    from matplotlib import colormaps
    from matplotlib.patheffects import withStroke

    painted, colours = canvas.paint(patches, scaled.places), colormaps[scaled.colours]
    right, bottom = (o + s * canvas.scale for o, s in zip(canvas.origin, canvas.size, strict=True))
    extent = (canvas.origin[0], right, bottom, canvas.origin[1])
    lines = overlay == "contour"
    picture = colour(np.full_like(painted, np.nan) if lines else painted, colours, background, stain=overlay != "grey")
    axes.imshow(picture, interpolation="nearest", extent=extent)
    axes.set(xticks=[], yticks=[])
    if lines:
        middle = 0.5 if scaled.signed else 0.0  # nothing: not outlined, and what lies beside the tissue
        painted = np.where(np.isnan(painted), middle, painted)
        levels = [place for place, _ in scaled.ticks if painted.min() < place < painted.max() and place != middle]
        if levels:
            columns, rows = (
                o + (np.arange(n) + 0.5) * canvas.scale for o, n in zip(canvas.origin, canvas.size, strict=True)
            )
            lines_of = [colours(level) for level in levels]
            lines_drawn = axes.contour(columns, rows, painted, levels, colors=lines_of, linewidths=1.8)
            lines_drawn.set(path_effects=[withStroke(linewidth=3.2, foreground="#333333")])  # seen on any tissue


def _add_bar(figure: "Figure", axes: Any, scaled: Scaled, *, light: bool = False) -> None:
    """A colour bar, with arrows where patches lie beyond it; ``light``: as the colours are over grey tissue."""
    from matplotlib import colormaps
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import Colormap, ListedColormap

    ends = {(False, False): "neither", (True, False): "min", (False, True): "max", (True, True): "both"}
    extend = ends[scaled.beyond[0] > 0, scaled.beyond[1] > 0]
    marks = [place for place, _ in scaled.ticks]
    colours: Colormap = colormaps[scaled.colours]
    if light:
        colours = ListedColormap(1 - (1 - colours(np.linspace(0, 1, 256))[:, :3]) * LIGHT)
    bar = figure.colorbar(ScalarMappable(cmap=colours), ax=axes, shrink=0.8, ticks=marks, extend=extend)
    bar.ax.set_yticklabels([text for _, text in scaled.ticks], fontsize=8)
    bar.set_label(scaled.label, fontsize=8)


def describe_slide(header: BagHeader, side: float) -> str:
    """Orientation, magnification and sizes, as far as the files say them.

    ``side`` of a patch, in the header's unit.
    """
    said = ["as scanned: x to the right, y down"]
    if header.magnification:
        said.append(f"scanned at {header.magnification:g}x")
    if header.unit == "um":
        said.append(f"patches of {side:.0f} µm")
    elif header.mpp:
        said += [f"{header.mpp:.3g} µm per pixel", f"patches of {side:g} pixels, {side * header.mpp:.0f} µm"]
    else:
        said += [f"patches of {side:g} pixels", "size of a pixel not known"]
    return "; ".join(said)


def bar_length(width: float) -> float:
    """Microns of a scale bar for a picture that is ``width`` microns wide: 1, 2 or 5 times a power of ten, at most a quarter.

    >>> [bar_length(width) for width in (1100, 9000, 43000)]
    [200.0, 2000.0, 10000.0]
    """
    power = 10.0 ** math.floor(math.log10(width / 4))
    return max(step * power for step in (1, 2, 5) if step * power <= width / 4)


def _add_scale(axes: "Axes", canvas: Canvas, header: BagHeader) -> None:
    """A scale bar in microns, in the lower left, where the size of a pixel is known."""
    from matplotlib.patheffects import withStroke

    mpp = 1.0 if header.unit == "um" else header.mpp
    if not mpp:
        return
    width, height = (size * canvas.scale for size in canvas.size)
    microns = bar_length(width * mpp)
    text = f"{microns / 1000:g} mm" if microns >= 1000 else f"{microns:g} µm"
    left, low = canvas.origin[0] + 0.03 * width, canvas.origin[1] + height - 0.025 * height
    white = [withStroke(linewidth=3, foreground="white")]
    axes.plot(
        [left, left + microns / mpp], [low, low], color="black", linewidth=3, solid_capstyle="butt", path_effects=white
    )
    axes.text(
        left + microns / mpp / 2, low - 0.012 * height, text, ha="center", va="bottom", fontsize=8, path_effects=white
    )


def _add_outlines(axes: "Axes", drawn: Annotations, *, legend: bool) -> None:
    """What was drawn on the slide, a line per class: colour and dashes tell classes apart."""
    import shapely
    from matplotlib.lines import Line2D
    from matplotlib.patheffects import withStroke

    handles, around = [], [withStroke(linewidth=2.6, foreground="white")]  # seen on any tissue
    for number, name in enumerate(drawn.classes):
        line: dict[str, Any] = {"color": _LINES[number % 5], "linestyle": ("-", "--", ":")[number // 5 % 3]}
        for ring in shapely.get_rings(shapely.get_parts(drawn.shape([name]))):
            axes.plot(
                *shapely.get_coordinates(ring).T, linewidth=1.4, path_effects=around, scalex=False, scaley=False, **line
            )
        handles.append(Line2D([], [], label=name, **line))
    if legend and handles:
        axes.legend(handles=handles, fontsize=7, loc="upper right", title="drawn", title_fontsize=7)


def _add_numbers(axes: "Axes", patches: Patches, numbers: Mapping[int, int], *, framed: bool, beside: bool) -> None:
    """In the middle of each patch, or ``beside`` it."""
    from matplotlib.patches import Rectangle
    from matplotlib.patheffects import withStroke

    white = [withStroke(linewidth=2, foreground="white")]
    for row, number in numbers.items():
        x, y = patches.corners[row]
        if framed:
            frame: dict[str, Any] = {"fill": False, "edgecolor": "black", "linewidth": 0.8, "path_effects": white}
            axes.add_patch(Rectangle((x, y), patches.side, patches.side, **frame))
        at = (x + patches.side, y) if beside else (x + patches.side / 2, y + patches.side / 2)
        aligned: dict[str, Any] = {"ha": "left", "va": "bottom"} if beside else {"ha": "center", "va": "center"}
        axes.text(*at, str(number), fontsize=7, path_effects=white, **aligned)


def _wrapped(text: str, width: int) -> str:
    return "\n".join(textwrap.fill(line, width) for line in text.splitlines())


# Slides beside methods ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class GridRow:
    """One slide of a grid: a map per method, over the slide's overview where there is one."""

    name: str
    maps: Mapping[str, tuple[Patches, PatchMap]]  # by method
    slide: tuple[np.ndarray, Canvas] | None = None


def figure_of_grid(
    rows: Sequence[GridRow], *, title: str, percentile: bool = False, overlay: Overlay = "grey"
) -> "Figure":
    """Slides from top to bottom; a thumbnail and one map per method from left to right, on one scale."""
    from matplotlib.figure import Figure

    methods = list(dict.fromkeys(method for row in rows for method in row.maps))
    figure = Figure(figsize=(2.9 * (1 + len(methods)) + 0.8, 3.0 * len(rows) + 0.6), layout="constrained")
    axes = figure.subplots(len(rows), 1 + len(methods), squeeze=False)
    scaled: dict[tuple[int, str], Scaled] = {
        (i, method): scaled_map(one, percentile=percentile)
        for i, row in enumerate(rows)
        for method, (_, one) in row.maps.items()
    }
    for i, row in enumerate(rows):
        patches = next(iter(row.maps.values()))[0]
        canvas = row.slide[1] if row.slide else Canvas.around(patches, patches.header.level0_size)
        thumbnail = axes[i, 0]
        painted = canvas.paint(patches, np.ones(len(patches.corners)))
        bare = np.where(np.isnan(painted)[..., None], np.uint8(235), np.uint8(150)).repeat(3, -1)
        right, bottom = (o + s * canvas.scale for o, s in zip(canvas.origin, canvas.size, strict=True))
        thumbnail.imshow(
            row.slide[0] if row.slide else bare, extent=(canvas.origin[0], right, bottom, canvas.origin[1])
        )
        thumbnail.set(xticks=[], yticks=[])
        thumbnail.set_ylabel(_wrapped(row.name, 28), fontsize=8)
        _add_scale(thumbnail, canvas, patches.header)
        for axis, method in zip(axes[i, 1:], methods, strict=True):
            if method in row.maps:
                _paint(
                    axis, row.maps[method][0], scaled[i, method], canvas, row.slide[0] if row.slide else None, overlay
                )
            else:
                axis.set_axis_off()
    for axis, heading in zip(
        axes[0], ["slide" if any(row.slide for row in rows) else "patches", *methods], strict=True
    ):
        axis.set_title(heading, fontsize=9)
    first = next(iter(scaled.values()))
    below, above = (max(one.beyond[side] for one in scaled.values()) for side in (0, 1))
    ticks = ((0.0, "lowest"), (1.0, "highest")) if percentile else first.ticks
    label = "within each slide and method: percentiles 1 to 99" if percentile else first.label
    light = overlay == "grey" and any(row.slide for row in rows)
    _add_bar(figure, axes, Scaled(first.places, ticks, first.colours, label, (below, above)), light=light)
    figure.suptitle(title, fontsize=10)
    return figure


def draw_grid(rows: Sequence[GridRow], path: Path, **settings: Any) -> None:
    """`figure_of_grid` to a PNG."""
    from matplotlib import rc_context

    with rc_context(_PLAIN), whole(path) as draft:
        figure_of_grid(rows, **settings).savefig(draft, dpi=_DPI, format="png")


# Single patches -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Group:
    """Rows of patches with the most of something; ``note`` says what is not among them."""

    name: str
    rows: np.ndarray
    note: str = ""


def extremes(one: PatchMap, *, count: int = 12) -> tuple[Group, Group]:
    """The patches with the highest and the lowest values.

    On a signed map only patches above zero are among the highest and below zero among the lowest. No patch is in both. Where patches
    at the border of a group share one value, none of them is taken: which of them would be arbitrary.
    """
    values = one.shown
    known = np.flatnonzero(np.isfinite(values))
    if one.signed:
        up, down = known[values[known] > 0], known[values[known] < 0]
        return _most(values, up, count, "highest, above zero"), _most(-values, down, count, "lowest, below zero")
    half = min(count, len(known) // 2)
    return _most(values, known, half, "highest"), _most(-values, known, half, "lowest")


def _most(values: np.ndarray, rows: np.ndarray, count: int, name: str) -> Group:
    order = rows[np.argsort(-values[rows], kind="stable")]
    if not len(order):
        return Group(name, order, "no patch")
    taken = order[:count]
    if len(order) > count and count and values[order[count]] == values[taken[-1]]:
        border = values[taken[-1]]
        taken = taken[values[taken] > border]
        same = int((values[order] == border).sum())
        more = f"{'the next ' if len(taken) else ''}{counted(same, 'patch')} share one value, so none of them is shown"
        return Group(name, taken, more)
    return Group(name, taken)


def numbered(groups: Sequence[Group]) -> dict[int, int]:
    """Row of a patch to its number on the sheet, from 1 through all groups."""
    return {int(row): number for number, row in enumerate(np.concatenate([group.rows for group in groups]), 1)}


def contact_sheet(patches: Patches, one: PatchMap, image: Path, *, count: int = 12) -> Image.Image:
    """The patches with the highest and the lowest values at their own resolution, framed, with the tissue around them.

    Each has its number, which `draw_maps` writes on the map, its value and its position.
    """
    groups = extremes(one, count=count)
    numbers = numbered(groups)
    with SlideImage(image) as slide:
        here = in_image_pixels(patches, slide.info)
        shown = round(min(max(here.side, _PATCH), _LARGEST))  # pixels of a patch
        tile = round(shown * (1 + 2 * _CONTEXT))
        columns = max(1, min(6, max(len(group.rows) for group in groups)))
        heights = [_CAPTION + math.ceil(len(group.rows) / columns) * (tile + _CAPTION + _GAP) for group in groups]
        sheet = Image.new("RGB", (max(columns * (tile + _GAP) + _GAP, 1240), sum(heights) + 3 * _GAP), "white")
        pen, font, top = ImageDraw.Draw(sheet), _font(), _GAP
        captions = {
            row: f"{number}: {_value(one, row)}, ({here.corners[row, 0]:.0f}, {here.corners[row, 1]:.0f})"
            for row, number in numbers.items()
        }
        widest = max((font.getlength(text) for text in captions.values()), default=1.0)
        small = font.font_variant(size=max(8, int(font.size * min(1.0, tile / widest))))
        for group, height in zip(groups, heights, strict=True):
            note = f" ({group.note})" if group.note else ""
            pen.text((_GAP, top), f"{group.name}: {one.title.splitlines()[0].rstrip(':')}{note}", "black", font)
            for place, row in enumerate(group.rows):
                left, high = (
                    _GAP + place % columns * (tile + _GAP),
                    top + _CAPTION + place // columns * (tile + _CAPTION + _GAP),
                )
                sheet.paste(_tile(slide, here.corners[row], here.side, tile), (left, high))
                margin = (tile - shown) // 2
                for out, ink in ((3, "white"), (1, "black")):  # seen on any tissue
                    low, far = margin - out, margin + shown + out - 1
                    pen.rectangle((left + low, high + low, left + far, high + far), outline=ink, width=2)
                pen.text((left, high + tile + 4), captions[int(row)], "black", small)
            top += height + _GAP
    return sheet


def _value(one: PatchMap, row: int) -> str:
    """As the colour bar counts it: in multiples or shares of the slide's mean, else as it is."""
    value = float(one.shown[row])
    if not one.unit:
        return f"{value:.3g}"
    return f"{100 * value / one.unit:+.1f} % of the mean" if one.signed else f"{value / one.unit:.3g} x the mean"


def _font() -> Any:
    import matplotlib

    return ImageFont.truetype(
        Path(matplotlib.get_data_path()) / "fonts" / "ttf" / "DejaVuSans.ttf", 22
    )  # to be read when the sheet is shown at half its size


def _tile(slide: SlideImage, corner: np.ndarray, side: float, tile: int) -> Image.Image:
    """A patch with the tissue around it, ``tile`` pixels wide."""
    wide = side * (1 + 2 * _CONTEXT)
    level = slide.best_level(max(1.0, wide / tile))
    read = max(1, round(wide / slide.info.downsamples[level]))
    x, y = (round(at - side * _CONTEXT) for at in corner)
    pixels = slide.read(x, y, level=level, size=(read, read))
    return Image.fromarray(pixels).resize((tile, tile), Image.Resampling.LANCZOS)
