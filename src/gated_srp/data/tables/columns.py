"""Which column of a user's table holds what: named in the config, or found by its usual name.

Doubt is an error, not a guess.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pandas as pd

from gated_srp.data.tables.read import listed, pick_column, usual_columns
from gated_srp.errors import UserError

Task = Literal["classification", "survival", "multilabel"]

# In the order of preference, as tablefile.plain() writes them.
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
    "target": ("label", "target"),
    "time": (
        *("time", "time_days", "survival_months", "survival_days", "survival_time"),
        *("os_survival_days", "os_time", "os_days", "os_months"),
    ),
    "event": ("event", "status", "os", "vital_status", "os_status", "os_event"),
    "censorship": ("censorship", "os_censorship", "censored"),
}


@dataclass(frozen=True)
class Columns:
    """Which column holds what; None: found by its usual name. Several targets: one 0/1 column a label."""

    slide: str | None = None
    case: str | None = None
    target: str | tuple[str, ...] | None = None
    time: str | None = None
    event: str | None = None
    censorship: str | None = None
    site: str | None = None


def resolve_columns(
    frame: pd.DataFrame, columns: Columns, task: Task | None, where: Path
) -> tuple[Columns, Task, tuple[str, ...]]:
    """Every column by its name in the file, the task that these columns allow, and notes to print."""
    named: dict[str, Any] = {}
    for key, value in vars(columns).items():
        if isinstance(value, tuple):
            named[key] = tuple(pick_column(frame, name, where) for name in value)
        elif value is not None:
            named[key] = pick_column(frame, value, where)
    notes = []
    for key in ("slide", "case", "site"):
        found = [name for name in usual_columns(frame, USUAL[key]) if name not in named.values()]
        if key not in named and found:
            named[key] = found[0]
            notes += _others(frame, key, found, where)
    task = task or _only_task(frame, columns, where)
    if task == "multilabel" and not isinstance(named.get("target"), tuple):
        raise UserError(f"{where}: a multilabel task needs its label columns: list them as `target`. {listed(frame)}")
    if task == "classification" and "target" not in named:
        named["target"] = _only(frame, "target", where)
    if task == "survival":
        if "time" not in named:
            named["time"] = _only(frame, "time", where)
        named |= _status(frame, named, where)
    return Columns(**named), task, tuple(notes)


def _others(frame: pd.DataFrame, key: str, found: list[str], where: Path) -> list[str]:
    """Two patient columns that group differently would leak patients across splits: the user must say which counts."""
    first = found[0]
    differ = [
        name
        for name in found[1:]
        if len(frame[[first, name]].drop_duplicates()) != min(frame[[first, name]].nunique(dropna=False))
    ]
    if key == "case" and differ:
        raise UserError(
            f"{where}: {first!r} and {differ[0]!r} group slides differently. Name the patients with `case`."
        )
    return [f"{key}: column {first!r} (also seen: {', '.join(found[1:])})"] if len(found) > 1 else []


def _only_task(frame: pd.DataFrame, columns: Columns, where: Path) -> Task:
    survival = columns.time or columns.event or columns.censorship
    if columns.target is not None and not survival:
        return "multilabel" if isinstance(columns.target, tuple) else "classification"
    if survival and columns.target is None:
        return "survival"
    has_label = bool(usual_columns(frame, USUAL["target"]))
    has_status = bool(usual_columns(frame, USUAL["event"] + USUAL["censorship"]))
    has_survival = has_status and bool(usual_columns(frame, USUAL["time"]))
    if has_label == has_survival or columns.target is not None:
        seen = "columns for classes and for survival" if has_label else "no usual label column"
        raise UserError(
            f"{where}: {seen}. Set `task`, and name `target`, or `time` with `event` or `censorship`. {listed(frame)}"
        )
    return "classification" if has_label else "survival"


def _only(frame: pd.DataFrame, key: str, where: Path) -> str:
    found = usual_columns(frame, USUAL[key])
    if len(found) != 1:
        seen = f"several columns could be the {key} ({', '.join(found)})" if found else f"no usual {key} column"
        raise UserError(f"{where}: {seen}. Name it with `{key}` in the config. {listed(frame)}")
    return found[0]


def _status(frame: pd.DataFrame, named: dict[str, Any], where: Path) -> dict[str, str]:
    keys = ["event", "censorship"]
    given = {key: named[key] for key in keys if key in named}
    if len(given) == 2:
        raise UserError(f"{where}: `event` and `censorship` say the opposite of each other; name one of them.")
    if given:
        return given
    found = [(key, name) for key in keys for name in usual_columns(frame, USUAL[key])]
    if len(found) != 1:
        seen = (
            f"several columns ({', '.join(name for _, name in found)}) could say" if found else "no usual column says"
        )
        raise UserError(
            f"{where}: {seen} whether the event was seen. Name one in the config: `event` (1 = event) "
            f"or `censorship` (1 = censored). {listed(frame)}"
        )
    return dict(found)
