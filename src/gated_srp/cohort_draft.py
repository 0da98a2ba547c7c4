"""A first cohort.yaml from a folder of features and a spreadsheet: what can be seen is set, what cannot is a choice in a comment."""

from __future__ import annotations

import math
import os
import re
import textwrap
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import Any

import pandas as pd
import yaml

from gated_srp.data.bag import BagError, BagHeader
from gated_srp.data.files.formats import read_header
from gated_srp.data.files.siblings import embeddings_left_out, encoder_of_folder, look_into, nothing_found
from gated_srp.data.matching import match_slides
from gated_srp.data.spreadsheet import USUAL, Columns, read_frame, resolve_columns, usual_columns
from gated_srp.errors import Note, UserError
from gated_srp.files import write_whole
from gated_srp.tasks import TASKS, Task, find_task

_LOOKED_AT = 24  # files that are opened; `check` opens all
_FEW = 12  # values that a column of classes has at most
_LINE = 110  # characters of a comment
_LABELS = {key: names for kind in TASKS.values() for key, names in kind.usual.items() if names}
_MEANINGS = {key: meaning for kind in TASKS.values() for key, meaning in kind.meanings.items()}


@dataclass
class Draft:
    """A cohort.yaml as it comes to be. ``notes`` say what was seen and, as warnings, what the user has to choose."""

    path: Path
    lines: list[str] = field(default_factory=list)
    notes: list[Note] = field(default_factory=list)

    @property
    def text(self) -> str:
        """The file."""
        return "\n".join(self.lines) + "\n"

    @property
    def choices(self) -> list[Note]:
        """What the user has to choose."""
        return [note for note in self.notes if note.level == "warning"]

    def _repr_html_(self) -> str:
        return f"<p><b>{escape(str(self.path))}</b></p><pre>{escape(self.text)}</pre>"

    def saw(self, what: str) -> None:
        self.notes.append(Note("note", "init", what))

    def ask(self, what: str) -> None:
        self.notes.append(Note("warning", "choice", what))

    def say(self, words: str = "") -> None:
        """A comment, or an empty line."""
        wrapped = textwrap.wrap(" ".join(words.split()), _LINE, break_long_words=False, break_on_hyphens=False)
        self.lines += [f"# {line}".rstrip() for line in wrapped] if words else [""]

    def put(self, key: str, value: Any, why: str = "") -> None:
        """A setting."""
        self.lines.append(_setting(key, value, why))

    def suggest(self, key: str, value: Any, why: str = "") -> None:
        """A setting in a comment."""
        self.lines.append(f"# {_setting(key, value, why)}")

    def offer(self, key: str, values: Sequence[tuple[Any, str]], question: str) -> None:
        """A choice that only the user can make; all of it in comments."""
        self.ask(f"{key}: {question}")
        self.say(f"CHOOSE: {question} Remove the # of one line:")
        for value, why in values:
            self.suggest(key, value, why)


def init(
    features: str | Path,
    table: str | Path,
    *,
    out: str | Path = "cohort.yaml",
    sheet: str | None = None,
    force: bool = False,
) -> Draft:
    """Look at a folder and a spreadsheet and write a cohort's YAML.

    Args:
        features: the folder of feature files, as the extractor left it.
        table: the spreadsheet of slides or patients: csv, tsv, xlsx, parquet.
        out: where to write the YAML; its paths are relative to its folder.
        sheet: of an xlsx; the first.
        force: write over a file that is there.

    Returns:
        A `Draft`: ``path``, ``text``, ``notes`` (what was seen) and ``choices`` (what could not be seen and is a comment in the file).

    Example:
        >>> draft = gated_srp.init("features_uni_v2", "slides.csv")  # doctest: +SKIP
        >>> [note.what for note in draft.choices]  # doctest: +SKIP
        []
    """
    path = Path(out)
    if path.exists() and not force:
        cure = "Choose another name with -o, or --force."
        raise UserError("is there already and stays as it is", where=path, cure=cure, kind="exists")
    draft = draft_cohort(Path(features), Path(table), path, sheet=sheet)
    write_whole(path, draft.text)
    return draft


def draft_cohort(folder: Path, table: Path, out: Path, *, sheet: str | None = None) -> Draft:
    """As `init`, without writing the file."""
    home = out.absolute().parent
    files, embeddings = look_into(folder)
    if not files:
        raise nothing_found(folder)
    frame, notes = read_frame(table, sheet=sheet)
    draft = Draft(out)
    draft.say(f"Written by `gated-srp init {folder} {table}`. Paths are relative to this file. Next: gated-srp check")
    draft.put("name", _name(folder, table))
    draft.say()
    files = _put_features(draft, folder, files, home)
    draft.notes += embeddings_left_out(embeddings)
    draft.say()
    draft.put("table", _path(table, home), f"{len(frame)} rows, {len(frame.columns)} columns")
    if sheet is not None:
        draft.put("sheet", sheet)
    draft.saw(f"{table}: {len(frame)} rows")
    draft.notes += notes
    column, slides = _put_slides(draft, frame, files)
    ids = {column, *(name for key in ("slide", "case", "site") for name in usual_columns(frame, USUAL[key]))}
    task = _put_task(draft, frame[[name for name in frame.columns if name not in ids]], table)
    draft.say()
    _put_defaults(draft, find_task(task), slides)
    return draft


def _put_features(draft: Draft, folder: Path, files: Sequence[Path], home: Path) -> list[Path]:
    """The folder and its encoder, from every file's folder and from the headers of some files; gives the files of one encoder."""
    headers, broken = _headers(files)
    said = Counter(encoder_of_folder(path) or "" for path in files)
    for header in headers:
        if header.encoder and not said[header.encoder]:
            said[header.encoder] = 1
    names = sorted(name for name in said if name)
    names += [name for one in broken if one.kind == "several_encoders" for name in one.found if name not in names]
    draft.put("features", _path(folder, home), f"{len(files)} feature files")
    draft.saw(f"{folder}: {len(files)} feature files")
    if len(names) > 1:
        question = "features of several encoders were found; a model is trained on those of one."
        draft.offer("encoder", [(name, f"{said[name]} files" if said[name] else "") for name in names], question)
    elif names:
        draft.put("encoder", names[0])
        draft.saw(f"encoder {names[0]}")
    else:
        draft.say("No file says which encoder made it; name it if you know, so that features of two are never mixed.")
        draft.say("encoder: uni_v2")
    for (stride, unit, source), _ in Counter((h.stride, h.unit, h.stride_source) for h in headers).most_common(3):
        draft.say(f"stride {stride:g} {unit}: {source}")
    draft.say("stride: 512      # only where what the files say is wrong")
    if others := [one for one in broken if one.kind != "several_encoders"]:
        unusable = f"{len(others)} of {len(headers) + len(broken)} files looked at cannot be used"
        draft.say(f"{unusable}; `gated-srp check` names all.")
        draft.saw(f"{unusable}: {others[0]}")
    return [path for path in files if len(names) < 2 or encoder_of_folder(path) in (None, names[0])]


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


def _put_defaults(draft: Draft, kind: type[Task], slides: int) -> None:
    draft.say("What follows are the defaults; remove a # to change one.")
    draft.lines += [
        "# arms: [na, xsa, diff, gated_srp]",
        "# seeds: [42, 43, 44, 45, 46]      # each draws its own split by patient",
        "# folds: 5                         # cross-validation instead of one split per seed",
        f"# metric: {kind.selects[0]}                # selects the epoch",
        "# window: 3                        # 8 neighbours; 5 gives 24",
        "# cap: 20000                       # at most so many patches of a slide, if memory is short",
        "# train: {epochs: 15}",
        "# out: runs",
    ]
    if 0 < slides < 20:
        draft.saw(f"only {slides} slides have a file: enough to try things, not to show anything")


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


# The table -----------------------------------------------------------------------------------------------------------


def _put_slides(draft: Draft, frame: pd.DataFrame, files: Sequence[Path]) -> tuple[str | None, int]:
    """Which columns name slides, patients and sites; how many slides have a file."""
    named, found = _slide_column(frame, files)
    usual = usual_columns(frame, USUAL["slide"])
    if named is not None:
        why = f"{found} of {frame[named].nunique()} name a file"
        draft.put("slide", named, why)
        draft.saw(f"slides: column {named!r}, {why}")
    elif usual:
        draft.put("slide", usual[0], "WARNING: none of its values names a feature file")
        draft.ask(f"slide: no value of {usual[0]!r} names a feature file; look at both spellings.")
    cases = [name for name in usual_columns(frame, USUAL["case"]) if name != named]
    if len({tuple(pd.factorize(frame[name])[0]) for name in cases}) > 1:  # which rows they put together
        question = "several columns could be the patient, and they group the slides differently."
        draft.offer("case", [(name, f"{frame[name].nunique()} patients") for name in cases], question)
    elif cases:
        draft.put("case", cases[0], f"{frame[cases[0]].nunique()} patients; a patient is never in two parts of a split")
        if named is None and not usual:
            draft.say("No column of slides: a patient's slides are the files whose names start with the patient's id.")
    elif named is not None:
        draft.say(_NO_CASE)
        draft.say(
            "case: patient_id      # name it if patients have several slides, or they leak between train and test"
        )
    else:
        others = [(name, _examples(frame[name])) for name in frame.columns]
        draft.offer("slide", others, "no column names slides or patients in the usual way, and none names the files.")
    if site := usual_columns(frame, USUAL["site"]):
        draft.put("site", site[0], f"{frame[site[0]].nunique()} sites")
    return named, found


_NO_CASE = "No patient column was found: patients are taken from TCGA barcodes, else every slide counts as its own."


def _slide_column(frame: pd.DataFrame, files: Sequence[Path]) -> tuple[str | None, int]:
    """The column whose values name most files, a usual name first where it does as well."""
    usual = usual_columns(frame, USUAL["slide"])
    patients = usual_columns(frame, USUAL["case"])
    order = [*usual, *(name for name in frame.columns if name not in usual and name not in patients)]
    counts = {name: len(match_slides(list(frame[name].dropna().unique()), files).found) for name in order}
    best = max(order, key=lambda name: counts[name], default=None)
    return (best, counts[best]) if best is not None and counts[best] else (None, 0)


def _put_task(draft: Draft, frame: pd.DataFrame, table: Path) -> str | None:
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
        draft.suggest("classes", list(order), "to set their order")
        draft.saw(f"{columns.target}: {_examples(frame[str(columns.target)])}")
    draft.saw(f"task: {task}")
    return task


def _offer_targets(draft: Draft, frame: pd.DataFrame) -> None:
    """Several tasks, or none that is named in the usual way."""
    usual, times = usual_columns(frame, _LABELS["target"]), usual_columns(frame, _LABELS["time"])
    status = [(key, name) for key in _MEANINGS for name in usual_columns(frame, _LABELS[key])]
    known = {*usual, *times, *(name for _, name in status)}
    classes = [name for name in frame.columns if name not in known and _could_be_classes(frame[name])]
    draft.ask("target, or time with event or censorship: which column is to be predicted?")
    draft.say("CHOOSE: what is to be predicted? Remove the # of one line for classes:")
    for name in [*usual, *classes] or ["label"]:
        draft.suggest("target", name, _examples(frame[name]) if name in frame else "")
    draft.say("or of a time and of a line that says who had the event, for survival:")
    for name in times or ["time"]:
        draft.suggest("time", name)
    for key, name in status or [("event", "event")]:
        draft.suggest(key, name, _MEANINGS[key])


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


def _setting(key: str, value: Any, why: str = "") -> str:
    """``key: value      # why``, on one line."""
    text = yaml.safe_dump(value, default_flow_style=True, allow_unicode=True, width=math.inf)
    text = text.removesuffix("...\n").strip()
    if "\n" in text:  # a name with a line break: only double quotes hold it on one line
        text = yaml.safe_dump(value, default_style='"', width=math.inf).strip()
    comment = " ".join(why.split())
    return f"{key}: {text}      # {comment}" if comment else f"{key}: {text}"
