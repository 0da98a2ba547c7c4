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
    from torchmetrics.functional.classification import binary_auroc

    return float(binary_auroc(torch.from_numpy(score), torch.from_numpy(positive.astype(np.int64))))


def average_precision(score: Floats, positive: Bools) -> float:
    """Area under the precision-recall steps; undefined without a positive."""
    if not positive.any():
        return float("nan")
    import torch
    from torchmetrics.functional.classification import binary_average_precision

    return float(binary_average_precision(torch.from_numpy(score), torch.from_numpy(positive.astype(np.int64))))


def calibration_error(probability: Floats, target: NDArray[np.int64], bins: int = 15) -> float:
    """Expected calibration error of (B, C) probabilities.

    |confidence - accuracy| in equal bins of confidence, weighted by their size.
    """
    if not len(target):
        return float("nan")
    import torch
    from torchmetrics.functional.classification import multiclass_calibration_error

    error = multiclass_calibration_error(
        torch.from_numpy(probability), torch.from_numpy(target), num_classes=probability.shape[1], n_bins=bins
    )
    return float(error)


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
