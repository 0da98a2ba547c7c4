"""Maps of test slides on the page: the reference beside the arm with gates beside their difference, and how well each finds what is
known to be true.

Shapes: N patches of the file.
"""

from __future__ import annotations

import base64
import io
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import mean
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from gated_srp.config.cohort import open_cohort, preparation
from gated_srp.config.load import load_config
from gated_srp.data.prepared import Preparation, open_header
from gated_srp.errors import UserError, counted
from gated_srp.models import arm_title, is_gated
from gated_srp.reports.draw import Canvas, Scaled, colour, describe, find_image, overview, past_the_bar, scaled_map
from gated_srp.reports.maps import (
    Patches,
    PatchMap,
    SlideView,
    difference,
    maps_of,
    read_scores,
    spread_over,
    view_slide,
)
from gated_srp.reports.page.contents import Contents, FinishedRun
from gated_srp.tasks.metrics import roc_auc
from gated_srp.training.known import known_of
from gated_srp.training.trained import TrainedRun

BYTES = 2_500_000  # of all maps on a page
FIRST = 6  # slides that are shown, and printed, before the reader asks for more
_PATCHES = 300_000  # that the models look at for one page: half a minute on two cores
_LARGEST = 480  # pixels of a map's longer side
_PATCH = 8  # most pixels of a patch


class Panel(NamedTuple):
    """One map: its heading, the picture, and what it says in numbers."""

    heading: str
    uri: str
    note: str


@dataclass(frozen=True)
class SideBySide:
    """One test slide. ``scores``: how well each map finds what is known to be true, 0.5 is chance; empty where nothing is known."""

    cohort: str
    slide: str
    case: str
    words: str
    panels: tuple[Panel, ...]
    scores: Mapping[str, float] = field(default_factory=dict)

    @property
    def size(self) -> int:
        return sum(len(panel.uri) for panel in self.panels)


@dataclass(frozen=True)
class Sides:
    """All of them, the colour bars that they share, and why others are missing."""

    slides: tuple[SideBySide, ...] = ()
    bars: tuple[dict[str, Any], ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def places(self) -> dict[tuple[str, str], int]:
        """Cohort and slide, or case, to the number of its maps."""
        found = {(one.cohort, one.slide): number for number, one in enumerate(self.slides)}
        cases: dict[tuple[str, str], int] = {}
        for number, one in enumerate(self.slides):
            cases.setdefault((one.cohort, one.case), number)
        return cases | found

    @property
    def truth(self) -> list[tuple[str, str, float, float, float, int]]:
        """Per cohort and map: mean, lowest and highest score over the slides whose truth is known, and how many they are."""
        found: dict[tuple[str, str], list[float]] = {}
        for one in self.slides:
            for name, score in one.scores.items():
                found.setdefault((one.cohort, name), []).append(score)
        return [(*key, mean(all_), min(all_), max(all_), len(all_)) for key, all_ in found.items()]


class _Pair(NamedTuple):
    """What is compared on one slide: two runs of one seed, and the predictions of its test set."""

    cohort: str
    runs: tuple[FinishedRun, FinishedRun]
    table: pd.DataFrame


class _Files(NamedTuple):
    """A cohort's feature files by slide, and how they are read."""

    of_slide: Mapping[str, Path]
    reading: Preparation
    known: Mapping[Path, Mapping[str, Any]] = MappingProxyType({})  # `known_of` each

    @classmethod
    def of(cls, run: FinishedRun) -> _Files:
        place = run.path / "config.yaml"
        config = load_config(place)
        found = {name: Path(file) for name, file in open_cohort(config).matches.found.items()}
        known = known_of(TrainedRun.open(run.path), list(found.values()), place)
        places: dict[str, Any] = {"regions": preparation(config).regions, "features_low": config.features_low}
        return cls(found, Preparation(**config.reading, **places), known)


def side_by_side(
    contents: Contents, *, most: int | None = None, wsi: Path | None = None, truth: Path | None = None
) -> Sides:
    """Maps of the test slides of every comparison, as long as they fit onto a page; what cannot be drawn is said in a note.

    ``most``: slides; None: as many as some 300,000 patches allow. ``wsi``: folder of slide images. ``truth``: folder with a table
    SLIDE.csv per slide (x, y and one column that is above 0.5 where it is true), by default the folder ``truth`` of the report's.
    """
    truth = contents.home / "truth" if truth is None else truth
    found: list[SideBySide] = []
    notes: dict[str, None] = {}
    bars: tuple[dict[str, Any], ...] = ()
    patches, room, tested, absent, left = _PATCHES, BYTES, 0, 0, 0
    files: dict[str, _Files] = {}
    for pair, row in _slides(contents) if most != 0 else ():
        tested += 1
        try:
            if pair.cohort not in files:
                files[pair.cohort] = _Files({}, Preparation())  # what cannot be read is said once
                files[pair.cohort] = _Files.of(pair.runs[0])
            if (file := files[pair.cohort].of_slide.get(str(row["slide"]))) is None:
                absent += 1
                continue
            count = len(open_header(file, files[pair.cohort].reading).coords)
            if room <= 0 or (len(found) == most if most else count > patches):
                left += 1
                continue
            own = files[pair.cohort]
            how: dict[str, Any] = {"reading": own.reading, "known": own.known.get(file, {})}
            views = [view_slide(run.path, file, **how) for run in pair.runs]
            one, bars = _draw(pair, row, views, wsi, truth / f"{row['slide']}.csv")
        except UserError as error:
            notes[f"Maps that could not be drawn: {error}"] = None
            continue
        patches, room = patches - count, room - one.size
        found.append(one)
    said = list(notes)[:3]
    if len(found) < tested:
        why = [f"{absent} of them without a feature file where the settings say" if absent else ""]
        why.append(
            f"{left} left out to keep the page small and quick (`--maps {len(found) + left}` draws more)"
            if left
            else ""
        )
        said.append("; ".join([f"Maps of {len(found)} of {counted(tested, 'test slide')}", *filter(None, why)]) + ".")
    return Sides(tuple(found), bars, tuple(said))


def _slides(contents: Contents) -> Iterator[tuple[_Pair, Mapping[str, Any]]]:
    """Each test slide once, by name, with the first seed that tested it."""
    for pairs in _pairs(contents):
        known: dict[str, tuple[_Pair, Mapping[str, Any]]] = {}
        for pair in pairs:
            for row in pair.table.to_dict("records"):
                known.setdefault(str(row["slide"]), (pair, {str(key): value for key, value in row.items()}))
        yield from (known[slide] for slide in sorted(known))


def _pairs(contents: Contents) -> Iterator[list[_Pair]]:
    """Per compared cohort the runs of the reference and of the first arm with gates, seed by seed."""
    for study in contents.studies:
        reference = str(study.comparison.get("reference"))
        for cohort in dict.fromkeys(row.get("cohort") for row in study.comparison.get("cohorts") or ()):
            own = [run for run in contents.runs if run.cohort == cohort and run.model.is_file()]
            arms = [str(row["arm"]) for row in study.comparison["cohorts"] if row.get("cohort") == cohort]
            gated = next((arm for arm in arms if is_gated(arm)), None)
            own = [run for run in own if run.name == arm_title(run.arm)]  # not one with settings of its own
            units = {arm: {run.unit: run for run in own if run.arm == arm} for arm in (reference, gated)}
            found = []
            for unit in sorted(set(units[reference]) & set(units[gated])) if gated != reference else ():
                runs = units[reference][unit], units[gated][unit]
                with suppress(UserError):
                    table = _tested(runs[1])
                    found += [_Pair(str(cohort), runs, table)] if "slide" in table else []
            yield found


def _tested(run: FinishedRun) -> pd.DataFrame:
    """Predictions of its test slides; where a bag is a patient, the patient's for each of its slides."""
    if run.settings.get("bag") != "patient":
        return run.predictions("test", "slide")
    cases = run.predictions("test", "case")
    return run.features[["slide", "case"]].merge(cases.drop(columns="slides", errors="ignore"), on="case")


# One slide ------------------------------------------------------------------------------------------------------------


def _draw(
    pair: _Pair, row: Mapping[str, Any], views: Sequence[SlideView], wsi: Path | None, truth: Path
) -> tuple[SideBySide, tuple[dict[str, Any], ...]]:
    """``truth``: the table that says which patches are true, if it is there."""
    header = views[0].patches.header
    patches, slide = Patches.of(header), None
    count, titles = len(patches.corners), [arm_title(run.arm) for run in pair.runs]
    each = [maps_of(view, "attention")[-1] for view in views]
    shown = [spread_over(one, view.patches.rows, count) for one, view in zip(each, views, strict=True)]
    apart = difference(*shown, title=f"{titles[1]} minus {titles[0]}")
    image = None if wsi is None else find_image(patches, wsi)
    if image is not None:
        patches, picture, canvas = overview(patches, image)
        slide = picture
    else:
        canvas = Canvas.around(patches, header.level0_size)
    known, panels = _known(truth, Patches.of(header)), []
    if known is not None:
        mask = replace(
            scaled_map(PatchMap("truth", "", known.astype(float), limit=1.0)), places=0.85 * known, colours="Greys"
        )
        panels.append(Panel("what is true", _uri(patches, mask, canvas, slide), counted(int(known.sum()), "patch")))
    scales = [scaled_map(one) for one in (*shown, apart)]
    for heading, one, scale in zip((*titles, apart.title), (*shown, apart), scales, strict=True):
        panels.append(Panel(heading, _uri(patches, scale, canvas, slide), describe(one) + past_the_bar(scale)))
    scores = {} if known is None else _scores(views[1], shown, titles, known)
    said = [f"{name} {row[name]}" for name in pair.runs[1].truth if name in row]
    said += [f"{title}: {view.prediction}" for title, view in zip(titles, views, strict=True) if view.prediction]
    words = "; ".join((*said, f"seed {pair.runs[0].unit}"))
    bars = tuple(_bar(scale, what) for scale, what in zip(scales[1:], ("attention", "difference"), strict=True))
    return SideBySide(pair.cohort, str(row["slide"]), str(row.get("case")), words, tuple(panels), scores), bars


def _uri(patches: Patches, scaled: Scaled, canvas: Canvas, slide: np.ndarray | None) -> str:
    """The map as a small picture: a JPEG over tissue, a PNG of plain squares without."""
    from matplotlib import colormaps
    from PIL import Image

    if slide is None:
        pixels = min(_PATCH, max(1, _LARGEST * patches.side / canvas.scale / max(canvas.size)))  # of a patch
        scale = patches.side / pixels
        size = tuple(math.ceil(extent * canvas.scale / scale) for extent in canvas.size)
        canvas = replace(canvas, scale=scale, size=(size[0], size[1]))
    drawn = Image.fromarray(colour(canvas.paint(patches, scaled.places), colormaps[scaled.colours], slide))
    drawn.thumbnail((_LARGEST, _LARGEST))
    out = io.BytesIO()
    if slide is None:
        drawn.quantize(128).save(out, "PNG", optimize=True)
    else:
        drawn.save(out, "JPEG", quality=80)
    kind = "png" if slide is None else "jpeg"
    return f"data:image/{kind};base64,{base64.b64encode(out.getvalue()).decode('ascii')}"


def _bar(scaled: Scaled, what: str) -> dict[str, Any]:
    """A colour bar for the page: its colours as a CSS gradient, its ticks in percent."""
    from matplotlib import colormaps
    from matplotlib.colors import to_hex

    colours = ", ".join(to_hex(rgba) for rgba in colormaps[scaled.colours](np.linspace(0, 1, 17)))
    return {
        "what": what,
        "colours": colours,
        "label": scaled.label,
        "ticks": [(100 * at, text) for at, text in scaled.ticks],
    }


# What is known to be true ---------------------------------------------------------------------------------------------


def _known(table: Path, patches: Patches) -> np.ndarray | None:
    """(N,) whether a patch is what the slide's label speaks of; None where nobody says."""
    if not table.is_file():
        return None
    return np.asarray(read_scores(table, patches).values > 0.5)


def _scores(view: SlideView, shown: Sequence[PatchMap], titles: Sequence[str], known: np.ndarray) -> dict[str, float]:
    """Of two patches, one of them true: how often a map puts the true one first. Undefined where all or none are."""
    rows, maps = (
        view.patches.rows,
        {f"attention of {title}": one.values for title, one in zip(titles, shown, strict=True)},
    )
    for value, name, sign in (("beta", "beta of {}, {}", 1.0), ("homogeneity", "low homogeneity", -1.0)):
        with suppress(UserError):  # of an arm without gates
            for one in maps_of(view, value):
                layer = one.title.split(", ")[1] if value == "beta" else ""
                maps[name.format(titles[1], layer)] = sign * spread_over(one, rows, len(known)).values
    found = {}
    for name, values in maps.items():
        seen = np.isfinite(values)
        score = roc_auc(values[seen], known[seen])
        if not math.isnan(score):
            found[name] = score
    return found
