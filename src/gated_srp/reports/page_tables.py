"""Tables of a page as plain values: metrics, slides, data, hashes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import mean, stdev
from typing import Any

import pandas as pd

from gated_srp.models import arm_title
from gated_srp.reports.page_material import Material, Run, Study
from gated_srp.reports.tables import metric_name

MOST_SLIDES = 2000  # rows of a table of slides


@dataclass(frozen=True)
class Table:
    """Heads and rows of cells; a cell is what is shown and what it sorts by."""

    title: str
    heads: tuple[str, ...]
    rows: Sequence[tuple[tuple[str, Any], ...]]
    note: str = ""
    search: str = ""  # what a search field above it asks for


def number(value: Any, digits: int = 4) -> str:
    """
    >>> number(0.51236), number(None), number(True)
    ('0.5124', '–', 'True')
    """
    if isinstance(value, bool) or not isinstance(value, int | float):
        return "–" if value is None else str(value)
    return "–" if not math.isfinite(value) else f"{value:.{digits}f}" if isinstance(value, float) else str(value)


def signed(value: Any) -> str:
    """
    >>> signed(-0.25)
    '−0.2500'
    """
    return f"{value:+.4f}".replace("-", "−") if isinstance(value, float | int) else "–"


def cell(value: Any, shown: str | None = None) -> tuple[str, Any]:
    """What is shown, and what it sorts by."""
    return (number(value) if shown is None else shown), ("" if value is None else value)


def spread(middle: Any, deviation: Any) -> str:
    return number(middle) + (f" ± {number(deviation)}" if isinstance(deviation, float) else "")


# Metrics -------------------------------------------------------------------------------------------------------------


def cohort_metrics(study: Study) -> Iterator[Table]:
    """Mean ± standard deviation over seeds of every metric that the runs have."""
    for cohort in dict.fromkeys(row["cohort"] for row in study.results):
        found: dict[str, dict[str, list[float]]] = {}
        metrics: dict[str, None] = {}
        for row in study.results:
            if row["cohort"] == cohort and row["value"] not in ("", "nan"):
                found.setdefault(row["arm"], {}).setdefault(row["metric"], []).append(float(row["value"]))
                metrics[row["metric"]] = None
        rows = [
            (cell(arm_title(arm)), *(_over_seeds(values.get(metric, [])) for metric in metrics))
            for arm, values in found.items()
        ]
        yield Table(
            str(cohort), ("Arm", *map(metric_name, metrics)), rows, "Test set, mean ± standard deviation over seeds."
        )


def _over_seeds(values: Sequence[float]) -> tuple[str, Any]:
    if not values:
        return cell(None)
    return cell(mean(values), spread(mean(values), stdev(values) if len(values) > 1 else None))


def run_metrics(runs: Iterable[Run]) -> Table:
    """Every run by itself, at the level that scores."""
    runs = list(runs)
    metrics: dict[str, None] = {}
    for run in runs:
        metrics |= dict.fromkeys(_scores(run))
    rows = [
        (
            cell(run.cohort),
            cell(run_name(run)),
            cell(run.unit),
            cell(run.metrics.get("best_epoch")),
            *(cell(_scores(run).get(metric)) for metric in metrics),
        )
        for run in runs
    ]
    heads = ("Cohort", "Arm", "Seed", "Best epoch", *map(metric_name, metrics))
    return Table("Every run", heads, rows, "Test set, with the weights of the epoch that validation chose.")


def _scores(run: Run) -> dict[str, Any]:
    return dict((run.metrics.get("test") or {}).get(run.metrics.get("score")) or {})


def run_name(run: Run) -> str:
    """The arm, and what a study varied of it: runs of one arm with other settings lie below ``variants``."""
    above = run.path.absolute().parents
    varied = above[2].name if len(above) > 3 and above[3].name == "variants" else ""
    return arm_title(run.arm) + (f" ({varied.replace('model.', '').replace(',', ', ')})" if varied else "")


# Slides --------------------------------------------------------------------------------------------------------------


def slides(runs: Sequence[Run]) -> Iterator[Table]:
    """A table a cohort: each test slide (or case) with its truth, and what the arms said, over the seeds that tested it."""
    for cohort in dict.fromkeys(run.cohort for run in runs):
        own = [(run, table) for run in runs if run.cohort == cohort and (table := run.predictions()) is not None]
        if not own:
            continue
        key = "slide" if "slide" in own[0][1] else "case"
        truth = [name for name in ("case", "label", "time", "event") if name in own[0][1] and name != key]
        arms = list(dict.fromkeys(run_name(run) for run, _ in own))
        known: dict[str, dict[str, Any]] = {}
        said: dict[tuple[str, str], list[float]] = {}
        for run, table in own:
            for name, value, facts in _said(table, key, truth):
                known.setdefault(name, facts)
                said.setdefault((name, run_name(run)), []).append(value)
        what = _meaning(own[0][1])
        rows = [
            (cell(name), *(cell(facts[t]) for t in truth), *(_told(said.get((name, arm)), what) for arm in arms))
            for name, facts in sorted(known.items())[:MOST_SLIDES]
        ]
        note = f"{what}, over the seeds whose test set has it." + (
            f" The first {MOST_SLIDES} of {len(known)}; the rest is in the runs' predictions_test_{key}.csv."
            if len(known) > MOST_SLIDES
            else ""
        )
        heads = (key.capitalize(), *(name.capitalize() for name in truth), *arms)
        yield Table(f"{cohort}: {len(known)} test {key}s", heads, rows, note, f"Search {key}s of {cohort}")


def _meaning(table: pd.DataFrame) -> str:
    if "risk" in table:
        return "Predicted risk"
    return "Probability of the true class" if "predicted" in table else "Mean probability of the labels"


def _said(table: pd.DataFrame, key: str, truth: Sequence[str]) -> Iterator[tuple[str, float, dict[str, Any]]]:
    chances = [name for name in table if str(name).startswith("prob_")]
    for row in table.to_dict("records"):
        if "risk" in row:
            value = row["risk"]
        elif f"prob_{row.get('label')}" in row:
            value = row[f"prob_{row['label']}"]
        else:
            value = mean(float(row[name]) for name in chances) if chances else math.nan
        yield str(row[key]), float(value), {name: row[name] for name in truth}


def _told(values: Sequence[float] | None, what: str) -> tuple[str, Any]:
    if not values:
        return cell(None)
    middle = mean(values)
    digits = 3 if what == "Predicted risk" else 2
    return cell(middle, f"{middle:.{digits}f}" + (f" ({len(values)} seeds)" if len(values) > 1 else ""))


# Data, settings ------------------------------------------------------------------------------------------------------


def check_facts(check: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The main numbers of `gated-srp check`, in words."""
    summary = check["summary"]
    files, slides_, labels = summary.get("files") or {}, summary.get("slides") or {}, summary.get("labels") or {}
    patches, near = summary.get("patches") or {}, summary.get("neighbours") or {}
    facts = []
    if slides_:
        facts.append(
            (
                "Slides",
                f"{slides_.get('slides')} of {slides_.get('patients')} patients, {slides_.get('found')} with a file",
            )
        )
    facts.append(("Files", f"{files.get('usable')} of {files.get('looked_at')} usable"))
    for key, name in (("encoders", "Encoder"), ("widths", "Width"), ("dtypes", "Type")):
        if summary.get(key):
            facts.append((name, ", ".join(map(str, summary[key]))))
    if patches.get("median") is not None:
        text = f"{patches['min']:,.0f} to {patches['max']:,.0f} a slide, median {patches['median']:,.0f}; {patches['total']:,} in all"
        facts.append(("Patches", text))
    if (near.get("mean") or {}).get("median") is not None:
        facts.append(("Neighbours", f"{near['mean']['median']:.1f} of {near['most']} a patch (median of slides)"))
    facts += [("Labels", str(note)) for note in labels.get("notes", ())]
    for name, one in (summary.get("split") or {}).items():
        if "slides" in one:
            facts.append((f"Split, {name}", ", ".join(f"{count} {part}" for part, count in one["slides"].items())))
    return [(name, text) for name, text in facts if text]


def hashes(material: Material) -> Table:
    """Of splits and models: what another person's runs must have to be the same."""
    rows = [
        (
            cell(run.cohort),
            cell(run_name(run)),
            cell(run.unit),
            cell(str(run.metrics.get("split_hash") or "–")[:16]),
            cell(str(run.environment.get("slides_hash") or "–")[:16]),
            cell(run.model_hash[:16] or "–"),
        )
        for run in material.runs
    ]
    note = "First 16 signs of SHA-256. Runs with equal splits are paired; equal models are equal to the last bit."
    return Table("Hashes", ("Cohort", "Arm", "Seed", "Split", "Slides and labels", "Model"), rows, note)
