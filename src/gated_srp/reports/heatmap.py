"""`gated_srp.heatmap`: maps of one run or several side by side, a contact sheet, files for other programs."""

import base64
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from gated_srp.data.annotations import annotations_of, find_annotations, qupath_crops
from gated_srp.data.files.siblings import find_bags
from gated_srp.data.matching import slide_stem
from gated_srp.data.prepared import Preparation, open_header
from gated_srp.data.regions import folder_of
from gated_srp.errors import Note, UserError
from gated_srp.files import as_stored, write_image
from gated_srp.models import arm_title, load_card, model_file
from gated_srp.progress import Event, Progress, silent
from gated_srp.reports import maps
from gated_srp.reports.draw import find_image, no_image, overview, place_of_images
from gated_srp.reports.export import WRITERS
from gated_srp.reports.maps import Patches, PatchMap, SlideView, read_scores, view_slide
from gated_srp.reports.pictures import GridRow, Overlay, contact_sheet, draw_grid, draw_maps, extremes, numbered
from gated_srp.slides.reader import ENDINGS
from gated_srp.training.known import files_for, known_of, low_for
from gated_srp.training.trained import TrainedRun


@dataclass(frozen=True, eq=False)
class SlideHeatmap:
    """The maps of one slide and the files that were written of it; a notebook shows the picture."""

    slide: str
    picture: Path
    sheet: Path | None  # the contact sheet, where the slide image is there
    exports: tuple[Path, ...]
    maps: tuple[PatchMap, ...]
    row: GridRow
    warnings: tuple[Note, ...] = ()  # of its annotations, and of files for other programs

    @property
    def written(self) -> list[Path]:
        return [self.picture, *([self.sheet] if self.sheet else []), *self.exports]

    def _repr_png_(self) -> bytes:
        return self.picture.read_bytes()


@dataclass(frozen=True, eq=False)
class Heatmaps:
    """One `SlideHeatmap` per slide, a note on each slide that was left out, and warnings about the others."""

    slides: tuple[SlideHeatmap, ...]
    left_out: tuple[Note, ...] = ()
    warnings: tuple[Note, ...] = ()
    grid: Path | None = None  # slides beside runs in one picture

    @property
    def written(self) -> list[Path]:
        return [*(path for slide in self.slides for path in slide.written), *([self.grid] if self.grid else [])]

    def _repr_html_(self) -> str:
        pictures = (base64.b64encode(slide._repr_png_()).decode() for slide in self.slides[:20])
        return "\n".join(f'<img style="max-width: 100%" src="data:image/png;base64,{picture}">' for picture in pictures)


def heatmap(
    runs: str | Path | Sequence[str | Path],
    features: str | Path,
    *,
    value: str | Path = "attention",
    layer: int | None = None,
    head: int | None = None,
    gates: str | None = None,
    percentile: bool = False,
    overlay: Overlay = "grey",
    grid: bool = False,
    wsi: str | Path | None = None,
    annotations: str | Path | None = None,
    export: Sequence[str] = (),
    coords: str | Path | None = None,
    table: str | Path | None = None,
    features_low: str | Path | None = None,
    stride: float | None = None,
    force: bool = False,
    out: str | Path = "heatmap",
    progress: Progress = silent,
) -> Heatmaps:
    """Draw where models look on slides and what their gates change.

    Args:
        runs: run folders or model files, drawn side by side; empty if ``value`` is a table of scores.
        features: a slide's feature file, or a folder of them for one picture per slide.
        value: attention, beta, homogeneity, correction, change, or a CSV file with one score per patch.
        layer: which layer, from 1; attention is of the last one if not set, other values of all.
        head: which head, from 1; the mean over heads if not set.
        gates: a what-if: set every gate to off, projection, reflection or amplification instead of what it learned.
        percentile: colours stretched to each slide, from percentile 1 to 99, instead of a fixed scale; the picture says so.
        overlay: colours over the tissue in grey, over its own colours (stain), or outlines over the latter (contour).
        grid: also one picture of all slides beside all runs, as the paper shows them.
        wsi: the slide image, or the folder with the images; a path that a feature file names is opened only there.
        annotations: a folder with files of what was drawn on the slides, or the one slide's file: their outlines are drawn too,
            and a run that was trained on ``regions`` finds them there.
        export: also write geojson (QuPath), csv, parquet or h5.
        coords: the folder of the positions, where it is not beside the features.
        table: as in `predict`; a run whose bags are patients finds a slide's others by it, in the folder of the feature file; a run
            with covariates needs it.
        features_low: folder of the slides' lower magnification, for runs that were trained on two; maps show `features` alone.
        stride: distance between patches, where the file's is wrong.
        force: as in `predict`: draw files with another stride, or an encoder's name that we do not know, than in training.
        out: folder of the pictures.
        progress: called after each slide.

    Returns:
        The maps and the written files. Of a folder, slides that cannot be drawn are left out with a note; a single file raises.

    Example:
        >>> gated_srp.heatmap("runs/luad/gated_srp/seed42", "feats/s1.h5", value="beta").written  # doctest: +SKIP
        [PosixPath('heatmap/s1_beta.png')]
    """
    paths = [Path(runs)] if isinstance(runs, str | Path) else [Path(run) for run in runs]
    shown: dict[str, Any] = {
        "value": str(value),
        "layer": layer,
        "head": head,
        "percentile": percentile,
        "overlay": overlay,
    }
    files = feature_files(
        Path(features), paths
    )  # before runs are opened: it knows when they were named in another order
    low = low_for([TrainedRun.open(run) for run in paths], features_low)
    places: dict[str, Any] = {
        "coords": Path(coords) if coords else None,
        "regions": folder_of(annotations),
        "features_low": low,
    }
    reading = Preparation(**places, stride=stride)
    shown |= {"image": place_of_images(wsi, len(files)), "export": export, "reading": reading}
    if unknown := [name for name in export if name not in WRITERS]:
        raise UserError(f"expected some of {', '.join(WRITERS)}.", where=f"--export {unknown[0]}")
    others = [known_beside(TrainedRun.open(run), Path(features), files, table) for run in paths]
    known = {} if annotations is None else find_annotations(annotations, [slide_stem(file) for file in files])
    drawn: list[SlideHeatmap] = []
    left_out: list[Note] = []
    warnings: dict[Note, None] = {}
    for number, file in enumerate(files, 1):
        try:
            how: dict[str, Any] = {"reading": reading, "layer": layer, "gates": gates, "force": force}
            views = [
                view_slide(run, file, known=own.get(file, {}), **how) for run, own in zip(paths, others, strict=True)
            ]
            drawn.append(draw_slide(views, file, Path(out), annotations=known.get(slide_stem(file)), **shown))
            said = [*(note for view in views for note in view.warnings), *drawn[-1].warnings]
            warnings |= dict.fromkeys(said)
        except UserError as error:
            if len(files) == 1:
                raise
            left_out.append(Note.of(error))
        if len(files) > 1:
            progress(Event("slides", number, len(files)))
    if annotations is not None and (bare := [file.name for file in files if slide_stem(file) not in known]):
        warnings[Note("note", "annotations", "no file of annotations, drawn without", tuple(bare[:5]))] = None
    if wsi is not None and (bare := [one.slide for one in drawn if one.sheet is None]):
        warnings[no_image(wsi, *bare)] = None
    together = None
    if grid and drawn:
        together = Path(out) / f"grid_{Path(value).stem}.png"
        settings: dict[str, Any] = {"percentile": percentile, "overlay": overlay}
        title = f"{drawn[0].maps[-1].title.splitlines()[0]}: slides beside methods"
        draw_grid([one.row for one in drawn], together, title=title, **settings)
    return Heatmaps(tuple(drawn), tuple(left_out), tuple(warnings), together)


def known_beside(
    run: TrainedRun, features: Path, files: Sequence[Path], table: str | Path | None
) -> dict[Path, dict[str, Any]]:
    """`known_of`; for a model whose bags are patients the other slides of one file's patient are those in its folder."""
    pool = files_for(run, features.parent) if run.patients and not features.is_dir() else []
    return known_of(run, list(dict.fromkeys([*files, *pool])), table)


def feature_files(where: Path, runs: Sequence[Path]) -> list[Path]:
    """All files of a folder that come from the first run's encoder, else the file itself; anything else is refused with a cure."""
    where = as_stored(where)
    if where.suffix.lower() in ENDINGS:
        raise UserError(
            "a slide image, expected its feature file",
            where=where,
            cure=f"Make one with `gated-srp extract {where} -o FOLDER --encoder NAME`, or do everything at once: "
            f"`gated-srp explain RUN {where}`.",
        )
    if where.suffix == ".safetensors" or (where / "model.safetensors").is_file():
        features = next((path for path in runs if not (path / "model.safetensors").is_file()), "FEATURES")
        raise UserError(f"a run; the features come last: `gated-srp heatmap {where} {features}`.", where=where)
    if not where.is_dir() or where.suffix == ".zarr":
        return [where]
    encoder = load_card(model_file(runs[0])).get("encoder") if runs else None
    found = find_bags(where, encoder=encoder)
    if not found:
        raise UserError(
            f"no feature files{f' of {encoder}' if encoder else ''} below this folder",
            where=where,
            cure="Expected RUN... FEATURES: runs, then a slide's feature file (or a folder of them) as `gated-srp extract` writes it.",
        )
    return found


# One slide ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class _Panel:
    heading: str
    patches: Patches
    one: PatchMap
    table: dict[str, np.ndarray]  # of the whole run, for exports
    run: int = 0


def draw_slide(
    views: Sequence[SlideView],
    file: Path,
    out: Path,
    *,
    value: str,
    layer: int | None = None,
    head: int | None = None,
    percentile: bool = False,
    overlay: Overlay = "grey",
    image: Path | None = None,
    annotations: Path | None = None,
    export: Sequence[str] = (),
    reading: Preparation = Preparation(),  # noqa: B008 - frozen
) -> SlideHeatmap:
    """As `heatmap`, of one slide that the models have seen already. Without views the value must be a CSV of scores."""
    panels: list[_Panel] = []
    for run, view in enumerate(views):
        found = maps.maps_of(view, value, layer=layer, head=head)
        table = {**(maps.all_values(view) if export else {}), **{one.name: one.values for one in found}}
        heading = f"{view.run}: {view.prediction}" if view.prediction else view.run
        panels += [_Panel(f"{heading}\n{one.title}", view.patches, one, table, run) for one in found]
    panels = panels or [_score_panel(file, value, reading)]
    own = panels[0].patches
    image, slide = find_image(own, image), None
    numbers: dict[int, int] = {}
    if image is not None:
        here, picture, canvas = overview(own, image)
        slide, numbers = (picture, canvas), numbered(extremes(panels[0].one))
        panels = [replace(panel, patches=_on_image(panel.patches, here)) for panel in panels]
    name = slide_stem(file)
    kind = panels[0].one.name if len(panels) == 1 else Path(value).stem
    stem = f"{name}_" + re.sub(r"[^\w.-]+", "_", kind)  # a user's column may have any name
    title = f"{name}: " + (value if value in maps.VALUES else f"scores of {Path(value).name}")
    drawn, sheet = out / f"{stem}.png", None
    headed = [(panel.heading, panel.patches, panel.one) for panel in panels]
    on = panels[0].patches
    outlines = None if annotations is None else annotations_of(annotations, on.header, on.bounds)
    notes = outlines.notes if outlines else ()
    notes += qupath_crops(None, on.header.wsi_path, on.bounds) if "geojson" in export else ()
    how: dict[str, Any] = {"percentile": percentile, "overlay": overlay, "numbers": numbers, "drawn": outlines}
    draw_maps(headed, drawn, title=title, slide=slide, **how)
    if image is not None:
        sheet = out / f"{stem}_patches.png"
        write_image(contact_sheet(own, panels[0].one, image), sheet)
    exports = []
    firsts = list({panel.run: panel for panel in reversed(panels)}.values())[::-1]
    for first in firsts:  # one file per run
        label = stem if len(firsts) == 1 else f"{stem}_run{first.run + 1}"
        for ending in export:
            exports.append(out / f"{label}.{ending}")
            WRITERS[ending](exports[-1], first.patches, first.table, first.one)
    last = {panel.run: (panel.patches, panel.one) for panel in panels}  # of a signed attention its positive part
    arms = [view.arm for view in views]
    methods = [arm_title(view.arm) if arms.count(view.arm) == 1 else view.run for view in views] or ["scores"]
    row = GridRow(name, dict(zip(methods, last.values(), strict=True)), slide)
    return SlideHeatmap(name, drawn, sheet, tuple(exports), tuple(panel.one for panel in panels), row, notes)


def _score_panel(file: Path, value: str, reading: Preparation) -> _Panel:
    if Path(value).suffix.lower() not in maps.SCORES:
        cure = "Expected RUN... FEATURES."
        raise UserError("shows a model, but no run was named", where=f"--value {value}", cure=cure)
    patches = Patches.of(open_header(file, reading))
    one = read_scores(Path(value), patches)
    return _Panel(f"column {one.name}", patches, one, {one.name: one.values})


def _on_image(patches: Patches, here: Patches) -> Patches:
    """In the pixels of the image, as ``here`` is: a run with a cap has fewer patches of the same file."""
    scale = here.side / patches.side  # 1, unless the file has microns
    return replace(patches, corners=patches.corners * scale, side=here.side, header=here.header, bounds=here.bounds)
