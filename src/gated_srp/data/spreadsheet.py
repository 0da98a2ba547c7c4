"""A user's spreadsheet (csv, tsv, xlsx, parquet): its cells as text, and which column holds what.

Text, because a label may spell a missing-value word: only an empty cell is missing. A column is named in the config or found by
its usual name; doubt is an error, not a guess.
"""

import difflib
import re
import zipfile
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from gated_srp.errors import Note, UserError
from gated_srp.tasks import TASKS, Task, find_task, named_task

_TEXT: dict[str, Any] = {"dtype": str, "keep_default_na": False, "na_values": [""]}

# In the order of preference, without case and punctuation (`plain`).
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
}  # of ids; those of labels belong to the task: `Task.usual`


def read_frame(path: str | Path, *, sheet: str | None = None) -> tuple[pd.DataFrame, tuple[Note, ...]]:
    """The cells as stripped text (missing where empty), and notes to print. The index is the row number in the file."""
    path = Path(path)
    if not path.is_file():
        cure = "Expected a .csv, .tsv, .xlsx or .parquet file; correct `table`."
        raise UserError("no such table", where=path, cure=cure, kind="missing")
    try:
        frame, notes = _read(path, sheet)
    except UserError:
        raise
    except UnicodeDecodeError as error:
        cure = "Save the table again as 'CSV UTF-8' or as .xlsx."
        raise UserError(f"not UTF-8 text ({error.reason})", where=path, cure=cure) from None
    except (ValueError, OSError, KeyError, zipfile.BadZipFile) as error:
        what = f"cannot be read as a table ({error})"
        raise UserError(what, where=path, cure="Open it, check it, save it again.") from None
    frame.columns = pd.Index([str(name).strip() for name in frame.columns])
    frame = frame.apply(_as_text)
    frame.index = pd.RangeIndex(2, len(frame) + 2)  # the header is row 1, as a spreadsheet shows it
    frame = frame.dropna(how="all")
    if frame.empty:
        cure = "Expected a header and one row per slide or per patient."
        raise UserError("the table has no rows", where=path, cure=cure)
    return frame, notes


def _read(path: Path, sheet: str | None) -> tuple[pd.DataFrame, tuple[Note, ...]]:
    ending = path.suffix.lower()
    if ending in {".xlsx", ".xlsm"}:
        with pd.ExcelFile(path, engine="openpyxl") as book:
            names = [str(name) for name in book.sheet_names]
            if sheet is not None and sheet not in names:
                cure = f"Sheets: {', '.join(names)}. Correct `sheet`."
                raise UserError(f"no sheet {sheet!r}", where=path, cure=cure, kind="sheet")
            chosen = sheet or names[0]
            said = f"{path.name}: first sheet {chosen!r} read; `sheet` names another of {names}"
            notes = () if sheet or len(names) == 1 else (Note("note", "table", said),)
            return pd.read_excel(book, sheet_name=chosen, **_TEXT), notes
    if sheet is not None:
        what = "`sheet` is given but only .xlsx files have sheets"
        raise UserError(what, where=path, cure="Remove it.", kind="sheet")
    if ending == ".parquet":
        frame = pd.read_parquet(path)
        if frame.index.names != [None]:  # ids may have been saved as the index
            frame = frame.reset_index()
        return frame, ()
    if ending in {".csv", ".tsv", ".txt"}:
        frame = pd.read_csv(path, sep=_separator(path), encoding="utf-8-sig", skip_blank_lines=False, **_TEXT)
        if not isinstance(frame.index, pd.RangeIndex):  # pandas then takes the first column for an index
            cure = "Name every column in the header."
            raise UserError("its rows have more cells than the header", where=path, cure=cure)
        return frame, ()
    what = f"tables end in .csv, .tsv, .xlsx or .parquet, not {ending or 'nothing'!r}"
    raise UserError(what, where=path, cure="Save it as one of these.")


def _separator(path: Path) -> str:
    """Tab, semicolon (spreadsheets in much of Europe) or comma: the one most frequent in the header."""
    with path.open(encoding="utf-8-sig") as file:
        header = file.readline()
    return max(",;\t", key=header.count)


def _as_text(column: "pd.Series[Any]") -> "pd.Series[Any]":
    """Cells as stripped text; whole numbers that a missing neighbour made floats lose their ``.0``."""
    if pd.api.types.is_float_dtype(column) and (column.dropna() % 1 == 0).all():
        column = column.astype("Int64")
    text = column.astype(object).map(lambda cell: str(cell).strip(), na_action="ignore")
    return text.where(text.notna() & (text != ""), None)


# Columns --------------------------------------------------------------------------------------------------------------


def pick_column(frame: pd.DataFrame, name: str, where: str | Path) -> str:
    """The column that the user named: exactly, or the only one that agrees apart from case and punctuation."""
    if name in frame.columns:
        return name
    alike = [column for column in frame.columns if plain(column) == plain(name)]
    if len(alike) == 1:
        return alike[0]
    near = difflib.get_close_matches(name, list(frame.columns), n=1, cutoff=0.5)
    hint = f"Did you mean {near[0]!r}? " if near else ""
    raise UserError(f"no column {name!r}", where=where, cure=f"{hint}{listed(frame)}", kind="column")


def usual_columns(frame: pd.DataFrame, usual: Iterable[str]) -> list[str]:
    """Columns under one of the usual names, in the order of those names."""
    return [column for name in usual for column in frame.columns if plain(column) == name]


def listed(frame: pd.DataFrame) -> str:
    """The columns there are, for an error message."""
    return f"Columns: {', '.join(map(str, frame.columns))}."


def plain(name: str) -> str:
    """A column's name without case and punctuation.

    >>> plain("OS.time"), plain("Patient Id")
    ('os_time', 'patient_id')
    """
    return re.sub(r"[^a-z0-9]+", "_", name.casefold()).strip("_")


@dataclass(frozen=True)
class Columns:
    """Which column holds what; None: found by its usual name. Several targets: one 0/1 column per label."""

    slide: str | None = None
    case: str | None = None
    target: str | tuple[str, ...] | None = None
    time: str | None = None
    event: str | None = None
    censorship: str | None = None
    site: str | None = None


@dataclass(frozen=True, eq=False)
class Header:
    """The columns of a table, as a task looks for its own among them."""

    frame: pd.DataFrame
    where: Path

    def usual(self, names: Collection[str]) -> list[str]:
        """Columns with one of these usual names."""
        return usual_columns(self.frame, names)

    def only(self, key: str, names: Collection[str]) -> str:
        """The one column with a usual name; none or several is an error that asks for the setting ``key``."""
        found = self.usual(names)
        if len(found) == 1:
            return found[0]
        seen = f"several columns could be the {key} ({', '.join(found)})" if found else f"no usual {key} column"
        raise self.error(seen, f"Name it with `{key}` in the config.")

    def error(self, what: str, cure: str) -> UserError:
        """An error that names the table and lists its columns."""
        return UserError(what, where=self.where, cure=f"{cure} {listed(self.frame)}".strip())


def resolve_columns(
    frame: pd.DataFrame, columns: Columns, task: str | None, where: Path
) -> tuple[Columns, str, tuple[Note, ...]]:
    """Every column by its name in the file, the task that these columns allow, and notes to print."""
    named: dict[str, Any] = {}
    for key, value in vars(columns).items():
        if isinstance(value, tuple):
            named[key] = tuple(pick_column(frame, name, where) for name in value)
        elif value is not None:
            named[key] = pick_column(frame, value, where)
    notes: list[Note] = []
    for key in USUAL:
        found = [name for name in usual_columns(frame, USUAL[key]) if name not in named.values()]
        if key not in named and found:
            named[key] = found[0]
            notes += _others(frame, key, found, where)
    header = Header(frame, where)
    kind = find_task(task) if task else _only_task(columns, header)
    return Columns(**named | kind.find_columns(named, header)), kind.name, tuple(notes)


def _others(frame: pd.DataFrame, key: str, found: list[str], where: Path) -> list[Note]:
    """Two patient columns that group differently would leak patients across splits: the user must say which counts."""
    first = found[0]
    pairs = {name: frame[[first, name]] for name in found[1:]}
    differ = [name for name, two in pairs.items() if len(two.drop_duplicates()) != min(two.nunique(dropna=False))]
    if key == "case" and differ:
        what = f"{first!r} and {differ[0]!r} group slides differently"
        raise UserError(what, where=where, cure="Name the patients with `case`.", kind="column")
    said = f"{key}: column {first!r} (also seen: {', '.join(found[1:])})"
    return [Note("note", "table", said)] if len(found) > 1 else []


def _only_task(columns: Columns, header: Header) -> type[Task]:
    """The task that the named columns mean; where none is named, the only one whose usual columns are there."""
    if kind := named_task(vars(columns)):
        return kind
    seen = [kind for kind in TASKS.values() if kind.seen_in(header)]
    if len(seen) == 1 and columns.target is None:
        return seen[0]
    what = f"columns for {' and for '.join(kind.subject for kind in seen)}" if seen else "no usual label column"
    raise header.error(what, "Set `task`, and name `target`, or `time` with `event` or `censorship`.")
