"""What finished cells say: one table of results, the comparison with its patient bootstrap, and what the paper shows of a task."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import pandas as pd

from gated_srp.errors import UserError
from gated_srp.study.cells import Cell, refuse_unpaired
from gated_srp.study.predictions import metrics_of, read_predictions
from gated_srp.study.results import COLUMNS, Comparison, compare
from gated_srp.study.statistics import RATIO, Bootstrap, paired_bootstrap
from gated_srp.tasks import find_task


def collect(cells: Sequence[Cell]) -> pd.DataFrame:
    """Test metrics of the finished cells, at the level that scores: cohort, arm, seed, metric, value (missing: undefined)."""
    refuse_unpaired(cells)
    rows = []
    for cell in cells:
        if not cell.run.finished:
            continue
        found = cell.run.read_json("metrics.json")
        metrics = (found.get("test") or {}).get(cell.config.score) or {}
        for metric, value in metrics.items():
            rows.append((cell.cohort, cell.row, cell.unit, metric, math.nan if value is None else float(value)))
    return pd.DataFrame(rows, columns=list(COLUMNS))


def shown_metrics(cell: Cell) -> tuple[str, ...]:
    """Those that the paper shows for this task; the one that selects comes first if it is none of them (PANDA's kappa)."""
    usual = find_task(cell.config.task).shown
    return usual if cell.config.metric in usual else (cell.config.metric, *usual)


def compare_cells(
    cells: Sequence[Cell], results: pd.DataFrame, reference: str, *, repeats: int = 1000, notes: tuple[str, ...] = ()
) -> Comparison:
    """Every row against the reference on the metrics that the paper shows. ``repeats`` 0: patients are not resampled."""
    shown = {(cell.cohort, metric) for cell in cells for metric in shown_metrics(cell)}
    known = pd.Series(list(zip(results["cohort"], results["metric"], strict=True)), dtype=object).isin(list(shown))
    keep = known.to_numpy() & results["value"].notna().to_numpy()
    if not keep.any():
        raise UserError("no cell is finished, so there is nothing to compare. Mend what failed and start again.")
    found = compare(results[keep].reset_index(drop=True), reference, ratio=split_ratio(cells), notes=notes)
    return with_bootstrap(found, cells, repeats) if repeats else found


def split_ratio(cells: Sequence[Cell]) -> float:
    """Test over train in the cells' splits; the paper's where none is finished."""
    ratios = {}
    for cell in cells:
        path = cell.key / "split.csv"
        if path.is_file() and (cell.cohort, cell.unit) not in ratios:
            parts = pd.read_csv(path, dtype=str, keep_default_na=False)["split"].value_counts()
            if parts.get("train", 0):
                ratios[cell.cohort, cell.unit] = parts.get("test", 0) / parts["train"]
    return float(sum(ratios.values()) / len(ratios)) if ratios else RATIO


def with_bootstrap(comparison: Comparison, cells: Sequence[Cell], repeats: int) -> Comparison:
    """Each cell of a cohort with the interval over resampled patients of its seeds' test sets."""
    tables = {(c.cohort, c.row, c.unit): predictions(c) for c in cells if c.run.finished}
    found: dict[tuple[str, str], dict[str, Bootstrap]] = {}
    judged = []
    for one in comparison.cohorts:
        key = (str(one.cohort), one.arm)
        if key not in found:
            units = [unit for cohort, row, unit in tables if (cohort, row) == key]
            both = [(tables[(*key, u)], tables.get((key[0], comparison.reference, u))) for u in units]
            pairs = [(first, second) for first, second in both if second is not None and len(first)]
            found[key] = paired_bootstrap(pairs, metrics_of, repeats=repeats)
        judged.append(replace(one, bootstrap=found[key].get(one.metric)))
    return replace(comparison, cohorts=tuple(judged))


def predictions(cell: Cell) -> pd.DataFrame:
    """Of the test set, at the level that scores."""
    return read_predictions(cell.key / f"predictions_test_{cell.config.score}.csv")
