"""Tables of a page as plain values: metrics, differences between arms, numbers beside the published ones, slides, hashes."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import mean
from typing import Any

import pandas as pd

from gated_srp.errors import counted
from gated_srp.models import arm_title, is_gated
from gated_srp.records import parse_numbers
from gated_srp.reports.page.contents import FinishedRun, StudyFolder
from gated_srp.reports.tables import mean_and_std, metric_name, tone_of
from gated_srp.training.folder import departures

MOST_SLIDES = 2000  # rows of a table of slides
Cell = tuple[str, Any]  # what is shown, and what it sorts by
Row = Mapping[str, Any]  # of comparison.json or reproduction.csv
GLOSSARY = {  # words of the page, which say under the mouse what they mean where they head a column
    "Arm": "One way to build the model: NA is plain Nystrom attention, Gated SRP the same model with the correction, and so on.",
    "Seed": "One split of the patients with its own start weights. Arms are compared seed by seed, so both see the same slides.",
    "95 % interval": "Where the true mean difference lies, as far as these seeds can tell. Seeds share slides; the interval allows for it "
    "(Nadeau and Bengio).",
    "p (Holm)": "How surprising the difference would be by chance alone, corrected for making several comparisons at once (Holm). A "
    "difference counts, here and in every figure, only if its interval excludes zero and this p is below 5 %.",
    "W–L–T": "Seeds that the arm won, lost and tied.",
    "Over patients": "95 % interval of the difference when the test patients are resampled instead.",
    "Best epoch": "The epoch whose weights were kept: the best one on the validation slides.",
    "Attention": "How much weight the model gives to a patch, in multiples of the slide's mean.",
    "beta (β)": "What a gate does with the part of a patch that it shares with its neighbours: 0 leaves it, 1 removes it, 2 flips it, "
    "below 0 amplifies it.",
    "Homogeneity": "How alike a patch and its neighbours are: the mean cosine of their features.",
}


@dataclass(frozen=True)
class HtmlTable:
    """Heads and rows of cells. ``search``: the label of a search field above it."""

    title: str
    heads: tuple[str, ...]
    rows: Sequence[tuple[Cell, ...]]
    note: str = ""
    search: str = ""
    cohort: str = ""  # whose slides they are


def signed(value: Any) -> str:
    """
    >>> signed(-0.25), signed(None)
    ('−0.2500', '–')
    """
    return f"{value:+.4f}".replace("-", "−") if isinstance(value, float | int) else "–"


def cell(value: Any, shown: str | None = None) -> Cell:
    """Sorts by the value; shows it, numbers with four digits, or a text of its own.

    >>> cell(0.51236), cell(None), cell(True), cell(math.nan)[0], cell(2, "two"), cell(3e-6)[0]
    (('0.5124', 0.51236), ('–', ''), ('True', True), '–', ('two', 2), '< 0.0001')
    """
    if value is None:
        return shown or "–", ""
    if shown is None and isinstance(value, float):
        shown = "< 0.0001" if 0 < value < 0.00005 else mean_and_std(value)  # a p is never zero
    return str(value) if shown is None else shown, value


def spread(middle: Any, deviation: Any) -> Cell:
    """Mean ± standard deviation."""
    return cell(middle, mean_and_std(*(math.nan if value is None else value for value in (middle, deviation))))


def interval(low: Any, high: Any) -> Cell:
    return cell(low, "–" if low is None else f"{signed(low)} to {signed(high)}")


# Metrics --------------------------------------------------------------------------------------------------------------


def cohort_metrics(study: StudyFolder) -> Iterator[HtmlTable]:
    """Mean ± standard deviation over seeds of every metric that the runs have."""
    results = pd.DataFrame(study.results, columns=["cohort", "arm", "metric", "value"])
    results["value"] = parse_numbers(results["value"])
    for cohort, own in results.dropna(subset="value").groupby("cohort", sort=False):
        metrics = own["metric"].unique()
        over_seeds = own.groupby(["arm", "metric"])["value"].agg(["mean", "std"])
        found = {key: spread(middle, std) for key, middle, std in over_seeds.itertuples()}
        rows = [
            (cell(arm_title(arm)), *(found.get((arm, metric), cell(None)) for metric in metrics))
            for arm in sorted(own["arm"].unique(), key=lambda arm: not is_gated(arm))
        ]
        note = "Test set, mean ± standard deviation over seeds."
        yield HtmlTable(str(cohort), ("Arm", *map(metric_name, metrics)), rows, note)


def run_metrics(runs: Sequence[FinishedRun]) -> HtmlTable:
    """Every run by itself, at the level that scores."""
    metrics = list(dict.fromkeys(metric for run in runs for metric in run.scores))
    rows = [
        (*_run_cells(run), cell(run.results.get("best_epoch")), *(_remarked(run, metric) for metric in metrics))
        for run in runs
    ]
    heads = ("Cohort", "Arm", "Seed", "Best epoch", *map(metric_name, metrics))
    note = "Test set, with the weights of the epoch that validation chose."
    found = {run: departures(run.settings) for run in runs}
    for words in dict.fromkeys(line for lines in found.values() for line in lines):
        own = [f"{run.name}, seed {run.unit}" for run, lines in found.items() if words in lines]
        of = "" if len(own) == len(runs) else f" ({'; '.join(own)})"
        note += f" {words[0].upper()}{words[1:]}{of}."
    return HtmlTable("Every run", heads, rows, note)


def _remarked(run: FinishedRun, metric: str) -> Cell:
    """A test metric, with what the run says beside it (a class that counts as 0)."""
    shown, value = cell(run.scores.get(metric))
    remark = ((run.results.get("remarks") or {}).get("test") or {}).get(metric)
    return f"{shown} ({remark})" if remark else shown, value


def hashes(runs: Sequence[FinishedRun]) -> HtmlTable:
    """Of splits and models: what another person's runs must have to be the same."""
    rows = []
    for run in runs:
        found = run.results.get("split_hash"), run.environment.get("slides_hash"), run.model_hash
        rows.append((*_run_cells(run), *(cell(str(one or "–")[:16]) for one in found)))
    note = "First 16 characters of the SHA-256. Runs with equal splits are paired; "
    note += "equal models are equal to the last bit."
    return HtmlTable("Hashes", ("Cohort", "Arm", "Seed", "Split", "Slides and labels", "Model"), rows, note)


def _run_cells(run: FinishedRun) -> tuple[Cell, ...]:
    return cell(run.cohort), cell(run.name), cell(run.unit)


# Differences between arms ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Forest:
    """Differences of one cohort and metric, drawn on one scale; places in percent of the width."""

    title: str
    low: float
    high: float
    zero: float
    lines: list[dict[str, Any]]


def headline(row: Row, metric: str, reference: str) -> str:
    """What one difference means, in one sentence for somebody who reads nothing else."""
    arm, test = arm_title(str(row.get("arm"))), _test(row)
    seeds, difference, (low, high) = row.get("n") or 0, test.get("difference"), _limits(test).values()
    start = f"On {where(row)}, {arm}"
    if difference is None:
        return f"{start} could not be compared with {reference}: no seed has both."
    told = f"{metric} {signed(difference)}"
    if low is None or high is None:
        return f"{start} was compared with {reference} on {counted(seeds, 'seed')}: {told}. That is too little for an answer."
    told += f", 95 % interval {signed(low)} to {signed(high)}, {counted(seeds, 'seed')}"
    if row.get("claimed"):
        return f"{start} measurably {'helped' if tone(row) == 'better' else 'hurt'} compared with {reference}: {told}."
    lower = tone_of(1.0, str(row.get("metric"))) == "worse"  # is better
    worst = max(0.0, high if lower else -low)
    few = " With so few seeds the interval is wide." if seeds < 5 else ""
    said = f"it is {row['no_worse']}; " if row.get("no_worse") else ""  # files of 0.2 lack it
    return (
        f"{start} did not measurably help or hurt compared with {reference}: {told}; {said}at worst, as far as these runs can tell, it is "
        f"{worst:.3f} {'higher' if lower else 'lower'}.{few}"
    )


def differences(study: StudyFolder) -> HtmlTable:
    heads = ("Cohort", "Metric", "Arm", "Mean", "Reference", "Difference", "95 % interval", "p (Holm)", "W–L–T")
    rows = []
    for row in all_rows(study):
        test, patients = _test(row), row.get("bootstrap") or {}
        rows.append(
            (
                cell(where(row)),
                cell(metric_name(str(row.get("metric")))),
                cell(arm_title(str(row.get("arm")))),
                spread(row.get("mean"), row.get("std")),
                spread(row.get("reference_mean"), row.get("reference_std")),
                cell(test.get("difference"), signed(test.get("difference"))),
                interval(*_limits(test).values()),
                cell(row.get("p_holm")),
                cell(row.get("wins"), "–".join(str(row.get(key, "")) for key in ("wins", "losses", "ties"))),
                interval(patients.get("low"), patients.get("high")),
            )
        )
    reference = arm_title(str(study.comparison.get("reference")))
    note = (
        f"Differences to {reference}, paired by seed; the interval allows for seeds that share slides (Nadeau and Bengio). "
        "W–L–T: seeds won, lost, tied. Over patients: 95 % interval when test patients are resampled."
    )
    return HtmlTable("Differences", (*heads, "Over patients"), rows, note)


def all_rows(study: StudyFolder) -> list[dict[str, Any]]:
    """Per cohort, and across cohorts where there are several; arms with gates first."""
    rows = list(study.comparison.get("cohorts") or [])
    if len({row.get("cohort") for row in rows}) > 1:
        rows += list(study.comparison.get("across") or [])
    groups = list(dict.fromkeys((row.get("cohort"), row.get("metric")) for row in rows))
    order = {group: place for place, group in enumerate(groups)}
    return sorted(
        rows, key=lambda row: (order[row.get("cohort"), row.get("metric")], not is_gated(str(row.get("arm"))))
    )


def where(row: Row) -> str:
    return "all cohorts" if row.get("cohort") is None else str(row["cohort"])


def tone(row: Row) -> str:
    """better, worse or open; a difference that does not survive Holm's correction is open."""
    difference = _test(row).get("difference")
    return "open" if not row.get("claimed") or difference is None else tone_of(difference, str(row.get("metric")))


def forests(study: StudyFolder) -> Iterator[Forest]:
    groups: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in all_rows(study):
        groups.setdefault((where(row), str(row.get("metric"))), []).append(row)
    for (place, metric), rows in groups.items():
        found = [{"at": _test(row).get("difference"), **_limits(_test(row))} for row in rows]
        ends = [0.0, *(value for one in found for value in one.values() if value is not None)]
        margin = 0.06 * ((max(ends) - min(ends)) or 1.0)
        low, high = min(ends) - margin, max(ends) + margin
        lines = []
        for row, one in zip(rows, found, strict=True):
            words = signed(one["at"])
            words += "" if one["from"] is None else f" ({signed(one['from'])} to {signed(one['to'])})"
            places = {name: _percent(value, low, high) for name, value in one.items()}
            lines.append({"arm": arm_title(str(row.get("arm"))), "tone": tone(row), "words": words, **places})
        yield Forest(f"{place}, {metric_name(metric)}", low, high, _percent(0.0, low, high) or 0.0, lines)


def _test(row: Row) -> Row:
    """The test that the verdict speaks of: corrected for shared slides within a cohort, plain across cohorts."""
    found: Row = row.get("corrected") or row
    return found


def _limits(test: Row) -> dict[str, float | None]:
    low, high = test.get("interval") or (None, None)
    return {"from": low, "to": high}


def _percent(value: float | None, low: float, high: float) -> float | None:
    return None if value is None else round(100 * (value - low) / (high - low), 2)


# A study of the paper, beside the published numbers -------------------------------------------------------------------

_SHOWN = {"row", "cohort", "metric", "mean", "std", "seeds", "published", "published_std", "difference", "low", "high"}


def reproduction(study: StudyFolder) -> HtmlTable | None:
    """What was run, as `reproduce` judged it; what was not run is counted below the table."""
    rows = [{name: _value(text) for name, text in row.items()} for row in study.reproduction]
    run = [row for row in rows if row.get("mean") is not None]
    if not rows:
        return None
    more = [name for name in rows[0] if name not in _SHOWN and any(row.get(name) is not None for row in run)]
    heads = ("Row", "Cohort", "Metric", "Ours", "Seeds", "Published", "Difference", "95 % interval")
    cells = [
        (
            cell(row.get("row")),
            cell(row.get("cohort")),
            cell(metric_name(str(row.get("metric")))),
            spread(row["mean"], row.get("std")),
            cell(row.get("seeds")),
            spread(row.get("published"), row.get("published_std")),
            cell(row.get("difference"), signed(row.get("difference"))),
            interval(row.get("low"), row.get("high")),
            *(cell(row.get(name)) for name in more),
        )
        for row in run
    ]
    left = len(rows) - len(run)
    note = f"Not run: {counted(left, 'more number')} of the table." if left else ""
    more = [name.replace("_", " ").capitalize() for name in more]
    return HtmlTable("Beside the published numbers", (*heads, *more), cells, note)


def agreement(study: StudyFolder) -> dict[str, str] | None:
    """How many of the published numbers ours agree with, in words; None where nothing is judged."""
    counts = Counter(row.get("verdict") for row in study.reproduction)
    judged = counts["compatible"] + counts["not compatible"]
    few = [row for row in study.reproduction if row.get("verdict") == "incomplete"]
    if not judged and not few:
        return None
    words = "No number is judged"
    if judged:
        words = f"{counts['compatible']} of {judged} numbers that were run are compatible with the published ones, "
        words += f"{counts['not compatible']} are not; {counts['not run']} were not run. table.md states the rule"
    if few:
        listed = dict.fromkeys(f"{row['cohort']}: {row['slides']} of {row['paper_slides']} slides" for row in few)
        words += f"{'; not judged' if judged else ''}: {len(few)} are of incomplete cohorts ({'; '.join(listed)})"
    words += "."
    return {"what": f"Reproduction of {study.path.name}", "words": words, "tone": "open"}


def _value(text: str) -> Any:
    """
    >>> _value("0.5"), _value("2"), _value("nan"), _value(""), _value("not run")
    (0.5, 2, None, None, 'not run')
    """
    try:
        value = float(text)
    except ValueError:
        return text or None
    return int(text) if text.lstrip("-").isdigit() else value if math.isfinite(value) else None


# Where truth is known -------------------------------------------------------------------------------------------------


def truth(scores: Sequence[tuple[str, str, float, float, float, int]]) -> HtmlTable:
    """How well each map finds what is known to be true; see `sides.Sides.truth`."""
    rows = [
        (
            cell(cohort),
            cell(name),
            cell(middle, f"{100 * middle:.0f} %"),
            cell(low, f"{100 * low:.0f} to {100 * high:.0f} %"),
            cell(count),
        )
        for cohort, name, middle, low, high, count in scores
    ]
    note = (
        "Of two patches of a slide, one of which is known to be what the label speaks of, the map puts that one first so often: 50 % is "
        "chance, 100 % finds all of them first. Means over slides of one seed each; they show where a model looks, not whether one is better."
    )
    return HtmlTable("Maps where truth is known", ("Cohort", "Map", "Mean", "Lowest to highest", "Slides"), rows, note)


# Slides ---------------------------------------------------------------------------------------------------------------


def slides(runs: Sequence[FinishedRun]) -> Iterator[HtmlTable]:
    """One table per cohort: each test slide (or case) with its truth, and what the arms predicted, over the seeds that tested it."""
    for cohort in dict.fromkeys(run.cohort for run in runs):
        own = [(run, table) for run in runs if run.cohort == cohort and (table := run.tested()) is not None]
        if not own:
            continue
        first, table = own[0]
        key = "slide" if "slide" in table else "case"
        truth = [name for name in ("case", *first.truth) if name in table and name != key]
        arms = list(dict.fromkeys(run.name for run, _ in own))
        known: dict[str, Mapping[Any, Any]] = {}
        predicted: dict[tuple[str, str], list[float]] = {}
        what = ""
        for run, table in own:
            what, values = run.task.headline(table)
            for name, value, facts in zip(table[key], values, table[truth].to_dict("records"), strict=True):
                known.setdefault(str(name), facts)
                predicted.setdefault((str(name), run.name), []).append(float(value))
        rows = [
            (cell(name), *(cell(facts[t]) for t in truth), *(_mean(predicted.get((name, arm))) for arm in arms))
            for name, facts in sorted(known.items())[:MOST_SLIDES]
        ]
        note = f"{what}, over the seeds whose test set has it."
        if len(known) > MOST_SLIDES:
            note += f" The first {MOST_SLIDES} of {len(known)}; the rest is in the runs' predictions_test_{key}.csv."
        heads = (key.capitalize(), *(name.capitalize() for name in truth), *arms)
        yield HtmlTable(f"{cohort}: {len(known)} test {key}s", heads, rows, note, f"Search {key}s of {cohort}", cohort)


def _mean(values: Sequence[float] | None) -> Cell:
    if not values:
        return cell(None)
    middle = mean(values)
    seeds = f" ({counted(len(values), 'seed')})" if len(values) > 1 else ""
    return cell(middle, f"{middle:.3f}{seeds}" if math.isfinite(middle) else f"–{seeds}")


def localized(found: Mapping[str, Any]) -> HtmlTable:
    """Maps against annotations: every arm, value and metric with its interval."""
    rows = [
        (
            cell(arm_title(str(row.get("arm")))),
            cell(str(row.get("value")).replace("_layer", ", layer ")),
            cell(metric_name(str(row.get("metric")))),
            cell(row.get("mean")),
            cell(row.get("low"), f"{signed(row.get('low'))} to {signed(row.get('high'))}".replace("+", "")),
            cell(row.get("slides")),
        )
        for row in found.get("table") or ()
    ]
    note = "Intervals over resampled patients. Higher values count as a sign of it: 0.5 of AUROC is chance."
    heads = ("arm", "value", "metric", "mean", "95 % interval", "slides")
    return HtmlTable(f"Maps against {', '.join(map(str, found.get('classes') or ()))}", heads, rows, note)
