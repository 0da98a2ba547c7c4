"""Clinical covariates: columns of the table beside the label, as numbers that a model's head sees beside the slide.

A number is standardised by the mean and the standard deviation of the training part; a category is a one among zeros, one place for each
that the training part has. A missing number counts as the training mean, a missing category as none of them; where the training part has
gaps itself, a further place is one for a gap, so that a model can learn what that means.

Shapes: B bags, F places.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import pandas as pd
import torch
from torch import Tensor

from gated_srp.data.columns import pick_column
from gated_srp.errors import Note, UserError, counted
from gated_srp.tasks.task import read_numbers

if TYPE_CHECKING:
    from gated_srp.data.loader import SlideBag

_MOST = 200  # categories of a column: more are ids


class Named(Protocol):
    """Which columns are covariates, as the YAML or a model's card says."""

    @property
    def numeric(self) -> Sequence[str]: ...

    @property
    def categorical(self) -> Sequence[str]: ...


def stored(name: str) -> str:
    """What a covariate's column is called in a tidy table, beside columns of ours.

    >>> stored("age")
    'covariate age'
    """
    return f"covariate {name}"


def read_covariates(frame: pd.DataFrame, named: Named, taken: Collection[str | None], where: Path) -> pd.DataFrame:
    """The covariates of each row of a spreadsheet: numbers, or text; missing where a cell is empty.

    ``taken``: columns that hold the ids and the answer, which no model may see.
    """
    found = {}
    names = (*named.numeric, *named.categorical)
    if not names or len(set(names)) < len(names):
        what = "`covariates` must name at least one column, each once, as numeric or as categorical"
        raise UserError(what, where=where, cure="`covariates: {numeric: [age], categorical: [sex]}`", kind="covariates")
    for name in names:
        column = pick_column(frame, name, where)
        if column in taken:
            what = f"column {column!r} is a covariate, and also what is predicted, or an id"
            raise UserError(what, where=where, cure="Leave it out of `covariates`.", kind="covariates")
        cells = frame[column]
        found[stored(name)] = read_numbers(cells, where) if name in named.numeric else cells
    return pd.DataFrame(found, index=frame.index)


@dataclass(frozen=True)
class Numeric:
    """(x - mean) / std; 0 where x is missing, or never varied in training. ``gaps``: a second place is 1 where x is missing."""

    name: str
    mean: float
    std: float
    gaps: bool

    @classmethod
    def fit(cls, name: str, values: pd.Series[Any]) -> Numeric:
        known = values.dropna().astype(float)
        std = float(known.std(ddof=0)) if known.nunique() > 1 else 0.0  # rounding gives equal values a deviation
        return cls(name, float(known.mean()), std, len(known) < len(values))

    @property
    def width(self) -> int:
        return 1 + self.gaps

    def places(self, value: Any) -> list[float]:
        if pd.isna(value):
            return [0.0, 1.0][: self.width]
        return [(float(value) - self.mean) / self.std if self.std > 0 else 0.0, 0.0][: self.width]

    def unseen(self, value: Any) -> str:
        return ""

    def __str__(self) -> str:
        return f"{self.name} (mean {self.mean:.4g}, std {self.std:.4g}{', with gaps' if self.gaps else ''})"


@dataclass(frozen=True)
class Categorical:
    """A place for each category of the training part, sorted; ``gaps``: one more for a missing value."""

    name: str
    categories: tuple[str, ...]
    gaps: bool

    @classmethod
    def fit(cls, name: str, values: pd.Series[Any]) -> Categorical:
        known = values.dropna().astype(str)
        return cls(name, tuple(sorted(set(known))), len(known) < len(values))

    @property
    def width(self) -> int:
        return len(self.categories) + self.gaps

    def places(self, value: Any) -> list[float]:
        missing = pd.isna(value) or str(value) not in self.categories
        own = [float(str(value) == one) for one in self.categories]
        return own + ([float(missing)] if self.gaps else [])

    def unseen(self, value: Any) -> str:
        """What is wrong with a value that training never saw; nothing otherwise."""
        if pd.isna(value) or str(value) in self.categories:
            return ""
        known = ", ".join(self.categories[:8]) + (", ..." if len(self.categories) > 8 else "")
        return f"{self.name} is {str(value)!r:.60}, but {known} in the training part"

    def __str__(self) -> str:
        shown = ", ".join(self.categories[:6]) + (", ..." if len(self.categories) > 6 else "")
        return f"{self.name} ({shown}{'; with gaps' if self.gaps else ''})"


@dataclass(frozen=True)
class Covariates:
    """The columns in their order, each with what the training part says of it. Made by `fit`, or from a model's card."""

    columns: tuple[Numeric | Categorical, ...]

    @classmethod
    def fit(cls, training: pd.DataFrame, named: Named, *, where: str = "") -> Covariates:
        """From the rows of the training part alone, one per bag.

        >>> from types import SimpleNamespace
        >>> rows = pd.DataFrame({"covariate age": [50.0, 70.0, None], "covariate sex": ["m", "f", "m"]})
        >>> found = Covariates.fit(rows, SimpleNamespace(numeric=("age",), categorical=("sex",)))
        >>> found.encode(rows).tolist()
        [[-1.0, 0.0, 0.0, 1.0], [1.0, 0.0, 1.0, 0.0], [0.0, 1.0, 0.0, 1.0]]
        """
        kinds: list[tuple[type[Numeric] | type[Categorical], str]] = [(Numeric, name) for name in named.numeric]
        kinds += [(Categorical, name) for name in named.categorical]
        columns = []
        for kind, name in kinds:
            values = training[stored(name)]
            if values.isna().all():
                what = f"covariate {name!r} has no value in the training part"
                raise UserError(what, where=where, cure="Leave it out of `covariates`.", kind="covariates")
            columns.append(kind.fit(name, values))
            if isinstance(columns[-1], Categorical) and columns[-1].width > _MOST:
                what = f"covariate {name!r} has {columns[-1].width} categories in the training part"
                cure = f"At most {_MOST}: merge rare ones; numbers are `numeric`; ids are no covariates."
                raise UserError(what, where=where, cure=cure, kind="covariates")
        return cls(tuple(columns))

    @property
    def names(self) -> list[str]:
        return [column.name for column in self.columns]

    @property
    def numeric(self) -> tuple[str, ...]:
        return tuple(column.name for column in self.columns if isinstance(column, Numeric))

    @property
    def categorical(self) -> tuple[str, ...]:
        return tuple(column.name for column in self.columns if isinstance(column, Categorical))

    @property
    def stored(self) -> list[str]:
        """Their columns of a tidy table."""
        return [stored(name) for name in self.names]

    @property
    def width(self) -> int:
        return sum(column.width for column in self.columns)

    def row(self, given: Mapping[str, Any] | None, where: str | Path) -> dict[str, Any]:
        """One slide's columns of a tidy table, from values by name; None is a missing one, a name left out is refused."""
        if given is None or set(given) != set(self.names):
            raise needed(self, where)
        return {
            stored(name): float(given[name]) if name in self.numeric and given[name] is not None else given[name]
            for name in self.names
        }

    def encode(self, rows: pd.DataFrame) -> Tensor:
        """(B, F) in float32."""
        cells = [rows[stored(column.name)] for column in self.columns]
        values = [
            [place for column, value in zip(self.columns, row, strict=True) for place in column.places(value)]
            for row in zip(*cells, strict=True)
        ]
        return torch.tensor(values, dtype=torch.float32).reshape(len(rows), self.width)

    def unseen(self, rows: pd.DataFrame) -> dict[int, str]:
        """Row numbers with a category that training never saw, and which."""
        found: dict[int, str] = {}
        for column in self.columns:
            for row, value in enumerate(rows[stored(column.name)]):
                if problem := column.unseen(value):
                    found.setdefault(row, problem)
        return found

    def notes(self, slides: pd.DataFrame) -> Iterator[Note]:
        """For a run's log: what the head sees, and what the other parts (column part) have that training has not."""
        said = f"the head also sees {', '.join(map(str, self.columns))}, as in the training part"
        yield Note("note", "covariates", said)
        constant = [one.name for one in self.columns if isinstance(one, Numeric) and one.std == 0]
        constant += [one.name for one in self.columns if isinstance(one, Categorical) and len(one.categories) == 1]
        if constant:
            what = (
                f"covariate {', '.join(constant)}: one value in the whole training part, of which nothing can be learnt"
            )
            yield Note("warning", "covariates", what)
        others = slides[slides["part"] != "train"]
        lost = {one.name: int(others[stored(one.name)].isna().sum()) for one in self.columns if not one.gaps}
        if gaps := ", ".join(f"{name} ({count})" for name, count in lost.items() if count):
            what = f"missing in validation or test, never in training: {gaps}; a number counts as the training mean, a category as none"
            yield Note("warning", "covariates", what)
        if odd := self.unseen(others):
            what = f"{counted(len(odd), 'bag')} of validation or test with a category that training has not: {next(iter(odd.values()))}"
            yield Note("warning", "covariates", f"{what}; it counts as missing", cure="Merge rare categories.")

    def card(self) -> list[dict[str, Any]]:
        """For the card of a model file; `from_card` reads it."""
        return [{"name": one.name, **_facts(one), "gaps": one.gaps} for one in self.columns]

    @classmethod
    def from_card(cls, card: Sequence[Mapping[str, Any]]) -> Covariates:
        return cls(
            tuple(
                Categorical(one["name"], tuple(one["categories"]), one["gaps"])
                if "categories" in one
                else Numeric(one["name"], one["mean"], one["std"], one["gaps"])
                for one in card
            )
        )


def _facts(column: Numeric | Categorical) -> dict[str, Any]:
    if isinstance(column, Numeric):
        return {"mean": column.mean, "std": column.std}
    return {"categories": list(column.categories)}


@dataclass(frozen=True, eq=False)
class BagCovariates:
    """The covariates of a dataset's bags, (B, F); ``unknown``: bags that have none to use, and why; ``gaps``: what others lack."""

    values: Tensor
    unknown: Mapping[int, UserError] = field(default_factory=dict)
    gaps: Mapping[int, Note] = field(default_factory=dict)

    @classmethod
    def of(cls, covariates: Covariates, rows: pd.DataFrame) -> BagCovariates:
        """For a finished model: rows (one per bag, with its covariates; ``listed``: whether a table knows it) that it can use, or not."""
        unknown = {}
        for row, problem in covariates.unseen(rows).items():
            cure = "Spell it as in the training table, or leave it empty where it is not known."
            unknown[row] = UserError(problem, where=f"slide {rows['slide'].iloc[row]!r}", cure=cure, kind="covariates")
        for row, there in enumerate(rows.get("listed", ())):
            if not there:
                unknown[row] = needed(covariates, f"slide {rows['slide'].iloc[row]!r}, which the table does not list")
        lost = rows[covariates.stored].isna().to_numpy()
        gaps = {}
        for row in [number for number, one in enumerate(lost) if one.any()]:
            names = [column.name for column, gone in zip(covariates.columns, lost[row], strict=True) if gone]
            what = f"{', '.join(names)}: missing; a number counts as the training mean, a category as none of the known"
            gaps[row] = Note("warning", "covariates", what)
        return cls(covariates.encode(rows), unknown, gaps)

    def added_to(self, bag: SlideBag) -> SlideBag:
        """The bag with its own."""
        if bag.index in self.unknown:
            raise self.unknown[bag.index]
        graph = bag.graph.with_covariates(self.values[bag.index][None])
        gaps = (self.gaps[bag.index],) if bag.index in self.gaps else ()
        return replace(bag, graph=graph, warnings=(*bag.warnings, *gaps))


def needed(covariates: Covariates, where: str | Path) -> UserError:
    """That a model cannot answer without its covariates."""
    cure = "Name a table that has these columns, slides and patients, or a cohort's YAML, with --table; in Python `table`, or `covariates={...}`."
    return UserError(f"the model also needs {', '.join(covariates.names)}", where=where, cure=cure, kind="covariates")
