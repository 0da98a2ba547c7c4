"""Scores of probabilities, the temperature that calibrates them, and survival metrics. Undefined is not a number, never a warning.

Scores are torchmetrics' and torchsurv's to the last bit; importing these takes longer than a small training.
Shapes: B bags, C classes, N cases, T times.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from gated_srp.errors import counted

if TYPE_CHECKING:
    import pandas as pd
    from torch import Tensor

    from gated_srp.tasks.task import Task

# Beyond these a "temperature" says that the validation set is too small or too easy to fit one.
COLDEST, HOTTEST = 0.05, 20.0
# Validation slides below which no temperature is fitted: of 50 it is known to about a third, of 10 not within a factor of five.
FEWEST = 50
_ROWS = 1024  # pairs are counted in blocks of rows: memory stays small for any number of cases

Floats = NDArray[np.floating]
Bools = NDArray[np.bool_]


def full_precision(logits: Tensor) -> Tensor:
    """Half precision to single; double stays. Losses are never computed in less."""
    import torch

    return logits.to(torch.promote_types(logits.dtype, torch.float32))


def as_numpy(logits: Tensor) -> NDArray[np.float64]:
    """Logits for prediction columns, in double precision.

    What follows is computed by numpy and scipy, since torch's sigmoid rounds equal inputs differently in a vector's
    tail: slides with equal logits must have equal, that is tied, predictions.
    """
    return np.asarray(logits.detach().cpu().double())


def roc_auc(score: Floats, positive: Bools) -> float:
    """Area under the ROC curve, ties counted half; undefined without both a positive and a negative.

    >>> roc_auc(np.array([0.1, 0.4, 0.4, 0.8]), np.array([False, False, True, True]))
    0.875
    """
    if positive.all() or not positive.any():
        return math.nan
    import torch

    hits, misses = (torch.nn.functional.pad(count, (1, 0)) for count in _counts(score, positive))
    return float(torch.trapezoid(hits / hits[-1], misses / misses[-1]))


def average_precision(score: Floats, positive: Bools) -> float:
    """Area under the precision-recall steps; undefined without a positive."""
    if not positive.any():
        return math.nan
    import torch

    hits, misses = _counts(score, positive)
    precision, recall = (hits / (hits + misses)).flip(0), (hits / hits[-1]).flip(0)
    recall = torch.nn.functional.pad(recall, (0, 1))
    return float(-torch.sum((recall[1:] - recall[:-1]) * precision))


def _counts(score: Floats, positive: Bools) -> tuple[Tensor, Tensor]:
    """Positives and negatives at or above each distinct score, from the highest."""
    import torch

    order = torch.argsort(torch.from_numpy(score), descending=True)
    ordered, target = torch.from_numpy(score)[order], torch.from_numpy(positive.astype(np.int64))[order]
    last = torch.nn.functional.pad(torch.where(ordered[1:] - ordered[:-1])[0], (0, 1), value=len(target) - 1)
    hits = torch.cumsum(target, 0)[last]
    return hits, 1 + last - hits


def calibration_error(probability: Floats, target: NDArray[np.int64], bins: int = 15) -> float:
    """Expected calibration error of (B, C) probabilities: |confidence - accuracy| in equal bins of confidence, weighted by their size."""
    if not len(target):
        return math.nan
    import torch

    highest, predicted = torch.from_numpy(probability).max(1)
    confidence, right = highest.float(), predicted.eq(torch.from_numpy(target)).float()  # (B,)
    place = torch.bucketize(confidence, torch.linspace(0, 1, bins + 1), right=True) - 1
    count, confident, accurate = (
        torch.zeros(bins + 1).scatter_add_(0, place, values) for values in (torch.ones_like(right), confidence, right)
    )
    gap = torch.abs(torch.nan_to_num(accurate / count) - torch.nan_to_num(confident / count))
    return float(torch.sum(gap * (count / count.sum())))


def quadratic_kappa(confusion: Floats) -> float:
    """Cohen's kappa with quadratic weights; undefined when all targets are one class (it could only be 0).

    >>> quadratic_kappa(np.array([[2.0, 0.0], [1.0, 1.0]]))
    0.5
    """
    if np.count_nonzero(confusion.sum(1)) < 2:
        return math.nan
    rank = np.arange(len(confusion))
    weight = (rank[:, None] - rank) ** 2
    expected = np.outer(confusion.sum(1), confusion.sum(0)) / confusion.sum()
    return 1.0 - float((weight * confusion).sum() / (weight * expected).sum())


def calibration(probability: Floats, target: NDArray[np.int64]) -> dict[str, float]:
    """How far (B, C) probabilities can be believed: calibration error, and the Brier score summed over classes."""
    brier = float(((probability - np.eye(probability.shape[1])[target]) ** 2).sum(1).mean())
    return {"calibration_error": calibration_error(probability, target), "brier": brier}


def of_classes(probability: Floats, target: NDArray[np.int64]) -> dict[str, float]:
    """Of (B, C) probabilities and (B,) class numbers; see `Classification.metrics`."""
    count = probability.shape[1]
    confusion = np.zeros((count, count))  # rows: targets
    np.add.at(confusion, (target, probability.argmax(1)), 1)
    hits, support = np.diagonal(confusion), confusion.sum(1)
    present = support > 0
    aucs = [roc_auc(score, target == number) for number, score in enumerate(probability.T)]
    return {
        "macro_f1": float((2.0 * hits / np.maximum(confusion.sum(0) + support, 1)).mean()),
        "accuracy": float(np.trace(confusion) / len(target)),
        "balanced_accuracy": float((hits[present] / support[present]).mean()),
        "macro_auc": float(np.mean(aucs)),
        "quadratic_kappa": quadratic_kappa(confusion),
        **calibration(probability, target),
    }


def of_labels(probability: Floats, truth: Bools) -> dict[str, float]:
    """Of (B, C) probabilities and truths; see `Multilabel.metrics`."""
    positive = probability >= 0.5  # a label is predicted at logit >= 0, as in the release
    f1 = 2.0 * (positive & truth).sum(0) / np.maximum(positive.sum(0) + truth.sum(0), 1)

    def mean(score: Callable[[Floats, Bools], float]) -> float:
        values = [score(*pair) for pair in zip(probability.T, truth.T, strict=True)]
        defined = [value for value in values if not math.isnan(value)]
        return float(np.mean(defined)) if defined else math.nan

    whole = {"macro_f1": float(f1.mean()), "accuracy": float((positive == truth).mean())}
    return {"macro_map": mean(average_precision), **whole, "macro_auc": mean(roc_auc)}


def absent_remark(names: Sequence[str], kind: str) -> dict[str, str]:
    """Beside macro F1: what no row has (of a label: as a positive)."""
    if not names:
        return {}
    shown = ", ".join(names[:5]) + (", ..." if len(names) > 5 else "")
    some = (
        f"{kind} {shown} is absent and counts"
        if len(names) == 1
        else f"{counted(len(names), kind)} ({shown}) are absent and count"
    )
    return {"macro_f1": f"{some} as 0"}


def fit_temperature(task: Task, logits: Tensor, target: Tensor) -> float:
    """One temperature for all logits (Guo et al., 2017): the T that minimises the task's loss of (B, K) logits / T; 1.0 where the data cannot say.

    They cannot when the task has no probabilities to calibrate, when there are fewer than `FEWEST` bags or only one kind
    of target, or when the loss has no minimum inside the bounds (all slides right: it only falls as T goes to 0).
    """
    import torch
    from scipy.optimize import minimize_scalar

    logits, target = logits.detach().cpu().double(), target.detach().cpu()
    kinds = np.unique(target.numpy(), axis=0)
    if not task.calibrates or len(logits) < FEWEST or len(kinds) < 2 or not torch.isfinite(logits).all():
        return 1.0

    def loss(log_temperature: float) -> float:
        return float(task.loss(logits / math.exp(log_temperature), target))

    low, high = math.log(COLDEST), math.log(HOTTEST)
    found = minimize_scalar(loss, bounds=(low, high), method="bounded", options={"xatol": 1e-6})
    inside = min(found.x - low, high - found.x) > 1e-3
    return math.exp(found.x) if inside and found.fun < loss(0.0) else 1.0


# Survival ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class FollowUp:
    """Observed times of cases and whether each ended with the event."""

    time: Floats
    event: Bools

    @classmethod
    def of(cls, time: object, event: object) -> FollowUp:
        """From anything that numpy reads."""
        return cls(np.asarray(time, dtype=np.float64), np.asarray(event).astype(bool))


def concordance_index(risk: Floats, cases: FollowUp, weight: Floats | None = None) -> float:
    """Share of pairs in which the case whose event came strictly first has the higher risk; a tied risk counts half.

    A pair is comparable when case i had the event and t_i < t_j. With the squared inverse probability of censoring as
    the weight of i, this is Uno's C. Not a number without a comparable pair.

    >>> cases = FollowUp.of([1, 2, 3], [1, 0, 1])
    >>> concordance_index(np.array([0.5, 0.5, 0.1]), cases)
    0.75
    """
    weight = np.ones(len(risk)) if weight is None else weight
    agreed = total = 0.0
    first = np.flatnonzero(cases.event)
    for start in range(0, len(first), _ROWS):
        i = first[start : start + _ROWS]
        later = cases.time[i, None] < cases.time
        twice = 2 * np.sum(later & (risk[i, None] > risk), 1) + np.sum(later & (risk[i, None] == risk), 1)
        agreed += float(weight[i] @ twice) / 2
        total += float(weight[i] @ later.sum(1))
    return agreed / total if total > 0 else math.nan


def uno_concordance(risk: Floats, cases: FollowUp, training: FollowUp) -> float:
    """Uno's C: censoring estimated on the training cases; events that its follow-up does not reach weigh nothing."""
    weight = censoring_weight(cases.time, training)
    return math.nan if weight is None else concordance_index(risk, cases, weight**2)


def censoring_weight(time: Floats, training: FollowUp) -> Floats | None:
    """1 / P(not censored by t), by Kaplan-Meier on the training cases; 0 where that is 0; None without any event."""
    if not training.event.any():
        return None
    import torch

    times, place, total = _single(training.time).unique(return_inverse=True, return_counts=True)
    events = torch.bincount(place[torch.from_numpy(training.event)], minlength=len(times))
    at_risk = len(place) - (total.cumsum(0) - total) - events  # of censoring: events at a time come before it
    left = torch.cumprod(1.0 - torch.where(total > events, (total - events) / at_risk, 0.0), 0)
    at = torch.searchsorted(times, _single(time), side="right")
    known = torch.nn.functional.pad(left, (1, 0), value=1.0)[at]
    return np.asarray(torch.where(known > 0, 1.0 / known, 0.0).double())


def survival_at_times(survival: Floats, times: Floats, cases: FollowUp, training: FollowUp) -> dict[str, float]:
    """Integrated Brier score and mean cumulative/dynamic AUC of (N, T) predicted survival, corrected for censoring.

    Only times that have both an event up to them and a case after them count. The Brier score is integrated over these
    by trapezoids and divided by their span; the AUC, with 1 - survival as the marker, is their plain mean.
    """
    weight, at_times = censoring_weight(cases.time, training), censoring_weight(times, training)
    undefined = {"integrated_brier": math.nan, "time_auc": math.nan}
    if weight is None or at_times is None:
        return undefined
    before = (cases.event & (weight > 0))[:, None] & (cases.time[:, None] <= times)  # (N, T)
    known = before.any(0) & (cases.time[:, None] > times).any(0) & (at_times > 0)
    if not known.any():
        return undefined
    import torch

    estimate, points, time = torch.from_numpy(survival[:, known]), _single(times[known]), _single(cases.time)[:, None]
    ended, after = (time <= points) & torch.from_numpy(cases.event)[:, None], time > points  # (N, T)
    weights, later = torch.from_numpy(weight), torch.from_numpy(at_times[known])
    lost = estimate.square() * ended * weights[:, None] + (1.0 - estimate).square() * after * later
    brier = lost.mean(0)
    span = points[-1] - points[0]
    aucs = [_weighted_auc(1 - estimate[:, k], weights * ended[:, k], after[:, k]) for k in range(len(points))]
    return {
        "integrated_brier": float(torch.trapezoid(brier, points) / span if len(points) > 1 else brier[0]),
        "time_auc": float(torch.stack(aucs).mean()),
    }


def _weighted_auc(marker: Tensor, positive: Tensor, negative: Tensor) -> Tensor:
    """Area under the ROC curve with a weight per positive (0: none); ties counted half."""
    import torch

    order = torch.argsort(-marker)
    hits, misses = positive[order].cumsum(0), negative[order].cumsum(0)
    last = torch.nn.functional.pad(marker[order].diff().abs() > 1e-8, (0, 1), value=True)  # of those with one marker
    rates = ((count / count[-1])[last] for count in (hits, misses))
    return torch.trapezoid(*(torch.nn.functional.pad(rate, (1, 0)) for rate in rates)).float()


@dataclass(frozen=True, eq=False)
class RiskGroups:
    """Kaplan-Meier curves of the cases above and not above a risk, and the log-rank test between them."""

    curves: pd.DataFrame  # group (low | high), time, at_risk, events, survival, lower, upper
    statistic: float
    p_value: float


def risk_groups(risk: Floats, cases: FollowUp, threshold: float) -> RiskGroups:
    """Split at a threshold: the median risk of the TRAINING cases. No test where a group is empty or nobody had an event."""
    import pandas as pd
    from lifelines import KaplanMeierFitter
    from lifelines.statistics import logrank_test

    high = risk > threshold
    curves = [pd.DataFrame()]
    for name, chosen in (("low", ~high), ("high", high)):
        if chosen.any():
            fitted = KaplanMeierFitter().fit(cases.time[chosen], cases.event[chosen])
            table = fitted.event_table[["at_risk", "observed"]].rename(columns={"observed": "events"})
            table.insert(0, "group", name)
            table["survival"] = fitted.survival_function_.iloc[:, 0]
            table[["lower", "upper"]] = fitted.confidence_interval_.to_numpy()
            curves.append(table.rename_axis("time").reset_index())
    statistic = p_value = math.nan
    if high.any() and not high.all() and cases.event.any():
        test = logrank_test(cases.time[high], cases.time[~high], cases.event[high], cases.event[~high])
        statistic, p_value = float(test.test_statistic), float(test.p_value)
    return RiskGroups(pd.concat(curves[1:] or curves, ignore_index=True), statistic, p_value)


def curve_at(times: Floats, edges: Floats, curve: Floats) -> Floats:
    """Survival (B, times) from survival at a model's own edges (B, edges): the hazard is constant from edge to edge, and goes on.

    >>> curve_at(np.array([1.0, 4.0]), np.array([2.0]), np.array([[0.25]])).tolist()
    [[0.5, 0.0625]]
    """
    place = np.concatenate([[0.0], edges])
    log = np.log(np.concatenate([np.ones((len(curve), 1)), curve], 1))  # (B, 1 + edges)
    right = np.clip(np.searchsorted(place, times), 1, len(edges))
    share = (times - place[right - 1]) / (place[right] - place[right - 1])
    return np.asarray(np.exp(log[:, right - 1] + share * (log[:, right] - log[:, right - 1])))


def _single(values: Floats) -> Tensor:
    import torch

    # As torchsurv compares times: rounding every time alike keeps equal times equal.
    return torch.from_numpy(values.astype(np.float32))


def without_deviations(names: Sequence[str], truth: Iterable[str]) -> list[str]:
    """Classes that columns of probabilities name, without ``X_std`` beside ``X``: the deviation between members of an ensemble.

    >>> without_deviations(["a", "b", "a_std", "b_std"], ["a", "b"]), without_deviations(["a", "a_std"], ["a", "a_std"])
    (['a', 'b'], ['a', 'a_std'])
    """
    known = {*truth}
    return [name for name in names if name in known or name.removesuffix("_std") not in {*names} - {name}]
