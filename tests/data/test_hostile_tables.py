"""Tables and settings made to harm, or damaged: a clear error, in little time and memory."""

import resource
import time
import zipfile
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from gated_srp.config import load_config
from gated_srp.data.annotations import read_annotations
from gated_srp.data.imported_splits import import_split
from gated_srp.data.prediction_tables import read_any_predictions
from gated_srp.data.spreadsheet import read_frame
from gated_srp.data.table import Table, read_table
from gated_srp.errors import UserError
from gated_srp.records import read_rows
from gated_srp.study.results import read_results

TABLE = pd.DataFrame(
    {"slide_id": [f"s{i}" for i in range(8)], "case_id": [f"p{i}" for i in range(8)], "label": list("abababab")}
)


@contextmanager
def little():
    """At most 5 s of processor and 1 GB."""
    before = resource.getrusage(resource.RUSAGE_SELF)
    started = time.process_time()
    yield
    assert time.process_time() - started < 5
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before.ru_maxrss < 1_000_000  # kB


def _refused(path: Path, read=read_frame) -> UserError:
    with little(), pytest.raises(UserError) as caught:
        read(path)
    assert str(path) in str(caught.value) and caught.value.cure
    return caught.value


def _outcome(path: Path) -> pd.DataFrame | None:
    """The table, or None where it was refused by name."""
    try:
        return read_frame(path)[0]
    except UserError as error:
        if str(path) not in str(error):
            raise AssertionError(str(error)) from error
    return None


def _book(path: Path, sheet: str) -> Path:
    """A workbook with this XML as its sheet."""
    TABLE.to_excel(path, index=False)
    with zipfile.ZipFile(path) as old:
        parts = {name: old.read(name) for name in old.namelist()}
    space = "http://schemas.openxmlformats.org/spreadsheetml/2006/main"
    parts["xl/worksheets/sheet1.xml"] = (
        f'<worksheet xmlns="{space}"><sheetData>{sheet}</sheetData></worksheet>'.encode()
    )
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as new:
        for name, content in parts.items():
            new.writestr(name, content)
    return path


_CELL = '<c r="{}" t="inlineStr"><is><t>{}</t></is></c>'
_ROWS = "".join(f'<row r="{i}">{_CELL.format(f"A{i}", f"s{i}")}{_CELL.format(f"B{i}", "x")}</row>' for i in range(1, 9))


@pytest.mark.parametrize(
    ("place", "said"),
    [
        ('<row r="1048576"><c r="XFD1048576"><v>1</v></c></row>', "XFD1048576"),
        ('<row r="1048576"><c><v>1</v></c></row>', "B1048576"),
        ('<row r="400000"><c><v>1</v></c></row>', "B400000"),
    ],
)
def test_a_cell_at_the_end_of_the_sheet_is_refused_at_once(tmp_path, place, said):
    assert said in _refused(_book(tmp_path / "t.xlsx", _ROWS + place)).what


def test_a_workbook_that_unfolds_beyond_measure_is_refused_at_once(tmp_path):
    row = "<row>" + "<c><v>1</v></c>" * 50 + "</row>"
    path = _book(tmp_path / "t.xlsx", row * 250_000)
    assert path.stat().st_size < 2**20
    assert "unfolds" in _refused(path).what


def test_a_workbook_with_ordinary_gaps_is_read(tmp_path):
    frame, _ = read_frame(_book(tmp_path / "t.xlsx", _ROWS + f'<row r="400">{_CELL.format("A400", "s400")}</row>'))
    assert frame.iloc[-1].tolist() == ["s400", None]


@pytest.mark.parametrize(
    "part", ["xl/worksheets/sheet1.xml", "xl/workbook.xml", "xl/styles.xml", "[Content_Types].xml"]
)
@pytest.mark.parametrize("damage", [b"", b"<a", b"<a/>", b"\0\1\2", b"<!DOCTYPE a [<!ENTITY x 'y'>]><a>&x;</a>"])
def test_a_damaged_part_of_a_workbook_is_an_error_of_ours_or_does_no_harm(tmp_path, part, damage):
    path = tmp_path / "t.xlsx"
    TABLE.to_excel(path, index=False)
    with zipfile.ZipFile(path) as old:
        parts = {name: old.read(name) for name in old.namelist()}
    with zipfile.ZipFile(path, "w") as new:
        for name, content in (parts | {part: damage}).items():
            new.writestr(name, content)
    frame = _outcome(path)
    assert frame is None or frame["slide_id"].tolist() == TABLE["slide_id"].tolist()


def test_a_parquet_damaged_anywhere_is_an_error_of_ours_or_a_table(tmp_path):
    path, rng = tmp_path / "t.parquet", np.random.default_rng(0)
    TABLE.to_parquet(path)
    whole = bytearray(path.read_bytes())
    for _ in range(120):
        damaged = whole.copy()
        for at in rng.integers(0, len(whole), 4):
            damaged[at] = rng.integers(0, 256)
        path.write_bytes(damaged)
        _outcome(path)


def test_a_parquet_of_a_thousand_million_equal_rows_is_refused(tmp_path):
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows = pa.table({"slide_id": pa.array(["s"] * 1_000_000).dictionary_encode(), "label": pa.array([1] * 1_000_000)})
    with pq.ParquetWriter(tmp_path / "t.parquet", rows.schema) as writer:
        for _ in range(30):
            writer.write_table(rows)
    assert "30,000,000 rows" in _refused(tmp_path / "t.parquet").what


# Quotation marks ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ('slide_id,label\ns1,a\ns2,"b\ns3,a\ns4,b\n', 3),  # to the end of the file
        ('slide_id,label\ns1,"a\ns2,b\ns3,a"\ns4,b\n', 2),  # to the next one, as if rows were a cell
        ('slide_id,label,note\ns1,"a,x\ns2,b",y\ns3,a,z\n', 2),
        ('slide_id,label\ns1,"a"b\ns2,b\n', 2),
    ],
)
def test_a_stray_quotation_mark_that_swallows_rows_is_an_error_with_its_line(tmp_path, text, line):
    path = tmp_path / "t.csv"
    path.write_text(text)
    error = _refused(path)
    assert f"line {line}" in str(error) and "quotation mark" in str(error)


def test_cells_with_line_breaks_and_quotation_marks_inside_are_read(tmp_path):
    path = tmp_path / "t.csv"
    path.write_text('slide_id,label,note\ns1,a,"first, second\nthird"\ns2,b,5" core\ns3,a,"say ""yes"""\n')
    assert read_frame(path)[0]["note"].tolist() == ["first, second\nthird", '5" core', 'say "yes"']


# Numbers --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "number", ["1e2147483648", "1e3000000000", "-3E+3000000000", "1e-99999", "12345e0002147483644"]
)
def test_a_number_whose_exponent_pandas_crashes_on_is_refused_with_its_row(tmp_path, number):
    for name, text, read in [
        ("t.csv", f"slide_id,time,event\ns1,3,1\ns2,{number},0\n", lambda path: read_table(path, task="survival")),
        ("r.csv", f"cohort,arm,seed,metric,value\nc,na,1,f1,0.5\nc,xsa,1,f1,{number}\n", read_results),
    ]:
        (tmp_path / name).write_text(text)
        assert "row 3" in str(_refused(tmp_path / name, read))
    (tmp_path / "p.csv").write_text(f"PATIENT,pred_score,time,event\np1,0.5,3,1\np2,{number},4,0\n")
    assert "row 3" in str(_refused(tmp_path / "p.csv", read_any_predictions))


def test_such_a_number_in_a_table_of_annotated_patches_is_refused(tmp_path):
    (tmp_path / "a.csv").write_text("x,y,tumour\n0,0,1\n1e2147483648,0,0\n")
    _refused(tmp_path / "a.csv", lambda path: read_annotations(path, side=512.0))


def test_such_a_number_in_a_file_of_our_own_is_refused_with_its_row(tmp_path):
    (tmp_path / "own.csv").write_text("epoch,loss\n1,0.5\n2,1e2147483648\n")
    error = _refused(tmp_path / "own.csv", lambda path: read_rows(path, cure="Do.", numbers=["loss"]))
    assert "row 3: loss is '1e2147483648', no number" in str(error)


# Empty columns --------------------------------------------------------------------------------------------------------


def test_an_empty_column_of_values_is_an_error(tmp_path):
    path = tmp_path / "r.csv"
    path.write_text("cohort,arm,seed,metric,value\nc,na,1,f1,\nc,xsa,1,f1,\n")
    assert "value" in _refused(path, read_results).what


@pytest.mark.parametrize(
    "text", ["slide_id,split\ns0,\ns1,\n", "train,val,test\n,s1,\n", "slide_id,train,val,test\ns0,,,\n"]
)
def test_an_empty_column_of_a_split_is_an_error(tmp_path, text):
    path = tmp_path / "s.csv"
    path.write_text(text)
    table = Table(TABLE.assign(label=0).set_axis(["slide", "case", "label"], axis=1), "classification", ("a", "b"))
    _refused(path, lambda path: import_split(path, table))


# Settings -------------------------------------------------------------------------------------------------------------


def _yaml(folder: Path, text: str) -> Path:
    TABLE.to_csv(folder / "t.csv", index=False)
    path = folder / "cohort.yaml"
    path.write_text(text)
    return path


def test_anchors_that_multiply_are_refused_at_once(tmp_path):
    text = "a: &a [" + "x, " * 300 + "]\nb: &b [" + "*a, " * 300 + "]\narms: [" + "*b, " * 300 + "]\n"
    assert "anchors" in _refused(_yaml(tmp_path, text), load_config).what


def test_an_anchor_that_is_used_twice_is_read(tmp_path):
    path = _yaml(tmp_path, "table: t.csv\nfeatures: f\ntarget: &x label\nsite: *x\n")
    assert load_config(path).site == "label"


def test_a_name_that_no_folder_should_have_is_told_in_words(tmp_path):
    path = _yaml(tmp_path, "name: -inf\ntable: t.csv\nfeatures: f\ntarget: label\n")
    with pytest.raises(UserError, match=r"line 1: name: should be letters, digits, .* found '-inf'"):
        load_config(path)


@pytest.mark.parametrize(
    "line",
    [
        *("task: [x]", "task: {a: b}", "window: 1000000001", "cohort: [x]", "encoder: [x]", "train: 3", "model: [1]", "folds: []"),
        *("classes: {a: 1}", "arms: {a: 1}", "seeds: [[1]]", "images: [1]", "cache: [1]", "sheet: [x]", "name: [x]", "cap: 1e400"),
        *('features: "a\\0b"', 'out: "a\\0b"', f"features: {'a' * 300}", f"table: {'a/' * 3000}", 'split: "\\0"'),
        *("model: {dim: 1000000000}", "model: {depth: 100000000}", "target: [[a]]", "slides: [a]", "labels: [a]", "stride: [1]"),
    ],
)  # fmt: skip
def test_settings_of_the_wrong_kind_are_errors_that_name_the_file(tmp_path, line):
    key = line.split(":")[0]
    base = {"table": "table: t.csv", "features": "features: f", "target": "target: label"}
    assert load_config(_yaml(tmp_path, "\n".join([*base.values(), ""]))).window == 3, (
        "without the line nothing is wrong"
    )
    base.pop(key, None)
    path = _yaml(tmp_path, "\n".join([*base.values(), line, ""]))
    with little(), pytest.raises(UserError) as caught:
        load_config(path)
    assert "cohort.yaml" in str(caught.value)
