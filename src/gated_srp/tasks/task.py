"""What a task is. The training loop, prediction and evaluation know this interface and nothing else of a task.

Shapes: B bags, K outputs. A predictions table has one row a slide (or a case): ``slide``, ``case``, truth, predictions.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gated_srp.errors import UserError

if TYPE_CHECKING:
    import pandas as pd

Metrics = dict[str, float]
Columns = dict[str, NDArray[np.generic]]


class Task(Protocol):
    """Gives logits their meaning: loss, predictions, metrics, and which metric selects a checkpoint."""

    @property
    def num_outputs(self) -> int:
        """K, the width of the model's head."""

    @property
    def truth(self) -> tuple[str, ...]:
        """Columns of the label table, and of a predictions table of labelled slides, that hold the truth."""

    @property
    def select(self) -> str:
        """The metric that selects; higher is better. See `selection_score`."""

    @property
    def calibrates(self) -> bool:
        """Whether logits may be divided by a fitted temperature before `predict`."""

    def encode(self, table: pd.DataFrame) -> Tensor:
        """Targets of the table's rows, (B, ...); row b is the target of one bag."""

    def answers(self, table: pd.DataFrame) -> Columns:
        """The truth columns of the table's rows as a person reads them, for a predictions table."""

    def loss(self, logits: Tensor, target: Tensor) -> Tensor:
        """Mean loss of (B, K) logits and (B, ...) targets; one bag may come without its batch dimension."""

    def predict(self, logits: Tensor) -> Columns:
        """Prediction columns of (B, K) logits."""

    def by_case(self, slides: pd.DataFrame) -> pd.DataFrame:
        """One row a case from a predictions table with one row a slide."""

    def metrics(self, predictions: pd.DataFrame) -> Metrics:
        """Every metric of a labelled predictions table; not a number where it is not defined."""


def selection_score(task: Task, metrics: Mapping[str, float], loss: float) -> float:
    """What a better checkpoint exceeds strictly: the selecting metric, or minus the validation loss where undefined.

    Whether the metric is defined depends on the validation labels alone, so the two never mix within a run.
    """
    value = metrics[task.select]
    return -loss if math.isnan(value) else value


def mean_by_case(slides: pd.DataFrame, truth: Sequence[str], averaged: Sequence[str]) -> pd.DataFrame:
    """Mean over each case's slides, cases in order of appearance; the slides of a case must share the truth."""
    known = [name for name in truth if name in slides]
    groups = slides.groupby("case", sort=False)
    for name in known:
        mixed = groups[name].nunique(dropna=False)
        if (mixed > 1).any():
            raise UserError(
                f"case {mixed.idxmax()!r}: its slides differ in {name!r}, so a score per case has no single truth. "
                "Correct the table, or set `score: slide`."
            )
    means = groups[list(averaged)].mean()
    means.insert(0, "slides", groups.size())
    for name in reversed(known):
        means.insert(0, name, groups[name].first())
    return means.reset_index()


def full_precision(logits: Tensor) -> Tensor:
    """Half precision to single; double stays. Losses are never computed in less."""
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


def as_numpy(logits: Tensor) -> NDArray[np.float64]:
    """Logits for prediction columns, in double precision.

    What follows is computed by numpy and scipy, since torch's sigmoid rounds equal inputs differently in a vector's
    tail: slides with equal logits must have equal, that is tied, predictions.
    """
    return np.asarray(logits.detach().cpu().double())
