"""A study of the paper on a page: ours beside the published, and how many agree."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

from gated_srp.reports.page_material import Study
from gated_srp.reports.page_tables import Table, cell, signed, spread
from gated_srp.reports.tables import metric_name

_TOLD = {"row", "cohort", "metric", "mean", "std", "seeds", "published", "published_std", "difference", "low", "high"}


def reproduction(study: Study) -> Table | None:
    """What was run, as `reproduce` judged it; what was not is counted below the table."""
    rows = [{name: _value(text) for name, text in row.items()} for row in study.reproduction]
    run = [row for row in rows if row.get("mean") is not None]
    if not rows:
        return None
    more = [name for name in rows[0] if name not in _TOLD and any(row.get(name) is not None for row in run)]
    heads = ("Row", "Cohort", "Metric", "Ours", "Seeds", "Published", "Difference", "95 % interval")
    cells = [
        (
            cell(row.get("row")),
            cell(row.get("cohort")),
            cell(metric_name(str(row.get("metric")))),
            cell(row["mean"], spread(row["mean"], row.get("std"))),
            cell(row.get("seeds")),
            cell(row.get("published"), spread(row.get("published"), row.get("published_std"))),
            cell(row.get("difference"), signed(row.get("difference"))),
            cell(row.get("low"), _interval(row)),
            *(cell(row.get(name)) for name in more),
        )
        for row in run
    ]
    left = len(rows) - len(run)
    note = f"{left} more numbers of the table were not run." if left else ""
    return Table("Beside the published numbers", (*heads, *(_words(name) for name in more)), cells, note)


def agreement(study: Study) -> dict[str, str] | None:
    """How many of the published numbers ours agree with, in words; None where nothing is judged."""
    counts = Counter(row.get("verdict") for row in study.reproduction)
    judged = counts["compatible"] + counts["not compatible"]
    if not judged:
        return None
    words = (
        f"{counts['compatible']} of {judged} numbers that were run are compatible with the published ones, "
        f"{counts['not compatible']} are not; {counts['not run']} were not run. table.md states the rule."
    )
    return {"what": f"Reproduction of {study.path.name}", "words": words, "tone": "open"}


def _interval(row: dict[str, Any]) -> str:
    return "–" if row.get("low") is None else f"{signed(row['low'])} to {signed(row['high'])}"


def _words(name: str) -> str:
    return name.replace("_", " ").capitalize()


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
