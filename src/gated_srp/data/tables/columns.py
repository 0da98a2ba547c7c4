"""Which column of a user's table holds what: named in the config, or found by its usual name.

Doubt is an error, not a guess.
"""

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from gated_srp.data.tables.read import listed, pick_column, usual_columns
from gated_srp.errors import Note, UserError
from gated_srp.tasks import TASKS, Task, find_task, named_task

# In the order of preference, without case and punctuation (`plain`).
USUAL: dict[str, tuple[str, ...]] = {
    "slide": (
        *("slide_id", "slide", "filename", "image_id", "slide_name"),
        *("wsi_filename", "wsi_name", "wsi", "image", "file_name"),
    ),
    "case": (
        *("case_id", "patient_id", "patient", "case_barcode", "submitter_id"),
        *("case", "subject_id", "bcr_patient_barcode"),
    ),
    "site": ("site", "center", "centre", "institution", "hospital", "data_provider", "tissue_source_site"),
}  # of ids; those of labels belong to the task: `Task.usual`


@dataclass(frozen=True)
class Columns:
    """Which column holds what; None: found by its usual name. Several targets: one 0/1 column per label."""

    slide: str | None = None
    case: str | None = None
    target: str | tuple[str, ...] | None = None
    time: str | None = None
    event: str | None = None
    censorship: str | None = None
    site: str | None = None


@dataclass(frozen=True, eq=False)
class Header:
    """The columns of a table, as a task looks for its own among them."""

    frame: pd.DataFrame
    where: Path

    def usual(self, names: Collection[str]) -> list[str]:
        """Columns with one of these usual names."""
        return usual_columns(self.frame, names)

    def only(self, key: str, names: Collection[str]) -> str:
        """The one column with a usual name; none or several is an error that asks for the setting ``key``."""
        found = self.usual(names)
        if len(found) == 1:
            return found[0]
        seen = f"several columns could be the {key} ({', '.join(found)})" if found else f"no usual {key} column"
        raise self.error(seen, f"Name it with `{key}` in the config.")

    def error(self, what: str, cure: str) -> UserError:
        """An error that names the table and lists its columns."""
        return UserError(what, where=self.where, cure=f"{cure} {listed(self.frame)}".strip())


def resolve_columns(
    frame: pd.DataFrame, columns: Columns, task: str | None, where: Path
) -> tuple[Columns, str, tuple[Note, ...]]:
    """Every column by its name in the file, the task that these columns allow, and notes to print."""
    named: dict[str, Any] = {}
    for key, value in vars(columns).items():
        if isinstance(value, tuple):
            named[key] = tuple(pick_column(frame, name, where) for name in value)
        elif value is not None:
            named[key] = pick_column(frame, value, where)
    notes: list[Note] = []
    for key in USUAL:
        found = [name for name in usual_columns(frame, USUAL[key]) if name not in named.values()]
        if key not in named and found:
            named[key] = found[0]
            notes += _others(frame, key, found, where)
    header = Header(frame, where)
    kind = find_task(task) if task else _only_task(columns, header)
    return Columns(**named | kind.find_columns(named, header)), kind.name, tuple(notes)


def _others(frame: pd.DataFrame, key: str, found: list[str], where: Path) -> list[Note]:
    """Two patient columns that group differently would leak patients across splits: the user must say which counts."""
    first = found[0]
    differ = [
        name
        for name in found[1:]
        if len(frame[[first, name]].drop_duplicates()) != min(frame[[first, name]].nunique(dropna=False))
    ]
    if key == "case" and differ:
        what = f"{first!r} and {differ[0]!r} group slides differently"
        raise UserError(what, where=where, cure="Name the patients with `case`.", kind="column")
    said = f"{key}: column {first!r} (also seen: {', '.join(found[1:])})"
    return [Note("note", "table", said)] if len(found) > 1 else []


def _only_task(columns: Columns, header: Header) -> type[Task]:
    """The task that the named columns mean; where none is named, the only one whose usual columns are there."""
    if kind := named_task(vars(columns)):
        return kind
    seen = [kind for kind in TASKS.values() if kind.seen_in(header)]
    if len(seen) == 1 and columns.target is None:
        return seen[0]
    what = f"columns for {' and for '.join(kind.subject for kind in seen)}" if seen else "no usual label column"
    raise header.error(what, "Set `task`, and name `target`, or `time` with `event` or `censorship`.")
