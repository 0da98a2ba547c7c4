"""Users' tables, as they come."""

import unicodedata
from pathlib import Path

import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gated_srp.data.matching import match_slides
from gated_srp.data.table import Columns, Table, read_table
from gated_srp.errors import UserError


def write(folder: Path, text: str, name: str = "t.csv") -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


def rows(table: Table, *names: str) -> list[tuple[object, ...]]:
    return list(table.frame[list(names)].itertuples(index=False, name=None))


WORDS = ["NA", "None", "nan", "null"]


@pytest.mark.parametrize("ending", ["csv", "tsv", "xlsx", "parquet"])
def test_words_for_missing_stay_labels_if_told_so_and_an_empty_cell_is_missing_in_every_format(
    tmp_path: Path, ending: str
) -> None:
    frame = pd.DataFrame({"slide_id": list("abcde"), "case_id": list("12345"), "label": [*WORDS, None]})
    path = tmp_path / f"t.{ending}"
    if ending == "xlsx":
        frame.to_excel(path, index=False)
    elif ending == "parquet":
        frame.to_parquet(path)
    else:
        frame.to_csv(path, index=False, sep="\t" if ending == "tsv" else ",")
    with pytest.raises(UserError, match=r"'NA' \(1 slide\), .*: classes, or words for a label that is missing\?"):
        read_table(path)
    table = read_table(path, missing=[])
    assert table.classes == ("NA", "None", "nan", "null")
    assert rows(table, "slide", "case", "label") == [("a", "1", 0), ("b", "2", 1), ("c", "3", 2), ("d", "4", 3)]
    assert table.dropped == ("row 6 (e): no label",)
    assert "dropped 1 row: no label (e)" in [note.what for note in table.notes]


@pytest.mark.parametrize("word", ["unknown", "n/a", "-", "Unbekannt", "#N/A", "not reported"])
def test_a_label_that_may_be_missing_is_asked_about_and_never_a_silent_class(tmp_path: Path, word: str) -> None:
    path = write(tmp_path, f"slide_id,case_id,label\na,1,1\nb,2,0\nc,3,{word}\nd,4,{word}\n")
    with pytest.raises(UserError, match=r"\(2 slides\): a class, or words") as refused:
        read_table(path)
    assert "`missing: []` to keep them as classes" in refused.value.cure and refused.value.kind == "missing_labels"
    left = read_table(path, missing=[word.upper()])
    assert left.classes == ("0", "1") and left.dropped == ("row 4 (c): no label", "row 5 (d): no label")
    assert set(read_table(path, missing=[]).classes) == {"0", "1", word}
    assert read_table(path, classes=["0", "1", word]).classes == ("0", "1", word)  # named: a class


def test_the_balance_of_classes_cannot_be_misread(tmp_path: Path) -> None:
    table = read_table(write(tmp_path, "slide_id,case_id,grade\na,1,0\nb,2,1\nc,3,1\n"), Columns(target="grade"))
    assert table.notes[-1].what == "slides by grade: 1 of '0', 2 of '1'"


def test_a_sheet_is_chosen_by_name_and_without_one_the_first_is_read_with_a_note(tmp_path: Path) -> None:
    path = tmp_path / "t.xlsx"
    with pd.ExcelWriter(path) as book:
        pd.DataFrame({"slide": ["a", "b"], "case": [1, 2], "label": [0, 1]}).to_excel(
            book, sheet_name="first", index=False
        )
        pd.DataFrame({"slide": ["c", "d"], "case": [1, 2], "label": [1, 0]}).to_excel(
            book, sheet_name="second", index=False
        )
    assert rows(read_table(path, sheet="second"), "slide", "case", "label") == [("c", "1", 1), ("d", "2", 0)]
    first = read_table(path)
    assert list(first.frame["slide"]) == ["a", "b"]
    assert "first sheet 'first' read" in first.notes[0].what
    with pytest.raises(UserError, match=r"no sheet 'third'. Sheets: first, second"):
        read_table(path, sheet="third")


def test_a_table_of_europe_with_a_byte_order_mark_and_semicolons_is_read(tmp_path: Path) -> None:
    path = write(tmp_path, "\ufeffSlide ID;Patient;Label\n a ;1;tumour\nb;1;normal\n\n")
    table = read_table(path)
    assert rows(table, "slide", "case", "label") == [("a", "1", 1), ("b", "1", 0)]
    assert table.classes == ("normal", "tumour")


def test_classes_of_numbers_are_sorted_by_value_and_an_added_decimal_is_no_new_class(tmp_path: Path) -> None:
    path = write(tmp_path, "slide_id,case_id,label\na,1,10.0\nb,2,2\nc,3,2.0\nd,4,\n")
    table = read_table(path)
    assert table.classes == ("2", "10")
    assert list(table.frame["label"]) == [1, 0, 0]


def test_named_classes_give_the_order_and_leave_the_others_out_by_name(tmp_path: Path) -> None:
    path = write(tmp_path, "slide_id,case_id,label\na,1,x\nb,2,y\nc,3,normal\n")
    table = read_table(path, classes=["y", "x"])
    assert list(table.frame["label"]) == [1, 0]
    assert table.dropped == ("row 4 (c): its label is none of `classes`",)
    with pytest.raises(UserError, match=r"no row of class z in column 'label'. Found: normal, x, y"):
        read_table(path, classes=["y", "z"])


def test_a_column_of_measurements_is_refused_as_classes(tmp_path: Path) -> None:
    body = "".join(f"s{i},p{i},{i / 7}\n" for i in range(30))
    with pytest.raises(UserError, match="30 different values in 30 rows"):
        read_table(write(tmp_path, "slide_id,case_id,label\n" + body))


def test_a_named_column_may_differ_in_case_and_a_wrong_name_gets_a_suggestion(tmp_path: Path) -> None:
    path = write(tmp_path, "slide_id,case_id,Tumour Type\na,1,x\nb,2,y\n")
    assert read_table(path, Columns(target="tumour_type")).classes == ("x", "y")
    with pytest.raises(UserError, match=r"no column 'tumor_typ'. Did you mean 'Tumour Type'\?"):
        read_table(path, Columns(target="tumor_typ"))
    with pytest.raises(UserError, match="no usual label column"):
        read_table(path)


# Slides and patients


def test_several_slides_in_one_cell_become_rows_of_the_same_patient(tmp_path: Path) -> None:
    table = read_table(write(tmp_path, 'patient,slide,label\nP1,"a; b",0\nP2,c|d,1\nP3,"e,f",1\nP4,g,0\n'))
    assert rows(table, "slide", "case", "label") == [
        *[("a", "P1", 0), ("b", "P1", 0), ("c", "P2", 1), ("d", "P2", 1)],
        *[("e", "P3", 1), ("f", "P3", 1), ("g", "P4", 0)],
    ]
    assert "several slides in 3 cells of 'slide'; each becomes a row" in [note.what for note in table.notes]


def test_a_cell_that_names_a_file_is_one_slide_whatever_signs_are_in_its_name(tmp_path: Path) -> None:
    path = write(tmp_path, 'patient,slide,label\nP1,"s,1 x.svs",0\nP2,"f/a.svs,f/b.svs",1\n')
    table = read_table(path, files=[Path(f"f/{name}.h5") for name in ("S,1 x", "a", "b")])
    assert rows(table, "slide", "case") == [("s,1 x.svs", "P1"), ("f/a.svs", "P2"), ("f/b.svs", "P2")]


def test_a_patients_row_stands_for_all_files_that_start_with_the_patients_id(tmp_path: Path) -> None:
    path = write(tmp_path, "patient,label\nP1,0\nP10,1\nP3,1\n")
    table = read_table(path, files=[Path("f/P1_a.h5"), Path("f/P1_b.svs.h5"), Path("f/P10.h5"), Path("f/other.h5")])
    assert rows(table, "slide", "case", "label") == [("P1_a", "P1", 0), ("P1_b", "P1", 0), ("P10", "P10", 1)]
    assert table.dropped == ("row 4 (P3): no file starts with the patient's id",)


def test_a_blank_slide_cell_is_filled_from_the_files_and_a_full_one_kept(tmp_path: Path) -> None:
    path = write(tmp_path, "patient,slide,label\nP1,,0\nP2,own,1\n")
    assert rows(read_table(path, files=["P1_x.h5"]), "slide", "case") == [("P1_x", "P1"), ("own", "P2")]
    assert read_table(path).dropped == ("row 2 (P1): no slide",)


def test_a_patient_table_without_files_keeps_the_patients_with_a_warning(tmp_path: Path) -> None:
    table = read_table(write(tmp_path, "patient,label\nP1,0\nP2,1\n"))
    assert rows(table, "slide", "case") == [("P1", "P1"), ("P2", "P2")]
    assert any(note.line.startswith("warning: no slide column") for note in table.notes)


def test_a_clinical_table_is_joined_to_a_slide_table_and_the_unpartnered_are_listed(tmp_path: Path) -> None:
    clinical = write(tmp_path, "PATIENT,KRAS\nP1,mut\nP2,wt\nP3,wt\n", "clini.csv")
    slides = write(tmp_path, "PATIENT,FILENAME\nP1,sub/a.h5\nP1,sub/b.h5\nP2,c.h5\nP9,d.h5\n", "slides.csv")
    table = read_table(clinical, Columns(target="KRAS"), slide_table=slides)
    assert rows(table, "slide", "case", "label") == [("sub/a.h5", "P1", 0), ("sub/b.h5", "P1", 0), ("c.h5", "P2", 1)]
    assert table.dropped == ("row 5 (d.h5): its patient is not in clini.csv", "row 4 (P3): no slide in slides.csv")


def test_a_tcga_barcode_gives_patient_and_site_with_notes(tmp_path: Path) -> None:
    body = "TCGA-3Z-A93Z-01Z-00-DX1.79F4.svs,0\ntcga-6d-aa2e-01Z-00-DX1,1\n"
    table = read_table(write(tmp_path, "slide_id,label\n" + body))
    assert list(table.frame["case"]) == ["TCGA-3Z-A93Z", "TCGA-6D-AA2E"]
    assert list(table.frame["site"]) == ["3Z", "6D"]
    assert "no patient column: patient = first 12 characters of the TCGA barcode (2 patients)" in [
        note.what for note in table.notes
    ]


def test_without_patients_each_slide_is_its_own_with_a_warning(tmp_path: Path) -> None:
    table = read_table(write(tmp_path, "slide_id,label\na,0\nb,1\n"))
    assert list(table.frame["case"]) == ["a", "b"]
    assert any(
        note.line.startswith("warning: no patient column: 2 slides counted as a patient each") for note in table.notes
    )


def test_a_patient_spelt_in_two_ways_is_warned_about(tmp_path: Path) -> None:
    body = "a,P 07,0\nb,p07,1\nc,P8,0\nd,P8,1\n"
    table = read_table(write(tmp_path, "slide_id,case_id,label\n" + body))
    (said,) = [note for note in table.notes if note.kind == "patients"]
    assert "'case_id' has several ids for 1 patient, but for capitals or spaces (P 07, p07)" in said.what
    assert said.level == "warning" and table.patients == "unknown"
    chosen = read_table(tmp_path / "t.csv", Columns(case="none"))
    assert chosen.patients == "slide" and not [note for note in chosen.notes if note.kind == "patients"]


@pytest.mark.parametrize("classes", [None, ["0", "1"]])
def test_slides_of_a_patient_that_may_be_missing_are_asked_about_and_never_one_patient(
    tmp_path: Path, classes: list[str] | None
) -> None:
    path = write(tmp_path, "slide_id,case_id,label\na,NA,0\nb,NA,1\nc,NA,0\nd,P1,1\ne,-,0\n")
    with pytest.raises(
        UserError, match=r"'NA' \(3 slides\): a patient, or words for a patient that is miss"
    ) as refused:
        read_table(path, classes=classes)
    assert refused.value.kind == "missing_patients" and "`missing: [NA]`" in refused.value.cure
    left = read_table(path, classes=classes, missing=["NA"])
    assert list(left.frame["case"]) == ["a", "b", "c", "P1", "-"] and left.patients == "partly"
    assert list(read_table(path, classes=classes, missing=[]).frame["case"]) == ["NA", "NA", "NA", "P1", "-"]


def test_two_patient_columns_that_group_differently_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="'case_id' and 'patient' group slides differently"):
        read_table(write(tmp_path, "slide_id,case_id,patient,label\na,1,x,0\nb,2,x,1\n"))
    same = read_table(write(tmp_path, "slide_id,case_id,patient,label\na,1,x,0\nb,2,y,1\n"))
    assert list(same.frame["case"]) == ["1", "2"]


@pytest.mark.parametrize("evil", ["../../etc/passwd", "..\\x", "a/../b"])
def test_an_id_that_climbs_is_dropped_with_its_reason(tmp_path: Path, evil: str) -> None:
    table = read_table(write(tmp_path, f"slide_id,case_id,label\na,1,0\n{evil},2,1\nc,3,1\n"))
    assert list(table.frame["slide"]) == ["a", "c"]
    assert table.dropped == (f"row 3 ({evil}): its id holds '..', which no file name needs",)


def test_a_slide_with_two_labels_is_refused_and_one_repeated_is_taken_once(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"1 slide \(a\) with rows that differ in case or label"):
        read_table(write(tmp_path, "slide_id,case_id,label\na,1,0\na,1,1\n"))
    table = read_table(write(tmp_path, "slide_id,case_id,label\na,1,0\na,1,0\nb,2,1\n"))
    assert list(table.frame["slide"]) == ["a", "b"]
    assert any("1 row repeats a slide" in note.what for note in table.notes)


def test_a_full_path_is_no_longer_absolute_and_still_finds_its_file(tmp_path: Path) -> None:
    table = read_table(write(tmp_path, "slide_id,case_id,label\n/data/p1/a.h5,1,0\nC:\\data\\p2\\a.h5,2,1\n"))
    assert list(table.frame["slide"]) == ["data/p1/a.h5", "data\\p2\\a.h5"]
    files = [Path("x/data/p1/a.h5"), Path("x/data/p2/a.h5")]
    assert list(match_slides(list(table.frame["slide"]), files).found.values()) == files


def test_ids_that_a_parquet_file_keeps_as_its_index_are_read(tmp_path: Path) -> None:
    frame = pd.DataFrame({"case_id": ["1", "2"], "label": [0.0, 1.0]}, index=pd.Index(["a", "b"], name="slide_id"))
    frame.to_parquet(tmp_path / "t.parquet")
    assert rows(read_table(tmp_path / "t.parquet"), "slide", "label") == [("a", 0), ("b", 1)]


def test_a_column_named_for_one_thing_is_not_found_again_for_another(tmp_path: Path) -> None:
    table = read_table(write(tmp_path, "patient,label\np_1,0\np_2,1\n"), Columns(slide="patient"))
    assert any(note.line.startswith("warning: no patient column") for note in table.notes)
    asked = read_table(write(tmp_path, "patient,label\np_1,0\np_2,1\n"), Columns(slide="patient", case="patient"))
    assert not any("no patient column" in note.what for note in asked.notes) and asked.patients == "slide"


# Survival


def test_censorship_is_turned_into_events_and_the_reading_is_printed(tmp_path: Path) -> None:
    body = "a,1,12,1\nb,1,12,1\nc,2,24,0\nd,3,36,1\ne,4,30,1\n"
    table = read_table(write(tmp_path, "slide_id,case_id,survival_months,censorship\n" + body))
    assert table.task == "survival"
    assert table.classes == ()
    assert rows(table, "time", "event") == [(12.0, 0), (12.0, 0), (24.0, 1), (36.0, 0), (30.0, 0)]
    assert table.notes[-1].what == (
        "censorship: 1 = censored -> event = 1 - censorship; 25 % events; median follow-up 2.2 y (4 patients)"
    )


@pytest.mark.parametrize(
    ("column", "cells", "events"),
    [
        ("event", ["1", "0", "1.0"], [1, 0, 1]),
        ("vital_status", ["Dead", "alive", "DECEASED"], [1, 0, 1]),
        ("OS_STATUS", ["1:DECEASED", "0:LIVING", "0 : living"], [1, 0, 0]),
        ("status", ["event", "censored", "yes"], [1, 0, 1]),
        ("censored", ["yes", "No", "TRUE"], [0, 1, 0]),
        ("os_censorship", ["censored", "event", "0"], [0, 1, 1]),
    ],
)
def test_known_words_for_events_are_read(tmp_path: Path, column: str, cells: list[str], events: list[int]) -> None:
    body = "".join(f"s{i},p{i},{i + 1},{cell}\n" for i, cell in enumerate(cells))
    assert list(read_table(write(tmp_path, f"slide_id,case_id,OS.time,{column}\n{body}")).frame["event"]) == events


@pytest.mark.parametrize(
    ("column", "cell"),
    [
        ("event", "2"),
        ("event", "lost"),
        ("event", "-1"),
        ("event", "0.5"),
        ("censorship", "1:DECEASED"),
        ("event", "NA"),
    ],
)
def test_other_values_of_an_event_are_refused_with_the_row(tmp_path: Path, column: str, cell: str) -> None:
    with pytest.raises(UserError, match=f"column '{column}' holds 1 value that cannot be read .row 3: '{cell}'"):
        read_table(write(tmp_path, f"slide_id,case_id,time,{column}\na,1,5,0\nb,2,6,{cell}\n"))


def test_event_and_censorship_side_by_side_must_be_named(tmp_path: Path) -> None:
    path = write(tmp_path, "slide_id,case_id,time,event,censorship\na,1,5,1,0\nb,2,6,0,1\n")
    with pytest.raises(UserError, match=r"several columns \(event, censorship\) could say"):
        read_table(path)
    assert list(read_table(path, Columns(censorship="censorship")).frame["event"]) == [1, 0]
    with pytest.raises(UserError, match="the opposite of each other"):
        read_table(path, Columns(event="event", censorship="censorship"))


def test_labels_beside_survival_columns_must_be_chosen(tmp_path: Path) -> None:
    path = write(tmp_path, "slide_id,case_id,label,time,event\na,1,0,5,1\nb,2,1,6,0\n")
    with pytest.raises(UserError, match="columns for classes and for survival"):
        read_table(path)
    assert list(read_table(path, task="survival").frame["time"]) == [5.0, 6.0]
    assert read_table(path, task="classification").classes == ("0", "1")


def test_missing_and_non_positive_times_are_listed(tmp_path: Path) -> None:
    table = read_table(
        write(tmp_path, "slide_id,case_id,time_days,event\na,1,5,1\nb,2,0,1\nc,3,-4,0\nd,4,,1\ne,5,7,\n")
    )
    assert list(table.frame["slide"]) == ["a"]
    assert table.dropped == (
        *("row 3 (b): its time is not positive", "row 4 (c): its time is not positive"),
        *("row 5 (d): no time", "row 6 (e): no event"),
    )
    with pytest.raises(UserError, match="row 2: 'three'"):
        read_table(write(tmp_path, "slide_id,case_id,time,event\na,1,three,1\n"))


def test_a_patient_with_two_follow_ups_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"1 patient \(1\) with rows that differ in time or event"):
        read_table(write(tmp_path, "slide_id,case_id,time,event\na,1,5,1\nb,1,6,1\n"))


# Multilabel and broken files


def test_several_labels_are_read_as_zeros_and_ones(tmp_path: Path) -> None:
    path = write(tmp_path, "slide_id,case_id,ER,PR\na,1,1,no\nb,2,0,yes\nc,3,,1\n")
    table = read_table(path, Columns(target=("ER", "PR")))
    assert table.task == "multilabel"
    assert table.classes == ("ER", "PR")
    assert rows(table, "ER", "PR") == [(1, 0), (0, 1)]
    assert table.dropped == ("row 4 (c): no ER",)
    with pytest.raises(UserError, match="row 2: '2'"):
        read_table(write(tmp_path, "slide_id,case_id,ER\na,1,2\n"), Columns(target=("ER",)))
    with pytest.raises(UserError, match="needs its label columns"):
        read_table(path, task="multilabel")


@pytest.mark.parametrize(
    ("name", "content"),
    [
        *[("t.csv", b""), ("t.csv", b"slide_id,label\n"), ("t.csv", b"\xff\xfe\x00s"), ("t.csv", b"a,b\n1,2,3\n")],
        *[("t.xlsx", b"no zip"), ("t.parquet", b"no parquet"), ("t.doc", b"x"), ("t.csv", b"slide_id,label\na,\n")],
    ],
)
def test_a_broken_table_is_a_users_error_that_names_the_file(tmp_path: Path, name: str, content: bytes) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=name):
        read_table(tmp_path / name)


def test_a_missing_table_and_a_sheet_of_a_text_file_are_users_errors(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no such table"):
        read_table(tmp_path / "none.csv")
    with pytest.raises(UserError, match="files have sheets"):
        read_table(write(tmp_path, "slide_id,label\na,1\n"), sheet="x")


TEXT = st.text(
    st.characters(codec="utf-8", exclude_categories=("C", "Z"), exclude_characters=";|,\"'./\\"), min_size=1, max_size=6
).map(lambda text: unicodedata.normalize("NFC", text))


@settings(deadline=None)
@given(st.dictionaries(TEXT, st.one_of(TEXT.filter(lambda t: not t.isnumeric()), st.just("")), min_size=1, max_size=12))
def test_any_text_survives_as_id_and_label_and_every_row_is_kept_or_listed(
    tmp_path_factory: pytest.TempPathFactory, labels: dict[str, str]
) -> None:
    path = tmp_path_factory.mktemp("t") / "t.csv"
    pd.DataFrame({"slide_id": list(labels), "case_id": "p", "label": list(labels.values())}).to_csv(path, index=False)
    if not any(labels.values()):
        with pytest.raises(UserError):
            read_table(path, missing=[])
        return
    table = read_table(path, missing=[])
    told = {slide: table.classes[label] for slide, label in rows(table, "slide", "label")}
    assert told == {slide: label for slide, label in labels.items() if label}
    assert len(table.dropped) == sum(not label for label in labels.values())
