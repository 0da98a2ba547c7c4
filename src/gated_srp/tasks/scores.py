"""Scores of probabilities that classification and multilabel share. Undefined is not a number, never a warning."""

import numpy as np
import torch
from numpy.typing import NDArray
from torchmetrics.functional.classification import (
    binary_auroc,
    binary_average_precision,
    multiclass_calibration_error,
)

Floats = NDArray[np.floating]
Bools = NDArray[np.bool_]


def roc_auc(score: Floats, positive: Bools) -> float:
    """Area under the ROC curve, ties counted half; undefined without both a positive and a negative.

    >>> roc_auc(np.array([0.1, 0.4, 0.4, 0.8]), np.array([False, False, True, True]))
    0.875
    """
    if positive.all() or not positive.any():
        return float("nan")
    return float(binary_auroc(torch.from_numpy(score), torch.from_numpy(positive.astype(np.int64))))


def average_precision(score: Floats, positive: Bools) -> float:
    """Area under the precision-recall steps; undefined without a positive."""
    if not positive.any():
        return float("nan")
    return float(binary_average_precision(torch.from_numpy(score), torch.from_numpy(positive.astype(np.int64))))


def calibration_error(probability: Floats, target: NDArray[np.int64], bins: int = 15) -> float:
    """Expected calibration error of (B, C) probabilities.

    |confidence - accuracy| in equal bins of confidence, weighted by their size.
    """
    if not len(target):
        return float("nan")
    error = multiclass_calibration_error(
        torch.from_numpy(probability), torch.from_numpy(target), num_classes=probability.shape[1], n_bins=bins
    )
    return float(error)


def f1_per_class(confusion: Floats) -> Floats:
    """F1 of each class from a (C, C) confusion, rows targets; a class that nobody has and nobody predicts scores 0."""
    hits: Floats = np.diagonal(confusion)
    involved = confusion.sum(0) + confusion.sum(1)
    return np.asarray(2.0 * hits / np.maximum(involved, 1))
