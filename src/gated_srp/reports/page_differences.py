"""Differences between arms on a page: the table of all, and their places on forest plots."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from gated_srp.models import arm_title
from gated_srp.reports.page_material import Study
from gated_srp.reports.page_tables import Table, cell, signed, spread
from gated_srp.reports.tables import metric_name
from gated_srp.study.results import LOWER_IS_BETTER


@dataclass(frozen=True)
class Forest:
    """Differences of one cohort and metric, drawn on one scale; places in percent of the width."""

    title: str
    low: float
    high: float
    zero: float
    lines: list[dict[str, Any]] = field(default_factory=list)


def test_of(row: Mapping[str, Any]) -> Mapping[str, Any]:
    """The one of which the verdict speaks: corrected for shared slides within a cohort, plain across cohorts."""
    found: Mapping[str, Any] = row.get("corrected") or row
    return found


def tone(row: Mapping[str, Any]) -> str:
    """better, worse or open; a hint that Holm's correction takes back is open."""
    difference = test_of(row).get("difference")
    if not row.get("claimed") or not isinstance(difference, float | int):
        return "open"
    return "better" if (difference < 0) == (row.get("metric") in LOWER_IS_BETTER) else "worse"


def where(row: Mapping[str, Any]) -> str:
    return "all cohorts" if row.get("cohort") is None else str(row["cohort"])


def differences(study: Study) -> Table:
    heads = (
        "Cohort",
        "Metric",
        "Arm",
        "Mean",
        "Reference",
        "Difference",
        "95 % interval",
        "p (Holm)",
        "W–L–T",
        "Over patients",
    )
    rows = []
    for row in all_rows(study):
        test, drawn = test_of(row), row.get("bootstrap") or {}
        tally = "–".join(str(row.get(key, "")) for key in ("wins", "losses", "ties"))
        low, high = _interval(test)
        patients = f"{signed(drawn.get('low'))} to {signed(drawn.get('high'))}" if drawn else "–"
        rows.append(
            (
                cell(where(row)),
                cell(metric_name(str(row.get("metric")))),
                cell(arm_title(str(row.get("arm")))),
                cell(row.get("mean"), spread(row.get("mean"), row.get("std"))),
                cell(row.get("reference_mean"), spread(row.get("reference_mean"), row.get("reference_std"))),
                cell(test.get("difference"), signed(test.get("difference"))),
                cell(low, "–" if low is None else f"{signed(low)} to {signed(high)}"),
                cell(row.get("p_holm")),
                cell(row.get("wins"), tally),
                cell(drawn.get("low"), patients),
            )
        )
    reference = arm_title(str(study.comparison.get("reference")))
    note = (
        f"Differences to {reference}, paired by seed; the interval allows for seeds that share slides (Nadeau and Bengio). "
        "W–L–T: seeds won, lost, tied. Over patients: 95 % interval when test patients are resampled."
    )
    return Table("Differences", heads, rows, note)


def all_rows(study: Study) -> list[dict[str, Any]]:
    """Per cohort, and across cohorts where there are several."""
    cohorts = list(study.comparison.get("cohorts") or [])
    several = len({row.get("cohort") for row in cohorts}) > 1
    return cohorts + (list(study.comparison.get("across") or []) if several else [])


def forests(study: Study) -> Iterator[Forest]:
    groups: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in all_rows(study):
        groups.setdefault((where(row), str(row.get("metric"))), []).append(row)
    for (place, metric), rows in groups.items():
        ends = [0.0]
        for row in rows:
            ends += [v for v in (*_interval(test_of(row)), test_of(row).get("difference")) if v is not None]
        low, high = min(ends), max(ends)
        margin = 0.06 * ((high - low) or 1.0)
        low, high = low - margin, high + margin
        forest = Forest(f"{place}, {metric_name(metric)}", low, high, _percent(0.0, low, high) or 0.0)
        for row in rows:
            test = test_of(row)
            first, last = _interval(test)
            forest.lines.append(
                {
                    "arm": arm_title(str(row.get("arm"))),
                    "tone": tone(row),
                    "at": _percent(test.get("difference"), low, high),
                    "from": _percent(first, low, high),
                    "to": _percent(last, low, high),
                    "words": f"{signed(test.get('difference'))}"
                    + ("" if first is None else f" ({signed(first)} to {signed(last)})"),
                }
            )
        yield forest


def _interval(test: Mapping[str, Any]) -> tuple[float | None, float | None]:
    found = test.get("interval") or (None, None)
    return found[0], found[1]


def _percent(value: float | None, low: float, high: float) -> float | None:
    return None if value is None else round(100 * (value - low) / (high - low), 2)
