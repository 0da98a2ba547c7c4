"""The user's spreadsheet as one tidy table of slides: who, which patient, what label.

Nothing is dropped or guessed silently: every reading is a note to print, every dropped row is listed with its reason.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pandas as pd

from gated_srp.data.tables.columns import Columns, resolve_columns
from gated_srp.data.tables.read import read_frame
from gated_srp.data.tables.rows import Log, fill_cases, fill_slides, join_ids, read_ids
from gated_srp.errors import Note, UserError
from gated_srp.tasks import Task, find_task
from gated_srp.tasks.task import first_rows

__all__ = ["Columns", "Table", "read_table"]


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
    log = Log(where, list(notes))
    columns, task, found = resolve_columns(frame, columns, task, where)
    log.notes += found
    kind = find_task(task)
    labels = kind.read(frame, columns, classes=classes, where=where)
    names = list(labels.frame.columns)
    files = None if files is None else list(files)
    ids = (
        read_ids(frame, columns, log, files or ())
        if slide_table is None
        else join_ids(frame, columns, Path(slide_table), log)
    )
    rows = fill_cases(fill_slides(ids, files, log), log).join(labels.frame, on="row")
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


def _unique(rows: pd.DataFrame, labels: list[str], *, by_case: bool, log: Log) -> pd.DataFrame:
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
