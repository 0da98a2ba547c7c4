"""What a task is: everything that differs between classes, survival and whatever else a slide may be asked.

A task's class knows what is true of every task of its kind: which columns of a table it needs and how their cells are read, how patients
are stratified, the training recipe. An instance, made by `Task.fit` from the training rows, knows its classes or time bins and gives the
logits of a model their meaning. Nothing outside of `gated_srp.tasks` asks which kind of task it deals with.

Shapes: B bags, K outputs. A predictions table has one row per slide (or per case): ``slide``, ``case``, truth, predictions.
"""

from __future__ import annotations

import math
import re
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol, Self, TypeAlias

from numpy.typing import NDArray

from gated_srp.errors import Note, UserError, counted
from gated_srp.records import parse_numbers

if TYPE_CHECKING:
    import pandas as pd
    from torch import Tensor

Metrics = dict[str, float]
Columns = dict[str, NDArray[Any]]
Level = Literal["slide", "case"]
Cells: TypeAlias = "pd.Series[Any]"  # of one column of a user's table
Matched: TypeAlias = "tuple[pd.DataFrame, tuple[Note, ...]]"

SCARCE = 10  # slides of a class, or events, below which a result says little


@dataclass(frozen=True)
class Recipe:
    """AdamW settings of the appendix; a step takes ``batch_size`` bags, an update ``accumulation`` steps."""

    epochs: int
    lr: float
    weight_decay: float
    accumulation: int
    batch_size: int = 1
    drop_last: bool = False  # leave out an epoch's last batch where it is smaller than the others


class Header(Protocol):
    """The header of a user's table; see ``gated_srp.data.columns``."""

    def usual(self, names: Collection[str]) -> list[str]:
        """The table's columns that have one of these usual names."""

    def only(self, key: str, names: Collection[str]) -> str:
        """The one column with a usual name; none or several is an error that asks for the setting ``key``."""

    def error(self, what: str, cure: str) -> UserError:
        """An error that names the table and lists its columns."""


@dataclass(frozen=True, eq=False)
class Labels:
    """What the cells of a table say. ``frame`` has one row per row of the file, missing where a cell is empty.

    ``dropped``: rows that cannot be used although they have a label, and why. ``notes``: doubts about what the cells mean.
    """

    frame: pd.DataFrame
    classes: tuple[str, ...] = ()
    dropped: tuple[tuple[pd.Series[bool], str], ...] = ()
    notes: tuple[Note, ...] = ()


@dataclass(frozen=True, eq=False)
class Findings:
    """What a task says of evaluated cases besides its metrics: columns for the table of cases, tables and facts to write, lines to print."""

    columns: Columns = field(default_factory=dict)
    tables: dict[str, pd.DataFrame] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)
    lines: tuple[str, ...] = ()


class Task(ABC):
    """Gives logits their meaning: loss, predictions, metrics, and which metric selects a checkpoint.

    A subclass sets ``name``, ``selects``, ``usual`` and ``truth``, implements the abstract methods, and overrides of the others what
    its kind does differently. One line makes it known: ``TASKS["name"] = MyTask``, or an entry point of the group ``gated_srp.tasks``.
    """

    # Facts of the kind -----------------------------------------------------------------------------------------------

    name: ClassVar[str]  # as ``task`` in a cohort's YAML and in a model's card
    subject: ClassVar[str]  # what is predicted, for messages: "columns for <subject>"
    selects: ClassVar[tuple[str, ...]]  # metrics that may select the best epoch, higher is better; the first does
    shown: ClassVar[tuple[str, ...]]  # metrics that tables and comparisons show
    figures: ClassVar[tuple[str, ...]] = ()  # figures of its predictions, see ``reports.curves``
    recipe: ClassVar[Recipe] = Recipe(epochs=15, lr=2e-4, weight_decay=0.05, accumulation=16)
    score: ClassVar[Level] = "slide"  # what is scored unless the YAML says otherwise
    usual: ClassVar[Mapping[str, tuple[str, ...]]]  # setting that names a label column -> usual names of the column
    meanings: ClassVar[Mapping[str, str]] = {}  # setting -> how its cells are read, where that may be mistaken
    real: ClassVar[tuple[str, ...]] = ()  # label columns that hold real numbers; all others hold whole ones
    one_truth_per_case: ClassVar[bool] = False  # whether rows of one patient must agree
    hold_out: ClassVar[Literal["shuffled", "dealt"]] = "shuffled"  # see ``data.splits.rules``
    losses: ClassVar[tuple[str, ...]] = ()  # what ``train.loss`` may name; the first is the default
    joint: ClassVar[bool] = False  # whether the loss is of the bags of an update together, rather than a mean over them
    calibrates: ClassVar[bool] = False  # whether logits may be divided by a fitted temperature before `predict`
    masked: ClassVar[bool] = False  # whether the model predicts features of masked patches in place of labels
    scored: ClassVar[tuple[str, ...]] = ("val", "test")  # parts that a finished training is read on
    judges_training: ClassVar[bool] = False  # whether `training_facts` needs predictions of the training cases

    # Reading a table -------------------------------------------------------------------------------------------------

    @classmethod
    def named_by(cls, settings: Mapping[str, Any]) -> bool:
        """Whether the column settings of a YAML that names no task mean this one."""
        return False

    @classmethod
    def seen_in(cls, header: Header) -> bool:
        """Whether the usual columns of this task are in a table of which nothing was said."""
        return False

    @classmethod
    def suits(cls, cells: Cells) -> bool:
        """Whether a column is plainly of this kind, although it might be read as another: asked by `init`."""
        return False

    @classmethod
    def find_columns(cls, named: Mapping[str, Any], header: Header) -> dict[str, Any]:
        """The label columns by setting: those that were named, else the only ones with a usual name."""
        return {key: named.get(key) or header.only(key, names) for key, names in cls.usual.items()}

    @classmethod
    def class_names(cls, frame: pd.DataFrame, columns: Any, where: Path) -> tuple[str, ...]:
        """Classes in a column, for the first draft of a YAML; empty for tasks without classes."""
        return ()

    @classmethod
    @abstractmethod
    def read(cls, frame: pd.DataFrame, columns: Any, *, classes: Sequence[str] | None, where: Path) -> Labels:
        """Cells (text, or missing) to numbers. ``columns`` has an attribute per setting; what cannot be read is refused with its row."""

    @classmethod
    @abstractmethod
    def describe(cls, frame: pd.DataFrame, classes: tuple[str, ...], columns: Any) -> list[Note]:
        """How the columns were read, to confirm by eye. ``frame`` is the tidy table: slide, case, labels."""

    # A cohort of this task -------------------------------------------------------------------------------------------

    @classmethod
    @abstractmethod
    def strata(cls, frame: pd.DataFrame, classes: tuple[str, ...]) -> dict[str, str]:
        """What each patient is stratified by in a split."""

    @classmethod
    def tally(cls, frame: pd.DataFrame, classes: tuple[str, ...]) -> dict[str, Any]:
        """Counts of labels as plain values, for `check`."""
        return {}

    @classmethod
    def tally_lines(cls, tally: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
        """Title and text of what a person should see of the `tally` beyond `describe`."""
        yield from ()

    @classmethod
    def scarce(cls, frame: pd.DataFrame, classes: tuple[str, ...]) -> Iterator[Note]:
        """Too little of something to learn or to measure it."""
        yield from ()

    @classmethod
    def lacks(cls, frame: pd.DataFrame, classes: tuple[str, ...], part: str) -> Iterator[Note]:
        """What the slides of one part of a split (train, val, test) lack."""
        yield from ()

    # A task of its own -----------------------------------------------------------------------------------------------

    @classmethod
    @abstractmethod
    def fit(cls, training: pd.DataFrame, classes: tuple[str, ...] = (), metric: str | None = None) -> Self:
        """The task of a cohort; what must be learnt from data (time bins) comes from the ``training`` rows alone."""

    def with_loss(self, training: pd.DataFrame, *, loss: str | None = None, class_weights: Any = None) -> Task:
        """The task with what ``train`` asks for, one of its ``losses`` or weights of its classes; what it has not is refused."""
        if loss is not None and loss not in self.losses:
            expected = f"expected {' or '.join(self.losses)}" if self.losses else f"{self.name} has one loss"
            raise UserError(f"{loss!r}; {expected}", where="train.loss", cure="Correct it, or leave it out.")
        if class_weights is None:
            return self
        from gated_srp.tasks.imbalance import weighted  # not above: rarely asked for

        return weighted(self, training, class_weights)

    @abstractmethod
    def card(self) -> dict[str, Any]:
        """The task in a model's card, ``name`` aside; `from_card` reads it."""

    @classmethod
    @abstractmethod
    def from_card(cls, card: Mapping[str, Any]) -> Self:
        """The task that a model's card describes."""

    @property
    @abstractmethod
    def num_outputs(self) -> int:
        """K, the width of the model's head."""

    @property
    def outputs(self) -> tuple[str, ...]:
        """What the outputs are, in words."""
        return (f"{self.num_outputs} outputs",)

    @property
    @abstractmethod
    def truth(self) -> tuple[str, ...]:
        """Columns of the label table, and of a predictions table of labelled slides, that hold the truth."""

    @property
    def select(self) -> str:
        """The metric that selects; higher is better. See `selection_score`."""
        return self.selects[0]

    @abstractmethod
    def encode(self, table: pd.DataFrame) -> Tensor:
        """Targets of the table's rows, (B, ...); row b is the target of one bag."""

    @abstractmethod
    def answers(self, table: pd.DataFrame) -> Columns:
        """The truth columns of the table's rows as a person reads them, for a predictions table."""

    @abstractmethod
    def loss(self, logits: Tensor, target: Tensor) -> Tensor:
        """Mean loss of (B, K) logits and (B, ...) targets; one bag may come without its batch dimension."""

    def training_loss(self, logits: Tensor, target: Tensor) -> Tensor:
        """What is minimised; `loss`, which validation and calibration use, unless classes are weighted."""
        return self.loss(logits, target)

    @abstractmethod
    def predict(self, logits: Tensor) -> Columns:
        """Prediction columns of (B, K) logits."""

    def calibrated(self, logits: Tensor) -> Columns:
        """Further columns, of logits that were divided by the fitted temperature; asked for only where ``calibrates``."""
        return {}

    @abstractmethod
    def by_case(self, slides: pd.DataFrame) -> pd.DataFrame:
        """One row per case from a predictions table with one row per slide."""

    @abstractmethod
    def metrics(self, predictions: pd.DataFrame) -> Metrics:
        """Every metric of a labelled predictions table; not a number where it is not defined."""

    def remarks(self, predictions: pd.DataFrame) -> dict[str, str]:
        """What to say beside metrics of a labelled predictions table, by metric."""
        return {}

    # A finished model on other slides --------------------------------------------------------------------------------

    @classmethod
    def metrics_of(cls, predictions: pd.DataFrame) -> Metrics | None:
        """The metrics that a table of test predictions gives by itself; None where its columns are of another task."""
        return None

    @classmethod
    def headline(cls, predictions: pd.DataFrame) -> tuple[str, list[float]]:
        """The one number that a report shows per row of labelled test predictions: what it means, and the numbers."""
        numbers = predictions.select_dtypes("number")
        if not len(numbers.columns):
            return "Prediction", [math.nan] * len(predictions)
        last = str(numbers.columns[-1])  # predictions come after the truth
        return last.replace("_", " ").capitalize(), numbers[last].tolist()

    def training_facts(self, cases: pd.DataFrame) -> dict[str, Any]:
        """What the card keeps of the predictions of the training cases; asked for only where ``judges_training``."""
        return {}

    @classmethod
    def member_numbers(cls, tasks: Sequence[Task], logits: Sequence[Tensor]) -> list[Columns]:
        """Per member of an ensemble its numbers under common names, (B,) each; their mean is the ensemble's answer."""
        each = [task.predict(one) for task, one in zip(tasks, logits, strict=True)]
        return [{name: value.astype(float) for name, value in one.items() if value.dtype.kind in "fiu"} for one in each]

    def decided(self, averaged: pd.DataFrame) -> pd.DataFrame:
        """The averaged numbers with what follows from them (the likeliest class) in front."""
        return averaged

    def summary(self, predictions: pd.DataFrame) -> list[str]:
        """What a table of predictions says at a glance."""
        return []

    def matched(self, frame: pd.DataFrame, classes: tuple[str, ...], *, where: str) -> Matched:
        """The labels of another cohort in this task's terms, and what to know about them; what the model cannot say is refused."""
        return frame, ()

    def examine(self, cases: pd.DataFrame, card: Mapping[str, Any]) -> Findings | None:
        """What evaluated cases show besides metrics, e.g. risk groups."""
        return None

    @classmethod
    def window_problem(cls, bags: int) -> UserError | None:
        """Why nothing can be learnt from so many bags per update, if so."""
        return None

    @classmethod
    def checked_metric(cls, metric: str | None) -> str:
        """The metric that selects; one that cannot is refused."""
        if metric is None or metric in cls.selects:
            return metric or cls.selects[0]
        expected = " or ".join(map(repr, cls.selects))
        raise UserError(f"{metric!r} cannot select for {cls.name}; expected {expected}.", where="metric")


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
            said = f"its slides differ in {name!r}, so a score per case has no single truth"
            cure = "Correct the table, or set `score: slide`."
            raise UserError(said, where=f"case {mixed.idxmax()!r}", cure=cure)
    means = groups[list(averaged)].mean()
    means.insert(0, "slides", groups.size())
    for name in reversed(known):
        means.insert(0, name, groups[name].first())
    return means.reset_index()


def first_rows(frame: pd.DataFrame) -> pd.DataFrame:
    """The first row of each patient, indexed and sorted by patient."""
    return frame.drop_duplicates("case").set_index("case").sort_index()


def scarce_note(kind: str, what: str, more: str) -> Note:
    """A warning that there is too little of something."""
    cure = f"Add {more}; otherwise read differences between models with great care."
    return Note("warning", kind, what, ("table",), cure)


def read_classes(cells: Cells, classes: Sequence[str] | None, where: Path) -> tuple[Cells, tuple[str, ...]]:
    """Class numbers (missing where the cell is empty, or of no wanted class) and the names in order.

    Without ``classes`` whole numbers are sorted by value, anything else by name.
    """
    named = cells.dropna()
    numeric = all(re.fullmatch(r"-?\d+(\.0+)?", cell) for cell in named)
    if numeric:  # "1.0" and "1" are one class: spreadsheets add the ending to columns with gaps
        cells = cells.map(lambda cell: str(int(float(cell))), na_action="ignore")
        named = cells.dropna()
    found = sorted(set(named), key=int if numeric else None)
    if classes is None and len(found) > 20 and len(found) > len(named) / 2:
        said = f"column {cells.name!r} holds {len(found)} different values in {len(named)} rows: no classes"
        cure = (
            "Name the label column with `target`, or list `classes`; for a number per slide write `task: regression`."
        )
        raise UserError(said, where=where, cure=cure)
    order = tuple(map(str, classes)) if classes is not None else tuple(found)
    absent = [name for name in order if name not in found]
    if absent or not order:
        said = f"no row of class {', '.join(absent) or '(any)'} in column {cells.name!r}. Found: {', '.join(found)}"
        raise UserError(said, where=where, cure="Correct `classes` or `target`.", kind="user" if found else "no_labels")
    return cells.map({name: i for i, name in enumerate(order)}), order


def read_numbers(cells: Cells, where: Path) -> Cells:
    """Numbers, missing where a cell is empty."""
    numbers = parse_numbers(cells.str.replace(",", ".") if decimal_comma(cells) else cells).astype(float)
    wrong = cells.notna() & (numbers.isna() | numbers.isin([float("inf"), float("-inf")]))
    refuse_unreadable(cells, wrong, where, "a number (a decimal point, no unit, no separator of thousands)")
    return numbers


def decimal_comma(cells: Cells) -> str | None:
    """A cell whose comma is a decimal point, as in much of Europe; None where there is none, or it may mean thousands."""
    found = [cell for cell in cells.dropna() if "," in cell]
    sure = all(re.fullmatch(r"-?\d+,\d+", cell) for cell in found) and not any("." in cell for cell in cells.dropna())
    return found[0] if found and sure and not all(re.fullmatch(r"-?\d{1,3},\d{3}", cell) for cell in found) else None


def refuse_unreadable(cells: Cells, wrong: pd.Series[bool], where: Path, expected: str) -> None:
    """Raise for cells that cannot be read, with the first few rows."""
    if wrong.any():
        rows = "; ".join(f"row {row}: {cells[row]!r}" for row in cells.index[wrong][:5])
        said = f"column {cells.name!r} holds {counted(int(wrong.sum()), 'value')} that cannot be read ({rows}). Expected {expected}"
        cure = "Correct the cells, list words for an empty one as `missing`, or name another column in the config."
        raise UserError(said, where=where, cure=cure)
