"""One class a slide.

Shapes: B bags, C classes.
"""

from __future__ import annotations

from dataclasses import dataclass
from difflib import get_close_matches
from typing import TYPE_CHECKING, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.special import softmax
from torch import Tensor
from torch.nn import functional as F

from gated_srp.errors import UserError
from gated_srp.tasks import scores
from gated_srp.tasks.task import Columns, Metrics, as_numpy, full_precision, mean_by_case

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True)
class Classification:
    """Unweighted cross entropy over ``classes``; macro F1 selects unless another metric is named (PANDA: the kappa).

    Columns: ``label`` (truth, a class name), ``predicted`` (a class name), ``prob_<class>``.
    """

    classes: tuple[str, ...]
    select: str = "macro_f1"

    NAMES: ClassVar[tuple[str, ...]] = (
        "macro_f1",
        "accuracy",
        "balanced_accuracy",
        "macro_auc",
        "quadratic_kappa",
    )
    truth: ClassVar[tuple[str, ...]] = ("label",)
    calibrates: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if len(self.classes) < 2 or len(set(self.classes)) < len(self.classes):
            raise UserError(f"classes: {list(self.classes)}; expected at least two different names.")
        if self.select not in self.NAMES:
            near = get_close_matches(self.select, self.NAMES, 1)
            hint = f" Did you mean {near[0]!r}?" if near else ""
            raise UserError(f"metric: {self.select!r} cannot select; expected one of {', '.join(self.NAMES)}.{hint}")

    @property
    def num_outputs(self) -> int:
        """One output a class."""
        return len(self.classes)

    def encode(self, table: pd.DataFrame) -> Tensor:
        """Class numbers, (B,), of the column ``label``: whole numbers are class numbers, text is class names."""
        return torch.from_numpy(self._index(table["label"]))

    def answers(self, table: pd.DataFrame) -> Columns:
        """``label`` as class names."""
        return {"label": self._name(self._index(table["label"]))}

    def loss(self, logits: Tensor, target: Tensor) -> Tensor:
        """Mean cross entropy of (B, C) logits and (B,) class numbers."""
        return F.cross_entropy(full_precision(logits).reshape(-1, self.num_outputs), target.reshape(-1))

    def predict(self, logits: Tensor) -> Columns:
        """Softmax in double precision, and the name of the likeliest class."""
        probability = softmax(as_numpy(logits), axis=1)  # (B, C)
        return {
            "predicted": self._name(probability.argmax(1)),
            **dict(zip(self._probabilities, probability.T, strict=True)),
        }

    def by_case(self, slides: pd.DataFrame) -> pd.DataFrame:
        """Mean of the slides' probabilities."""
        cases = mean_by_case(slides, self.truth, self._probabilities)
        cases["predicted"] = self._name(cases[self._probabilities].to_numpy().argmax(1))
        return cases

    def metrics(self, predictions: pd.DataFrame) -> Metrics:
        """Macro F1 counts an absent class as 0; macro AUC is one-vs-rest and undefined when a class is absent.

        Balanced accuracy is the mean recall of the classes present. Brier sums over classes (0 best, 2 worst).
        """
        target = self._index(predictions["label"])
        probability = predictions[self._probabilities].to_numpy(np.float64)  # (B, C)
        if not len(target):
            return dict.fromkeys((*self.NAMES, "calibration_error", "brier"), float("nan"))
        truth = np.eye(self.num_outputs)[target]  # (B, C)
        confusion = np.zeros((self.num_outputs, self.num_outputs))
        np.add.at(confusion, (target, probability.argmax(1)), 1)
        support = confusion.sum(1)
        present = support > 0
        return {
            "macro_f1": float(scores.f1_per_class(confusion).mean()),
            "accuracy": float(np.trace(confusion) / len(target)),
            "balanced_accuracy": float((np.diagonal(confusion)[present] / support[present]).mean()),
            "macro_auc": float(
                np.mean([scores.roc_auc(p, t > 0) for p, t in zip(probability.T, truth.T, strict=True)])
            ),
            "quadratic_kappa": quadratic_kappa(confusion),
            "calibration_error": scores.calibration_error(probability, target),
            "brier": float(((probability - truth) ** 2).sum(1).mean()),
        }

    @property
    def _probabilities(self) -> list[str]:
        return [f"prob_{name}" for name in self.classes]

    def _name(self, numbers: NDArray[np.int64]) -> NDArray[np.object_]:
        return np.array([self.classes[i] for i in numbers], dtype=object)

    def _index(self, labels: pd.Series) -> NDArray[np.int64]:
        number: dict[object, int] = {name: i for i, name in enumerate(self.classes)}
        if labels.dtype.kind in "iu":
            number = dict(enumerate(range(self.num_outputs)))
        strange = [label for label in labels if label not in number]
        if strange:
            raise UserError(
                f"label {strange[0]!r} is none of the classes {list(self.classes)}. "
                "Add it to `classes`, or correct the table."
            )
        return np.array([number[label] for label in labels], dtype=np.int64)


def quadratic_kappa(confusion: NDArray[np.floating]) -> float:
    """Cohen's kappa with quadratic weights; undefined when all targets are one class (it could only be 0).

    >>> quadratic_kappa(np.array([[2.0, 0.0], [1.0, 1.0]]))
    0.5
    """
    rank = np.arange(len(confusion))
    weight = (rank[:, None] - rank) ** 2
    expected = np.outer(confusion.sum(1), confusion.sum(0)) / confusion.sum()
    if np.count_nonzero(confusion.sum(1)) < 2:
        return float("nan")
    return 1.0 - float((weight * confusion).sum() / (weight * expected).sum())
