"""Figures of studies, drawn from run folders alone: what the gates did, how arms differ seed by seed, what was predicted.

Colours are Okabe and Ito's, which readers of every colour vision can tell apart; markers, line styles or words repeat them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
import torch
from numpy.typing import NDArray

from gated_srp.files import whole
from gated_srp.models import METHOD, arm_title, is_gated
from gated_srp.reports.tables import metric_name, short, tone_colour
from gated_srp.study.cells import Cell
from gated_srp.study.results import Comparison
from gated_srp.tasks import find_task
from gated_srp.tasks.metrics import FollowUp, risk_groups
from gated_srp.training.folder import RunFolder

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#D55E00", "#56B4E9", "#F0E442", "#000000")
STYLES = ("-", "--", "-.", ":")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
_GRID = np.linspace(0, 1, 101)
_BINS = 10
_ENOUGH = 5  # least slides in a bin of the reliability diagram
_GROUPS = {"high": (COLOURS[4], "--", "high predicted risk"), "low": (COLOURS[0], "-", "low predicted risk")}
Floats = NDArray[np.float64]
Runs = Mapping[str, Sequence[RunFolder]]  # by cohort, or by row of a table: one run per seed


def save(figure: Figure, stem: Path, *, title: str = "", mark: str = "", formulas: bool = False) -> list[Path]:
    """``stem``.svg and ``stem``.png, each written whole; the same numbers give the same file. ``mark`` is printed at the foot.

    Text between dollars is drawn as it is, since names of cohorts, classes and files may have some; ``formulas``: as TeX.
    """
    from matplotlib import rc_context
    from matplotlib.text import Text

    if title:
        figure.suptitle(title, x=0.01, ha="left", fontsize=11)
    if mark:
        figure.supxlabel(mark, fontsize=7, color="#B3261E", x=0.01, ha="left")
    for text in figure.findobj(Text):
        text.set_parse_math(formulas)
    paths = {ending: stem.with_name(f"{stem.name}.{ending}") for ending in ("svg", "png")}
    settings: dict[Any, Any] = {"svg.hashsalt": "gated-srp", "svg.fonttype": "none", "text.parse_math": formulas}
    for ending, path in paths.items():
        with whole(path) as draft, rc_context(settings):  # labels of ticks are made while it is drawn
            figure.savefig(draft, format=ending, dpi=150, metadata={"Date": None} if ending == "svg" else None)
    return list(paths.values())


def panels(count: int, *, width: float = 3.4, height: float = 3.0, most: int = 4) -> tuple[Figure, list[Axes]]:
    """A figure with ``count`` axes in rows of at most ``most``."""
    from matplotlib.figure import Figure

    columns = min(count, most)
    rows = math.ceil(count / columns)
    figure = Figure(figsize=(max(5.0, width * columns), height * rows + 0.4), layout="constrained")
    axes = list(figure.subplots(rows, columns, squeeze=False).flat)
    for spare in axes[count:]:
        spare.set_visible(False)
    return figure, axes[:count]


def tidy(axes: Axes, *, x: str, y: str, title: str = "", whole_numbers: bool = False) -> None:
    """Labels and a faint grid; no frame. ``whole_numbers``: those of x have no fractions."""
    axes.set(xlabel=x, ylabel=y)
    axes.set_title(title, fontsize=10)
    if whole_numbers:
        from matplotlib.ticker import MaxNLocator

        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25, linewidth=0.6)


# A whole comparison --------------------------------------------------------------------------------------------------


def draw_comparison(
    folder: Path, cells: Sequence[Cell], results: pd.DataFrame, comparison: Comparison, *, mark: str = ""
) -> list[Path]:
    """Every figure for which these runs have the files."""
    from gated_srp.reports.gates import draw_regimes, draw_trajectories

    done = [cell for cell in cells if cell.run.finished]
    written = draw_pairs(results, comparison, folder / "paired", mark=mark)
    by_row: dict[str, dict[str, list[RunFolder]]] = {}
    by_cohort: dict[str, dict[str, list[RunFolder]]] = {}
    for cell in done:
        by_row.setdefault(cell.row, {}).setdefault(cell.cohort, []).append(cell.run)
        by_cohort.setdefault(cell.cohort, {}).setdefault(cell.row, []).append(cell.run)
    for row, runs in by_row.items():
        suffix = "" if row == METHOD else "_" + re.sub(r"[^\w-]+", "_", row).strip("_")
        written += draw_trajectories(runs, folder / f"trajectories{suffix}", title=arm_title(row), mark=mark)
        written += draw_regimes(runs, folder / f"regimes{suffix}", title=arm_title(row), mark=mark)
    for cohort, runs in by_cohort.items():
        written += draw_curves(folder, cohort, runs, mark=mark)
    return written


# One run ------------------------------------------------------------------------------------------------------------


def draw_history(run: RunFolder, stem: Path, *, title: str) -> list[Path]:
    """Loss and every other metric of history.csv by epoch, one panel per metric; nothing where there is no history."""
    history = run.history
    metrics = list(dict.fromkeys(history["metric"]))[:8]
    if not metrics:
        return []
    figure, axes = panels(len(metrics), width=3.0, height=2.4)
    for axis, metric in zip(axes, metrics, strict=True):
        for place, (split, part) in enumerate(history[history["metric"] == metric].groupby("split", sort=False)):
            axis.plot(part["epoch"], part["value"], color=COLOURS[place], linestyle=STYLES[place], label=str(split))
        tidy(axis, x="epoch", y=str(metric), whole_numbers=True)
        axis.legend(frameon=False, fontsize=8)
    return save(figure, stem, title=title)


# Differences ---------------------------------------------------------------------------------------------------------


def draw_pairs(results: pd.DataFrame, comparison: Comparison, stem: Path, *, mark: str = "") -> list[Path]:
    """Per cohort and metric: each seed's value by arm, joined (left), and the differences with their intervals (right)."""
    keys = list(dict.fromkeys((str(cell.cohort), cell.metric) for cell in comparison.cohorts))
    if not keys:
        return []
    arms = [comparison.reference, *_gated_first(dict.fromkeys(cell.arm for cell in comparison.cohorts))]
    width, height = max(4.0, 0.2 * len(arms)), max(3.0, 1.0 + 0.2 * len(arms))  # room for each name
    figure, axes = panels(2 * len(keys), width=width, height=height, most=2)
    for place, (cohort, metric) in enumerate(keys):
        part = results[(results["cohort"] == cohort) & (results["metric"] == metric)]
        name = f"{short(cohort)}, {metric_name(metric)}"
        _draw_dots(axes[2 * place], part.pivot(index="seed", columns="arm", values="value").reindex(columns=arms), name)
        _draw_forest(axes[2 * place + 1], comparison, cohort, metric)
    return save(figure, stem, mark=mark)


def _gated_first(arms: Iterable[str]) -> list[str]:
    return sorted(arms, key=lambda arm: not is_gated(arm))


def _draw_dots(axis: Axes, wide: pd.DataFrame, name: str) -> None:
    positions = np.arange(wide.shape[1])
    for place, (seed, values) in enumerate(wide.iterrows()):
        axis.plot(positions, values, color="#AAAAAA", linewidth=0.8, zorder=1)
        marker, colour = MARKERS[place % len(MARKERS)], COLOURS[place % len(COLOURS)]
        axis.scatter(positions, values, marker=marker, color=colour, s=22, zorder=2, label=f"seed {seed}")
    axis.hlines(wide.mean(), positions - 0.25, positions + 0.25, color="#000000", linewidth=1.6, zorder=3)
    turned: dict[str, Any] = {"rotation": 20, "ha": "right"} if len(positions) <= 10 else {"rotation": 90}
    axis.set_xticks(positions, [arm_title(str(arm)) for arm in wide.columns], fontsize=8, **turned)
    axis.legend(frameon=False, fontsize=7, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    tidy(axis, x="", y=name.rpartition(", ")[2], title=f"{name}: every seed (bar: mean)")


def _draw_forest(axis: Axes, comparison: Comparison, cohort: str, metric: str) -> None:
    by_arm = {cell.arm: cell for cell in comparison.cohorts if (cell.cohort, cell.metric) == (cohort, metric)}
    cells = [by_arm[arm] for arm in _gated_first(by_arm)]
    axis.axvline(0, color="#000000", linewidth=0.8)
    for place, cell in enumerate(reversed(cells)):
        test, drawn = cell.test, cell.bootstrap
        colour = tone_colour(test.mean, metric) if cell.claimed else "#777777"  # as everywhere: after Holm
        if not math.isnan(test.low):
            axis.plot([test.low, test.high], [place, place], color=colour, linewidth=2)
        if drawn is not None and not math.isnan(drawn.low):
            axis.plot([drawn.low, drawn.high], [place - 0.22] * 2, color=COLOURS[1], linewidth=1.2, linestyle="--")
        # A filled marker repeats what the colour says.
        axis.plot(test.mean, place, marker="o", color=colour, markerfacecolor=colour if cell.claimed else "white")
    axis.set_yticks(range(len(cells)), [arm_title(cell.arm) for cell in reversed(cells)], fontsize=8)
    axis.set_ylim(-0.6, len(cells) - 0.4)
    title = f"difference to {arm_title(comparison.reference)}\n(95 % over seeds; dashed: over patients)"
    tidy(axis, x=f"difference in {metric_name(metric)}", y="", title=title)


# Predictions ---------------------------------------------------------------------------------------------------------


def draw_curves(folder: Path, cohort: str, rows: Runs, *, mark: str = "") -> list[Path]:
    """The figures that a cohort's task has: survival curves, ROC, precision-recall and reliability, or a scatter of values."""
    settings = next(iter(rows.values()))[0].settings
    draw = {
        "kaplan_meier": draw_kaplan_meier,
        "roc": draw_roc,
        "reliability": draw_reliability,
        "scatter": draw_scatter,
    }
    written: list[Path] = []
    for figure in find_task(settings["task"]).figures:
        written += draw[figure](rows, folder / f"{figure}_{cohort}", cohort=cohort, mark=mark)
    return written


def _predictions(run: RunFolder) -> pd.DataFrame:
    """Of the test set, at the level that scores."""
    return run.predictions("test", run.settings["score"])


def p_in_words(p: float) -> str:
    """
    >>> p_in_words(0.0304), p_in_words(3e-6)
    ('p 0.030', 'p < 0.001')
    """
    return f"p {p:.3f}" if p >= 0.001 else "p < 0.001"


def draw_kaplan_meier(rows: Runs, stem: Path, *, cohort: str, mark: str = "") -> list[Path]:
    """Test cases above and below the training cases' median risk; thin lines are seeds, p is the median of their log-rank tests."""
    figure, axes = panels(len(rows))
    for axis, (row, runs) in zip(axes, rows.items(), strict=True):
        p_values = [p for run in runs if not math.isnan(p := _draw_groups(axis, run))]
        test = f"log-rank {p_in_words(float(np.median(p_values)))}" if p_values else "one group only"
        test += f" (median of {len(p_values)} seeds)" if len(p_values) > 1 else ""
        tidy(axis, x="time", y="survival probability", title=f"{arm_title(row)}\n{test}")
        axis.set_ylim(0, 1.02)
    for colour, style, label in _GROUPS.values():
        axes[0].plot([], [], color=colour, linestyle=style, label=label)
    axes[0].legend(frameon=False, fontsize=8)
    title = f"{short(cohort)}: Kaplan-Meier of test cases by predicted risk, one thin line per seed"
    return save(figure, stem, title=title, mark=mark)


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


def draw_roc(rows: Runs, stem: Path, *, cohort: str, mark: str = "") -> list[Path]:
    """One-vs-rest curves, mean over classes and seeds, band of one standard deviation over seeds."""
    figure, (left, right) = panels(2, width=4.2, height=max(3.8, 0.6 + 0.18 * len(rows)))  # room for the legend
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
    return save(figure, stem, title=title, mark=mark)


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

    false, true, _ = binary_roc(torch.from_numpy(score), torch.from_numpy(positive).long())
    return np.asarray(np.interp(_GRID, false.double().numpy(), true.double().numpy()))


def precision_recall(score: Floats, positive: NDArray[np.bool_]) -> Floats:
    """Precision at the first threshold that reaches each recall of the grid; at recall 0 that of the first positive."""
    from torchmetrics.functional.classification import binary_precision_recall_curve

    found = binary_precision_recall_curve(torch.from_numpy(score), torch.from_numpy(positive).long())
    precision, recall = (curve.double().numpy()[-2::-1] for curve in found[:2])  # from the highest threshold
    reached = np.searchsorted(recall, np.maximum(_GRID, recall[recall > 0][0]) - 1e-6, side="left")  # single precision
    return np.asarray(precision[np.minimum(reached, len(recall) - 1)])


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
    return save(figure, stem, title=title, mark=mark)


def draw_scatter(rows: Runs, stem: Path, *, cohort: str, mark: str = "") -> list[Path]:
    """Predicted over true values, a marker per seed, on equal axes with the line on which both agree."""
    figure, axes = panels(len(rows), width=3.6, height=3.6)
    kind = find_task(next(iter(rows.values()))[0].settings["task"])
    tables = {row: [_predictions(run) for run in runs] for row, runs in rows.items()}
    values = np.concatenate(
        [table[["value", "predicted_value"]].to_numpy().ravel() for own in tables.values() for table in own]
    )
    margin = 0.05 * (float(np.ptp(values)) or 1.0)
    ends = (float(values.min()) - margin, float(values.max()) + margin)
    for axis, (row, own) in zip(axes, tables.items(), strict=True):
        for place, table in enumerate(own):
            look: dict[str, Any] = {"marker": MARKERS[place % len(MARKERS)], "color": COLOURS[place % len(COLOURS)]}
            axis.scatter(table["value"], table["predicted_value"], s=16, alpha=0.6, linewidths=0, **look)
        axis.plot(ends, ends, color="#888888", linewidth=0.8, linestyle=":")
        scores = pd.DataFrame([kind.metrics_of(table) for table in own]).mean()
        named = ", ".join(f"{metric_name(str(name))} {value:.3g}" for name, value in scores.items())
        tidy(axis, x="true value", y="predicted value", title=f"{arm_title(row)}\n{named}")
        axis.set(xlim=ends, ylim=ends, aspect="equal")
    count = len(next(iter(rows.values())))
    title = (
        f"{short(cohort)}: test part, {'a marker per seed, scores are means over them' if count > 1 else 'one seed'}"
    )
    return save(figure, stem, title=title, mark=mark)
