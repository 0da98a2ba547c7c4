"""Who had the event and when, as tables of clinics, GDC and cBioPortal say it; nothing is turned round silently."""

import pytest

from gated_srp.data.table import Columns, read_table
from gated_srp.errors import UserError


def follow_up(folder, header, rows):
    (folder / "t.csv").write_text("\n".join([header, *(",".join(map(str, row)) for row in rows)]))
    return folder / "t.csv"


def warned(table):
    return [note for note in table.notes if note.level == "warning"]


@pytest.mark.parametrize(
    "name", ["censorship", "Censored", "censor", "OS_cens", "c", "alive", "zensiert", "os_censorship"]
)
def test_an_event_column_that_is_called_censoring_is_warned_of_and_not_turned_round(tmp_path, name):
    rows = [(f"s{i}", f"p{i}", 10 + i, int(i % 3 > 0)) for i in range(30)]
    path = follow_up(tmp_path, f"slide_id,case_id,time,{name}", rows)
    table = read_table(path, Columns(event=name))
    assert int(table.frame["event"].sum()) == 20  # as the user said
    (warning,) = warned(table)
    assert f"`event: {name}` is read as 1 = event seen" in warning.what and "67 % of 30" in warning.what
    assert warning.cure == f"If 1 means censored there, write `censorship: {name}` instead of `event: {name}`."
    assert warned(read_table(path, Columns(censorship=name))) == []


@pytest.mark.parametrize("name", ["event", "OS_event", "death", "vital_status", "dead"])
def test_a_censorship_column_that_is_called_event_is_warned_of(tmp_path, name):
    rows = [(f"s{i}", f"p{i}", 10 + i, int(i % 3 > 0)) for i in range(30)]
    path = follow_up(tmp_path, f"slide_id,case_id,time,{name}", rows)
    (warning,) = warned(read_table(path, Columns(censorship=name)))
    assert warning.cure == f"If 1 means that the event was seen, write `event: {name}` instead of `censorship: {name}`."
    assert warned(read_table(path, Columns(event=name))) == []


@pytest.mark.parametrize(("events", "said"), [(27, "90 % of 30 patients"), (0, "0 % of 30 patients"), (15, None)])
def test_an_implausible_share_of_events_is_warned_of(tmp_path, events, said):
    rows = [(f"s{i}{k}", f"p{i}", 10 + i, int(i < events)) for i in range(30) for k in range(1 + i % 2)]
    found = warned(read_table(follow_up(tmp_path, "slide_id,case_id,time,status", rows)))
    assert [said in note.what for note in found] == ([True] if said else [])


def test_words_say_the_event_whatever_the_column_is_called_and_how_many_had_it(tmp_path):
    rows = [(f"s{i}", f"p{i}", 10 + i, "Dead" if i < 29 else "Alive") for i in range(30)]
    table = read_table(follow_up(tmp_path, "slide_id,case_id,time,censorship", rows), Columns(event="censorship"))
    assert warned(table) == [] and int(table.frame["event"].sum()) == 29


def test_the_words_of_cbioportal_are_known_and_named_when_others_are_refused(tmp_path):
    cells = ["1:DECEASED", "0:LIVING", "1:PROGRESSION", "0:CENSORED", "1:Recurred/Progressed", "0:DiseaseFree"]
    rows = [(f"s{i}", f"p{i}", 10 + i, cell) for i, cell in enumerate(cells)]
    path = follow_up(tmp_path, "slide_id,case_id,Overall Survival (Months),Overall Survival Status", rows)
    assert list(read_table(path).frame["event"]) == [1, 0, 1, 0, 1, 0]
    path = follow_up(tmp_path, "slide_id,case_id,time,event", [("a", "p", 1, "0"), ("b", "q", 2, "1:ALIVE")])
    with pytest.raises(UserError, match="1:DECEASED/0:LIVING") as refused:
        read_table(path)
    assert "`missing`" in refused.value.cure


def test_days_to_death_and_to_the_last_follow_up_are_one_time(tmp_path):
    rows = [
        *[("TCGA-AA-1000", "Dead", "300", "'--"), ("TCGA-AA-1001", "Alive", "'--", "900")],
        *[
            ("TCGA-AA-1002", "Dead", "'--", "50"),
            ("TCGA-AA-1003", "Alive", "'--", "'--"),
            ("TCGA-AA-1004", "Dead", "20", "10"),
        ],
    ]
    path = follow_up(tmp_path, "case_submitter_id,vital_status,days_to_death,days_to_last_follow_up", rows)
    table = read_table(path)
    found = table.frame[["case", "time", "event"]]
    assert found.to_numpy().tolist() == [
        ["TCGA-AA-1000", 300.0, 1],
        ["TCGA-AA-1001", 900.0, 0],
        ["TCGA-AA-1004", 20.0, 1],
    ]
    assert table.dropped == ("row 4 (TCGA-AA-1002): no time", "row 5 (TCGA-AA-1003): no time")
    said = "days_to_death where the event was seen, days_to_last_follow_up where not"
    assert any(said in note.what for note in table.notes)
    named = Columns(time=("days_to_death", "days_to_last_follow_up"), event="vital_status")
    assert read_table(path, named).frame.equals(table.frame)
    with pytest.raises(
        UserError,
        match=r"leaves out everyone without the event.*Write `time: \[days_to_death, days_to_last_follow_up\]`",
    ):
        read_table(path, Columns(time="days_to_death", event="vital_status"))


def test_a_biotab_of_tcga_is_read_without_its_second_and_third_header(tmp_path):
    names = "bcr_patient_barcode,vital_status,last_contact_days_to,death_days_to"
    again = [("bcr_patient_barcode", "vital_status", "days_to_last_followup", "days_to_death")]
    codes = [("CDE_ID:2003301", "CDE_ID:5", "CDE_ID:3008273", "CDE_ID:3165475")]
    rows = [("TCGA-AA-1000", "Dead", "[Not Available]", 300), ("TCGA-AA-1001", "Alive", 900, "[Not Applicable]")]
    table = read_table(follow_up(tmp_path, names, [*again, *codes, *rows]))
    assert table.frame[["case", "time", "event"]].to_numpy().tolist() == [
        ["TCGA-AA-1000", 300.0, 1],
        ["TCGA-AA-1001", 900.0, 0],
    ]
