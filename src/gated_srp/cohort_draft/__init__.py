"""A first cohort.yaml from a folder of features and a spreadsheet: what can be seen is set, what cannot is a choice in a comment."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from gated_srp.cohort_draft.draft import Draft
from gated_srp.cohort_draft.table import put_slides, put_task
from gated_srp.data.bag import BagError, BagHeader
from gated_srp.data.files.encoders import encoder_of_folder
from gated_srp.data.files.formats import read_header
from gated_srp.data.files.siblings import find_bags
from gated_srp.data.tables.columns import USUAL
from gated_srp.data.tables.read import read_frame, usual_columns
from gated_srp.errors import UserError
from gated_srp.files import write_whole
from gated_srp.tasks import Task, find_task

__all__ = ["Draft", "draft_cohort", "write_cohort"]

_LOOKED_AT = 24  # files that are opened; `check` opens all


def draft_cohort(folder: Path, table: Path, home: Path, *, sheet: str | None = None) -> Draft:
    """Look at the folder and at the table; ``home`` is where the YAML will stand, its paths are relative to it."""
    files = find_bags(folder)
    if not files:
        cure = "Point at the folder of an extraction (.h5, .pt, .npz, ...)."
        raise UserError("no feature file in it", where=folder, cure=cure, kind="missing")
    frame, notes = read_frame(table, sheet=sheet)
    draft = Draft()
    draft.say(f"Written by `gated-srp init {folder} {table}`. Paths are relative to this file. Next: gated-srp check")
    draft.put("name", _name(folder, table))
    draft.say()
    _put_features(draft, folder, files, home)
    draft.say()
    draft.put("table", _path(table, home), f"{len(frame)} rows, {len(frame.columns)} columns")
    if sheet is not None:
        draft.put("sheet", sheet)
    draft.seen += [f"{table}: {len(frame)} rows", *map(str, notes)]
    column, slides = put_slides(draft, frame, files)
    ids = {column, *(name for key in ("slide", "case", "site") for name in usual_columns(frame, USUAL[key]))}
    task = put_task(draft, frame[[name for name in frame.columns if name not in ids]], table)
    draft.say()
    _put_defaults(draft, find_task(task), slides)
    return draft


def write_cohort(folder: Path, table: Path, output: Path, *, sheet: str | None = None, force: bool = False) -> Draft:
    """`draft_cohort` into a file; one that is there stays unless ``force``."""
    if output.exists() and not force:
        raise UserError(f"{output}: is there already and stays as it is. Choose another name with -o, or --force.")
    draft = draft_cohort(folder, table, output.absolute().parent, sheet=sheet)
    write_whole(output, draft.text)
    return draft


def _put_features(draft: Draft, folder: Path, files: Sequence[Path], home: Path) -> None:
    """The folder and its encoder, from every file's folder and from the headers of some files."""
    headers, broken = _headers(files)
    said = Counter(encoder_of_folder(path) or "" for path in files)
    for header in headers:
        if header.encoder and not said[header.encoder]:
            said[header.encoder] = 1
    names = sorted(name for name in said if name)
    names += [name for one in broken if one.kind == "several_encoders" for name in one.found if name not in names]
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


_ENCODERS = "features of several encoders were found; a model is trained on those of one."
_NO_ENCODER = "No file says which encoder made it; name it if you know, so that features of two are never mixed."


def _put_defaults(draft: Draft, kind: type[Task], slides: int) -> None:
    draft.say("What follows are the defaults; remove a # to change one.")
    for line in (
        "arms: [na, xsa, diff, gated_srp]",
        "seeds: [42, 43, 44, 45, 46]      # each draws its own split by patient",
        "folds: 5                         # cross-validation instead of one split a seed",
        f"metric: {kind.selects[0]}                # selects the epoch",
        "window: 3                        # 8 neighbours; 5 gives 24",
        "cap: 20000                       # at most so many patches of a slide, if memory is short",
        "train: {epochs: 15}",
        "out: runs",
    ):
        draft.lines.append(f"# {line}")
    if 0 < slides < 20:
        draft.seen.append(f"only {slides} slides have a file: enough to try things, not to show anything")


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
