"""One slide shown: maps of one run or several side by side, a contact sheet, files for other programs."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from gated_srp.data.files.formats import read_header
from gated_srp.data.tables.matching import slide_stem
from gated_srp.errors import UserError
from gated_srp.reports.geojson import WRITERS
from gated_srp.reports.heatmap import draw_maps
from gated_srp.reports.on_slide import find_image, overview, write_contact_sheet
from gated_srp.reports.values import VALUES, Patches, PatchMap, View, all_values, look, maps_of, patches_of, scores


@dataclass(frozen=True, kw_only=True)
class Request:
    """What is to be shown of a slide. ``value``: a name of `values.VALUES`, or a CSV of scores."""

    value: str = "attention"
    layer: int | None = None
    head: int | None = None
    percentile: bool = False
    image: Path | None = None  # None: the one that the feature file names, if it is there
    exports: Sequence[str] = ()
    stride: float | None = None


@dataclass(frozen=True, eq=False)
class _Shown:
    heading: str
    patches: Patches
    one: PatchMap
    table: dict[str, np.ndarray]  # of the whole run
    run: int = 0


def show_slide(runs: Sequence[Path], file: Path, request: Request, out: Path) -> list[Path]:
    """Draw and write into ``out``; gives the files, the map first. Without runs the value must be a CSV of scores."""
    unknown = [name for name in request.exports if name not in WRITERS]
    if unknown:
        raise UserError(f"--export {unknown[0]}: expected some of {', '.join(WRITERS)}.")
    views = [look(run, file, stride=request.stride, layer=request.layer) for run in runs]
    return show_views(views, file, request, out)


def show_views(views: Sequence[View], file: Path, request: Request, out: Path) -> list[Path]:
    """As `show_slide`, for runs that have looked already."""
    shown = [s for run, view in enumerate(views) for s in _of_view(view, request, run)] or [_of_scores(file, request)]
    image = find_image(shown[0].patches, request.image)
    slide = None
    if image is not None:
        here, picture, canvas = overview(shown[0].patches, image)
        slide = picture, canvas
        scale = here.side / shown[0].patches.side  # 1, unless the file has microns
        shown = [replace(s, patches=_scaled(s.patches, scale)) for s in shown]
    name = slide_stem(file)
    kind = shown[0].one.name if len(shown) == 1 else Path(request.value).stem
    stem = f"{name}_" + re.sub(r"[^\w.-]+", "_", kind)  # somebody's column may have any name
    written = [out / f"{stem}.png"]
    draw_maps(
        [(s.heading, s.patches, s.one) for s in shown],
        written[0],
        title=f"{name}: " + (request.value if request.value in VALUES else f"scores of {Path(request.value).name}"),
        slide=slide,
        percentile=request.percentile,
    )
    if image is not None:
        written.append(out / f"{stem}_patches.png")
        write_contact_sheet(views[0].patches if views else shown[0].patches, shown[0].one, image, written[-1])
    firsts = [s for i, s in enumerate(shown) if s.run not in [other.run for other in shown[:i]]]
    for first in firsts:  # a file a run
        label = stem if len(firsts) == 1 else f"{stem}_run{first.run + 1}"
        for export in request.exports:
            written.append(out / f"{label}.{export}")
            WRITERS[export](written[-1], first.patches, first.table, first.one)
    return written


def _of_view(view: View, request: Request, run: int) -> list[_Shown]:
    found = maps_of(view, request.value, layer=request.layer, head=request.head)
    table = {**(all_values(view) if request.exports else {}), **{one.name: one.values for one in found}}
    return [_Shown(f"{view.run}\n{one.title}", view.patches, one, table, run) for one in found]


def _of_scores(file: Path, request: Request) -> _Shown:
    if Path(request.value).suffix.lower() not in (".csv", ".tsv"):
        raise UserError(f"--value {request.value}: shows a model, but no run was named. Expected RUN... FEATURES.")
    patches = patches_of(read_header(file, stride=request.stride))
    one = scores(Path(request.value), patches)
    return _Shown(f"column {one.name}", patches, one, {one.name: one.values})


def _scaled(patches: Patches, scale: float) -> Patches:
    if scale == 1:
        return patches
    header = replace(patches.header, unit="px", coords=patches.header.coords * scale)
    return replace(patches, corners=patches.corners * scale, side=patches.side * scale, header=header)
