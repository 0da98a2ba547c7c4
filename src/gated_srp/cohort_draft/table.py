"""What a spreadsheet says: which columns name slides, patients and sites, and what is to be learnt."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from gated_srp.cohort_draft.draft import Draft, setting
from gated_srp.data.tables.columns import USUAL, Columns, resolve_columns
from gated_srp.data.tables.matching import match_slides
from gated_srp.data.tables.read import usual_columns
from gated_srp.errors import UserError
from gated_srp.tasks import TASKS, find_task

_FEW = 12  # values that a column of classes has at most


def put_slides(draft: Draft, frame: pd.DataFrame, files: Sequence[Path]) -> tuple[str | None, int]:
    """Which columns name slides, patients and sites; how many slides have a file."""
    named, found = _slide_column(frame, files)
    usual = usual_columns(frame, USUAL["slide"])
    if named is not None:
        why = f"{found} of {frame[named].nunique()} name a file"
        draft.put("slide", named, why)
        draft.seen.append(f"slides: column {named!r}, {why}")
    elif usual:
        draft.put("slide", usual[0], "WARNING: none of its values names a feature file")
        draft.choices.append(f"slide: no value of {usual[0]!r} names a feature file; look at both spellings.")
    cases = [name for name in usual_columns(frame, USUAL["case"]) if name != named]
    if cases and len({_grouping(frame[name]) for name in cases}) > 1:
        draft.offer("case", [(name, f"{frame[name].nunique()} patients") for name in cases], _CASES)
    elif cases:
        draft.put("case", cases[0], f"{frame[cases[0]].nunique()} patients; a patient is never in two parts of a split")
        if named is None and not usual:
            draft.say("No column of slides: a patient's slides are the files whose names start with the patient's id.")
    elif named is not None:
        draft.say("No patient column was found: TCGA barcodes tell patients, else every slide counts as its own.")
        draft.say(
            "case: patient_id      # name it if patients have several slides, or they leak between train and test"
        )
    else:
        others = [(name, _examples(frame[name])) for name in frame.columns]
        draft.offer("slide", others, "no column names slides or patients in the usual way, and none names the files.")
    site = usual_columns(frame, USUAL["site"])
    if site:
        draft.put("site", site[0], f"{frame[site[0]].nunique()} sites")
    return named, found


_CASES = "several columns could be the patient, and they group the slides differently."


def _slide_column(frame: pd.DataFrame, files: Sequence[Path]) -> tuple[str | None, int]:
    """The column whose values name most files, a usual name first where it does as well."""
    usual = usual_columns(frame, USUAL["slide"])
    patients = usual_columns(frame, USUAL["case"])
    order = [*usual, *(name for name in frame.columns if name not in usual and name not in patients)]
    counts = {name: len(match_slides(list(frame[name].dropna().unique()), files).found) for name in order}
    best = max(order, key=lambda name: counts[name], default=None)
    return (best, counts[best]) if best is not None and counts[best] else (None, 0)


def _grouping(column: pd.Series[Any]) -> tuple[int, ...]:
    """Which rows a column puts together, whatever it calls them."""
    return tuple(int(code) for code in pd.factorize(column)[0])


def put_task(draft: Draft, frame: pd.DataFrame, table: Path) -> str | None:
    """What is to be learnt, if the columns leave no doubt. ``frame`` is without the columns of ids."""
    draft.say()
    alone = _only_classes(frame)
    try:
        columns, task, _ = resolve_columns(frame, Columns(target=alone), None, table)
        kind = find_task(task)
        order = kind.class_names(frame, columns, table)
    except UserError:
        _offer_targets(draft, frame)
        return None
    draft.put("task", task)
    for key in kind.usual:
        if column := getattr(columns, key):
            meaning = f"{kind.meanings[key]}; {_examples(frame[column])}" if key in kind.meanings else ""
            draft.put(key, column, "the only column that can be classes" if alone else meaning)
    if order:
        draft.lines.append(f"# {setting('classes', list(order), 'to set their order')}")
        draft.seen.append(f"{columns.target}: {_examples(frame[str(columns.target)])}")
    draft.seen.append(f"task: {task}")
    return task


_LABELS = {key: names for kind in TASKS.values() for key, names in kind.usual.items() if names}
_MEANINGS = {key: meaning for kind in TASKS.values() for key, meaning in kind.meanings.items()}


def _offer_targets(draft: Draft, frame: pd.DataFrame) -> None:
    """Several tasks, or none that is named in the usual way."""
    usual, times = usual_columns(frame, _LABELS["target"]), usual_columns(frame, _LABELS["time"])
    status = [(key, name) for key in _MEANINGS for name in usual_columns(frame, _LABELS[key])]
    known = {*usual, *times, *(name for _, name in status)}
    classes = [name for name in frame.columns if name not in known and _could_be_classes(frame[name])]
    draft.choices.append("target, or time with event or censorship: which column is to be predicted?")
    draft.say("CHOOSE: what is to be predicted? Remove the # of one line for classes:")
    for name in [*usual, *classes] or ["label"]:
        draft.lines.append(f"# {setting('target', name, _examples(frame[name]) if name in frame else '')}")
    draft.say("or of a time and of a line that says who had the event, for survival:")
    for name in times or ["time"]:
        draft.lines.append(f"# {setting('time', name)}")
    for key, name in status or [("event", "event")]:
        draft.lines.append(f"# {setting(key, name, _MEANINGS[key])}")


def _only_classes(frame: pd.DataFrame) -> str | None:
    """The one column that can be classes, where none has the usual name of anything to predict."""
    if any(usual_columns(frame, names) for names in _LABELS.values()):
        return None
    found = [str(name) for name in frame.columns if _could_be_classes(frame[name])]
    return found[0] if len(found) == 1 else None


def _could_be_classes(column: pd.Series[Any]) -> bool:
    tally = column.value_counts()
    return 2 <= len(tally) <= _FEW and bool(tally.iloc[0] > 1)


def _examples(column: pd.Series[Any]) -> str:
    tally = column.value_counts()
    if len(tally) > _FEW:
        return f"{len(tally)} different values, such as {', '.join(map(str, tally.index[:2]))}"
    return ", ".join(f"{value} ({count})" for value, count in tally.sort_index().items())
