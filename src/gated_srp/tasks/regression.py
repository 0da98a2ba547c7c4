"""Regression: one number per slide, such as a gene's expression, a score or a fraction.

Shapes: B bags.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np

from gated_srp.errors import Note, UserError, counted
from gated_srp.tasks import metrics as scores
from gated_srp.tasks import task as base
from gated_srp.tasks.task import Cells, Columns, Labels, Matched, Metrics, Task

if TYPE_CHECKING:
    import pandas as pd
    from torch import Tensor

_FEW = 12  # different values that numbers have at least which are not classes
_MANY = 20  # from which on whole numbers are no classes either
_FAR = 5.0  # spreads of the training values, beyond which another cohort's unit is doubted


@dataclass(frozen=True)
class Regression(Task):
    """Mean squared error of values standardised by ``mean`` and ``std`` of the training slides; Pearson's correlation selects.

    ``objective``: ``squared``, or ``huber``, which grows linearly beyond one ``std`` so that outliers pull less.
    Columns: ``value`` (truth), ``predicted_value``, both in the unit of the table.
    """

    mean: float = 0.0
    std: float = 1.0
    objective: str = "squared"
    select: str = "pearson"

    name: ClassVar[str] = "regression"
    subject: ClassVar[str] = "a number"
    selects: ClassVar[tuple[str, ...]] = ("pearson", "r2")
    shown: ClassVar[tuple[str, ...]] = ("pearson", "r2", "mae")
    losses: ClassVar[tuple[str, ...]] = ("squared", "huber")
    figures: ClassVar[tuple[str, ...]] = ("scatter",)
    usual: ClassVar[Mapping[str, tuple[str, ...]]] = {"target": ("label", "target")}
    real: ClassVar[tuple[str, ...]] = ("value",)
    num_outputs: ClassVar[int] = 1
    truth: ClassVar[tuple[str, ...]] = ("value",)
    outputs: ClassVar[tuple[str, ...]] = ("one number",)

    @classmethod
    def suits(cls, cells: Cells) -> bool:
        """Numbers with fractions of which there are more than a few, or more whole numbers than classes ever are.

        >>> import pandas as pd
        >>> Regression.suits(pd.Series([f"{i}.5" for i in range(13)])), Regression.suits(pd.Series(["1", "2"] * 20))
        (True, False)
        """
        try:
            numbers = base.read_numbers(cells, Path()).dropna()
        except UserError:
            return False
        whole = bool((numbers % 1 == 0).all())
        return numbers.nunique() > (_MANY if whole else _FEW)

    @classmethod
    def read(cls, frame: pd.DataFrame, columns: Any, *, classes: Sequence[str] | None, where: Path) -> Labels:
        """``value``: a number, missing where the cell is empty."""
        import pandas as pd

        if not isinstance(columns.target, str):
            raise UserError("regression predicts one number", where=where, cure="Name one column as `target`.")
        if classes is not None:
            raise UserError("`classes` are set, but regression has none", where=where, cure="Leave them out.")
        return Labels(pd.DataFrame({"value": base.read_numbers(frame[columns.target], where)}))

    @classmethod
    def describe(cls, frame: pd.DataFrame, classes: tuple[str, ...], columns: Any) -> list[Note]:
        spread = cls.tally(frame, classes)["values"]
        said = "{different} different values from {min:.6g} to {max:.6g}, mean {mean:.4g}, std {std:.4g}".format(
            **spread
        )
        return [
            Note("note", "labels", f"{columns.target}: a number per slide, {said} ({counted(len(frame), 'slide')})")
        ]

    @classmethod
    def strata(cls, frame: pd.DataFrame, classes: tuple[str, ...]) -> dict[str, str]:
        """The quarter of a patient's mean; the half where that leaves fewer than five patients in a stratum."""
        means = frame.groupby("case")["value"].mean()
        for shares in ((0.25, 0.5, 0.75), (0.5,)):
            edges = np.unique(np.quantile(means, shares))
            place = np.searchsorted(edges, means.to_numpy(), side="right")
            if min(np.unique(place, return_counts=True)[1]) >= 5:
                break
        return {str(case): f"quantile{number}" for case, number in zip(means.index, place, strict=True)}

    @classmethod
    def tally(cls, frame: pd.DataFrame, classes: tuple[str, ...]) -> dict[str, Any]:
        values = frame["value"]
        spread = {name: float(getattr(values, name)()) for name in ("min", "mean", "median", "max")}
        return {"values": {**spread, "std": float(values.std(ddof=0)), "different": int(values.nunique())}}

    @classmethod
    def scarce(cls, frame: pd.DataFrame, classes: tuple[str, ...]) -> Iterator[Note]:
        different = frame["value"].nunique()
        if different < 2:
            what = f"all {len(frame)} slides that can be used have one value: there is nothing to learn"
            yield Note("error", "one_value", what, ("table",), "Correct `target`.")
        elif different <= base.SCARCE:
            said = f"only {different} different values in {counted(len(frame), 'slide')}"
            yield Note("warning", "few_values", said, ("table",), "If they are classes: `task: classification`.")

    @classmethod
    def lacks(cls, frame: pd.DataFrame, classes: tuple[str, ...], part: str) -> Iterator[Note]:
        if frame["value"].nunique() < 2:
            level: Literal["error", "warning"] = "error" if part == "train" else "warning"
            why = "there is nothing to learn" if part == "train" else "its correlation is not defined"
            yield Note(level, "split", f"fewer than two different values in {part}: {why}")

    @classmethod
    def fit(cls, training: pd.DataFrame, classes: tuple[str, ...] = (), metric: str | None = None) -> Regression:
        """Mean and standard deviation (n) of the TRAINING slides."""
        values = training["value"].to_numpy(np.float64)
        std = float(values.std()) if len(values) else 0.0
        if not std > 0 or np.ptp(values) == 0:  # rounding gives equal values a deviation
            cure = "Check the split and `target`."
            raise UserError("the training slides have one value only", where="regression", cure=cure)
        return cls(float(values.mean()), std, select=cls.checked_metric(metric))

    def with_loss(self, training: pd.DataFrame, *, loss: str | None = None, class_weights: Any = None) -> Task:
        super().with_loss(training, loss=loss, class_weights=class_weights)
        return replace(self, objective=loss or self.objective)

    def card(self) -> dict[str, Any]:
        return {"mean": self.mean, "std": self.std, "loss": self.objective}

    @classmethod
    def from_card(cls, card: Mapping[str, Any]) -> Regression:
        select = card.get("select", cls.selects[0])
        return cls(float(card["mean"]), float(card["std"]), card.get("loss", cls.losses[0]), select)

    def encode(self, table: pd.DataFrame) -> Tensor:
        """(B, 1): how many standard deviations of the training slides a value lies above their mean."""
        import torch

        return torch.from_numpy(((_values(table) - self.mean) / self.std).astype(np.float32))[:, None]

    def answers(self, table: pd.DataFrame) -> Columns:
        return {"value": _values(table)}

    def loss(self, logits: Tensor, target: Tensor) -> Tensor:
        """Mean over bags, in units of the training values' variance."""
        from torch.nn import functional as F

        logits = scores.full_precision(logits)
        measure = F.huber_loss if self.objective == "huber" else F.mse_loss
        return measure(logits, target.reshape(logits.shape).to(logits))

    def predict(self, logits: Tensor) -> Columns:
        return {"predicted_value": self.mean + self.std * scores.as_numpy(logits).reshape(-1)}

    def by_case(self, slides: pd.DataFrame) -> pd.DataFrame:
        """Mean of the slides' predictions."""
        return base.mean_by_case(slides, self.truth, ["predicted_value"])

    def metrics(self, predictions: pd.DataFrame) -> Metrics:
        """Pearson's correlation, R2 (1 - squared error over that of the scored slides' own mean) and the mean absolute error.

        The first two are not defined where all true values are one; the correlation neither where all predictions are.
        """
        truth, found = (predictions[name].to_numpy(np.float64) for name in ("value", "predicted_value"))
        if not len(truth):
            return dict.fromkeys(self.shown, math.nan)
        around, beside = truth - truth.mean(), found - found.mean()
        both = math.sqrt(float(around @ around) * float(beside @ beside))
        total, error = float(around @ around), truth - found
        varies, both_vary = (
            np.ptp(truth) > 0,
            np.ptp(truth) > 0 and np.ptp(found) > 0,
        )  # rounding gives equal values a deviation
        return {
            "pearson": float(around @ beside) / both if both > 0 and both_vary else math.nan,
            "r2": 1 - float(error @ error) / total if total > 0 and varies else math.nan,
            "mae": float(np.abs(error).mean()),
        }

    @classmethod
    def metrics_of(cls, predictions: pd.DataFrame) -> Metrics | None:
        return cls().metrics(predictions) if {"value", "predicted_value"} <= set(predictions) else None

    @classmethod
    def headline(cls, predictions: pd.DataFrame) -> tuple[str, list[float]]:
        return "Predicted value", predictions["predicted_value"].tolist()

    def summary(self, predictions: pd.DataFrame) -> list[str]:
        low, middle, high = predictions["predicted_value"].quantile([0, 0.5, 1])
        trained = f"in training {self.mean:.4g} on average, std {self.std:.4g}"
        return [f"predicted value: median {middle:.4g}, from {low:.4g} to {high:.4g} ({trained})"]

    def matched(self, frame: pd.DataFrame, classes: tuple[str, ...], *, where: str) -> Matched:
        """Another unit is told by the mean, in standard deviations of the training values."""
        here = float(frame["value"].mean())
        if abs(here - self.mean) <= _FAR * self.std:
            return frame, ()
        said = f"the mean value is {here:.4g} here and was {self.mean:.4g} (std {self.std:.4g}) in training. Are both in the same unit?"
        return frame, (Note("warning", "value_unit", said),)


def _values(table: pd.DataFrame) -> np.ndarray:
    values = table["value"].to_numpy(np.float64)
    if not np.isfinite(values).all():
        row = int(np.argmin(np.isfinite(values)))
        raise UserError(
            f"value {values[row]}; expected a number", where=f"regression, row {row + 1}", cure="Correct it."
        )
    return values
