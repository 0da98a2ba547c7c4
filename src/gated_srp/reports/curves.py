"""Figures of predictions: Kaplan-Meier curves of risk groups, ROC and precision-recall curves, reliability."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
import torch
from numpy.typing import NDArray

from gated_srp.models import arm_title
from gated_srp.reports.figures import COLOURS, STYLES, Runs, panels, save, tidy
from gated_srp.reports.tables import short
from gated_srp.tasks import find_task
from gated_srp.tasks.survival_metrics import FollowUp, risk_groups
from gated_srp.training.folder import RunFolder

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_GRID = np.linspace(0, 1, 101)
_BINS = 10
_ENOUGH = 5  # least slides in a bin of the reliability diagram
_GROUPS = {"high": (COLOURS[4], "--", "high predicted risk"), "low": (COLOURS[0], "-", "low predicted risk")}
Floats = NDArray[np.float64]


def draw_curves(folder: Path, cohort: str, rows: Runs, *, mark: str = "") -> list[Path]:
    """The figures that a cohort's task has: survival curves, or ROC, precision-recall and reliability."""
    settings = next(iter(rows.values()))[0].settings
    draw = {"kaplan_meier": draw_kaplan_meier, "roc": draw_roc, "reliability": draw_reliability}
    written: list[Path] = []
    for figure in find_task(settings["task"]).figures:
        written += draw[figure](rows, folder / f"{figure}_{cohort}", cohort=cohort, mark=mark)
    return written


def _predictions(run: RunFolder) -> pd.DataFrame:
    """Of the test set, at the level that scores."""
    return run.predictions("test", run.settings["score"])


# Survival ------------------------------------------------------------------------------------------------------------


def draw_kaplan_meier(rows: Runs, stem: Path, *, cohort: str, mark: str = "") -> list[Path]:
    """Test cases above and below the training cases' median risk; thin lines are seeds, p is the median of their log-rank tests."""
    figure, axes = panels(len(rows))
    for axis, (row, runs) in zip(axes, rows.items(), strict=True):
        p_values = [p for run in runs if not math.isnan(p := _draw_groups(axis, run))]
        test = f"log-rank p {np.median(p_values):.3f}" if p_values else "one group only"
        test += f" (median of {len(p_values)} seeds)" if len(p_values) > 1 else ""
        tidy(axis, x="time", y="survival probability", title=f"{arm_title(row)}\n{test}")
        axis.set_ylim(0, 1.02)
    for colour, style, label in _GROUPS.values():
        axes[0].plot([], [], color=colour, linestyle=style, label=label)
    axes[0].legend(frameon=False, fontsize=8)
    title = f"{short(cohort)}: Kaplan-Meier of test cases by predicted risk, one thin line per seed"
    figure.suptitle(title, x=0.01, ha="left", fontsize=11)
    return save(figure, stem, mark)


def _draw_groups(axis: Axes, run: RunFolder) -> float:
    """Both curves of one run; the log-rank p, not a number where there is no test."""
    table = _predictions(run)
    cases = FollowUp.of(table["time"], table["event"])
    found = risk_groups(table["risk"].to_numpy(np.float64), cases, run.card["median_risk"])
    for name, curve in found.curves.groupby("group"):
        colour, style, _ = _GROUPS[str(name)]
        line: dict[str, Any] = {"color": colour, "linestyle": style, "linewidth": 1, "alpha": 0.6}
        axis.step(curve["time"], curve["survival"], where="post", **line)
    return found.p_value


# Classification ------------------------------------------------------------------------------------------------------


def draw_roc(rows: Runs, stem: Path, *, cohort: str, mark: str = "") -> list[Path]:
    """One-vs-rest curves, mean over classes and seeds, band of one standard deviation over seeds."""
    figure, (left, right) = panels(2, width=4.2, height=3.8)
    for place, (row, runs) in enumerate(rows.items()):
        tables = [_predictions(run) for run in runs]
        for axis, curve in ((left, roc), (right, precision_recall)):
            found = np.array([macro_curve(table, curve) for table in tables])  # (seeds, grid)
            _draw_band(axis, found, place, arm_title(row))
    left.plot([0, 1], [0, 1], color="#888888", linewidth=0.8, linestyle=":")
    tidy(left, x="false positive rate", y="true positive rate", title="ROC")
    tidy(right, x="recall", y="precision", title="precision-recall")
    for axis in (left, right):
        axis.set(xlim=(0, 1), ylim=(0, 1.02))
    left.legend(frameon=False, fontsize=8, loc="lower right")
    count = len(next(iter(rows.values())))
    title = f"{short(cohort)}: test slides, mean over classes and {count} seed{'s' if count > 1 else ''} (± 1 std)"
    figure.suptitle(title, x=0.01, ha="left", fontsize=11)
    return save(figure, stem, mark)


def _draw_band(axis: Axes, curves: Floats, place: int, label: str) -> None:
    mean = curves.mean(0)
    colour, style = COLOURS[place % len(COLOURS)], STYLES[place % len(STYLES)]
    axis.plot(_GRID, mean, color=colour, linestyle=style, label=label, linewidth=1.6)
    if len(curves) > 1:
        spread = curves.std(0, ddof=1)
        axis.fill_between(_GRID, mean - spread, np.minimum(mean + spread, 1), color=colour, alpha=0.12, linewidth=0)


def macro_curve(table: pd.DataFrame, curve: Callable[[Floats, NDArray[np.bool_]], Floats]) -> Floats:
    """Mean over the classes that have both a positive and a negative, on a common grid."""
    found = []
    for column in [name for name in table if str(name).startswith("prob_")]:
        name = str(column).removeprefix("prob_")
        positive = (table["label"] == name if "label" in table else table[name].astype(float) > 0).to_numpy(bool)
        if positive.any() and not positive.all():
            found.append(curve(table[column].to_numpy(np.float64), positive))
    return np.asarray(np.mean(found, axis=0)) if found else np.full_like(_GRID, np.nan)


def roc(score: Floats, positive: NDArray[np.bool_]) -> Floats:
    """True positive rate on the grid of false positive rates; tied scores make a slope, not a step."""
    from torchmetrics.functional.classification import binary_roc

    false, true, _ = binary_roc(*_tensors(score, positive))
    return np.asarray(np.interp(_GRID, false.double().numpy(), true.double().numpy()))


def precision_recall(score: Floats, positive: NDArray[np.bool_]) -> Floats:
    """Precision at the first threshold that reaches each recall of the grid; at recall 0 that of the first positive."""
    from torchmetrics.functional.classification import binary_precision_recall_curve

    found = binary_precision_recall_curve(*_tensors(score, positive))
    precision, recall = (curve.double().numpy()[-2::-1] for curve in found[:2])  # from the highest threshold
    reached = np.searchsorted(recall, np.maximum(_GRID, recall[recall > 0][0]) - 1e-6, side="left")  # single precision
    return np.asarray(precision[np.minimum(reached, len(recall) - 1)])


def _tensors(score: Floats, positive: NDArray[np.bool_]) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.from_numpy(score), torch.from_numpy(positive.astype(np.int64))


def draw_reliability(rows: Runs, stem: Path, *, cohort: str, mark: str = "") -> list[Path]:
    """Accuracy of the predicted class by its confidence, test slides of all seeds together; bars say how many slides that is."""
    figure, axes = panels(len(rows))
    for place, (axis, (row, runs)) in enumerate(zip(axes, rows.items(), strict=True)):
        table = pd.concat([_predictions(run) for run in runs], ignore_index=True)
        probability = table[[name for name in table if str(name).startswith("prob_")]].to_numpy(np.float64)
        confidence, right = probability.max(1), (table["predicted"] == table["label"]).to_numpy(bool)
        number = np.minimum((confidence * _BINS).astype(int), _BINS - 1)
        kept = [b for b in range(_BINS) if (number == b).sum() >= _ENOUGH]
        axis.plot([0, 1], [0, 1], color="#888888", linewidth=0.8, linestyle=":")
        means = [(confidence[number == b].mean(), right[number == b].mean()) for b in kept]
        axis.plot(*zip(*means, strict=True) if means else ([], []), marker="o", color=COLOURS[place % len(COLOURS)])
        shares = np.bincount(number, minlength=_BINS) / len(number)
        axis.bar((np.arange(_BINS) + 0.5) / _BINS, shares, 0.09, color="#DDDDDD")
        tidy(axis, x="confidence", y="accuracy (bars: share of slides)", title=arm_title(row))
        axis.set(xlim=(0, 1), ylim=(0, 1.02))
    title = f"{short(cohort)}: reliability on test slides (bins of at least {_ENOUGH})"
    figure.suptitle(title, x=0.01, ha="left", fontsize=11)
    return save(figure, stem, mark)
