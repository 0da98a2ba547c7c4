"""Several labels an image or slide, each present or not.

Shapes: B bags, K labels.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np
import torch
from scipy.special import expit
from torch import Tensor
from torch.nn import functional as F

from gated_srp.errors import UserError
from gated_srp.tasks import scores
from gated_srp.tasks.task import Columns, Metrics, as_numpy, full_precision, mean_by_case

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True)
class Multilabel:
    """Binary cross entropy over ``labels``; macro mAP selects.

    Columns: one of 0 and 1 for each label (truth, under its own name), ``prob_<label>``.
    """

    labels: tuple[str, ...]

    select: ClassVar[str] = "macro_map"
    calibrates: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not self.labels or len(set(self.labels)) < len(self.labels):
            raise UserError(f"classes: {list(self.labels)}; expected at least one label, each with its own name.")

    @property
    def num_outputs(self) -> int:
        """One output a label."""
        return len(self.labels)

    @property
    def truth(self) -> tuple[str, ...]:
        """The labels' own columns."""
        return self.labels

    def encode(self, table: pd.DataFrame) -> Tensor:
        """(B, K) of 0 and 1."""
        target = table[list(self.labels)].to_numpy(np.float32)
        if not np.isin(target, (0, 1)).all():
            row, column = np.argwhere(~np.isin(target, (0, 1)))[0]
            raise UserError(f"label {self.labels[column]!r}, row {row + 1}: {target[row, column]}; expected 0 or 1.")
        return torch.from_numpy(target)

    def answers(self, table: pd.DataFrame) -> Columns:
        """Each label's column of 0 and 1."""
        return dict(zip(self.labels, self.encode(table).numpy().astype(np.int64).T, strict=True))

    def loss(self, logits: Tensor, target: Tensor) -> Tensor:
        """Mean over bags and labels of the binary cross entropy with logits."""
        logits = full_precision(logits)
        return F.binary_cross_entropy_with_logits(logits, target.reshape(logits.shape).to(logits))

    def predict(self, logits: Tensor) -> Columns:
        """Sigmoid, in double precision: then a probability above 0.5 is a logit above 0, however small."""
        probability = expit(as_numpy(logits))  # (B, K)
        return dict(zip(self._probabilities, probability.T, strict=True))

    def by_case(self, slides: pd.DataFrame) -> pd.DataFrame:
        """Mean of the slides' probabilities."""
        return mean_by_case(slides, self.truth, self._probabilities)

    def metrics(self, predictions: pd.DataFrame) -> Metrics:
        """F1 (macro over all labels, an absent one counts 0) and accuracy at logit 0.

        mAP averages the labels that have a positive, AUC those that have both; undefined when there are none.
        """
        truth = self.encode(predictions).numpy() > 0  # (B, K)
        probability = predictions[self._probabilities].to_numpy(np.float64)
        if not len(truth):
            return dict.fromkeys(("macro_map", "macro_f1", "accuracy", "macro_auc"), float("nan"))
        positive = probability > 0.5
        hits = (positive & truth).sum(0)
        f1 = 2.0 * hits / np.maximum(positive.sum(0) + truth.sum(0), 1)
        pairs = list(zip(probability.T, truth.T, strict=True))
        return {
            "macro_map": _mean_of_defined([scores.average_precision(p, t) for p, t in pairs]),
            "macro_f1": float(f1.mean()),
            "accuracy": float((positive == truth).mean()),
            "macro_auc": _mean_of_defined([scores.roc_auc(p, t) for p, t in pairs]),
        }

    @property
    def _probabilities(self) -> list[str]:
        return [f"prob_{name}" for name in self.labels]


def _mean_of_defined(values: list[float]) -> float:
    defined = [value for value in values if not np.isnan(value)]
    return float(np.mean(defined)) if defined else float("nan")
