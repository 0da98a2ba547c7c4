"""A study of the paper, done again: its rows and columns with our numbers, the published ones and the differences."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from gated_srp.reports.study import write, write_grids
from gated_srp.reports.tables import Entry, Grid, best_of
from gated_srp.study.paper import Study
from gated_srp.study.statistics import RULE

Line = Mapping[Any, Any]  # a row of `beside_published`
_MACHINES = (
    "Speed and memory belong to a machine, so they are not judged: what may be compared with the authors' GPU are the ratios. On a "
    "processor GiB is the most that the whole process held, libraries and loaded slides too; on a GPU what PyTorch had reserved."
)


def write_reproduction(folder: Path, study: Study, lines: pd.DataFrame, notes: tuple[str, ...] = ()) -> list[Path]:
    """``reproduction.csv`` (a line a number) and ``table`` in all formats. ``lines``: of `beside_published`."""
    written = [write(folder / "reproduction.csv", lines.to_csv(index=False, lineterminator="\n"))]
    return written + write_grids(folder, {"table": reproduction_grid(study, lines, notes)})


def reproduction_grid(study: Study, lines: pd.DataFrame, notes: tuple[str, ...] = ()) -> Grid:
    """A few lines a row: ours, the published value, and our difference to it with the verdict (of a runtime: ratios to the base)."""
    columns = tuple((cohort, metric) for cohort, metrics in study.columns.items() for metric in metrics)
    at = {(line["row"], line["cohort"], line["metric"]): line for line in lines.to_dict("records")}
    best = {c: best_of(lines[(lines["cohort"] == c[0]) & (lines["metric"] == c[1])]["mean"], c[1]) for c in columns}
    rows: list[tuple[str, tuple[Entry, ...]]] = []
    for row in dict.fromkeys(lines["row"]):
        found = [at[(row, *column)] for column in columns]
        ours = tuple(Entry(_mean(one), bool(one["mean"] == best[c])) for c, one in zip(columns, found, strict=True))
        rows.append((row, ours))
        if any(not math.isnan(one["published"]) for one in found):
            rows.append(("– published", tuple(Entry(_published(one)) for one in found)))
            rows += (
                _ratios(study, found) if study.kind == "runtime" else [("– difference", tuple(map(_difference, found)))]
            )
    title = f"{study.title}, reproduced" if study.published else study.title
    return Grid(title, columns, tuple(rows), (*notes, *_about(study, lines)))


def _about(study: Study, lines: pd.DataFrame) -> tuple[str, ...]:
    """Where the published numbers are from, how many agree, and by which rule."""
    if study.published is None:
        return ("Nothing published to compare with.",)
    source = f"Published: {study.published.source}."
    if study.kind == "runtime":
        return source, _MACHINES
    counts = lines["verdict"].value_counts()
    judged = {word: int(counts.get(word, 0)) for word in ("compatible", "not compatible", "not judged", "not run")}
    summary = "; ".join(f"{count} {word}" for word, count in judged.items() if count)
    return source, f"Of the published numbers: {summary}.", f"Rule: {RULE}"


def _ratios(study: Study, found: Sequence[Line]) -> list[tuple[str, tuple[Entry, ...]]]:
    """Ours and the published over the base's; nothing for the base itself."""
    base = study.rows[0].name
    if found[0]["row"] == base:
        return []
    names = {f"– ours / {base}": "times_base", f"– published / {base}": "published_times_base"}
    return [(name, tuple(Entry(_times(one[key])) for one in found)) for name, key in names.items()]


def _times(ratio: float) -> str:
    return "–" if math.isnan(ratio) else f"{ratio:.2f} ×"


def _mean(line: Line) -> str:
    if math.isnan(line["mean"]):
        return "–"
    return f"{line['mean']:.4f}" + ("" if math.isnan(line["std"]) else f" ± {line['std']:.4f}")


def _published(line: Line) -> str:
    if math.isnan(line["published"]):
        return "–"
    return f"{line['published']:.4f}" + ("" if math.isnan(line["published_std"]) else f" ± {line['published_std']:.4f}")


def _difference(line: Line) -> Entry:
    if math.isnan(line["difference"]):
        return Entry("–")
    reach = (line["high"] - line["low"]) / 2
    signs = {"compatible": f" (±{reach:.4f}) ✓ compatible", "not compatible": f" (±{reach:.4f}) ✗ not compatible"}
    return Entry(f"{line['difference']:+.4f}{signs.get(line['verdict'], ' ' + line['verdict'])}".replace("-", "−"))
