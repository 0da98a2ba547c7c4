"""The user's spreadsheet as one tidy table of slides: who, which patient, what label.

Nothing is dropped or guessed silently: every reading is a note to print, every dropped row is listed with its reason.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pandas as pd

from gated_srp.data.tables.columns import Columns, Task, resolve_columns
from gated_srp.data.tables.read import read_frame
from gated_srp.data.tables.rows import Log, fill_cases, fill_slides, join_ids, read_ids
from gated_srp.data.tables.targets import describe_survival, read_classes, read_events, read_flags, read_times
from gated_srp.errors import UserError

__all__ = ["Columns", "Table", "Task", "read_table"]


@dataclass(frozen=True)
class Table:
    """One row a slide. Columns of ``frame``: slide, case, the label, and site if it is known.

    The label is ``label`` (number of the class in ``classes``), or ``time`` and ``event``, or one 0/1 column a label.
    ``dropped`` names each row left out and why; ``notes`` say how the file was read.
    """

    frame: pd.DataFrame
    task: Task
    classes: tuple[str, ...] = ()
    dropped: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def cases(self) -> pd.DataFrame:
        """The first row of each patient, indexed and sorted by patient."""
        return self.frame.drop_duplicates("case").set_index("case").sort_index()


def read_table(
    path: str | Path,
    columns: Columns = Columns(),  # noqa: B008 - frozen
    *,
    task: Task | None = None,
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
    task: Task | None = None,
    classes: Sequence[str] | None = None,
    slide_table: str | Path | None = None,
    files: Iterable[str | Path] | None = None,
    notes: Sequence[str] = (),
) -> Table:
    """The same for cells that were read (``tablefile.read_frame``) and perhaps filtered."""
    log = Log(where, list(notes))
    columns, task, found = resolve_columns(frame, columns, task, where)
    log.notes += found
    labels, order = _labels(frame, columns, task, classes=classes, where=where)
    files = None if files is None else list(files)
    ids = (
        read_ids(frame, columns, log, files or ())
        if slide_table is None
        else join_ids(frame, columns, Path(slide_table), log)
    )
    rows = fill_cases(fill_slides(ids, files, log), log).join(labels, on="row")
    if task == "classification":
        named = frame[str(columns.target)].notna().reindex(rows["row"]).to_numpy()
        rows = log.drop(rows, rows["label"].isna() & named, "its label is none of `classes`")
    for name in labels:
        rows = log.drop(rows, rows[name].isna(), f"no {name}")
    if task == "survival":
        rows = log.drop(rows, rows["time"] <= 0, "its time is not positive")
    rows = _unique(rows, list(labels.columns), by_case=task == "survival", log=log)
    if rows.empty:
        raise UserError(f"{where}: no usable row is left. {'; '.join(log.notes)}")
    whole = [name for name in labels if name != "time"]
    rows = rows.astype(dict.fromkeys(whole, "int64"))[["slide", "case", *labels, *(["site"] if "site" in rows else [])]]
    table = Table(rows.reset_index(drop=True), task, order)
    return replace(table, dropped=tuple(log.dropped), notes=(*log.notes, *_readings(table, columns)))


def _labels(
    frame: pd.DataFrame, columns: Columns, task: Task, *, classes: Sequence[str] | None, where: Path
) -> tuple[pd.DataFrame, tuple[str, ...]]:
    """The numbers to learn, by row of the file, and the names of classes."""
    if task == "classification":
        codes, order = read_classes(frame[str(columns.target)], classes, where)
        return pd.DataFrame({"label": codes}), order
    if task == "multilabel":
        names = tuple(columns.target or ())
        clash = {"slide", "case", "site", "row"} & set(names)
        if clash:
            raise UserError(f"{where}: a label may not be called {clash.pop()!r}; rename the column.")
        return pd.DataFrame({name: read_flags(frame[name], where) for name in names}), names
    times = read_times(frame[str(columns.time)], where)
    status = frame[str(columns.censorship or columns.event)]
    events = read_events(status, where, censorship=columns.censorship is not None)
    return pd.DataFrame({"time": times, "event": events}), ()


def _unique(rows: pd.DataFrame, labels: list[str], *, by_case: bool, log: Log) -> pd.DataFrame:
    """One row a slide; a slide (in survival also a patient) that says two things is refused."""
    for key, facts in (("slide", ["case", *labels]), ("case", labels if by_case else [])):
        distinct = rows.drop_duplicates([key, *facts])
        torn = distinct.loc[distinct[key].duplicated(), key].unique()
        if len(torn):
            who = f"{len(torn)} {'slides' if key == 'slide' else 'patients'} ({', '.join(torn[:5])})"
            raise UserError(f"{log.where}: {who} have rows that differ in {' or '.join(facts)}. Correct the table.")
    repeated = rows["slide"].duplicated()
    if repeated.any():
        log.notes.append(f"{int(repeated.sum())} rows repeat a slide with the same label; each slide is taken once")
    return rows[~repeated]


def _readings(table: Table, columns: Columns) -> list[str]:
    """What the columns were taken to mean, in words."""
    if table.task == "survival":
        status = columns.censorship or columns.event or ""
        return [describe_survival(table.cases, columns.time or "", status, censorship=columns.censorship is not None)]
    if table.task == "multilabel":
        return ["labels: " + ", ".join(f"{name} {table.frame[name].sum()}" for name in table.classes)]
    tally = table.frame["label"].value_counts()
    balance = ", ".join(f"{name} {tally.get(i, 0)}" for i, name in enumerate(table.classes))
    alone = ["warning: only one class; nothing can be learnt from it"] if len(tally) == 1 else []
    return [f"{columns.target}: {balance} (slides by class)", *alone]
