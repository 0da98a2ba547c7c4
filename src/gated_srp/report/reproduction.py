"""A study of the paper, done again: its rows and columns with our numbers, the published ones and the differences."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pandas as pd

from gated_srp.report.study import write, write_grids
from gated_srp.report.tables import Entry, Grid, best_of
from gated_srp.study.judge import RULE
from gated_srp.study.reproduce import Study

Line = Mapping[Any, Any]  # a row of `beside_published`


def write_reproduction(folder: Path, study: Study, lines: pd.DataFrame, notes: tuple[str, ...] = ()) -> list[Path]:
    """``reproduction.csv`` (a line a number) and ``table`` in all formats. ``lines``: of `beside_published`."""
    written = [write(folder / "reproduction.csv", lines.to_csv(index=False, lineterminator="\n"))]
    return written + write_grids(folder, {"table": reproduction_grid(study, lines, notes)})


def reproduction_grid(study: Study, lines: pd.DataFrame, notes: tuple[str, ...] = ()) -> Grid:
    """Three lines a row: ours, the published value, our difference to it with the verdict."""
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
            rows.append(("– difference", tuple(_difference(one) for one in found)))
    counts = lines["verdict"].value_counts()
    judged = {word: int(counts.get(word, 0)) for word in ("compatible", "not compatible", "not judged", "not run")}
    summary = "; ".join(f"{count} {word}" for word, count in judged.items() if count)
    source = f"Published: {study.published.source}." if study.published else "Nothing published to compare with."
    title = f"{study.title}, reproduced" if study.published else study.title
    return Grid(
        title,
        columns,
        tuple(rows),
        (*notes, source, f"Of the published numbers: {summary}." if study.published else "", f"Rule: {RULE}"),
    )


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
