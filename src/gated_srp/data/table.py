"""The user's spreadsheet as one tidy table of slides: who, which patient, what label.

Nothing is dropped or guessed silently: every reading is a note to print, every dropped row is listed with its reason.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import pandas as pd

from gated_srp.data.matching import files_of_cases, slide_stem
from gated_srp.data.spreadsheet import USUAL, Columns, listed, read_frame, resolve_columns, usual_columns
from gated_srp.errors import Note, UserError
from gated_srp.tasks import Task, find_task
from gated_srp.tasks.task import first_rows

__all__ = ["Columns", "Table", "read_table"]

_BARCODE = re.compile(r"TCGA-[A-Z0-9]{2}-[A-Z0-9]{4}(?![A-Z0-9])", re.IGNORECASE)
_ROOT = re.compile(r"^(?:[A-Za-z]:)?[\\/]+")  # an id may be a full path; it must not stay one
_SEVERAL = r"\s*[;|,\n]\s*"  # between slides in one cell


@dataclass(frozen=True)
class Table:
    """One row per slide. Columns of ``frame``: slide, case, the label, and site if it is known.

    The label is ``label`` (number of the class in ``classes``), or ``time`` and ``event``, or one 0/1 column per label.
    ``dropped`` names each row left out and why; ``notes`` say how the file was read.
    """

    frame: pd.DataFrame
    task: str  # its name, see `gated_srp.tasks`
    classes: tuple[str, ...] = ()
    dropped: tuple[str, ...] = ()
    notes: tuple[Note, ...] = ()

    @property
    def kind(self) -> type[Task]:
        """The kind of task, which knows what its labels mean."""
        return find_task(self.task)

    @property
    def cases(self) -> pd.DataFrame:
        """The first row of each patient, indexed and sorted by patient."""
        return first_rows(self.frame)


def read_table(
    path: str | Path,
    columns: Columns = Columns(),  # noqa: B008 - frozen
    *,
    task: str | None = None,
    classes: Sequence[str] | None = None,
    sheet: str | None = None,
    slide_table: str | Path | None = None,
    files: Iterable[str | Path] | None = None,
) -> Table:
    """Read a table of slides, of patients with their slides, or of patients joined to ``slide_table`` by patient.

    ``files`` are the feature files that were found: a patient's row without slides stands for the files whose name
    starts with the patient's id.
    """
    frame, notes = read_frame(path, sheet=sheet)
    return tidy_table(
        frame, columns, where=Path(path), task=task, classes=classes, slide_table=slide_table, files=files, notes=notes
    )


def tidy_table(
    frame: pd.DataFrame,
    columns: Columns,
    *,
    where: Path,
    task: str | None = None,
    classes: Sequence[str] | None = None,
    slide_table: str | Path | None = None,
    files: Iterable[str | Path] | None = None,
    notes: Sequence[Note] = (),
) -> Table:
    """The same for cells that were read (`read_frame`) and perhaps filtered."""
    log = _Log(where, list(notes))
    columns, task, found = resolve_columns(frame, columns, task, where)
    log.notes += found
    kind = find_task(task)
    labels = kind.read(frame, columns, classes=classes, where=where)
    names = list(labels.frame.columns)
    files = None if files is None else list(files)
    if slide_table is None:
        ids = _read_ids(frame, columns, log, files or ())
    else:
        ids = _join_ids(frame, columns, Path(slide_table), log)
    rows = _fill_cases(_fill_slides(ids, files, log), log).join(labels.frame, on="row")
    for unusable, reason in labels.dropped:
        rows = log.drop(rows, rows["row"].map(unusable).astype(bool), reason)
    for name in names:
        rows = log.drop(rows, rows[name].isna(), f"no {name}")
    rows = _unique(rows, names, by_case=kind.one_truth_per_case, log=log)
    if rows.empty:
        raise UserError("no usable row is left", where=where, cure="; ".join(map(str, log.notes)), kind="empty")
    whole = [name for name in names if name not in kind.real]
    rows = rows.astype(dict.fromkeys(whole, "int64"))[["slide", "case", *names, *(["site"] if "site" in rows else [])]]
    table = Table(rows.reset_index(drop=True), kind.name, labels.classes)
    readings = kind.describe(table.frame, labels.classes, columns)
    return replace(table, dropped=tuple(log.dropped), notes=(*log.notes, *readings))


def _unique(rows: pd.DataFrame, labels: list[str], *, by_case: bool, log: _Log) -> pd.DataFrame:
    """One row per slide; a slide (or, where the task wants it, a patient) that says two things is refused."""
    for key, facts in (("slide", ["case", *labels]), ("case", labels if by_case else [])):
        distinct = rows.drop_duplicates([key, *facts])
        torn = distinct.loc[distinct[key].duplicated(), key].unique()
        if len(torn):
            who = f"{len(torn)} {'slides' if key == 'slide' else 'patients'} ({', '.join(torn[:5])})"
            what = f"{who} have rows that differ in {' or '.join(facts)}"
            raise UserError(what, where=log.where, cure="Correct the table.", kind="contradiction")
    repeated = rows["slide"].duplicated()
    if repeated.any():
        log.note(f"{int(repeated.sum())} rows repeat a slide with the same label; each slide is taken once")
    return rows[~repeated]


# Rows to slides and patients: several slides in a cell, many per patient, a second table joined --------------------


@dataclass
class _Log:
    """What happened to the table, for the user to read."""

    where: Path
    notes: list[Note] = field(default_factory=list)
    dropped: list[str] = field(default_factory=list)

    def note(self, what: str) -> None:
        """How something was read."""
        self.notes.append(Note("note", "table", what))

    def warn(self, what: str, cure: str) -> None:
        """Something that the user should look at."""
        self.notes.append(Note("warning", "table", what, cure=cure))

    def drop(self, rows: pd.DataFrame, gone: pd.Series[bool], reason: str) -> pd.DataFrame:
        """The rows that stay; the others are listed by number and id."""
        if not gone.any():
            return rows
        lost = rows[gone]
        ids = lost["slide"].where(lost["slide"].notna(), lost["case"])
        names = [name if isinstance(name, str) else "no id" for name in ids]
        self.dropped += [f"row {row} ({name}): {reason}" for row, name in zip(lost["row"], names, strict=True)]
        shown = ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
        self.note(f"dropped {len(names)} rows: {reason} ({shown})")
        return rows[~gone].copy()


def _read_ids(frame: pd.DataFrame, columns: Columns, log: _Log, files: Iterable[str | Path] = ()) -> pd.DataFrame:
    """Columns row (in the file), slide, case and, if there is one, site; one row for each slide named in a cell.

    A cell that names one of ``files`` is one slide, whatever characters are in its name.
    """
    if columns.slide is None and columns.case is None:
        what = "no slide and no patient column; name them with `slide` and `case`"
        raise UserError(what, where=log.where, cure=listed(frame), kind="column")
    rows = pd.DataFrame({"row": frame.index, "slide": None, "case": None})
    for key in ("slide", "case", "site"):
        if getattr(columns, key):
            rows[key] = frame[getattr(columns, key)].to_numpy()
    odd = {stem.casefold() for stem in map(slide_stem, files) if re.search(_SEVERAL, stem)}

    def parts_of(cell: str) -> list[str]:
        return [cell] if slide_stem(cell).casefold() in odd else [part for part in re.split(_SEVERAL, cell) if part]

    cells = rows["slide"].map(parts_of, na_action="ignore")
    several = sum(len(parts) > 1 for parts in cells.dropna())
    if several:
        log.note(f"{several} cells of {columns.slide!r} list several slides; each becomes a row")
    return rows.assign(slide=cells).explode("slide", ignore_index=True)


def _join_ids(frame: pd.DataFrame, columns: Columns, slide_table: Path, log: _Log) -> pd.DataFrame:
    """The patient table's rows joined to the slides of a second table; rows without a partner are listed."""
    slides, notes = read_frame(slide_table)
    log.notes += notes
    named = {}
    for key in ("slide", "case"):
        wanted = getattr(columns, key)
        found = [wanted] if wanted in slides.columns else usual_columns(slides, USUAL[key])
        if not found:
            what = f"no {key} column; a slide table needs slides and patients"
            raise UserError(what, where=slide_table, cure=listed(slides), kind="column")
        named[key] = found[0]
    if columns.case is None:
        what = f"no patient column to join {slide_table} by; name it with `case`"
        raise UserError(what, where=log.where, cure=listed(frame), kind="column")
    patients = _read_ids(frame, replace(columns, slide=None), log).drop(columns="slide")
    theirs = _read_ids(slides, Columns(**named), log)[["slide", "case", "row"]]
    patients = log.drop(patients.assign(slide=None), patients["case"].isna(), "no patient id").drop(columns="slide")
    theirs = log.drop(theirs, theirs["case"].isna(), f"no patient id in {slide_table.name}")
    theirs = log.drop(theirs, ~theirs["case"].isin(patients["case"]), f"its patient is not in {log.where.name}")
    joined = patients.merge(theirs[["slide", "case"]], on="case", how="left", indicator=True)
    alone = joined.pop("_merge") == "left_only"
    return log.drop(joined, alone, f"no slide in {slide_table.name}")


def _fill_slides(rows: pd.DataFrame, files: Iterable[str | Path] | None, log: _Log) -> pd.DataFrame:
    """Rows without a slide get those of the patient's files; no id stays absolute or climbs out of a folder."""
    blank = rows["slide"].isna() & rows["case"].notna()
    if blank.any() and files is not None:
        owned = files_of_cases(rows.loc[blank, "case"].unique(), files)
        count = sum(map(len, owned.values()))
        log.note(f"slides of {len(owned)} patients found by name: {count} files start with a patient's id")
        stems = {case: sorted(map(slide_stem, paths)) for case, paths in owned.items()}
        named = rows[~blank]
        found = rows[blank].assign(slide=rows.loc[blank, "case"].map(stems)).explode("slide")
        rows = pd.concat([named, found]).sort_values("row", kind="stable", ignore_index=True)
        rows = log.drop(rows, rows["slide"].isna() & rows["case"].notna(), "no file starts with the patient's id")
    elif blank.all() and len(rows):
        rows = rows.assign(slide=rows["case"])
        said = "no slide column: a patient's id stands for its slides until feature files are given"
        log.warn(said, "Give the feature files, or name the column with `slide`.")
    rooted = rows["slide"].map(lambda slide: _ROOT.sub("", slide), na_action="ignore")
    rows = rows.assign(slide=rooted.where(rooted != "", None))
    rows = log.drop(rows, rows["slide"].isna(), "no slide")
    climbs = rows["slide"].map(lambda slide: ".." in re.split(r"[\\/]", slide)).astype(bool)
    return log.drop(rows, climbs, "its id holds '..', which no file name needs")


def _fill_cases(rows: pd.DataFrame, log: _Log) -> pd.DataFrame:
    """A slide without a patient gets the TCGA barcode if its name is one, else itself. A barcode also names the site."""
    rows = rows.copy()
    unknown = rows["case"].isna()
    barcode = rows["slide"].map(lambda slide: _BARCODE.match(slide_stem(slide)) is not None).astype(bool)
    tcga, other = unknown & barcode, unknown & ~barcode
    rows.loc[tcga, "case"] = rows.loc[tcga, "slide"].map(lambda slide: slide_stem(slide)[:12].upper())
    rows.loc[other, "case"] = rows.loc[other, "slide"]
    if tcga.any():
        count = rows.loc[tcga, "case"].nunique()
        log.note(f"no patient column: patient = first 12 characters of the TCGA barcode ({count} patients)")
    if other.any():
        said = f"{int(other.sum())} slides without a patient: each counts as its own"
        log.warn(said, "Name the column with `case` if patients have several slides.")
    if "site" not in rows and all(_BARCODE.match(case) for case in rows["case"]):
        rows["site"] = rows["case"].str[5:7].str.upper()
        log.note(f"site: the two characters after 'TCGA-' ({rows['site'].nunique()} sites)")
    return rows
