"""The user's spreadsheet as one tidy table of slides: who, which patient, what label.

Nothing is dropped or guessed silently: every reading is a note to print, every dropped row is listed with its reason.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import pandas as pd

from gated_srp.data.columns import NO_CASE, Columns, id_columns, listed, possible_patients, resolve_columns
from gated_srp.data.matching import files_of_cases, slide_stem, tcga_patient
from gated_srp.data.spreadsheet import read_frame
from gated_srp.errors import Note, UserError, counted
from gated_srp.tasks import Task, find_task
from gated_srp.tasks.task import first_rows

if TYPE_CHECKING:
    from gated_srp.data.covariates import Named

__all__ = ["Columns", "Table", "read_table"]

_ROOT = re.compile(r"^(?:[A-Za-z]:)?[\\/]+")  # an id may be a full path; it must not stay one
_SEVERAL = r"\s*[;|,\n]\s*"  # between slides in one cell
# Labels that may mean that there is none, in a few languages.
_NO_LABEL = {
    *(
        "unknown",
        "unk",
        "not known",
        "na",
        "n/a",
        "n.a.",
        "nan",
        "none",
        "null",
        "nil",
        "-",
        "--",
        "---",
        "?",
        ".",
        "missing",
    ),
    *(
        "not available",
        "not applicable",
        "not reported",
        "not evaluated",
        "not done",
        "nd",
        "n.d.",
        "tbd",
        "pending",
        "#n/a",
    ),
    *("unbekannt", "k.a.", "k. a.", "keine angabe", "inconnu", "desconocido", "sconosciuto", "onbekend"),
}
# A column; TCGA barcodes; a column with gaps, whose slides are patients of their own; every slide by choice (`NO_CASE`); nothing said.
Patients = Literal["column", "barcode", "partly", "slide", "unknown"]


@dataclass(frozen=True)
class Table:
    """One row per slide. Columns of ``frame``: slide, case, the label, site if it is known, and `covariates.stored` ones.

    The label is ``label`` (number of the class in ``classes``), or ``time`` and ``event``, or one 0/1 column per label.
    ``dropped`` names each row left out and why; ``notes`` say how the file was read. ``patients``: where ``case`` comes from.
    """

    frame: pd.DataFrame
    task: str  # its name, see `gated_srp.tasks`
    classes: tuple[str, ...] = ()
    dropped: tuple[str, ...] = ()
    notes: tuple[Note, ...] = ()
    patients: Patients = "column"
    unlabelled: pd.DataFrame | None = None  # slide and case of rows that were dropped for want of a label

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
    missing: Sequence[str] | None = None,
    slide_table: str | Path | None = None,
    files: Iterable[str | Path] | None = None,
    covariates: Named | None = None,
) -> Table:
    """Read a table of slides, of patients with their slides, or of patients joined to ``slide_table`` by patient.

    ``files`` are the feature files that were found: a patient's row without slides stands for the files whose name
    starts with the patient's id. ``missing``: words that count as an empty cell; None: a label that may be one is asked about.
    """
    frame, notes = read_frame(path, sheet=sheet)
    if missing:
        words = {word.casefold() for word in missing}
        frame = frame.mask(frame.map(lambda cell: isinstance(cell, str) and cell.casefold() in words), None)
    how: dict[str, Any] = {"slide_table": slide_table, "files": files, "notes": notes, "covariates": covariates}
    table = tidy_table(frame, columns, where=Path(path), task=task, classes=classes, **how)
    if missing is None:
        _ask_about(table, Path(path), named=classes is not None)
    return table


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
    covariates: Named | None = None,
) -> Table:
    """The same for cells that were read (`read_frame`) and perhaps filtered."""
    log = _Log(where, list(notes))
    asked = columns.slide if slide_table is not None else None  # then it is a column of the other table
    columns, task, found = resolve_columns(frame, replace(columns, slide=None) if asked else columns, task, where)
    log.notes += found
    kind = find_task(task)
    labels = kind.read(frame, columns, classes=classes, where=where)
    log.notes += labels.notes
    names = list(labels.frame.columns)
    beside = pd.DataFrame(index=frame.index)
    if covariates is not None:
        from gated_srp.data.covariates import read_covariates  # not above: rarely asked for

        answers = (columns.target, columns.time, columns.event, columns.censorship, columns.slide, columns.case)
        taken = [one for named in answers for one in (named if isinstance(named, tuple) else (named,))]
        beside = read_covariates(frame, covariates, taken, where)
    files = None if files is None else list(files)
    if slide_table is None:
        ids = _read_ids(frame, columns, log, files or ())
    else:
        ids = _join_ids(frame, replace(columns, slide=asked or columns.slide), Path(slide_table), log)
    rows, patients = _fill_cases(_fill_slides(ids, files, log), columns, frame, log)
    rows = rows.join(labels.frame, on="row").join(beside, on="row")
    for unusable, reason in labels.dropped:
        rows = log.drop(rows, rows["row"].map(unusable).astype(bool), reason)
    unlabelled = rows.loc[rows[names].isna().any(axis=1), ["slide", "case"]].drop_duplicates(ignore_index=True)
    for name in names:
        rows = log.drop(rows, rows[name].isna(), f"no {name}")
    rows = _unique(rows, names, list(map(str, beside)), by_case=kind.one_truth_per_case, log=log)
    if rows.empty:
        raise UserError("no usable row is left", where=where, cure="; ".join(map(str, log.notes)), kind="empty")
    whole = [name for name in names if name not in kind.real]
    kept = ["slide", "case", *names, *(["site"] if "site" in rows else []), *beside]
    rows = rows.astype(dict.fromkeys(whole, "int64"))[kept]
    table = Table(rows.reset_index(drop=True), kind.name, labels.classes, patients=patients, unlabelled=unlabelled)
    readings = kind.describe(table.frame, labels.classes, columns)
    return replace(table, dropped=tuple(log.dropped), notes=(*log.notes, *readings))


def doubtful_classes(classes: Iterable[str]) -> list[str]:
    """Those that are called like a missing value.

    >>> doubtful_classes(["mutated", "N/A", "wild type", "-"])
    ['N/A', '-']
    """
    return [name for name in classes if name.casefold() in _NO_LABEL]


def _ask_about(table: Table, where: Path, *, named: bool) -> None:
    """A class, or a patient of several slides, that is called like a missing value is never trained on unasked. ``named``: classes are."""
    of_cases = table.frame["case"].value_counts()
    cases = {name: int(of_cases[name]) for name in doubtful_classes(of_cases.index) if of_cases[name] > 1}
    labels = doubtful_classes(table.classes) if "label" in table.frame and not named else []
    classes = {name: int((table.frame["label"] == table.classes.index(name)).sum()) for name in labels}
    own = "count their slides as patients of their own"
    for counts, one, several, lacks, do, kind in (
        (classes, "a class", "classes", "words for a label that is missing", "leave these rows out", "missing_labels"),
        (cases, "a patient", "patients", "words for a patient that is missing", own, "missing_patients"),
    ):
        if counts:
            said = ", ".join(f"{name!r} ({counted(count, 'slide')})" for name, count in counts.items())
            cure = f"Write `missing: [{', '.join(map(_quoted, counts))}]` to {do}, or `missing: []` to keep them as {several}."
            what = f"{said}: {one if len(counts) == 1 else several}, or {lacks}?"
            raise UserError(what, where=where, cure=cure, kind=kind)


def _quoted(word: str) -> str:
    """As an item of a YAML list."""
    return word if re.fullmatch(r"[A-Za-z][\w /.]*", word) else f'"{word}"'


def _unique(rows: pd.DataFrame, labels: list[str], beside: list[str], *, by_case: bool, log: _Log) -> pd.DataFrame:
    """One row per slide; a slide (or, where the task wants it, a patient) that says two things is refused."""
    for key, facts in (("slide", ["case", *labels, *beside]), ("case", labels if by_case else [])):
        distinct = rows.drop_duplicates([key, *facts])
        torn = distinct.loc[distinct[key].duplicated(), key].unique()
        if len(torn):
            who = f"{counted(len(torn), 'slide' if key == 'slide' else 'patient')} ({', '.join(torn[:5])})"
            what = f"{who} with rows that differ in {' or '.join(facts)}"
            raise UserError(what, where=log.where, cure="Correct the table.", kind="contradiction")
    repeated = rows["slide"].duplicated()
    if repeated.any():
        count = counted(int(repeated.sum()), "row")
        log.note(
            f"{count} repeat{'s' if repeated.sum() == 1 else ''} a slide with the same label; each slide is taken once"
        )
    return rows[~repeated]


def mixed_truth(slides: pd.DataFrame, truth: Sequence[str]) -> bool:
    """Whether some case's slides differ in their truth."""
    return bool(slides[["case", *truth]].drop_duplicates()["case"].duplicated().any())


def refuse_mixed_truth(slides: pd.DataFrame, truth: Sequence[str]) -> None:
    """Where cases are scored, the slides of each must have one truth."""
    if mixed_truth(slides, truth):
        what = f"case, but the slides of some patients differ in {' or '.join(truth)}, so a case has no single truth"
        raise UserError(what, where="score", cure="Set `score: slide`, or correct the table.")


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

    def warn(self, what: str, cure: str, *, kind: str = "table") -> None:
        """Something that the user should look at."""
        self.notes.append(Note("warning", kind, what, cure=cure))

    def drop(self, rows: pd.DataFrame, gone: pd.Series[bool], reason: str) -> pd.DataFrame:
        """The rows that stay; the others are listed by number and id."""
        if not gone.any():
            return rows
        lost = rows[gone]
        ids = lost["slide"].where(lost["slide"].notna(), lost["case"])
        names = [name if isinstance(name, str) else "no id" for name in ids]
        self.dropped += [f"row {row} ({name}): {reason}" for row, name in zip(lost["row"], names, strict=True)]
        shown = ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
        self.note(f"dropped {counted(len(names), 'row')}: {reason} ({shown})")
        return rows[~gone].copy()


def _read_ids(frame: pd.DataFrame, columns: Columns, log: _Log, files: Iterable[str | Path] = ()) -> pd.DataFrame:
    """Columns row (in the file), slide, case and, if there is one, site; one row for each slide named in a cell.

    A cell that names one of ``files`` is one slide, whatever characters are in its name.
    """
    if columns.slide is None and columns.case in (None, NO_CASE):
        what = "no slide and no patient column; name them with `slide` and `case`"
        raise UserError(what, where=log.where, cure=listed(frame), kind="column")
    rows = pd.DataFrame({"row": frame.index, "slide": None, "case": None})
    for key in ("slide", "case", "site"):
        if getattr(columns, key) in frame:  # not where it is `NO_CASE`
            rows[key] = frame[getattr(columns, key)].to_numpy()
    odd = {stem.casefold() for stem in map(slide_stem, files) if re.search(_SEVERAL, stem)}

    def parts_of(cell: str) -> list[str]:
        return [cell] if slide_stem(cell).casefold() in odd else [part for part in re.split(_SEVERAL, cell) if part]

    cells = rows["slide"].map(parts_of, na_action="ignore")
    several = sum(len(parts) > 1 for parts in cells.dropna())
    if several:
        log.note(f"several slides in {counted(several, 'cell')} of {columns.slide!r}; each becomes a row")
    return rows.assign(slide=cells).explode("slide", ignore_index=True)


def _join_ids(frame: pd.DataFrame, columns: Columns, slide_table: Path, log: _Log) -> pd.DataFrame:
    """The patient table's rows joined to the slides of a second table; rows without a partner are listed."""
    slides, notes = read_frame(slide_table)
    log.notes += notes
    named = {}
    for key in ("slide", "case"):
        wanted = getattr(columns, key)
        found = [wanted] if wanted in slides.columns else id_columns(slides, key)
        if not found:
            what = f"no {key} column; a slide table needs slides and patients"
            raise UserError(what, where=slide_table, cure=listed(slides), kind="column")
        named[key] = found[0]
    if columns.case is None or columns.case not in frame:
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
        log.note(
            f"slides of {counted(len(owned), 'patient')} found by name: {counted(count, 'file')} with a patient's id in front"
        )
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


def _fill_cases(rows: pd.DataFrame, columns: Columns, frame: pd.DataFrame, log: _Log) -> tuple[pd.DataFrame, Patients]:
    """A slide without a patient gets the TCGA barcode if its name is one, else itself. A barcode also names the site."""
    rows = rows.copy()
    unknown, chosen = rows["case"].isna(), columns.case in (NO_CASE, columns.slide) and columns.case is not None
    barcodes = rows["slide"].map(tcga_patient)
    tcga = unknown & barcodes.notna() & (columns.case != NO_CASE)
    other = unknown & ~tcga
    rows.loc[tcga, "case"], rows.loc[other, "case"] = barcodes[tcga], rows.loc[other, "slide"]
    patients: Patients = "barcode" if tcga.any() else "column"
    if tcga.any():
        count = rows.loc[tcga, "case"].nunique()
        log.note(f"no patient column: patient = first 12 characters of the TCGA barcode ({counted(count, 'patient')})")
    if chosen:
        patients = "slide"
        if columns.case == NO_CASE:
            log.note(f"case: none, as chosen: {counted(len(rows), 'slide')}, each a patient of its own")
    elif other.any() and columns.case is not None:
        patients = "partly"
        without = counted(int(other.sum()), "slide")
        what = f"{without} without a patient in {columns.case!r}: each counts as its own, so slides of one patient may be in two parts"
        log.warn(
            what, "Fill in the empty cells (of merged cells a spreadsheet keeps the first alone).", kind="patients"
        )
    elif other.any():
        patients = "unknown"
        what = f"no patient column: {counted(int(other.sum()), 'slide')} counted as a patient each, so slides of one patient may be in two parts"
        used = [name for value in vars(columns).values() for name in (value if isinstance(value, tuple) else (value,))]
        likely = possible_patients(frame, used)[:3]
        if likely:
            seen = ", ".join(f"{name!r} ({frame[name].nunique()} values in {len(frame)} rows)" for name in likely)
            what += f". Ids that repeat, perhaps the patients: {seen}"
        example = likely[0] if likely else "COLUMN"
        cure = f"Name the patients with `case: {example}`, or write `case: none` if no patient has two slides."
        log.warn(what, cure, kind="patients")
    spelt = rows["case"].map(lambda case: re.sub(r"\s", "", case).casefold())
    for alike, how, cure in (
        (barcodes, "by the TCGA barcodes", "Shorten the ids to their first 12 characters."),
        (spelt, "but for capitals or spaces", "Spell each patient's id in one way."),
    ):
        torn = rows["case"].groupby(alike).nunique()
        if not chosen and (torn > 1).any():
            patients = "unknown"
            some = torn.idxmax() if alike is barcodes else ", ".join(rows.loc[alike == torn.idxmax(), "case"].unique())
            what = f"{columns.case!r} has several ids for {counted(int((torn > 1).sum()), 'patient')}, {how} ({some})"
            log.warn(f"{what}, whose slides may be in two parts", cure, kind="patients")
    if "site" not in rows and all(map(tcga_patient, rows["case"])):
        rows["site"] = rows["case"].str[5:7].str.upper()
        log.note(f"site: the two characters after 'TCGA-' ({counted(rows['site'].nunique(), 'site')})")
    return rows, patients
