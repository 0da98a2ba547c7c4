"""Splits that other tools wrote, as they are.

- CLAM ``splits_0.csv`` (columns train, val, test of ids) and ``splits_0_bool.csv`` (ids x True/False), or their folder
- SurvPath and kin: the same with patients, train and val only
- Patho-Bench and MIL-Lab: columns ``fold_0`` ... in the label table, or the task's folder with its ``k=all.tsv``
- STAMP ``splits.json``, or the output folder of its crossval
- PANTHER: a folder of train.csv, val.csv, test.csv
- one row per id: ``slide_id,split`` or ``case_id,split``, also what we write ourselves
"""

import json
import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace
from itertools import count
from pathlib import Path

import pandas as pd

from gated_srp.data.columns import id_columns, listed, plain, usual_columns
from gated_srp.data.matching import tail_of
from gated_srp.data.splits import PARTS, Split, assign_parts, case_groups, check_fold, validation_of
from gated_srp.data.spreadsheet import read_frame
from gated_srp.data.table import Table
from gated_srp.errors import Note, UserError, counted
from gated_srp.files import as_stored, spreadsheet_plain

_WORDS = {
    **{"train": "train", "training": "train", "val": "val", "valid": "val", "validation": "val", "dev": "val"},
    **{"tune": "val", "test": "test", "testing": "test"},
}
# Pairs of id and part as the file has them, before the table says whether ids are slides or patients; whether val is the test.
_Read = tuple[list[tuple[str, str]], bool]
_FOLD = re.compile(
    r"(?:splits_|.*k=|fold_?)(\d+)(?:_bool)?(?:\.csv)?"
)  # CLAM's file, PANTHER's folder, Patho-Bench's column
_TRUE = {"true": True, "1": True, "1.0": True, "false": False, "0": False, "0.0": False}


def import_split(path: str | Path, table: Table, *, fold: int = 0, seed: int = 42) -> Split:
    """Read any of the forms above, in the table's own ids.

    Without a validation part one is drawn from the training patients by ``seed``.
    """
    path = as_stored(path)
    if not path.exists():
        cure = "Give a .csv, .tsv, .xlsx or .json file, or a folder of train/val/test.csv."
        raise UserError("no such split", where=path, cure=cure, kind="missing")
    source = _file_in(path)
    pairs, val_is_test = _read_folder(source, fold) if source.is_dir() else _read_file(source, fold)
    notes: list[Note] = []
    if val_is_test:
        pairs = [(unit, "test" if part == "val" else part) for unit, part in pairs]
        notes.append(_noted("the file has train and val only, as SurvPath writes it: its val is read as test"))
    split = _in_table_ids(pairs, table, path, notes)
    if "train" not in split.parts.values():
        raise UserError(
            "no slide or patient of the table is in train", where=path, cure="Correct the file.", kind="split"
        )
    if "val" not in split.parts.values():
        split = _with_validation(split, table, seed)
    try:
        assign_parts(split, table)  # raises when a patient crosses
    except UserError as error:
        raise error.changed(where=str(path)) from None
    return split


def import_fold(template: str | Path, table: Table, *, fold: int, folds: int | None, seed: int) -> Split:
    """The split of a cohort: ``{seed}`` and ``{fold}`` in its name are filled in. ``folds``: how many the cohort sets, if it does."""
    available = available_folds(template, seed)
    check_fold(fold, folds or 1, available)
    if folds and folds > available:
        what = f"`folds: {folds}`, but the split has {counted(available, 'fold')}"
        cure = f"Set `folds: {available}`." if available > 1 else "Remove `folds`."
        raise UserError(what, where=template, cure=cure, kind="split")
    split = import_split(_named(template, seed, fold), table, fold=fold, seed=seed)
    if available == 1:
        return split
    hint = "" if folds else f"; `folds: {available}` uses all"
    which = _noted(f"fold {fold} of the {available} folds of {Path(template).name} is used{hint}")
    return replace(split, notes=(which, *split.notes))


def available_folds(template: str | Path, seed: int) -> int:
    """How many folds a cohort's split has, in one file or in one of each."""
    if _named(template, seed, 0) == _named(template, seed, 1):
        return count_folds(_named(template, seed, 0))
    return next(number for number in count(1) if not _named(template, seed, number).exists())


def _named(template: str | Path, seed: int, fold: int) -> Path:
    return Path(str(template).replace("{seed}", str(seed)).replace("{fold}", str(fold)))


def count_folds(path: Path) -> int:
    """How many folds there are in a split's file or folder; 1 where it cannot be read, which reading it will say."""
    path = _file_in(path)
    try:
        if path.is_dir():
            found = {match[1] for file in path.iterdir() if (match := _FOLD.fullmatch(file.name))}
        elif path.suffix.lower() == ".json":
            found = set(range(len(json.loads(path.read_text(encoding="utf-8"))["splits"])))
        else:
            found = {match[1] for name in read_frame(path)[0] if (match := _FOLD.fullmatch(plain(str(name))))}
    except (OSError, ValueError, KeyError, TypeError):  # a UserError is a ValueError
        return 1
    return len(found) or 1


def part_columns(frame: pd.DataFrame) -> list[str]:
    """Columns of a table of labels that are a split: fold_0, fold_1 ... of Patho-Bench, else ``split``, filled with train, val, test."""
    folds = [str(name) for name in frame if re.fullmatch(r"fold_?\d+", plain(str(name)))]
    named = folds or usual_columns(frame, ("split", "set", "part"))[:1]
    words = {name: set(frame[name].dropna().str.lower()) for name in named}
    return [name for name in named if "train" in words[name] and words[name] <= _WORDS.keys()]


def _file_in(path: Path) -> Path:
    """The one file with all folds in a task folder of Patho-Bench or an output folder of STAMP; otherwise the path itself."""
    return next((path / name for name in ("k=all.tsv", "splits.json") if (path / name).is_file()), path)


def _read_folder(path: Path, fold: int) -> _Read:
    found = {_WORDS[file.stem.lower()]: file for file in sorted(path.glob("*.csv")) if file.stem.lower() in _WORDS}
    if found:
        pairs = []
        for part, file in found.items():
            frame, _ = read_frame(file)
            pairs += [(unit, part) for unit in _slides_of(frame[_units(frame)].dropna())]
        return pairs, False
    inner = [
        *(path.glob(f"splits_{fold}.csv")),
        *path.glob(f"splits_{fold}_bool.csv"),
        *sorted(path.glob(f"*k={fold}")),
    ]
    if not inner:
        what = f"no train.csv, splits_{fold}.csv, k=all.tsv, splits.json or folder ending in k={fold} in it"
        raise UserError(what, where=path, cure="Name the split's own file.", kind="split")
    return _read_folder(inner[0], fold) if inner[0].is_dir() else _read_file(inner[0], fold)


def _read_file(path: Path, fold: int) -> _Read:
    if path.suffix.lower() == ".json":
        return _read_stamp(path, fold)
    frame, _ = read_frame(path)
    parts = {column: _WORDS[plain(column)] for column in map(str, frame) if plain(column) in _WORDS}
    if "train" in parts.values():
        return _read_clam(frame, parts, path)
    plain_forms = usual_columns(frame, ("split", "set", "part")) if fold == 0 else []
    column = next(iter([*usual_columns(frame, (f"fold_{fold}",)), *plain_forms]), None)
    if column is None:
        what = f"no column train, fold_{fold} or split, so it names no parts"
        raise UserError(what, where=path, cure=listed(frame), kind="split")
    units = _units(frame)
    rows = frame[[units, column]].dropna()
    unknown = sorted(set(rows[column].str.lower()) - set(_WORDS))
    if unknown:
        what = f"column {column!r} holds {', '.join(map(repr, unknown[:5]))}"
        raise UserError(what, where=path, cure="Expected train, val or test.", kind="split")
    cells = zip(rows[units], rows[column].str.lower(), strict=True)
    return [(unit, _WORDS[part]) for cell, part in cells for unit in _slides_of([cell])], False


def _units(frame: pd.DataFrame) -> str:
    """The column of slides, else of patients, else the first."""
    return [*id_columns(frame, "slide"), *id_columns(frame, "case"), frame.columns[0]][0]


def _read_clam(frame: pd.DataFrame, parts: dict[str, str], path: Path) -> _Read:
    """Ids listed below each part, or a first column of ids and True/False below each part."""
    cells = {str(cell).lower() for column in parts for cell in frame[column].dropna()}
    if not cells <= set(_TRUE):
        pairs = [(unit, part) for column, part in parts.items() for unit in frame[column].dropna()]
    else:
        units = frame[frame.columns[0]]
        if frame.columns[0] in parts:
            what = f"True/False below {', '.join(parts)} but no column of ids before them"
            raise UserError(what, where=path, cure=listed(frame), kind="split")
        pairs = [
            (unit, part)
            for column, part in parts.items()
            for unit, inside in zip(units, frame[column], strict=True)
            if isinstance(unit, str) and isinstance(inside, str) and _TRUE[inside.lower()]
        ]
    return pairs, "test" not in parts.values()


def _read_stamp(path: Path, fold: int) -> _Read:
    try:
        folds = json.loads(path.read_text(encoding="utf-8"))["splits"]
        chosen = {part: [str(unit) for unit in folds[fold][f"{part}_patients"]] for part in ("train", "test")}
        val = {
            str(unit) for unit in folds[fold].get("val_patients", ())
        }  # ours: STAMP draws its own from those in train
        chosen |= {"train": [unit for unit in chosen["train"] if unit not in val], "val": sorted(val)}
    except (ValueError, KeyError, TypeError, IndexError) as error:
        what = f"not a splits.json of STAMP with a fold {fold} ({type(error).__name__}: {error})"
        cure = 'Expected {"splits": [{"train_patients": [...], "test_patients": [...]}, ...]}.'
        raise UserError(what, where=path, cure=cure, kind="split") from None
    return [(unit, part) for part, units in chosen.items() for unit in units], False


def _slides_of(cells: Iterable[str]) -> list[str]:
    """Some tables list a patient's slides in one cell."""
    return [unit.strip() for cell in cells for unit in cell.split(";") if unit.strip()]


def _folded(unit: str) -> str:
    return unicodedata.normalize("NFC", unit).casefold()


def _meant(units: Iterable[str], ids: Iterable[str], *keys: Callable[[str], str]) -> list[tuple[str, ...]]:
    """The table's ids that each unit may mean: those equal by the first of ``keys``, from strict to loose, by which any is.

    By the last one only where it tells the file's own units apart. Pandas writes whole numbers beside gaps as ``128.0``.
    """
    indexes: list[dict[str, dict[str, None]]] = [{} for _ in keys]
    for key, index in zip(keys, indexes, strict=True):
        for one in ids:
            index.setdefault(key(one), {})[one] = None
    loose = Counter({keys[1](unit): keys[-1](unit) for unit in units}.values())

    def fitting(unit: str) -> tuple[str, ...]:
        for key, index in zip(keys, indexes, strict=True):
            if (found := index.get(key(unit))) and (key is not keys[-1] or loose[key(unit)] < 2):
                return tuple(found)
        return fitting(unit[:-2]) if re.fullmatch(r"\d+\.0", unit) else ()

    return [fitting(unit) for unit in units]


def _in_table_ids(pairs: list[tuple[str, str]], table: Table, path: Path, notes: list[Note]) -> Split:
    """Slides or patients, whichever the table knows more of; a unit in two parts is an error, and a part of which nothing is left."""
    pairs = [(spreadsheet_plain(unit), part) for unit, part in pairs]  # as we write what looks like a formula
    units = [unit for unit, _ in pairs]
    as_slides = _meant(
        units, table.frame["slide"], str, lambda name: "/".join(tail_of(name)), lambda name: tail_of(name)[-1]
    )
    as_cases = _meant(units, table.frame["case"], str, _folded)
    by_case = sum(map(bool, as_cases)) > sum(map(bool, as_slides))
    fitting = as_cases if by_case else as_slides
    for unit, several in zip(units, fitting, strict=True):
        if len(several) > 1:
            what = f"{unit!r} may be any of {', '.join(several[:4])}"
            raise UserError(what, where=path, cure="Write these ids as the table does.", kind="split")
    known = [one[0] if one else None for one in fitting]
    column = "case" if by_case else "slide"
    parts: dict[str, str] = {}
    torn = []
    for own, (_, part) in zip(known, pairs, strict=True):
        if own is not None and parts.setdefault(own, part) != part:
            torn.append(own)
    if torn:
        who = ", ".join(sorted(set(torn))[:10])
        what = f"{counted(len(set(torn)), 'id')} in more than one part ({who})"
        raise UserError(what, where=path, cure="Correct the file.", kind="split")
    if not parts:
        sample = pairs[0][0] if pairs else "nothing"
        what = f"none of its ids (e.g. {sample!r}) is a slide or a patient of the table"
        raise UserError(what, where=path, cure="Check that the split is of this cohort.", kind="split")
    if lost := [part for part in PARTS if part not in parts.values() and any(part == named for _, named in pairs)]:
        some = next(unit for unit, part in pairs if part == lost[0])
        what = f"none of its ids in {lost[0]} (e.g. {some!r}) is a {'patient' if by_case else 'slide'} of the table"
        raise UserError(what, where=path, cure="Correct the ids in the file, or remove this part.", kind="split")
    strangers = sum(unit is None for unit in known)
    if strangers:
        notes.append(_noted(f"{strangers} of its {counted(len(pairs), 'id')} not in the table, left out"))
    absent = len(set(table.frame[column]) - parts.keys())
    if absent:
        who = counted(absent, "patient" if by_case else "slide")
        notes.append(_noted(f"{who} of the table in no part of the split, left out"))
    order = [part for part in PARTS if part in parts.values()]
    return Split(f"{column}_id", parts, f"imported from {path.name} ({', '.join(order)})", tuple(notes))


def _with_validation(split: Split, table: Table, seed: int) -> Split:
    """Patients of a tenth of each training group validate."""
    rows = assign_parts(split, table)
    train = set(table.frame.loc[rows == "train", "case"])
    drawn = validation_of({case: group for case, group in case_groups(table).items() if case in train}, seed)
    case_of = dict(zip(table.frame["slide"], table.frame["case"], strict=True)) if split.by_slide else {}
    parts = {unit: drawn[case_of.get(unit, unit)] if part == "train" else part for unit, part in split.parts.items()}
    note = _noted(f"no validation part: a tenth of the training patients was drawn, seed {seed}")
    return Split(split.unit, parts, split.source, (*split.notes, note))


def _noted(what: str) -> Note:
    return Note("note", "split", what)
