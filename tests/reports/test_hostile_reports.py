"""Damaged folders, drawings and names: `report` names what it cannot read, spreadsheets compute nothing, terminals obey nobody."""

import json
import shutil
from io import StringIO
from pathlib import Path

import pandas as pd
import pytest
from page_folders import compared
from rich.table import Table as Rows
from typer.testing import CliRunner

from gated_srp.cli import app, main
from gated_srp.cli.screen import _console, say, visible
from gated_srp.data.imported_splits import import_split
from gated_srp.data.splits import Split, write_split
from gated_srp.data.table import Table
from gated_srp.errors import UserError
from gated_srp.records import csv_text, read_rows
from gated_srp.reports.page import build_page
from gated_srp.reports.page.contents import inline_svg
from gated_srp.training.folder import RunFolder

SVG = '<svg xmlns="http://www.w3.org/2000/svg">{}</svg>'


@pytest.fixture(scope="module")
def study(tmp_path_factory) -> Path:
    return compared(tmp_path_factory.mktemp("study"))


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("comparison/comparison.json", lambda found: found | {"cohorts": 3}),
        ("comparison/comparison.json", lambda found: found | {"runs": ["a"]}),
        ("comparison/comparison.json", lambda found: found | {"cohorts": [found["cohorts"][0] | {"mean": "x"}]}),
        (
            "comparison/comparison.json",
            lambda found: found | {"cohorts": [found["cohorts"][0] | {"corrected": {"interval": [1]}}]},
        ),
        ("check.json", lambda found: found | {"summary": []}),
        ("check.json", lambda found: found | {"findings": [1]}),
        ("check.json", lambda found: found | {"findings": [{"severity": "note", "cure": ""}]}),
        ("comparison/comparison.json", lambda found: 3),
    ],
)
def test_a_damaged_comparison_or_check_is_named(study, tmp_path, name, change):
    home = tmp_path / "copy"
    shutil.copytree(study, home)
    (home / name).write_text(json.dumps(change(json.loads((home / name).read_text()))))
    with pytest.raises(UserError) as caught:
        build_page(home)
    assert str(home / name) in str(caught.value) and caught.value.cure


@pytest.mark.parametrize(
    "name", ["history.csv", "gates.csv", "predictions_test_slide.csv", "metrics.json", "config.yaml"]
)
def test_a_run_with_a_cut_file_is_named(tmp_path, name):
    source = Path(__file__).parents[1] / "fixtures" / "v0_1" / "classification" / "runs" / "toy" / "gated_srp"
    shutil.copytree(source, tmp_path / "runs")
    config = tmp_path / "runs" / "seed42" / "config.yaml"
    config.write_text(config.read_text().replace("@HERE@@@@@@@@", "here"))
    path = tmp_path / "runs" / "seed42" / name
    path.write_bytes(path.read_bytes()[: int(path.stat().st_size * 0.55)].rstrip() + b"x")  # never a whole line
    with pytest.raises(UserError, match=r"seed42"):
        build_page(tmp_path / "runs")


def test_a_drawing_that_is_nested_without_end_is_left_out(tmp_path):
    path = tmp_path / "a.svg"
    for depth, drawn in ((20, True), (5_000, False), (100_000, False)):
        path.write_text(SVG.format("<g>" * depth + "</g>" * depth))
        assert (inline_svg(path, "p-") is not None) == drawn, depth
    path.write_text('<!DOCTYPE svg [<!ENTITY a "b">]>' + SVG.format("<text>&a;</text>"))
    assert inline_svg(path, "p-") is None


# Spreadsheets ---------------------------------------------------------------------------------------------------------

NAMES = ["=1+1", "@SUM(A1)", "-cmd|' /C calc'!A0", "+x", "'=quoted", "-1.5", "s-1", "\t=1"]


def test_text_that_spreadsheets_would_compute_is_quoted_and_read_back(tmp_path):
    frame = pd.DataFrame({"slide": NAMES, "case": NAMES, "=prob": [-0.5, 0.5] * 4})
    text = csv_text(frame)
    cells = [line.split(",")[0].strip('"') for line in text.splitlines()[1:]]
    assert cells == ["'=1+1", "'@SUM(A1)", "'-cmd|' /C calc'!A0", "'+x", "''=quoted", "-1.5", "s-1", "'\t=1"]
    assert "-0.5" in text.splitlines()[1].split(","), "numbers stay numbers"
    (tmp_path / "p.csv").write_text(text)
    back = read_rows(tmp_path / "p.csv", texts=("slide", "case"), cure="")
    pd.testing.assert_frame_equal(back, frame)


def test_a_run_and_a_split_read_back_the_names_that_were_quoted(tmp_path):
    RunFolder(tmp_path).write_csv(
        "predictions_test_slide.csv", pd.DataFrame({"slide": NAMES, "case": NAMES, "prob_a": 0.5})
    )
    assert RunFolder(tmp_path).predictions("test", "slide")["slide"].tolist() == NAMES
    parts = dict(zip(NAMES, ["train", "val", "test", "train", "train", "train", "train", "train"], strict=True))
    write_split(Split("slide_id", parts, "test"), tmp_path / "split.csv")
    assert "'=1+1,train" in (tmp_path / "split.csv").read_text()
    names = [name for name in NAMES if name.strip() == name]  # an id has no spaces around it
    table = Table(pd.DataFrame({"slide": names, "case": names, "label": 0}), "classification", ("a", "b"))
    assert import_split(tmp_path / "split.csv", table).parts == {name: parts[name] for name in names}


# Terminals ------------------------------------------------------------------------------------------------------------

ESCAPE = "\x1b]0;owned\x07\x1b[2J"


def test_an_error_prints_a_name_with_escapes_as_text(monkeypatch, capfd):
    monkeypatch.setattr("sys.argv", ["gated-srp", "check", f"{ESCAPE}.yaml"])
    with pytest.raises(SystemExit):
        main()
    said = "".join(capfd.readouterr())
    assert r"\x1b]0;owned\x07\x1b[2J.yaml" in said and "\x1b]" not in said


@pytest.mark.parametrize("bold", [False, True])
def test_a_step_of_the_work_prints_a_name_with_escapes_as_text(capfd, bold):
    say(f"read {ESCAPE}.h5", bold=bold)
    said = capfd.readouterr().out
    assert r"read \x1b]0;owned\x07\x1b[2J.h5" in said and "\x1b]" not in said and "\x07" not in said


def test_a_table_on_the_screen_prints_escapes_and_brackets_as_text():
    page = _console(file=StringIO(), markup=False, width=80, force_terminal=True)
    table = Rows()
    table.add_column("slide")
    table.add_row(f"{ESCAPE}[/nothing]")
    page.print(table)
    assert r"\x1b]0;owned\x07\x1b[2J[/nothing]" in page.file.getvalue() and "\x1b]" not in page.file.getvalue()
    assert visible("é\n\tä") == "é\n\tä"


def test_help_still_prints():
    assert CliRunner().invoke(app, ["--help"]).exit_code == 0
