"""A user's spreadsheet (csv, tsv, xlsx, parquet): its cells as text under its header, wherever in the file that is.

Text, because a label may spell a missing-value word: only an empty cell is missing.
"""

import csv
import re
import unicodedata
import zipfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import pandas as pd

from gated_srp.errors import Note, UserError, counted
from gated_srp.files import as_stored

_EMPTY = {"'--", "[not available]", "[not applicable]", "[not evaluated]", "[unknown]", "[discrepancy]", "[pending]"}
_UNNAMED = re.compile(r"Unnamed: \d+(_level_\d+)?")  # what pandas calls a column without a name
_NUMBER = re.compile(r"-?\d+([.,]\d+)?")
_ABOVE = 30  # rows among which the header is looked for
Cell = str | None

_UNFOLDED = 2**27  # bytes of XML: a million cells take 50 MB
_SPARSE = 100  # places per filled cell beyond which a sheet is no table
_MOST_ROWS = 10**7
_PLACE = re.compile(rb"<(?:\w+:)?(c|row)\b[^>]*?\br=\"([A-Z]{0,3})(\d{1,7})\"")


def read_frame(path: str | Path, *, sheet: str | None = None) -> tuple[pd.DataFrame, tuple[Note, ...]]:
    """The cells as stripped text (missing where empty), and notes to print. The index is the row number in the file."""
    path = as_stored(path)
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
    except Exception as error:  # damage shows as anything: openpyxl's, an XML parser's, Arrow's error
        what = f"cannot be read as a table ({type(error).__name__}: {' '.join(str(error).split())[:200]})"
        raise UserError(what, where=path, cure="Open it, check it, save it again.") from None
    frame = frame.dropna(how="all")
    if frame.empty:
        cure = "Expected a header and one row per slide or per patient."
        raise UserError("the table has no rows", where=path, cure=cure)
    marks = frame.map(lambda cell: isinstance(cell, str) and cell.casefold() in _EMPTY)
    if count := int(marks.to_numpy().sum()):
        frame = frame.mask(marks, None)
        said = f"{path.name}: {counted(count, 'cell')} with '-- or [Not Available], TCGA's marks of an empty cell, read as empty"
        notes += (Note("note", "table", said),)
    return frame, notes


def _read(path: Path, sheet: str | None) -> tuple[pd.DataFrame, tuple[Note, ...]]:
    ending = path.suffix.lower()
    if ending in {".xlsx", ".xlsm"}:
        return _read_book(path, sheet)
    if sheet is not None:
        what = "`sheet` is given but only .xlsx files have sheets"
        raise UserError(what, where=path, cure="Remove it.", kind="sheet")
    if ending == ".parquet":
        frame = _read_parquet(path)
        if frame.index.names != [None]:  # ids may have been saved as the index
            frame = frame.reset_index()
        frame.columns = pd.Index([_text(name) for name in frame.columns])
        frame.index = pd.RangeIndex(2, len(frame) + 2)  # as if the header were row 1
        return frame.apply(_as_text), ()
    if ending in {".csv", ".tsv", ".txt"}:
        with path.open(encoding="utf-8-sig", newline="") as file:
            lines = list(file)
        return _tabled(_rows(lines, _separator(lines), path), path)
    what = f"tables end in .csv, .tsv, .xlsx or .parquet, not {ending or 'nothing'!r}"
    raise UserError(what, where=path, cure="Save it as one of these.")


def _read_book(path: Path, sheet: str | None) -> tuple[pd.DataFrame, tuple[Note, ...]]:
    """A sheet of a workbook: the one that was named, else the first, which must then hold a table."""
    _check_book(path)
    with pd.ExcelFile(path, engine="openpyxl") as book:
        names = [str(name) for name in book.sheet_names]
        if sheet is not None and sheet not in names:
            cure = f"Sheets: {', '.join(names)}. Correct `sheet`."
            raise UserError(f"no sheet {sheet!r}", where=path, cure=cure, kind="sheet")
        chosen, others = sheet or names[0], names[1:]
        cells = pd.read_excel(book, sheet_name=chosen, header=None, dtype=object, keep_default_na=False, na_values=[""])
    try:
        if cells.shape[1] < 2 and others and not sheet:
            what = "holds no table" if cells.size else "is empty"
            raise UserError(what, where=path)
        frame, notes = _tabled(cells.where(cells.notna(), None).to_numpy().tolist(), path)
    except UserError as error:
        if sheet or not others:
            raise
        cure = f"Other sheets: {', '.join(map(repr, others))}. Name one with `sheet` (init: --sheet). {error.cure}"
        raise error.changed(
            what=f"the first sheet, {chosen!r}: {error.what}", cure=cure.strip(), kind="sheet"
        ) from None
    said = f"{path.name}: first sheet {chosen!r} read; `sheet` names another of {names}"
    return frame, notes if sheet or not others else (Note("note", "table", said), *notes)


def _check_book(path: Path) -> None:
    """Refuse a workbook that unfolds to what no table is, before anything is built from it."""
    with zipfile.ZipFile(path) as archive:
        size = sum(entry.file_size for entry in archive.infolist())
        if size > _UNFOLDED:
            what = f"unfolds to {size / 2**20:,.0f} MB, at most {_UNFOLDED / 2**20:,.0f} MB are read"
            raise UserError(what, where=path, cure="Keep the columns that are needed, or save the sheet as CSV.")
        for name in (name for name in archive.namelist() if name.startswith("xl/worksheets/") and name.endswith("xml")):
            found = list(_PLACE.finditer(archive.read(name)))
            cells = sum(1 for one in found if one[1] == b"c")
            last = max((int(one[3]) for one in found), default=0)
            right = max((len(one[2]), one[2]) for one in found)[1].decode() if found else ""
            width = sum((ord(sign) - 64) * 26**i for i, sign in enumerate(reversed(right)))
            if last * max(width, 1) > _SPARSE * (cells + 10_000) or last > _SPARSE * (len(found) + 1_000):
                what = f"its cells reach to {right or 'row '}{last}, but hardly any is filled"
                raise UserError(
                    what, where=path, cure="Delete what lies far right of and below the table, and save it again."
                )


def _read_parquet(path: Path) -> pd.DataFrame:
    """In parts, so that no claim of the file is believed before its rows are there."""
    from pyarrow.parquet import ParquetFile

    with ParquetFile(path) as file:
        rows = file.metadata.num_rows
        if rows > _MOST_ROWS:
            cure = "Keep the rows that are needed: one per slide or per patient."
            raise UserError(f"{rows:,} rows, which is no table of slides", where=path, cure=cure)
        frame: pd.DataFrame = file.read(use_threads=False).to_pandas()
        return frame


def _rows(lines: Sequence[str], separator: str, path: Path) -> list[list[str]]:
    """The rows of a CSV. A stray quotation mark, which would make one cell of the rows up to the next one, is an error."""
    reader, rows, line = csv.reader(lines, delimiter=separator, strict=True), [], 1
    usual = Counter(text.count(separator) for text in lines).most_common(1)
    cure = "Remove it, or double it and quote the whole cell."
    try:
        for row in reader:
            inside = lines[line - 1 : reader.line_num]
            if len(inside) > 1 and all(text.count(separator) == usual[0][0] for text in inside):
                what = f"a quotation mark makes one cell of the {len(inside)} rows from here on"
                raise UserError(what, where=f"{path}, line {line}", cure=cure)
            rows.append(row)
            line = reader.line_num + 1
    except csv.Error as error:
        what = f"a quotation mark that is not closed, or closed inside a cell ({error})"
        raise UserError(what, where=f"{path}, line {line}", cure=cure) from None
    return rows


def _separator(lines: Sequence[str]) -> str:
    """Tab, semicolon (spreadsheets in much of Europe) or comma: the one that cuts most rows into equally many cells."""

    def regular(separator: str) -> tuple[int, int]:
        sizes = Counter(len(row) for row in csv.reader(lines[:50], delimiter=separator) if len(row) > 1)
        size, rows = sizes.most_common(1)[0] if sizes else (0, 0)
        return rows, size

    return max(",;\t", key=regular)


def _tabled(cells: Sequence[Sequence[Any]], path: Path) -> tuple[pd.DataFrame, tuple[Note, ...]]:
    """Rows of cells as a table under its header, wherever that is."""
    rows = [[_text(cell) for cell in row] for row in cells]
    place = _header_row(rows)
    if place is None:
        first = next((cell for row in rows for cell in row if cell), None)
        if first is None:
            raise UserError("is empty", where=path, cure="Expected a header and one row per slide or per patient.")
        cure = "Delete what stands above the header, name every column, and give each a name of its own."
        raise UserError(f"no row names the columns; it begins with {first!r}", where=path, cure=cure, kind="header")
    width = max(len(row) for row in rows[place:])
    header, body = [*rows[place], *[None] * (width - len(rows[place]))], rows[place + 1 :]
    described = [i for i, row in enumerate(body[:2]) if any((cell or "").startswith("CDE_ID:") for cell in row)]
    body[: max(described, default=-1) + 1] = [[]] * (
        max(described, default=-1) + 1
    )  # TCGA's biotabs say it three times
    if wider := [i for i, row in enumerate(body) if any(row[len(rows[place]) :])]:
        what = f"its rows have more cells than the header, e.g. row {place + wider[0] + 2}"
        raise UserError(what, where=path, cure="Name every column in the header.")
    twice = [name for name, count in Counter(filter(None, header)).items() if count > 1]
    if twice:
        where = ", ".join(_letters(i) for i, name in enumerate(header) if name == twice[0])
        what = f"several columns are called {twice[0]!r} ({where})"
        raise UserError(what, where=path, cure="Rename or delete all but one.", kind="header")
    columns = [name if name and not _UNNAMED.fullmatch(name) else f"Unnamed: {i}" for i, name in enumerate(header)]
    body = [[*row, *[None] * (width - len(row))][:width] for row in body]
    index = pd.RangeIndex(place + 2, place + 2 + len(body))  # the rows as a spreadsheet numbers them
    frame = pd.DataFrame(body, columns=columns, index=index, dtype=object)
    empty = [name for name in columns if _UNNAMED.fullmatch(name) and frame[name].isna().all()]
    frame = frame.drop(columns=empty)
    if place == 0:
        return frame, ()
    above = [cell for row in rows[:place] for cell in row if cell]
    left = f"; what stands above it is left out ({above[0]!r}{', ...' if len(above) > 1 else ''})" if above else ""
    return frame, (Note("note", "table", f"{path.name}: row {place + 1} is the header{left}"),)


def _header_row(rows: Sequence[Sequence[Cell]]) -> int | None:
    """The first row that names nearly as many columns as rows usually fill; titles above a table fill fewer cells.

    A row below others is taken only if it can be nothing else: names, each once. Of a header in two rows (groups above, some
    columns without one) it is the second.
    """
    filled = [[cell for cell in row if cell and not _UNNAMED.fullmatch(cell)] for row in rows]
    sizes = [len(cells) for cells in filled[: 2 * _ABOVE] if cells]
    if not sizes:
        return None
    needed = min(max(0.75 * median(sizes), min(2, max(sizes))), max(sizes))
    first = next(i for i, cells in enumerate(filled) if cells)

    def names(i: int) -> bool:
        return len(set(filled[i])) == len(filled[i]) and not any(map(_NUMBER.fullmatch, filled[i]))

    for i, cells in enumerate(filled[:_ABOVE]):
        index = bool(rows[i]) and rows[i][0] in (None, "Unnamed: 0")  # a column of row numbers needs no name
        if not cells or len(cells) + index < needed:
            continue
        gaps = [k for k, cell in enumerate(rows[i]) if k and cell not in cells]
        below = rows[i + 1] if i + 2 < len(rows) and names(i + 1) else ()
        if gaps and all(k < len(below) and below[k] for k in gaps):
            return i + 1
        return i if i == first or names(i) else None
    return None


def _letters(place: int) -> str:
    """The name of a column in a spreadsheet: A, B, ..., Z, AA."""
    return (_letters(place // 26 - 1) if place >= 26 else "") + chr(ord("A") + place % 26)


def _text(cell: Any) -> Cell:
    """Stripped and with composed characters, as two systems write one umlaut differently; None where empty."""
    return unicodedata.normalize("NFC", str(cell)).strip() or None if cell is not None else None


def _as_text(column: "pd.Series[Any]") -> "pd.Series[Any]":
    """Cells as text; whole numbers that a missing neighbour made floats lose their ``.0``."""
    if pd.api.types.is_float_dtype(column) and (column.dropna() % 1 == 0).all():
        column = column.astype("Int64")
    text = column.astype(object).map(_text, na_action="ignore")
    return text.where(text.notna(), None)
