"""What run folders add to a comparison: patients to resample, and the true sizes of the splits.

Layout: RUNS/COHORT/ARM/seed42/ with predictions_test_slide.csv, predictions_test_case.csv and split.csv.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd

from gated_srp.errors import UserError
from gated_srp.study.results import Comparison
from gated_srp.study.statistics import Bootstrap, paired_bootstrap
from gated_srp.tasks import TASKS

_TEXT = dict.fromkeys(("slide", "case", "label", "predicted"), str)


def read_predictions(path: str | Path) -> pd.DataFrame:
    """A predictions table; ids and class names stay text, whatever they spell, and numbers are the ones that were written."""
    try:
        frame = pd.read_csv(path, dtype=_TEXT, keep_default_na=False, float_precision="round_trip")
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: cannot be read as predictions ({error}). Run `gated-srp predict` again.") from None
    if "case" not in frame:
        raise UserError(f"{path}: no column 'case', so patients cannot be resampled. Run `gated-srp evaluate` again.")
    return frame


def metrics_of(predictions: pd.DataFrame) -> Mapping[str, float]:
    """The metrics that a labelled predictions table gives by itself; its columns tell the task."""
    for kind in TASKS.values():
        if (found := kind.metrics_of(predictions)) is not None:
            return found
    raise UserError(f"predictions with the columns {', '.join(map(str, predictions))} are of no known task.")


def with_bootstrap(comparison: Comparison, runs: Path, *, repeats: int = 1000) -> Comparison:
    """The comparison with a patient bootstrap in each cell of a cohort whose predictions are found under ``runs``."""
    found: dict[tuple[str, str], dict[str, Bootstrap]] = {}
    cells = []
    for cell in comparison.cohorts:
        key = (str(cell.cohort), cell.arm)
        if key not in found:
            pairs = _pairs(runs / key[0], cell.arm, comparison.reference)
            found[key] = paired_bootstrap(pairs, metrics_of, repeats=repeats)
        cells.append(replace(cell, bootstrap=found[key].get(cell.metric)))
    return replace(comparison, cohorts=tuple(cells))


def split_ratio(runs: Path) -> float | None:
    """Mean of test over train, in rows of the runs' split.csv; None where there is none."""
    ratios = []
    for path in sorted(runs.glob("*/*/seed*/split.csv")):
        parts = pd.read_csv(path, dtype=str, keep_default_na=False)["split"].value_counts()
        if parts.get("train", 0):
            ratios.append(parts.get("test", 0) / parts["train"])
    return float(np.mean(ratios)) if ratios else None


def _pairs(cohort: Path, arm: str, reference: str) -> list[tuple[pd.DataFrame, pd.DataFrame]]:
    pairs = []
    for folder in sorted((cohort / arm).glob("seed*")):
        other = cohort / reference / folder.name
        # Survival is scored per case, the rest per slide; patients are resampled in both.
        for level in ("slide", "case"):
            paths = [place / f"predictions_test_{level}.csv" for place in (folder, other)]
            if all(path.is_file() for path in paths):
                first, second = map(read_predictions, paths)
                if level == "slide" and "risk" in first:
                    continue
                pairs.append((first, second))
                break
    return pairs
