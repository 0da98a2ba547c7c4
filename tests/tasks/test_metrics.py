"""The scores are those of torchmetrics, bit for bit, without its import."""

import math

import numpy as np
import pytest
import torch
from scipy.special import softmax
from torchmetrics.functional.classification import (
    binary_auroc,
    binary_average_precision,
    multiclass_calibration_error,
)

from gated_srp.tasks import Classification
from gated_srp.tasks import metrics as scores


def draws(seed: int, kinds: int) -> tuple[np.ndarray, np.ndarray]:
    """Scores with ties (few kinds of them) and targets of both kinds."""
    rng = np.random.default_rng(seed)
    score, positive = rng.integers(0, kinds, 40) / kinds, rng.random(40) < 0.4
    positive[:2] = True, False
    return score, positive


@pytest.mark.parametrize("kinds", [1, 3, 10**6])
@pytest.mark.parametrize("seed", range(20))
def test_areas_under_curves_are_those_of_torchmetrics(seed, kinds):
    score, positive = draws(seed, kinds)
    given = torch.from_numpy(score), torch.from_numpy(positive.astype(np.int64))
    assert scores.roc_auc(score, positive) == float(binary_auroc(*given))
    assert scores.average_precision(score, positive) == float(binary_average_precision(*given))


@pytest.mark.parametrize("sharpness", [0.1, 1.0, 50.0])
@pytest.mark.parametrize("seed", range(10))
def test_the_calibration_error_is_that_of_torchmetrics(seed, sharpness):
    rng = np.random.default_rng(seed)
    probability, target = softmax(sharpness * rng.normal(size=(30, 3)), axis=1), rng.integers(0, 3, 30)
    given = torch.from_numpy(probability), torch.from_numpy(target)
    expected = float(multiclass_calibration_error(*given, num_classes=3, n_bins=15))
    assert scores.calibration_error(probability, target) == expected


def test_probabilities_are_those_of_scipy():
    logits = torch.randn(20, 3, generator=torch.Generator().manual_seed(0)) * 30
    found = Classification(("a", "b", "c")).predict(logits)
    expected = softmax(logits.double().numpy(), axis=1)
    np.testing.assert_array_equal(np.stack([found[f"prob_{name}"] for name in "abc"], 1), expected)


def test_what_is_undefined_is_not_a_number():
    score, one = np.array([0.2, 0.8]), np.array([True, True])
    assert math.isnan(scores.roc_auc(score, one)) and math.isnan(scores.average_precision(score, ~one))
    assert math.isnan(scores.calibration_error(np.zeros((0, 2)), np.zeros(0, np.int64)))
