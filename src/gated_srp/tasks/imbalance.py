"""Rare classes: a loss that weighs them more, and epochs that draw them more often. Both are off unless ``train`` asks for them.

Shapes: B bags, C classes or labels.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from gated_srp.errors import UserError
from gated_srp.tasks.classes import Classification, Multilabel
from gated_srp.tasks.metrics import full_precision
from gated_srp.tasks.task import Task

if TYPE_CHECKING:
    import pandas as pd
    from torch import Tensor

BALANCED = "balanced"


@dataclass(frozen=True)
class WeightedClasses(Classification):
    """Classification that trains on cross entropy times the weight of the true class; everything else is as without weights."""

    weights: tuple[float, ...] = ()

    def card(self) -> dict[str, Any]:
        return super().card() | {"class_weights": dict(zip(self.classes, self.weights, strict=True))}

    def training_loss(self, logits: Tensor, target: Tensor) -> Tensor:
        """Mean over bags of w_y times the cross entropy. torch divides by the sum of the weights instead, which of one bag is no weight."""
        from torch.nn import functional as F

        logits, target = full_precision(logits).reshape(-1, self.num_outputs), target.reshape(-1)
        losses = F.cross_entropy(logits, target, reduction="none")  # (B,)
        return (losses * logits.new_tensor(self.weights)[target]).mean()


@dataclass(frozen=True)
class WeightedLabels(Multilabel):
    """Several labels, of which the positives of each count with its weight in the training loss."""

    weights: tuple[float, ...] = ()

    def card(self) -> dict[str, Any]:
        return super().card() | {"class_weights": dict(zip(self.classes, self.weights, strict=True))}

    def training_loss(self, logits: Tensor, target: Tensor) -> Tensor:
        """Mean over bags and labels of -(w t log p + (1 - t) log(1 - p))."""
        from torch.nn import functional as F

        logits = full_precision(logits)
        target, weights = target.reshape(logits.shape).to(logits), logits.new_tensor(self.weights)
        return F.binary_cross_entropy_with_logits(logits, target, pos_weight=weights)


def weighted(task: Task, training: pd.DataFrame, asked: str | Mapping[str, float]) -> Task:
    """The task with weights of its classes: as asked, 1 for classes that are not named, or ``balanced`` by the training rows.

    Balanced, a class c of n_c among n training bags has n / (C n_c), so that all classes weigh alike and the mean weight of a bag
    is 1; a label has negatives / positives.
    """
    if not isinstance(task, Classification | Multilabel):
        raise UserError(f"{task.name} has no classes", where="train.class_weights", cure="Leave it out.")
    names = task.classes
    if isinstance(asked, str):
        weights = _balanced(task, training, names)
    else:
        for name in asked:
            if name not in names:
                near = [f"Did you mean {one!r}?" for one in get_close_matches(name, names, 1)]
                cure = " ".join([*near, f"Classes: {', '.join(names)}."])
                raise UserError(f"{name!r} is no class", where="train.class_weights", cure=cure)
        weights = tuple(float(asked.get(name, 1.0)) for name in names)
    if isinstance(task, Classification):
        return WeightedClasses(names, task.select, weights)
    return WeightedLabels(names, weights)


def _balanced(task: Task, training: pd.DataFrame, names: tuple[str, ...]) -> tuple[float, ...]:
    counts = np.array(list(type(task).tally(training, names)["classes"].values()), dtype=np.float64)  # (C,)
    if not counts.all():
        absent = ", ".join(name for name, count in zip(names, counts, strict=True) if not count)
        cure = "Give weights by class instead, or another split."
        raise UserError(f"balanced, but no training slide is of {absent}", where="train.class_weights", cure=cure)
    of_labels = isinstance(task, Multilabel)
    if of_labels and (counts == len(training)).any():
        always = names[int(np.argmax(counts == len(training)))]
        cure = "Give weights by label instead, or another split."
        raise UserError(f"balanced, but every training slide has {always}", where="train.class_weights", cure=cure)
    found = (len(training) - counts) / counts if of_labels else len(training) / (len(names) * counts)
    return tuple(float(weight) for weight in found)


def sampling_weights(task: Task, training: pd.DataFrame) -> NDArray[np.float64]:
    """How likely each training row is drawn, (B,): all classes that are there equally often, and the rows of one class alike."""
    if not isinstance(task, Classification):
        why = "a slide may have several labels" if isinstance(task, Multilabel) else f"{task.name} has no classes"
        cure = "Leave it out; train.class_weights weighs labels." if isinstance(task, Multilabel) else "Leave it out."
        raise UserError(f"balanced, but {why}", where="train.sampling", cure=cure)
    labels = task.encode(training).numpy()
    counts = np.bincount(labels, minlength=task.num_outputs)
    return np.asarray(1 / (np.count_nonzero(counts) * counts[labels]), dtype=np.float64)
