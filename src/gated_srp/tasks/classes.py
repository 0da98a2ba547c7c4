"""Tasks whose outputs have names: one class per slide, or several labels of which each is present or not.

Shapes: B bags, C classes or labels.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self

import numpy as np
from numpy.typing import NDArray

from gated_srp.errors import Note, UserError, counted
from gated_srp.tasks import metrics as scores
from gated_srp.tasks import task as base
from gated_srp.tasks.task import Columns, Header, Labels, Matched, Metrics, Task

if TYPE_CHECKING:
    import pandas as pd
    from torch import Tensor


@dataclass(frozen=True)
class NamedOutputs(Task):
    """A probability per output, ``prob_<name>`` as the model gives it, and ``calibrated_<name>`` where a temperature was fitted.
    Nothing is learnt from the training rows."""

    classes: tuple[str, ...]
    calibrates: ClassVar[bool] = True

    @classmethod
    def scarce(cls, frame: pd.DataFrame, classes: tuple[str, ...]) -> Iterator[Note]:
        counts = cls.tally(frame, classes)["classes"]
        if few := [f"{count} of {name!r}" for name, count in counts.items() if count < base.SCARCE]:
            said = f"fewer than {base.SCARCE} slides of a class: {', '.join(few)}"
            yield base.scarce_note("rare_class", said, "slides")

    @classmethod
    def fit(cls, training: pd.DataFrame, classes: tuple[str, ...] = (), metric: str | None = None) -> Self:
        cls.checked_metric(metric)
        return cls(classes)

    def card(self) -> dict[str, Any]:
        return {"classes": list(self.classes)}

    @classmethod
    def from_card(cls, card: Mapping[str, Any]) -> Self:
        return cls(tuple(card["classes"]))

    @property
    def num_outputs(self) -> int:
        return len(self.classes)

    @property
    def outputs(self) -> tuple[str, ...]:
        return self.classes

    def by_case(self, slides: pd.DataFrame) -> pd.DataFrame:
        """Mean of the slides' probabilities."""
        known = [name for name in (*self._probabilities, *self._calibrated) if name in slides]
        return base.mean_by_case(slides, self.truth, known)

    def calibrated(self, logits: Tensor) -> Columns:
        found = self.predict(logits)
        return {new: found[name] for new, name in zip(self._calibrated, self._probabilities, strict=True)}

    @classmethod
    def metrics_of(cls, predictions: pd.DataFrame) -> Metrics | None:
        """Of a table with probabilities and the truth."""
        found = [str(name).removeprefix("prob_") for name in predictions if str(name).startswith("prob_")]
        names = tuple(scores.without_deviations(found, {*predictions.get("label", ()), *predictions}))
        return cls(names).metrics(predictions) if names and cls._needed(names) <= set(predictions) else None

    @classmethod
    def _needed(cls, names: Sequence[str]) -> set[str]:
        """Columns besides probabilities from which metrics follow."""
        return set(names)

    @staticmethod
    def _names_survival(settings: Mapping[str, Any]) -> bool:
        return any(settings.get(key) for key in ("time", "event", "censorship"))

    @property
    def _probabilities(self) -> list[str]:
        return [f"prob_{name}" for name in self.classes]

    @property
    def _calibrated(self) -> list[str]:
        return [f"calibrated_{name}" for name in self.classes]


@dataclass(frozen=True)
class Classification(NamedOutputs):
    """Unweighted cross entropy over ``classes``; macro F1 selects unless another metric is named (PANDA: the kappa).
    Columns: ``label`` (truth, a class name), ``predicted`` (a class name), ``prob_<class>``."""

    select: str = "macro_f1"

    name: ClassVar[str] = "classification"
    subject: ClassVar[str] = "classes"
    selects: ClassVar[tuple[str, ...]] = ("macro_f1", "accuracy", "balanced_accuracy", "macro_auc", "quadratic_kappa")
    shown: ClassVar[tuple[str, ...]] = ("macro_f1", "accuracy", "macro_auc")
    figures: ClassVar[tuple[str, ...]] = ("roc", "reliability")
    usual: ClassVar[Mapping[str, tuple[str, ...]]] = {"target": ("label", "target")}
    truth: ClassVar[tuple[str, ...]] = ("label",)

    def __post_init__(self) -> None:
        if len(self.classes) < 2 or len(set(self.classes)) < len(self.classes):
            raise UserError(f"classes: {list(self.classes)}; expected at least two different names.")
        if self.select not in self.selects:
            said = f"{self.select!r} cannot select; expected one of {', '.join(self.selects)}."
            near = [f"Did you mean {name!r}?" for name in get_close_matches(self.select, self.selects, 1)]
            raise UserError(said, where="metric", cure="".join(near))

    @classmethod
    def named_by(cls, settings: Mapping[str, Any]) -> bool:
        """By one ``target`` alone."""
        return isinstance(settings.get("target"), str) and not cls._names_survival(settings)

    @classmethod
    def seen_in(cls, header: Header) -> bool:
        return bool(header.usual(cls.usual["target"]))

    @classmethod
    def class_names(cls, frame: pd.DataFrame, columns: Any, where: Path) -> tuple[str, ...]:
        return base.read_classes(frame[columns.target], None, where)[1]

    @classmethod
    def read(cls, frame: pd.DataFrame, columns: Any, *, classes: Sequence[str] | None, where: Path) -> Labels:
        """``label``: the number of the class."""
        import pandas as pd

        cells = frame[columns.target]
        codes, order = base.read_classes(cells, classes, where)
        unusable = cells.notna() & codes.isna()
        return Labels(pd.DataFrame({"label": codes}), order, ((unusable, "its label is none of `classes`"),))

    @classmethod
    def describe(cls, frame: pd.DataFrame, classes: tuple[str, ...], columns: Any) -> list[Note]:
        counts = cls.tally(frame, classes)["classes"]
        balance = ", ".join(f"{count} of {name!r}" for name, count in counts.items())
        notes = [Note("note", "labels", f"slides by {columns.target}: {balance}")]
        if len(classes) > 12 and all(name.lstrip("-").replace(".", "", 1).isdecimal() for name in classes):
            said = f"{len(classes)} different numbers in {columns.target!r} are taken for classes"
            notes.append(Note("warning", "numbers", said, cure="For a number per slide write `task: regression`."))
        return notes

    @classmethod
    def strata(cls, frame: pd.DataFrame, classes: tuple[str, ...]) -> dict[str, str]:
        """The class of most of a patient's slides, ties to the higher."""
        tally = frame.groupby(["case", "label"]).size().reset_index(name="n").sort_values(["case", "n", "label"])
        return {str(case): str(label) for case, label in tally.groupby("case")["label"].last().items()}

    @classmethod
    def tally(cls, frame: pd.DataFrame, classes: tuple[str, ...]) -> dict[str, Any]:
        counts = frame["label"].value_counts()
        return {"classes": {name: int(counts.get(i, 0)) for i, name in enumerate(classes)}}

    @classmethod
    def scarce(cls, frame: pd.DataFrame, classes: tuple[str, ...]) -> Iterator[Note]:
        present = [name for name, count in cls.tally(frame, classes)["classes"].items() if count]
        if len(present) > 1:
            yield from super().scarce(frame, classes)
            return
        what = f"all {len(frame)} slides that can be used are of one class, {', '.join(present)}: there is nothing to learn"
        yield Note("error", "one_class", what, ("table",), "Add slides of another class, or correct `target`.")

    @classmethod
    def lacks(cls, frame: pd.DataFrame, classes: tuple[str, ...], part: str) -> Iterator[Note]:
        absent = [name for i, name in enumerate(classes) if not (frame["label"] == i).any()]
        if not absent:
            return
        nothing = part == "train" and len(classes) - len(absent) < 2
        why = "" if part != "train" else ": there is nothing to learn" if nothing else ": it cannot be learnt"
        said = f"no usable slide of class {', '.join(absent)} in {part}{why}"
        yield Note("error" if nothing else "warning", "split", said)

    @classmethod
    def fit(cls, training: pd.DataFrame, classes: tuple[str, ...] = (), metric: str | None = None) -> Self:
        return cls(classes, metric or cls.selects[0])

    @classmethod
    def from_card(cls, card: Mapping[str, Any]) -> Self:
        return cls(tuple(card["classes"]), card.get("select", cls.selects[0]))

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

        return F.cross_entropy(scores.full_precision(logits).reshape(-1, self.num_outputs), target.reshape(-1))

    def predict(self, logits: Tensor) -> Columns:
        """Softmax in double precision, and the name of the likeliest class."""
        values = scores.as_numpy(logits)  # (B, C)
        weight = np.exp(values - values.max(1, keepdims=True))
        probability = weight / weight.sum(1, keepdims=True)
        columns = dict(zip(self._probabilities, probability.T, strict=True))
        return {"predicted": self._name(probability.argmax(1)), **columns}

    def by_case(self, slides: pd.DataFrame) -> pd.DataFrame:
        cases = super().by_case(slides)
        cases["predicted"] = self._name(cases[self._probabilities].to_numpy().argmax(1))
        return cases

    def metrics(self, predictions: pd.DataFrame) -> Metrics:
        """Macro F1 counts an absent class as 0; macro AUC is one-vs-rest and undefined when a class is absent. Balanced accuracy
        is the mean recall of the classes present. Brier sums over classes (0 best, 2 worst); calibrated probabilities have their own."""
        target = self._index(predictions["label"])
        probability = predictions[self._probabilities].to_numpy(np.float64)  # (B, C)
        if not len(target):
            return dict.fromkeys((*self.selects, "calibration_error", "brier"), math.nan)
        there = set(self._calibrated) <= set(predictions)
        more = scores.calibration(predictions[self._calibrated].to_numpy(np.float64), target) if there else {}
        return scores.of_classes(probability, target) | {f"calibrated_{name}": value for name, value in more.items()}

    def remarks(self, predictions: pd.DataFrame) -> dict[str, str]:
        return scores.absent_remark([name for name in self.classes if name not in set(predictions["label"])], "class")

    @classmethod
    def _needed(cls, names: Sequence[str]) -> set[str]:
        return {"label", "predicted"}

    @classmethod
    def headline(cls, predictions: pd.DataFrame) -> tuple[str, list[float]]:
        found = [row.get(f"prob_{row['label']}", math.nan) for row in predictions.to_dict("records")]
        return "Probability of the true class", found

    @classmethod
    def member_numbers(cls, tasks: Sequence[Task], logits: Sequence[Tensor]) -> list[Columns]:
        found = super().member_numbers(tasks, logits)
        return [{name: value for name, value in one.items() if name.startswith("prob_")} for one in found]

    def decided(self, averaged: pd.DataFrame) -> pd.DataFrame:
        """``predicted``: the class with the highest mean probability, calibrated where members are."""
        names = self._calibrated if set(self._calibrated) <= set(averaged) else self._probabilities
        averaged.insert(0, "predicted", self._name(averaged[names].to_numpy().argmax(1)))
        return averaged

    def summary(self, predictions: pd.DataFrame) -> list[str]:
        counts = predictions["predicted"].value_counts()
        return ["predicted: " + ", ".join(f"{name} {count}" for name, count in counts.items())]

    def matched(self, frame: pd.DataFrame, classes: tuple[str, ...], *, where: str) -> Matched:
        """Class numbers of another table become names, which must be this task's."""
        frame = frame.assign(label=[classes[number] for number in frame["label"]])
        if strange := sorted(set(frame["label"]) - set(self.classes)):
            said = f"class {', '.join(strange)} in the table, but the model knows {', '.join(self.classes)}"
            raise UserError(said, where=where, cure="Rename them, or list the classes to keep in `classes`.")
        absent = [name for name in self.classes if name not in set(frame["label"])]
        said = f"no slide of class {', '.join(absent)} here: macro F1 counts it as 0, and macro AUC is not defined"
        return frame, (Note("note", "absent_class", said),) if absent else ()

    def _name(self, numbers: NDArray[np.int64]) -> NDArray[np.object_]:
        return np.array([self.classes[i] for i in numbers], dtype=object)

    def _index(self, labels: pd.Series) -> NDArray[np.int64]:
        known = range(self.num_outputs) if labels.dtype.kind in "iu" else self.classes
        number: dict[object, int] = {label: i for i, label in enumerate(known)}
        if strange := [label for label in labels if label not in number]:
            said = f"label {strange[0]!r} is none of the classes {list(self.classes)}"
            raise UserError(said, cure="Add it to `classes`, or correct the table.")
        return np.array([number[label] for label in labels], dtype=np.int64)


@dataclass(frozen=True)
class Multilabel(NamedOutputs):
    """Binary cross entropy over the labels; macro mAP selects.
    Columns: one of 0 and 1 for each label (truth, under its own name), ``prob_<label>``."""

    name: ClassVar[str] = "multilabel"
    subject: ClassVar[str] = "several labels"
    selects: ClassVar[tuple[str, ...]] = ("macro_map",)
    shown: ClassVar[tuple[str, ...]] = ("macro_map", "macro_f1", "accuracy", "macro_auc")
    figures: ClassVar[tuple[str, ...]] = ("roc",)
    usual: ClassVar[Mapping[str, tuple[str, ...]]] = {"target": ()}

    def __post_init__(self) -> None:
        if not self.classes or len(set(self.classes)) < len(self.classes):
            raise UserError(f"classes: {list(self.classes)}; expected at least one label, each with its own name.")

    @classmethod
    def named_by(cls, settings: Mapping[str, Any]) -> bool:
        """By a list of columns as ``target``."""
        listed = isinstance(settings.get("target"), list | tuple) and bool(settings["target"])
        return listed and not cls._names_survival(settings)

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

        from gated_srp.tasks.events import read_flags  # not above: classes do without

        names = tuple(columns.target or ())
        if clash := {"slide", "case", "site", "row", "file", "part", "slides"} & set(names):
            raise UserError(f"a label may not be called {clash.pop()!r}; rename the column.", where=where)
        return Labels(pd.DataFrame({name: read_flags(frame[name], where) for name in names}), names)

    @classmethod
    def describe(cls, frame: pd.DataFrame, classes: tuple[str, ...], columns: Any) -> list[Note]:
        counts = ", ".join(f"{frame[name].sum()} with {name}" for name in classes)
        return [Note("note", "labels", f"slides: {counts}, {len(frame)} in all")]

    @classmethod
    def strata(cls, frame: pd.DataFrame, classes: tuple[str, ...]) -> dict[str, str]:
        """A patient's rarest label, so that rare labels are spread first."""
        positives = frame.groupby("case")[list(classes)].max()
        rarest = sorted(classes, key=lambda name: (positives[name].sum(), name))
        return {str(case): next((name for name in rarest if row[name]), "none") for case, row in positives.iterrows()}

    @classmethod
    def tally(cls, frame: pd.DataFrame, classes: tuple[str, ...]) -> dict[str, Any]:
        return {"classes": {name: int(frame[name].sum()) for name in classes}}

    @classmethod
    def lacks(cls, frame: pd.DataFrame, classes: tuple[str, ...], part: str) -> Iterator[Note]:
        if absent := [name for name in classes if not frame[name].any()]:
            shown = ", ".join(absent[:5]) + (", ..." if len(absent) > 5 else "")
            yield Note("warning", "split", f"no positive of {counted(len(absent), 'label')} in {part} ({shown})")

    @property
    def truth(self) -> tuple[str, ...]:
        return self.classes

    def encode(self, table: pd.DataFrame) -> Tensor:
        """(B, C) of 0 and 1."""
        import torch

        target = table[list(self.classes)].to_numpy(np.float32)
        for row, column in np.argwhere(~np.isin(target, (0, 1))):
            raise UserError(f"label {self.classes[column]!r}, row {row + 1}: {target[row, column]}; expected 0 or 1.")
        return torch.from_numpy(target)

    def answers(self, table: pd.DataFrame) -> Columns:
        return dict(zip(self.classes, self.encode(table).numpy().astype(np.int64).T, strict=True))

    def loss(self, logits: Tensor, target: Tensor) -> Tensor:
        """Mean over bags and labels of the binary cross entropy with logits."""
        from torch.nn import functional as F

        logits = scores.full_precision(logits)
        return F.binary_cross_entropy_with_logits(logits, target.reshape(logits.shape).to(logits))

    def predict(self, logits: Tensor) -> Columns:
        """Sigmoid, in double precision: then a probability of at least 0.5 is a logit of at least 0."""
        from scipy.special import expit

        probability = expit(scores.as_numpy(logits))  # (B, C)
        return dict(zip(self._probabilities, probability.T, strict=True))

    def metrics(self, predictions: pd.DataFrame) -> Metrics:
        """F1 (macro over all labels, an absent one counts 0) and accuracy at logit 0. mAP averages the labels that have a positive,
        AUC those that have both; undefined when there are none."""
        truth = self.encode(predictions).numpy() > 0  # (B, C)
        probability = predictions[self._probabilities].to_numpy(np.float64)
        if not len(truth):
            return dict.fromkeys(self.shown, math.nan)
        return scores.of_labels(probability, truth)

    def remarks(self, predictions: pd.DataFrame) -> dict[str, str]:
        return scores.absent_remark([name for name in self.classes if not predictions[name].any()], "label")

    @classmethod
    def headline(cls, predictions: pd.DataFrame) -> tuple[str, list[float]]:
        return "Mean probability of the labels", predictions.filter(regex="^prob_").mean(axis=1).tolist()

    def summary(self, predictions: pd.DataFrame) -> list[str]:
        counts = [f"{name} {(predictions[f'prob_{name}'] >= 0.5).sum()}" for name in self.classes]
        return [f"more likely than not: {', '.join(counts)}"]

    def matched(self, frame: pd.DataFrame, classes: tuple[str, ...], *, where: str) -> Matched:
        """Another table must have all labels that the model knows; further ones are left out."""
        if absent := [name for name in self.classes if name not in classes]:
            said = f"no label {', '.join(absent)} in `target`; the model knows {', '.join(self.classes)}"
            raise UserError(said, where=where, cure="Name them all.")
        more = [name for name in classes if name not in self.classes]
        said = f"labels that the model does not know are left out: {', '.join(more)}"
        return frame, (Note("note", "unknown_label", said),) if more else ()
