"""One class per slide.

Shapes: B bags, C classes.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from gated_srp.errors import Note, UserError
from gated_srp.tasks import scores
from gated_srp.tasks.task import Columns, Header, Labels, Metrics, Task, as_numpy, full_precision, mean_by_case, rare

if TYPE_CHECKING:
    import pandas as pd
    from torch import Tensor


@dataclass(frozen=True)
class Classification(Task):
    """Unweighted cross entropy over ``classes``; macro F1 selects unless another metric is named (PANDA: the kappa).

    Columns: ``label`` (truth, a class name), ``predicted`` (a class name), ``prob_<class>``.
    """

    classes: tuple[str, ...]
    select: str = "macro_f1"

    name: ClassVar[str] = "classification"
    subject: ClassVar[str] = "classes"
    selects: ClassVar[tuple[str, ...]] = (
        *("macro_f1", "accuracy", "balanced_accuracy"),
        *("macro_auc", "quadratic_kappa"),
    )
    shown: ClassVar[tuple[str, ...]] = ("macro_f1", "accuracy", "macro_auc")
    figures: ClassVar[tuple[str, ...]] = ("roc", "reliability")
    usual: ClassVar[Mapping[str, tuple[str, ...]]] = {"target": ("label", "target")}
    truth: ClassVar[tuple[str, ...]] = ("label",)
    calibrates: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if len(self.classes) < 2 or len(set(self.classes)) < len(self.classes):
            raise UserError(f"classes: {list(self.classes)}; expected at least two different names.")
        if self.select not in self.selects:
            near = get_close_matches(self.select, self.selects, 1)
            raise UserError(
                f"{self.select!r} cannot select; expected one of {', '.join(self.selects)}.",
                where="metric",
                cure=f"Did you mean {near[0]!r}?" if near else "",
            )

    @classmethod
    def named_by(cls, settings: Mapping[str, Any]) -> bool:
        """By one ``target`` alone."""
        return isinstance(settings.get("target"), str) and not any(
            settings.get(key) for key in ("time", "event", "censorship")
        )

    @classmethod
    def seen_in(cls, header: Header) -> bool:
        return bool(header.usual(cls.usual["target"]))

    @classmethod
    def class_names(cls, frame: pd.DataFrame, columns: Any, where: Path) -> tuple[str, ...]:
        return read_classes(frame[columns.target], None, where)[1]

    @classmethod
    def read(cls, frame: pd.DataFrame, columns: Any, *, classes: Sequence[str] | None, where: Path) -> Labels:
        """``label``: the number of the class."""
        import pandas as pd

        cells = frame[columns.target]
        codes, order = read_classes(cells, classes, where)
        return Labels(
            pd.DataFrame({"label": codes}), order, ((cells.notna() & codes.isna(), "its label is none of `classes`"),)
        )

    @classmethod
    def describe(cls, frame: pd.DataFrame, classes: tuple[str, ...], columns: Any) -> list[Note]:
        counts = cls.tally(frame, classes)["classes"]
        balance = ", ".join(f"{name} {count}" for name, count in counts.items())
        notes = [Note("note", "labels", f"{columns.target}: {balance} (slides by class)")]
        if sum(count > 0 for count in counts.values()) == 1:
            notes.append(Note("warning", "table", "only one class", cure="Nothing can be learnt from it."))
        return notes

    @classmethod
    def strata(cls, frame: pd.DataFrame, classes: tuple[str, ...]) -> dict[str, str]:
        """The class of most of a patient's slides, ties to the higher."""
        tally = frame.groupby(["case", "label"]).size().reset_index(name="n").sort_values(["case", "n", "label"])
        return {str(case): str(label) for case, label in tally.groupby("case")["label"].last().items()}

    @classmethod
    def tally(cls, frame: pd.DataFrame, classes: tuple[str, ...]) -> dict[str, Any]:
        """Slides by class."""
        counts = frame["label"].value_counts()
        return {"classes": {name: int(counts.get(i, 0)) for i, name in enumerate(classes)}}

    @classmethod
    def scarce(cls, frame: pd.DataFrame, classes: tuple[str, ...]) -> Iterator[Note]:
        yield from rare(cls.tally(frame, classes)["classes"])

    @classmethod
    def lacks(cls, frame: pd.DataFrame, classes: tuple[str, ...], part: str) -> Iterator[Note]:
        if absent := [name for i, name in enumerate(classes) if not (frame["label"] == i).any()]:
            yield Note("warning", "split", f"no usable slide of class {', '.join(absent)} in {part}")

    @classmethod
    def fit(cls, training: pd.DataFrame, classes: tuple[str, ...] = (), metric: str | None = None) -> Classification:
        """Nothing is learnt from the rows."""
        return cls(classes, metric or cls.selects[0])

    def card(self) -> dict[str, Any]:
        return {"classes": list(self.classes)}

    @classmethod
    def from_card(cls, card: Mapping[str, Any]) -> Classification:
        return cls(tuple(card["classes"]), select=card.get("select", cls.selects[0]))

    @property
    def num_outputs(self) -> int:
        """One output per class."""
        return len(self.classes)

    @property
    def outputs(self) -> tuple[str, ...]:
        return self.classes

    def encode(self, table: pd.DataFrame) -> Tensor:
        """Class numbers, (B,), of the column ``label``: whole numbers are class numbers, text is class names."""
        import torch

        return torch.from_numpy(self._index(table["label"]))

    def answers(self, table: pd.DataFrame) -> Columns:
        """``label`` as class names."""
        return {"label": self._name(self._index(table["label"]))}

    def loss(self, logits: Tensor, target: Tensor) -> Tensor:
        """Mean cross entropy of (B, C) logits and (B,) class numbers."""
        from torch.nn import functional as F

        return F.cross_entropy(full_precision(logits).reshape(-1, self.num_outputs), target.reshape(-1))

    def predict(self, logits: Tensor) -> Columns:
        """Softmax in double precision, and the name of the likeliest class."""
        values = as_numpy(logits)  # (B, C)
        weight = np.exp(values - values.max(1, keepdims=True))
        probability = weight / weight.sum(1, keepdims=True)
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
            return dict.fromkeys((*self.selects, "calibration_error", "brier"), float("nan"))
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

    @classmethod
    def metrics_of(cls, predictions: pd.DataFrame) -> Metrics | None:
        """Of a table with ``label``, ``predicted`` and probabilities."""
        names = tuple(str(name).removeprefix("prob_") for name in predictions if str(name).startswith("prob_"))
        return cls(names).metrics(predictions) if names and {"label", "predicted"} <= set(predictions) else None

    @classmethod
    def headline(cls, predictions: pd.DataFrame) -> tuple[str, list[float]]:
        rows = predictions.to_dict("records")
        return "Probability of the true class", [row.get(f"prob_{row['label']}", math.nan) for row in rows]

    @classmethod
    def member_numbers(cls, tasks: Sequence[Task], logits: Sequence[Tensor]) -> list[Columns]:
        """The probabilities."""
        found = super().member_numbers(tasks, logits)
        return [{name: value for name, value in one.items() if name.startswith("prob_")} for one in found]

    def decided(self, averaged: pd.DataFrame) -> pd.DataFrame:
        """``predicted``: the class with the highest mean probability."""
        averaged.insert(0, "predicted", self._name(averaged.to_numpy().argmax(1)))
        return averaged

    def summary(self, predictions: pd.DataFrame) -> list[str]:
        """Slides by predicted class."""
        counts = predictions["predicted"].value_counts()
        return ["predicted: " + ", ".join(f"{name} {count}" for name, count in counts.items())]

    def matched(
        self, frame: pd.DataFrame, classes: tuple[str, ...], *, where: str
    ) -> tuple[pd.DataFrame, tuple[Note, ...]]:
        """Class numbers of another table become names, which must be this task's."""
        frame = frame.assign(label=[classes[number] for number in frame["label"]])
        if strange := sorted(set(frame["label"]) - set(self.classes)):
            raise UserError(
                f"class {', '.join(strange)} in the table, but the model knows {', '.join(self.classes)}",
                where=where,
                cure="Rename them in the table, or list the classes to keep in `classes`.",
            )
        absent = [name for name in self.classes if name not in set(frame["label"])]
        said = f"no slide of class {', '.join(absent)} here: macro F1 counts it as 0, and macro AUC is not defined"
        return frame, (Note("note", "absent_class", said),) if absent else ()

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
                f"label {strange[0]!r} is none of the classes {list(self.classes)}",
                cure="Add it to `classes`, or correct the table.",
            )
        return np.array([number[label] for label in labels], dtype=np.int64)


def read_classes(
    cells: pd.Series[Any], classes: Sequence[str] | None, where: Path
) -> tuple[pd.Series[Any], tuple[str, ...]]:
    """Class numbers (missing where the cell is empty, or of no wanted class) and the names in order.

    Without ``classes`` whole numbers are sorted by value, anything else by name.
    """
    named = cells.dropna()
    numeric = all(re.fullmatch(r"-?\d+(\.0+)?", cell) for cell in named)
    if numeric:  # "1.0" and "1" are one class: spreadsheets add the ending to columns with gaps
        cells = cells.map(lambda cell: str(int(float(cell))), na_action="ignore")
        named = cells.dropna()
    found = sorted(set(named), key=(lambda cell: int(cell)) if numeric else None)
    if classes is None and len(found) > 20 and len(found) > len(named) / 2:
        raise UserError(
            f"column {cells.name!r} holds {len(found)} different values in {len(named)} rows: no classes",
            where=where,
            cure="Name the label column with `target`, or list `classes`.",
        )
    order = tuple(map(str, classes)) if classes is not None else tuple(found)
    absent = [name for name in order if name not in set(found)]
    if absent or not order:
        raise UserError(
            f"no row of class {', '.join(absent) or '(any)'} in column {cells.name!r}. Found: {', '.join(found)}",
            where=where,
            cure="Correct `classes` or `target`.",
        )
    return cells.map({name: i for i, name in enumerate(order)}), order


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
