"""Several labels per slide or image, each present or not.

Shapes: B bags, K labels.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from gated_srp.errors import Note, UserError
from gated_srp.tasks import scores
from gated_srp.tasks.task import (
    Columns,
    Header,
    Labels,
    Metrics,
    Task,
    as_numpy,
    full_precision,
    mean_by_case,
    rare,
    read_flags,
)

if TYPE_CHECKING:
    import pandas as pd
    from torch import Tensor


@dataclass(frozen=True)
class Multilabel(Task):
    """Binary cross entropy over ``labels``; macro mAP selects.

    Columns: one of 0 and 1 for each label (truth, under its own name), ``prob_<label>``.
    """

    labels: tuple[str, ...]

    name: ClassVar[str] = "multilabel"
    subject: ClassVar[str] = "several labels"
    selects: ClassVar[tuple[str, ...]] = ("macro_map",)
    shown: ClassVar[tuple[str, ...]] = ("macro_map", "macro_f1", "accuracy", "macro_auc")
    figures: ClassVar[tuple[str, ...]] = ("roc",)
    usual: ClassVar[Mapping[str, tuple[str, ...]]] = {"target": ()}
    calibrates: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not self.labels or len(set(self.labels)) < len(self.labels):
            raise UserError(f"classes: {list(self.labels)}; expected at least one label, each with its own name.")

    @classmethod
    def named_by(cls, settings: Mapping[str, Any]) -> bool:
        """By a list of columns as ``target``."""
        listed = isinstance(settings.get("target"), list | tuple) and bool(settings["target"])
        return listed and not any(settings.get(key) for key in ("time", "event", "censorship"))

    @classmethod
    def find_columns(cls, named: Mapping[str, Any], header: Header) -> dict[str, Any]:
        """Label columns have no usual names."""
        if not isinstance(named.get("target"), tuple):
            raise header.error("a multilabel task needs its label columns: list them as `target`", "")
        return {"target": named["target"]}

    @classmethod
    def read(cls, frame: pd.DataFrame, columns: Any, *, classes: Sequence[str] | None, where: Path) -> Labels:
        """One column of 0 and 1 per label."""
        import pandas as pd

        names = tuple(columns.target or ())
        if clash := {"slide", "case", "site", "row"} & set(names):
            raise UserError(f"a label may not be called {clash.pop()!r}; rename the column.", where=where)
        return Labels(pd.DataFrame({name: read_flags(frame[name], where) for name in names}), names)

    @classmethod
    def describe(cls, frame: pd.DataFrame, classes: tuple[str, ...], columns: Any) -> list[Note]:
        return [Note("note", "labels", "labels: " + ", ".join(f"{name} {frame[name].sum()}" for name in classes))]

    @classmethod
    def strata(cls, frame: pd.DataFrame, classes: tuple[str, ...]) -> dict[str, str]:
        """A patient's rarest label, so that rare labels are spread first."""
        positives = frame.groupby("case")[list(classes)].max()
        rarest = sorted(classes, key=lambda name: (positives[name].sum(), name))
        return {str(case): next((name for name in rarest if row[name]), "none") for case, row in positives.iterrows()}

    @classmethod
    def tally(cls, frame: pd.DataFrame, classes: tuple[str, ...]) -> dict[str, Any]:
        """Positives by label."""
        return {"classes": {name: int(frame[name].sum()) for name in classes}}

    @classmethod
    def scarce(cls, frame: pd.DataFrame, classes: tuple[str, ...]) -> Iterator[Note]:
        yield from rare(cls.tally(frame, classes)["classes"])

    @classmethod
    def lacks(cls, frame: pd.DataFrame, classes: tuple[str, ...], part: str) -> Iterator[Note]:
        if absent := [name for name in classes if not frame[name].any()]:
            shown = ", ".join(absent[:5]) + (", ..." if len(absent) > 5 else "")
            yield Note("warning", "split", f"no positive of {len(absent)} labels in {part} ({shown})")

    @classmethod
    def fit(cls, training: pd.DataFrame, classes: tuple[str, ...] = (), metric: str | None = None) -> Multilabel:
        """Nothing is learnt from the rows."""
        cls.checked_metric(metric)
        return cls(classes)

    def card(self) -> dict[str, Any]:
        return {"classes": list(self.labels)}

    @classmethod
    def from_card(cls, card: Mapping[str, Any]) -> Multilabel:
        return cls(tuple(card["classes"]))

    @property
    def num_outputs(self) -> int:
        """One output per label."""
        return len(self.labels)

    @property
    def truth(self) -> tuple[str, ...]:
        """The labels' own columns."""
        return self.labels

    @property
    def outputs(self) -> tuple[str, ...]:
        return self.labels

    def encode(self, table: pd.DataFrame) -> Tensor:
        """(B, K) of 0 and 1."""
        import torch

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
        from torch.nn import functional as F

        logits = full_precision(logits)
        return F.binary_cross_entropy_with_logits(logits, target.reshape(logits.shape).to(logits))

    def predict(self, logits: Tensor) -> Columns:
        """Sigmoid, in double precision: then a probability of at least 0.5 is a logit of at least 0."""
        from scipy.special import expit

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
        positive = probability >= 0.5  # a label is predicted at logit >= 0, as in the release
        hits = (positive & truth).sum(0)
        f1 = 2.0 * hits / np.maximum(positive.sum(0) + truth.sum(0), 1)
        pairs = list(zip(probability.T, truth.T, strict=True))
        return {
            "macro_map": _mean_of_defined([scores.average_precision(p, t) for p, t in pairs]),
            "macro_f1": float(f1.mean()),
            "accuracy": float((positive == truth).mean()),
            "macro_auc": _mean_of_defined([scores.roc_auc(p, t) for p, t in pairs]),
        }

    @classmethod
    def metrics_of(cls, predictions: pd.DataFrame) -> Metrics | None:
        """Of a table with probabilities and the labels' own columns."""
        names = tuple(str(name).removeprefix("prob_") for name in predictions if str(name).startswith("prob_"))
        return cls(names).metrics(predictions) if names and set(names) <= set(predictions) else None

    @classmethod
    def headline(cls, predictions: pd.DataFrame) -> tuple[str, list[float]]:
        return "Mean probability of the labels", predictions.filter(regex="^prob_").mean(axis=1).tolist()

    def summary(self, predictions: pd.DataFrame) -> list[str]:
        """Slides per label that are more likely to have it than not."""
        counts = [f"{name} {(predictions[f'prob_{name}'] >= 0.5).sum()}" for name in self.labels]
        return [f"more likely than not: {', '.join(counts)}"]

    def matched(
        self, frame: pd.DataFrame, classes: tuple[str, ...], *, where: str
    ) -> tuple[pd.DataFrame, tuple[Note, ...]]:
        """Another table must have all labels that the model knows; further ones are left out."""
        if absent := [name for name in self.labels if name not in classes]:
            raise UserError(
                f"no label {', '.join(absent)} in `target`; the model knows {', '.join(self.labels)}",
                where=where,
                cure="Name them all.",
            )
        more = [name for name in classes if name not in self.labels]
        said = f"labels that the model does not know are left out: {', '.join(more)}"
        return frame, (Note("note", "unknown_label", said),) if more else ()

    @property
    def _probabilities(self) -> list[str]:
        return [f"prob_{name}" for name in self.labels]


def _mean_of_defined(values: list[float]) -> float:
    defined = [value for value in values if not np.isnan(value)]
    return float(np.mean(defined)) if defined else float("nan")
