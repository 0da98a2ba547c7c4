"""A first cohort.yaml from a folder of features and a spreadsheet: what can be seen is set, what cannot is a choice in a comment."""

from __future__ import annotations

import math
import os
import re
import textwrap
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd
import yaml

from gated_srp.data.bag import BagError, BagHeader
from gated_srp.data.columns import USUAL, Columns, Task, resolve_columns
from gated_srp.data.encoders import encoder_of_folder
from gated_srp.data.formats import read_header
from gated_srp.data.matching import match_slides
from gated_srp.data.siblings import find_bags
from gated_srp.data.tablefile import read_frame, usual_columns
from gated_srp.data.targets import read_classes
from gated_srp.errors import UserError
from gated_srp.files import write_whole

_LOOKED_AT = 24  # files that are opened; `check` opens all
_FEW = 12  # values that a column of classes has at most
_LINE = 110


@dataclass
class Draft:
    """The settings of a cohort as they are found, with what to tell the user."""

    lines: list[str] = field(default_factory=list)
    seen: list[str] = field(default_factory=list)
    choices: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        return "\n".join(self.lines) + "\n"

    def say(self, words: str = "") -> None:
        """A comment, or an empty line."""
        self.lines += [f"# {line}".rstrip() for line in _wrapped(words)] if words else [""]

    def put(self, key: str, value: Any, why: str = "") -> None:
        self.lines.append(_setting(key, value, why))

    def offer(self, key: str, values: Sequence[tuple[Any, str]], question: str) -> None:
        """A choice that only the user can make; all of it in comments."""
        self.choices.append(f"{key}: {question}")
        self.say(f"CHOOSE: {question} Remove the # of one line:")
        self.lines += [f"# {_setting(key, value, why)}" for value, why in values]


def draft_cohort(folder: Path, table: Path, home: Path, *, sheet: str | None = None) -> Draft:
    """Look at the folder and at the table; ``home`` is where the YAML will stand, its paths are relative to it."""
    files = find_bags(folder)
    if not files:
        raise UserError(f"{folder}: no feature file in it. Point at the folder of an extraction (.h5, .pt, .npz, ...).")
    frame, notes = read_frame(table, sheet=sheet)
    draft = Draft()
    draft.say(f"Written by `gated-srp init {folder} {table}`. Paths are relative to this file. Next: gated-srp check")
    draft.put("name", _name(folder, table))
    draft.say()
    _features(draft, folder, files, home)
    draft.say()
    draft.put("table", _path(table, home), f"{len(frame)} rows, {len(frame.columns)} columns")
    if sheet is not None:
        draft.put("sheet", sheet)
    draft.seen += [f"{table}: {len(frame)} rows", *notes]
    column, slides = _slides(draft, frame, files)
    ids = {column, *(name for key in ("slide", "case", "site") for name in usual_columns(frame, USUAL[key]))}
    task = _task(draft, frame[[name for name in frame.columns if name not in ids]], table)
    draft.say()
    _defaults(draft, task, slides)
    return draft


def write_cohort(folder: Path, table: Path, output: Path, *, sheet: str | None = None, force: bool = False) -> Draft:
    """`draft_cohort` into a file; one that is there stays unless ``force``."""
    if output.exists() and not force:
        raise UserError(f"{output}: is there already and stays as it is. Choose another name with -o, or --force.")
    draft = draft_cohort(folder, table, output.absolute().parent, sheet=sheet)
    write_whole(output, draft.text)
    return draft


# Features ------------------------------------------------------------------------------------------------------------


def _features(draft: Draft, folder: Path, files: Sequence[Path], home: Path) -> None:
    """The folder and its encoder, from every file's folder and from the headers of some files."""
    headers, broken = _headers(files)
    said = Counter(encoder_of_folder(path) or "" for path in files)
    for header in headers:
        if header.encoder and not said[header.encoder]:
            said[header.encoder] = 1
    names = sorted(name for name in said if name)
    names += [name for one in broken if one.kind == "several_encoders" for name in _inside(one) if name not in names]
    draft.put("features", _path(folder, home), f"{len(files)} feature files")
    draft.seen.append(f"{folder}: {len(files)} feature files")
    if len(names) > 1:
        draft.offer("encoder", [(name, f"{said[name]} files" if said[name] else "") for name in names], _ENCODERS)
    elif names:
        draft.put("encoder", names[0])
        draft.seen.append(f"encoder {names[0]}")
    else:
        draft.say(_NO_ENCODER)
        draft.say("encoder: uni_v2")
    for (stride, unit, source), _ in Counter((h.stride, h.unit, h.stride_source) for h in headers).most_common(3):
        draft.say(f"stride {stride:g} {unit}: {source}")
    draft.say("stride: 512      # only where what the files say is wrong")
    others = [one for one in broken if one.kind != "several_encoders"]
    if others:
        draft.say(
            f"{len(others)} of {len(headers) + len(broken)} files looked at cannot be used; `gated-srp check` names all."
        )
        draft.seen.append(f"{len(others)} of {len(headers) + len(broken)} files looked at cannot be used: {others[0]}")


def _headers(files: Sequence[Path]) -> tuple[list[BagHeader], list[BagError]]:
    """Of some files, evenly chosen."""
    count = min(_LOOKED_AT, len(files))
    headers, broken = [], []
    for number in range(count):
        try:
            headers.append(read_header(files[number * len(files) // count]))
        except BagError as error:
            broken.append(error)
    return headers, broken


def _inside(error: BagError) -> list[str]:
    """The encoders that a file of several names in its refusal."""
    found = re.search(r"several encoders \(([^)]*)\)", str(error))
    return found[1].split(", ") if found else []


_ENCODERS = "features of several encoders were found; a model is trained on those of one."
_NO_ENCODER = "No file says which encoder made it; name it if you know, so that features of two are never mixed."


# Table ---------------------------------------------------------------------------------------------------------------


def _slides(draft: Draft, frame: pd.DataFrame, files: Sequence[Path]) -> tuple[str | None, int]:
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


def _task(draft: Draft, frame: pd.DataFrame, table: Path) -> Task | None:
    """What is to be learnt, if the columns leave no doubt. ``frame`` is without the columns of ids."""
    draft.say()
    try:
        columns, task, _ = resolve_columns(frame, Columns(), None, table)
        order = read_classes(frame[str(columns.target)], None, table)[1] if task == "classification" else ()
    except UserError:
        _offer_targets(draft, frame)
        return None
    draft.put("task", task)
    if task == "survival":
        status = "censorship" if columns.censorship else "event"
        column = str(getattr(columns, status))
        draft.put("time", columns.time)
        draft.put(status, column, f"{_MEANINGS[status]}; {_examples(frame[column])}")
    else:
        draft.put("target", columns.target)
        draft.lines.append(f"# {_setting('classes', list(order), 'to set their order')}")
        draft.seen.append(f"{columns.target}: {_examples(frame[str(columns.target)])}")
    draft.seen.append(f"task: {task}")
    return task


_MEANINGS = {"event": "1 = the event was seen", "censorship": "1 = censored"}


def _offer_targets(draft: Draft, frame: pd.DataFrame) -> None:
    """Several tasks, or none that is named in the usual way."""
    usual, times = usual_columns(frame, USUAL["target"]), usual_columns(frame, USUAL["time"])
    status = [(key, name) for key in _MEANINGS for name in usual_columns(frame, USUAL[key])]
    known = {*usual, *times, *(name for _, name in status)}
    classes = [name for name in frame.columns if name not in known and _could_be_classes(frame[name])]
    draft.choices.append("target, or time with event or censorship: which column is to be predicted?")
    draft.say("CHOOSE: what is to be predicted? Remove the # of one line for classes:")
    for name in [*usual, *classes] or ["label"]:
        draft.lines.append(f"# {_setting('target', name, _examples(frame[name]) if name in frame else '')}")
    draft.say("or of a time and of a line that says who had the event, for survival:")
    for name in times or ["time"]:
        draft.lines.append(f"# {_setting('time', name, '')}")
    for key, name in status or [("event", "event")]:
        draft.lines.append(f"# {_setting(key, name, _MEANINGS[key])}")


def _could_be_classes(column: pd.Series[Any]) -> bool:
    tally = column.value_counts()
    return 2 <= len(tally) <= _FEW and bool(tally.iloc[0] > 1)


# Defaults ------------------------------------------------------------------------------------------------------------


def _defaults(draft: Draft, task: Task | None, slides: int) -> None:
    metric = {"survival": "c_index", "multilabel": "macro_map"}.get(task or "", "macro_f1")
    draft.say("What follows are the defaults; remove a # to change one.")
    for line in (
        "arms: [na, xsa, diff, gated_srp]",
        "seeds: [42, 43, 44, 45, 46]      # each draws its own split by patient",
        "folds: 5                         # cross-validation instead of one split a seed",
        f"metric: {metric}                # selects the epoch",
        "window: 3                        # 8 neighbours; 5 gives 24",
        "cap: 20000                       # at most so many patches of a slide, if memory is short",
        "train: {epochs: 15}",
        "out: runs",
    ):
        draft.lines.append(f"# {line}")
    if 0 < slides < 20:
        draft.seen.append(f"only {slides} slides have a file: enough to try things, not to show anything")


def _setting(key: str, value: Any, why: str) -> str:
    text = (
        yaml.safe_dump(value, default_flow_style=True, allow_unicode=True, width=math.inf).removesuffix("...\n").strip()
    )
    if "\n" in text:  # a name with a line break: only double quotes hold it on one line
        text = yaml.safe_dump(value, default_style='"', width=math.inf).strip()
    comment = " ".join(why.split())
    return f"{key}: {text}      # {comment}" if comment else f"{key}: {text}"


def _examples(column: pd.Series[Any]) -> str:
    tally = column.value_counts()
    if len(tally) > _FEW:
        return f"{len(tally)} different values, such as {', '.join(map(str, tally.index[:2]))}"
    return ", ".join(f"{value} ({count})" for value, count in tally.sort_index().items())


def _wrapped(words: str) -> list[str]:
    return textwrap.wrap(" ".join(words.split()), _LINE, break_long_words=False, break_on_hyphens=False)


def _name(folder: Path, table: Path) -> str:
    """After the table if that says something, else after its folder."""
    words = (table.stem, table.absolute().parent.name, folder.absolute().name, "cohort")
    plain = [re.sub(r"[^\w .+-]", "_", word).lstrip("_ .+-") for word in words]
    dull = {"", "slides", "table", "labels", "cohort", "clinical", "data", "sheet", "features", "feats"}
    return next((word for word in plain if word.casefold() not in dull), "cohort")


def _path(path: Path, home: Path) -> str:
    """Relative while it is below or beside ``home``, else in full."""
    relative = os.path.relpath(path.absolute(), home)
    return str(path.absolute()) if relative.startswith(os.path.join("..", "..")) else relative
