"""Spreadsheets as people keep them: titles above the header, empty first sheets, names given twice, commas, decomposed umlauts."""

import unicodedata
from pathlib import Path
from typing import Any

import openpyxl
import pandas as pd
import pytest

from gated_srp.data.imported_splits import import_split
from gated_srp.data.matching import match_slides
from gated_srp.data.spreadsheet import read_frame
from gated_srp.data.table import Columns, read_table
from gated_srp.errors import UserError

ROWS = [[f"s{i}", f"P{i // 2}", "high" if i % 3 else "low"] for i in range(8)]
HEADER = ["slide_id", "patient", "Grading"]


def book(path: Path, **sheets: list[list[Any]]) -> Path:
    made = openpyxl.Workbook()
    made.remove(made.active)
    for name, rows in sheets.items():
        sheet = made.create_sheet(name)
        for row in rows:
            sheet.append(row)
    made.save(path)
    return path


def titled(path: Path, *above: list[Any]) -> Path:
    return book(path, Data=[*above, HEADER, *ROWS])


def test_a_merged_title_above_the_header_is_left_out_and_the_row_is_named(tmp_path: Path) -> None:
    path = titled(tmp_path / "t.xlsx", ["Grading of the cohort, Heidelberg 2021", None, None], [None, None, None])
    made = openpyxl.load_workbook(path)
    made["Data"].merge_cells("A1:C1")
    made.save(path)
    table = read_table(path, Columns(target="Grading"))
    assert table.classes == ("high", "low") and list(table.frame["slide"]) == [f"s{i}" for i in range(8)]
    assert table.notes[0].what == (
        "t.xlsx: row 3 is the header; what stands above it is left out ('Grading of the cohort, Heidelberg 2021')"
    )
    path = titled(tmp_path / "m.xlsx", ["Export", "2021-03-04", None], ["By", "M. Muster", None])
    assert list(read_frame(path)[0].columns) == HEADER and read_frame(path)[0].index[0] == 4


def test_blank_rows_above_the_header_and_rows_are_numbered_as_the_spreadsheet_shows_them(tmp_path: Path) -> None:
    path = titled(tmp_path / "t.xlsx", [None, None, None], [None, None, None])
    frame, notes = read_frame(path)
    assert list(frame.columns) == HEADER and list(frame.index) == list(range(4, 12))
    assert notes[0].what == "t.xlsx: row 3 is the header"


def test_a_title_above_a_text_table_is_left_out_and_its_commas_do_not_cut_it(tmp_path: Path) -> None:
    body = "\n".join(";".join(row) for row in [HEADER, *ROWS])
    (tmp_path / "t.csv").write_text(f"Grading, of the cohort, Heidelberg\n\n{body}\n")
    frame, notes = read_frame(tmp_path / "t.csv")
    assert list(frame.columns) == HEADER and list(frame.index) == list(range(4, 12))
    assert "row 3 is the header" in notes[0].what
    (tmp_path / "t.csv").write_text(f"sep=;\n{body}\n")  # a line for Excel
    assert list(read_frame(tmp_path / "t.csv")[0].columns) == HEADER


def test_a_header_that_pandas_spoilt_is_found_in_the_row_below(tmp_path: Path) -> None:
    pd.DataFrame([HEADER, *ROWS], columns=["Cohort", "Unnamed: 1", "Unnamed: 2"]).to_csv(
        tmp_path / "t.csv", index=False
    )
    assert list(read_frame(tmp_path / "t.csv")[0].columns) == HEADER


def test_of_a_header_in_two_rows_the_second_is_taken(tmp_path: Path) -> None:
    rows = [[*row, "f", "12"] for row in ROWS]
    groups = ["Ids", None, "Pathology", "Clinic", "Follow-up"]
    path = book(tmp_path / "t.xlsx", Data=[groups, [*HEADER, "sex", "months"], *rows])
    assert list(read_frame(path)[0].columns) == [*HEADER, "sex", "months"]


def test_a_column_without_a_name_is_never_used(tmp_path: Path) -> None:
    rows = [[*row, "seen twice"] for row in ROWS]
    path = book(tmp_path / "t.xlsx", Data=[HEADER, *rows])
    with pytest.raises(UserError, match=r"its rows have more cells than the header|has no name in the header"):
        read_table(path, Columns(target="Unnamed: 3"))
    pd.DataFrame(ROWS, columns=HEADER).to_csv(tmp_path / "i.csv")  # row numbers, as pandas writes them
    assert read_table(tmp_path / "i.csv", Columns(target="Grading")).classes == ("high", "low")
    with pytest.raises(UserError, match="'Unnamed: 0' has no name in the header"):
        read_table(tmp_path / "i.csv", Columns(target="Unnamed: 0"))


def test_a_name_given_twice_is_refused_with_the_columns_letters(tmp_path: Path) -> None:
    path = book(tmp_path / "t.xlsx", Data=[[*HEADER, "Grading"], *([*row, "x"] for row in ROWS)])
    with pytest.raises(UserError, match=r"several columns are called 'Grading' \(C, D\). Rename or delete all but one"):
        read_frame(path)
    (tmp_path / "t.csv").write_text("slide_id,label,label\na,0,1\n")
    with pytest.raises(UserError, match=r"several columns are called 'label' \(B, C\)"):
        read_frame(tmp_path / "t.csv")


@pytest.mark.parametrize("first", [[], [["Please read the sheet Data."], ["Thank you."]], [["a"], [None], ["b"]]])
def test_an_empty_first_sheet_or_one_of_remarks_names_the_others(tmp_path: Path, first: list[list[Any]]) -> None:
    path = book(tmp_path / "t.xlsx", Info=first, Data=[HEADER, *ROWS], Old=[HEADER])
    with pytest.raises(
        UserError, match=r"the first sheet, 'Info': .*Other sheets: 'Data', 'Old'\. Name one with `sheet`"
    ):
        read_frame(path)
    assert len(read_frame(path, sheet="Data")[0]) == 8


def test_a_sheet_without_a_header_is_refused(tmp_path: Path) -> None:
    rows = [["Study", None, None, None], [1, 2, 3, 4], [5, 6, 7, 8], [9, 10, 11, 12]]
    with pytest.raises(UserError, match="no row names the columns; it begins with 'Study'"):
        read_frame(book(tmp_path / "t.xlsx", Data=rows))


def test_empty_cells_as_tcga_writes_them_are_empty_and_it_is_said(tmp_path: Path) -> None:
    (tmp_path / "t.tsv").write_text(
        "case_submitter_id\tgrade\nTCGA-AA-1000\tG1\nTCGA-AA-1001\t'--\nTCGA-AA-1002\t[Not Available]\n"
    )
    frame, notes = read_frame(tmp_path / "t.tsv")
    assert frame["grade"].tolist() == ["G1", None, None]
    assert "2 cells with '-- or [Not Available]" in notes[0].what


def test_decomposed_umlauts_of_files_tables_and_splits_match_composed_ones(tmp_path: Path) -> None:
    names = ["Müller_1", "Jürgen_2", "Ångström_3"]
    apart = [unicodedata.normalize("NFD", name) for name in names]
    assert apart != names
    assert list(match_slides(names, [Path(f"f/{name}.h5") for name in apart]).found) == names
    assert list(match_slides(apart, [Path(f"f/{name}.h5") for name in names]).found) == apart
    assert list(
        match_slides(
            [f"Fälle/{names[0]}"],
            [Path(unicodedata.normalize("NFD", f"Fälle/{names[0]}.h5")), Path(f"x/{names[0]}.h5")],
        ).found
    )
    cells = [
        ("a", "Müller", "größer"),
        ("b", unicodedata.normalize("NFD", "Müller"), unicodedata.normalize("NFD", "größer")),
    ]
    text = "\n".join(",".join(row) for row in [("slide", "patient", "Größe"), *cells, ("c", "Ötzi", "kleiner")])
    (tmp_path / "t.csv").write_text(text)
    table = read_table(tmp_path / "t.csv", Columns(target=unicodedata.normalize("NFD", "Größe")))
    assert table.classes == ("größer", "kleiner") and table.frame["case"].nunique() == 2
    (tmp_path / "s.json").write_text(
        f'{{"splits": [{{"train_patients": ["{unicodedata.normalize("NFD", "Müller")}"], "test_patients": ["Ötzi"]}}]}}'
    )
    split = import_split(tmp_path / "s.json", table)
    assert set(split.parts) == {"Müller", "Ötzi"}


@pytest.mark.parametrize("ending", ["csv", "xlsx"])
def test_decimal_commas_are_read_and_said(tmp_path: Path, ending: str) -> None:
    rows = [
        ["slide_id", "patient", "survival_months", "event"],
        ["a", "1", "12,5", "1"],
        ["b", "2", "7", "0"],
        ["c", "3", "0,25", "1"],
    ]
    if ending == "csv":
        path = tmp_path / "t.csv"
        path.write_text("\n".join(";".join(row) for row in rows))
    else:
        path = book(tmp_path / "t.xlsx", Data=rows)
    table = read_table(path)
    assert list(table.frame["time"]) == [12.5, 7.0, 0.25]
    assert any("'survival_months': the comma in '12,5' is read as a decimal point" in note.what for note in table.notes)


@pytest.mark.parametrize("cells", [["1,234", "2,500"], ["1,5", "2.5"], ["1.234,5", "2"]])
def test_commas_that_may_mean_thousands_are_refused(tmp_path: Path, cells: list[str]) -> None:
    (tmp_path / "t.csv").write_text(
        "slide_id;patient;time;event\n" + "".join(f"s{i};p{i};{c};1\n" for i, c in enumerate(cells))
    )
    with pytest.raises(UserError, match=r"column 'time' holds . values? that cannot be read"):
        read_table(tmp_path / "t.csv")


def test_only_line_ends_end_a_row_and_a_quotation_mark_left_open_is_refused(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text('slide_id,label\na,x\u2028y\n"b\n1",z\x0b\n')
    assert read_frame(tmp_path / "t.csv")[0].to_numpy().tolist() == [["a", "x\u2028y"], ["b\n1", "z"]]
    (tmp_path / "t.csv").write_text('slide_id,label\na,"x\nb,y\nc,z\n')
    with pytest.raises(UserError, match="a quotation mark that is not closed"):
        read_frame(tmp_path / "t.csv")
