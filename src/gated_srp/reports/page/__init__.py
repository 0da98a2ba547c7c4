"""`gated_srp.report`: one self-contained page about a folder of runs. Nothing on it is loaded from anywhere."""

from __future__ import annotations

import base64
import hashlib
import html
import os
import re
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.resources import files
from pathlib import Path
from typing import Any, NamedTuple

from jinja2 import Environment, PackageLoader, StrictUndefined

from gated_srp import __version__
from gated_srp.checks.findings import facts_in_words
from gated_srp.errors import counted
from gated_srp.files import write_whole
from gated_srp.models import arm_title, is_gated
from gated_srp.records import naming
from gated_srp.reports.page import tables
from gated_srp.reports.page.contents import (
    Contents,
    FinishedRun,
    StudyFolder,
    inline_svg,
    read_contents,
    read_text,
    within,
)
from gated_srp.reports.page.tables import Row, all_rows, tone, where
from gated_srp.reports.tables import metric_name

LARGEST = 5_000_000  # bytes of a page
_CAPTIONS = {
    "paired": "Every seed, and the differences with their intervals",
    "trajectories": "Gates over the epochs: mean β of each layer",
    "regimes": "What the gates do in the epoch that was kept",
    "kaplan_meier": "Survival of test patients by predicted risk",
    "roc": "ROC and precision-recall on test slides",
    "reliability": "Calibration on test slides",
    "scatter": "Predicted and true values of the test part",
    "redundancy": "How similar neighbouring patches are",
    "localization": "How well maps find what was drawn: AUROC over patches",
    "froc": "Free-response curves: sensitivity by false positives per slide",
    "gates_by_class": "Gates and homogeneity by what covers a patch",
    "history": "Loss and score by epoch",
    "signed_gate": "Geometry of the signed gate",
}


class Figure(NamedTuple):
    caption: str
    markup: str


@dataclass(frozen=True)
class Report(os.PathLike[str]):
    """The page that was written; use it as a path, or let a notebook link to it."""

    path: Path
    size: int  # bytes

    def __fspath__(self) -> str:
        return str(self.path)

    def _repr_html_(self) -> str:
        link, name = html.escape(self.path.absolute().as_uri()), html.escape(str(self.path))
        return f'<a href="{link}" target="_blank">{name}</a> ({self.size / 1e6:.1f} MB)'


def report(
    folder: str | Path,
    *,
    out: str | Path = "report.html",
    maps: int | None = None,
    wsi: str | Path | None = None,
    truth: str | Path | None = None,
) -> Report:
    """Write one self-contained page: the verdict in words, tables, figures, maps of test slides, how to reproduce.

    Args:
        folder: a run, a comparison, a reproduction, or a folder above them.
        out: the page.
        maps: test slides of comparisons whose maps are drawn side by side; by default as many as half a minute allows. 0: none.
        wsi: the folder with the slide images, to draw these maps on the tissue.
        truth: a folder with one table per slide, SLIDE.csv, that says which patches are what its label speaks of (columns x, y and one
            that is 1 where it is true); by default the folder ``truth`` in ``folder``.

    Returns:
        The written page, which can be used as a path.

    Example:
        >>> gated_srp.report("runs/", out="report.html").path  # doctest: +SKIP
        PosixPath('report.html')
    """
    places = {"wsi": None if wsi is None else Path(wsi), "truth": None if truth is None else Path(truth)}
    text = build_page(Path(folder), maps=maps, **places)
    write_whole(Path(out), text)
    return Report(Path(out), len(text.encode()))


def build_page(folder: Path, *, maps: int | None = None, **places: Path | None) -> str:
    """The text of the page; see `report`."""
    from gated_srp.reports.page.sides import FIRST, side_by_side

    contents = read_contents(folder)
    environment = Environment(
        loader=PackageLoader("gated_srp.reports"), autoescape=True, undefined=StrictUndefined, trim_blocks=True
    )
    page = environment.get_template("page.html.j2")
    with naming(folder):
        sides = side_by_side(contents, most=maps, **places)
        context = _context(contents) | {
            "sides": sides,
            "places": sides.places,
            "first": FIRST,
            "truth": tables.truth(sides.truth),
        }
        bare = page.render(context, pictures=[], left_out=[])
    pictures, left_out = within(contents.maps, LARGEST - len(bare.encode()) - 50_000)
    return page.render(context, pictures=pictures, left_out=left_out)


def _context(contents: Contents) -> dict[str, Any]:
    templates = files("gated_srp.reports").joinpath("templates")
    style, script = (templates.joinpath(name).read_text("utf-8") for name in ("page.css", "page.js"))
    # The page may load nothing and run no script but its own.
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = "default-src 'none'; img-src data:; style-src 'unsafe-inline'; "
    policy += f"script-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'"
    newest = max(contents.runs, key=lambda run: str(run.environment.get("started")), default=None)
    alone = [run for run in contents.runs if run.cohort not in contents.compared]
    cohorts = sorted(contents.compared or {run.cohort for run in contents.runs})
    # Settings once per cohort and arm: those of its seeds differ in the seed alone.
    configs = {f"{run.cohort}, {run.name}": run.path / "config.yaml" for run in reversed(contents.runs)}
    return {
        "title": ", ".join(cohorts[:4]) + (" and more" if len(cohorts) > 4 else ""),
        "style": style,
        "script": script,
        "policy": policy,
        "about": _about(contents.about),
        "glossary": tables.GLOSSARY,
        "headlines": list(_headlines(contents.studies, contents.runs)),
        "verdicts": [
            *filter(None, map(tables.agreement, contents.studies)),
            *_verdicts(contents.studies, contents.runs),
            *map(_result, alone),
        ],
        "notes": [str(note) for study in contents.studies for note in study.comparison.get("notes") or ()],
        "studies": [_study(study, f"s{i}-") for i, study in enumerate(contents.studies)],
        "runs": tables.run_metrics(contents.runs),
        "figures_": [*_drawn(contents.drawings, "d"), *_run_figures(alone)],
        "localized": [(tables.localized(one), one.get("words") or []) for one in contents.localized],
        "budgets": [_budget(one) for one in contents.budgets],
        "slides": list(tables.slides(contents.runs)),
        "checks": [(check, list(facts_in_words(check["summary"]))) for check in contents.checks],
        "hashes": tables.hashes(contents.runs),
        "configs": [(name, read_text(path)) for name, path in reversed(configs.items())],
        "environment": newest.environment if newest else {},
        "commands": list(_commands(contents)),
        "version": __version__,
        "when": f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC",
        "folder": str(contents.home),
    }


def _budget(found: dict[str, Any]) -> tables.HtmlTable:
    """What shares of the patches did to logits and time."""
    names = ("share", "kept", "drift", "largest_drift", "changed", "time")
    rows = [tuple(tables.cell(row.get(name)) for name in names) for row in found.get("table") or ()]
    heads = ("share asked", "share kept", "drift of logits", "largest", "decided otherwise", "time")
    note = (
        "The most homogeneous patches are thinned out; neighbour means stay those of all neighbours. Drift: the largest change of a slide's "
        "logits, averaged over slides. Time: of the model alone, as a share of that with all patches, the median over slides."
    )
    slides = counted(int(found.get("slides") or 0), "slide")
    return tables.HtmlTable(f"Redundancy budget: {found.get('run')}, {slides}", heads, rows, note)


def _about(text: str) -> list[str]:
    """Its paragraphs; of a long text the first sentence, which is always shown, is a paragraph of its own.

    >>> _about("Short. Shown whole."), [len(part) for part in _about("First. " + 300 * "x" + "\\n\\nlast")]
    (['Short. Shown whole.'], [6, 300, 4])
    """
    parts = [part.strip() for part in text.split("\n\n") if part.strip()]
    if sum(map(len, parts)) <= 300:
        return parts
    return [*re.split(r"(?<=[.!?])\s+", parts[0], maxsplit=1), *parts[1:]]


# Words ---------------------------------------------------------------------------------------------------------------


def _judged(studies: Sequence[StudyFolder], runs: Sequence[FinishedRun]) -> Iterator[tuple[StudyFolder, Row, str]]:
    """Every difference on the metric that selects the epoch, arms with gates first; the other metrics are in the tables."""
    selecting = {run.cohort: run.results.get("select") for run in runs}
    for study in studies:
        rows = all_rows(study)
        metrics: dict[str, list[Any]] = {}
        for row in rows:
            metrics.setdefault(where(row), []).append(row.get("metric"))
        for row in sorted(rows, key=lambda row: not is_gated(str(row.get("arm")))):  # before those of other cohorts
            here = where(row)
            usual = selecting.get(here) if selecting.get(here) in metrics[here] else metrics[here][0]
            if row.get("metric") == usual:
                yield study, row, metric_name(str(usual))


def _headlines(studies: Sequence[StudyFolder], runs: Sequence[FinishedRun]) -> Iterator[str]:
    """The answer in one sentence per cohort: whether Gated SRP helped."""
    for cohort in dict.fromkeys(where(row) for _, row, _ in _judged(studies, runs) if row.get("cohort")):
        gated = [
            found for found in _judged(studies, runs) if where(found[1]) == cohort and is_gated(str(found[1]["arm"]))
        ]
        if gated:
            study, row, metric = gated[0]
            yield tables.headline(row, metric, arm_title(str(study.comparison.get("reference"))))


def _verdicts(studies: Sequence[StudyFolder], runs: Sequence[FinishedRun]) -> Iterator[dict[str, str]]:
    for study, row, metric in _judged(studies, runs):
        reference = arm_title(str(study.comparison.get("reference")))
        what = f"{arm_title(str(row.get('arm')))} against {reference}, {where(row)}, {metric}"
        words = "; ".join(filter(None, (str(row.get("verdict")), row.get("no_worse"))))  # files of 0.2 lack the second
        yield {"what": what, "words": re.sub(r"-(?=\d)", "−", words), "tone": tone(row)}


def _result(run: FinishedRun) -> dict[str, str]:
    metric = str(run.results.get("select"))
    value = run.scores.get(metric)
    result = "is not defined on its test set" if value is None else f"{value:.4f} on the test set"
    words = f"{metric_name(metric)} {result}. One run: it says how this model does, not whether its method is better."
    return {"what": f"{run.name}, {run.cohort}, seed {run.unit}", "words": words, "tone": "open"}


def _commands(contents: Contents) -> Iterator[str]:
    versions = next((run.environment.get("versions") or {} for run in contents.runs if run.environment), {})
    torch = str(versions.get("torch", "")).split("+")[0]
    version = versions.get("gated_srp", __version__)
    yield f"pip install '.[train]'{f' torch=={torch}' if torch else ''}  # in the repository of gated-srp, at version {version}"
    cohorts: dict[str, list[FinishedRun]] = {}
    for run in contents.runs:
        cohorts.setdefault(run.cohort, []).append(run)
    for study in [study for study in contents.studies if study.reproduction]:
        yield f"gated-srp reproduce {study.path.name} --features FOLDER --labels FOLDER"
        for name in study.cohorts:
            cohorts.pop(name, None)
    for name, runs in cohorts.items():
        seeds = sorted({str(run.results.get("seed")) for run in runs})
        yield f"# settings of {name}: below, saved as cohort.yaml"
        if name in contents.compared:
            arms = ",".join(dict.fromkeys(run.arm for run in runs))
            yield f"gated-srp compare cohort.yaml --arms {arms} --seeds {','.join(seeds)}"
        else:
            yield from (f"gated-srp train cohort.yaml --arm {run.arm} --seed {run.results.get('seed')}" for run in runs)


# Figures -------------------------------------------------------------------------------------------------------------


def _study(study: StudyFolder, prefix: str) -> dict[str, Any]:
    compared = bool(study.comparison.get("cohorts"))
    return {
        "name": ", ".join(sorted(study.cohorts)) or study.path.name,
        "quick": study.comparison.get("quick"),
        "differences": tables.differences(study) if compared else None,
        "forests": list(tables.forests(study)) if compared else [],
        "metrics": list(tables.cohort_metrics(study)),
        "reproduction": tables.reproduction(study),
        "figures": list(_drawn(study.drawings, prefix)),
    }


def _drawn(paths: Sequence[Path], prefix: str) -> Iterator[Figure]:
    """In the order of the captions; others last."""

    def known(path: Path) -> str:
        return next((name for name in _CAPTIONS if path.stem.startswith(name)), "")

    order = [*_CAPTIONS, ""]
    for place, path in enumerate(sorted(paths, key=lambda path: order.index(known(path)))):
        rest = path.stem.removeprefix(known(path)).strip("_").replace("_", " ")
        words = _CAPTIONS.get(known(path))
        markup = inline_svg(path, f"{prefix}{place}-")
        if markup is not None:
            yield Figure(rest if words is None else f"{words} ({rest})" if rest else words, markup)


def _run_figures(runs: Sequence[FinishedRun]) -> list[Figure]:
    """Of runs that belong to no comparison, drawn now."""
    from gated_srp.reports.figures import draw_curves, draw_history
    from gated_srp.reports.gates import draw_regimes, draw_trajectories

    found: list[Figure] = []
    for place, run in enumerate(runs):
        name = f"{run.name}, seed {run.unit}"
        with tempfile.TemporaryDirectory() as folder, naming(run.path):
            home, of = Path(folder), {run.cohort: [run]}
            drawn = draw_history(run, home / "history", title=name)
            drawn += draw_trajectories(of, home / "trajectories", title=name)
            drawn += draw_regimes(of, home / "regimes", title=name)
            drawn += draw_curves(home, run.cohort, {run.arm: [run]})
            found += _drawn([path for path in drawn if path.suffix == ".svg"], f"r{place}-")
    return found
