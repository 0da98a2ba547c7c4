"""Scores of probabilities, and the temperature that calibrates them. Undefined is not a number, never a warning."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from torch import Tensor

    from gated_srp.tasks.task import Task

# Beyond these a "temperature" says that the validation set is too small or too easy to fit one.
COLDEST, HOTTEST = 0.05, 20.0

Floats = NDArray[np.floating]
Bools = NDArray[np.bool_]


def roc_auc(score: Floats, positive: Bools) -> float:
    """Area under the ROC curve, ties counted half; undefined without both a positive and a negative.

    >>> roc_auc(np.array([0.1, 0.4, 0.4, 0.8]), np.array([False, False, True, True]))
    0.875
    """
    if positive.all() or not positive.any():
        return float("nan")
    import torch

    hits, misses = (torch.nn.functional.pad(count, (1, 0)) for count in _counts(score, positive))
    return float(torch.trapezoid(hits / hits[-1], misses / misses[-1]))


def average_precision(score: Floats, positive: Bools) -> float:
    """Area under the precision-recall steps; undefined without a positive."""
    if not positive.any():
        return float("nan")
    import torch

    hits, misses = _counts(score, positive)
    precision, recall = (hits / (hits + misses)).flip(0), (hits / hits[-1]).flip(0)
    recall = torch.nn.functional.pad(recall, (0, 1))
    return float(-torch.sum((recall[1:] - recall[:-1]) * precision))


def _counts(score: Floats, positive: Bools) -> tuple[Tensor, Tensor]:
    """Positives and negatives at or above each distinct score, from the highest.

    These curves, and the errors below, are torchmetrics' to the last bit; its import alone takes longer than a small training.
    """
    import torch

    order = torch.argsort(torch.from_numpy(score), descending=True)
    ordered, target = torch.from_numpy(score)[order], torch.from_numpy(positive.astype(np.int64))[order]
    last = torch.nn.functional.pad(torch.where(ordered[1:] - ordered[:-1])[0], (0, 1), value=len(target) - 1)
    hits = torch.cumsum(target, 0)[last]
    return hits, 1 + last - hits


def calibration_error(probability: Floats, target: NDArray[np.int64], bins: int = 15) -> float:
    """Expected calibration error of (B, C) probabilities.

    |confidence - accuracy| in equal bins of confidence, weighted by their size.
    """
    if not len(target):
        return float("nan")
    import torch

    highest, predicted = torch.from_numpy(probability).max(1)
    confidence, right = highest.float(), predicted.eq(torch.from_numpy(target)).float()  # (B,)
    place = torch.bucketize(confidence, torch.linspace(0, 1, bins + 1), right=True) - 1
    count, confident, accurate = (
        torch.zeros(bins + 1).scatter_add_(0, place, values) for values in (torch.ones_like(right), confidence, right)
    )
    gap = torch.abs(torch.nan_to_num(accurate / count) - torch.nan_to_num(confident / count))
    return float(torch.sum(gap * (count / count.sum())))


def f1_per_class(confusion: Floats) -> Floats:
    """F1 of each class from a (C, C) confusion, rows targets; a class that nobody has and nobody predicts scores 0."""
    hits: Floats = np.diagonal(confusion)
    involved = confusion.sum(0) + confusion.sum(1)
    return np.asarray(2.0 * hits / np.maximum(involved, 1))


def fit_temperature(task: Task, logits: Tensor, target: Tensor) -> float:
    """One temperature for all logits (Guo et al., 2017): the T that minimises the task's loss of (B, K) logits / T; 1.0 where the data cannot say.

    They cannot when the task has no probabilities to calibrate, when there are fewer than two bags or only one kind
    of target, or when the loss has no minimum inside the bounds (all slides right: it only falls as T goes to 0).
    """
    import torch
    from scipy.optimize import minimize_scalar

    logits = logits.detach().cpu().double()
    target = target.detach().cpu()
    kinds = np.unique(target.numpy(), axis=0)
    if not task.calibrates or len(logits) < 2 or len(kinds) < 2 or not torch.isfinite(logits).all():
        return 1.0

    def loss(log_temperature: float) -> float:
        return float(task.loss(logits / math.exp(log_temperature), target))

    low, high = math.log(COLDEST), math.log(HOTTEST)
    found = minimize_scalar(loss, bounds=(low, high), method="bounded", options={"xatol": 1e-6})
    inside = min(found.x - low, high - found.x) > 1e-3
    return math.exp(found.x) if inside and found.fun < loss(0.0) else 1.0
