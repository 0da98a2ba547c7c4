"""`gated-srp compare` from the YAML to the folder of results, with real training in a process of its own."""

import json

import pytest
import typer
from training.toy_cohorts import open_config, write_cohort
from typer.testing import CliRunner

import gated_srp
from gated_srp.cli import studies
from gated_srp.cli.screen import show_progress
from gated_srp.errors import UserError
from gated_srp.study import Declined
from gated_srp.study.cells import Row, plan
from gated_srp.study.engine import Board
from gated_srp.training.train import train


@pytest.fixture(scope="module")
def cohort(tmp_path_factory):
    return write_cohort(tmp_path_factory.mktemp("cohort"), slides=16, train={"epochs": 2})


@pytest.fixture(scope="module")
def app():
    app = typer.Typer()
    app.command()(studies.compare)
    return app


def test_a_half_done_comparison_is_finished_and_told(cohort, app):
    run = train(open_config(cohort), arm="na", seed=42).path
    before = (run / "metrics.json").stat().st_mtime_ns
    shown = CliRunner().invoke(app, [str(cohort), "--arms", "na,gated_srp", "--seeds", "42", "--bootstrap", "5"])
    assert shown.exit_code == 0, shown.output
    assert "2 cells, 1 finished before, 1 to run" in shown.output
    assert "Gated SRP against NA, toy, F1: one seed" in shown.output
    assert (run / "metrics.json").stat().st_mtime_ns == before
    folder = cohort.parent / "runs" / "toy" / "comparison"
    rows = (folder / "results.csv").read_text().splitlines()
    assert rows[0] == "cohort,arm,seed,metric,value"
    assert {row.rsplit(",", 2)[0] for row in rows[1:]} == {"toy,na,42", "toy,gated_srp,42"}
    assert json.loads((folder / "comparison.json").read_text())["reference"] == "na"
    assert "effective β" in (folder / "figures" / "trajectories.svg").read_text()


def test_the_function_gives_a_notebook_its_tables_verdict_and_files(cohort):
    """After the test above: all runs are finished, and nothing is trained."""
    said = []
    found = gated_srp.compare(
        cohort, arms=["na", "gated_srp"], seeds=[42], bootstrap=0, progress=lambda event: said.append(event.text)
    )
    assert said == ["2 cells, 2 finished before, 0 to run"]
    assert set(found.results["arm"]) == {"na", "gated_srp"} and not found.failed and found.script is None
    assert set(found.table["arm"]) == {"gated_srp"} and {"difference", "low", "high", "verdict"} <= set(found.table)
    assert "one seed" in found.verdict and "<table" in found._repr_html_()
    assert found.folder == cohort.parent / "runs" / "toy" / "comparison"
    assert all(path.is_file() for path in found.files) and found.folder / "README.md" in found.files


def test_a_study_that_is_declined_runs_nothing(cohort, tmp_path):
    asked = []

    def no(cost):
        asked.append(cost)
        return False

    with pytest.raises(Declined):
        gated_srp.compare(cohort, arms=["na"], seeds=[42], out=tmp_path / "elsewhere", confirm=no)
    assert asked[0].cells == 1 and asked[0].seconds > 0
    assert not (tmp_path / "elsewhere").exists()


def test_quick_is_said_and_kept_apart_and_slurm_only_writes(cohort, app):
    shown = CliRunner().invoke(app, [str(cohort), "--arms", "na,xsa", "--quick", "--engine", "slurm"])
    assert shown.exit_code == 0, shown.output
    assert shown.output.startswith("QUICK: 2 of 2 epochs, 3 of 5 seeds")
    (script,) = (cohort.parent / "runs" / "quick" / "slurm").glob("*/job.sh")
    assert f"`sbatch {script}`" in shown.output
    lines = script.with_name("cells.jsonl").read_text().splitlines()
    assert len(lines) == 6
    assert not (cohort.parent / "runs" / "quick" / "toy").exists()


def test_a_reference_that_is_not_compared_is_refused(cohort, app):
    shown = CliRunner().invoke(app, [str(cohort), "--arms", "xsa,diff", "--reference", "na"])
    assert isinstance(shown.exception, UserError)
    assert "not among the arms: xsa, diff" in str(shown.exception)


def test_an_option_that_says_nothing_is_refused_before_anything_runs(cohort, app, tmp_path):
    for option, given, said in (
        ("--seeds", "42,x", "'x' is no seed"),
        ("--seeds", "46-42", "'46-42' has no seed in it. Write 42-46."),
        ("--seeds", ",", "--seeds: ',' names nothing"),
        ("--arms", " , ", "--arms: ' , ' names nothing"),
        ("--margin", "0", "margin: 0, expected a positive number"),
    ):
        shown = CliRunner().invoke(app, [str(cohort), option, given, "--out", str(tmp_path)])
        assert isinstance(shown.exception, UserError) and said in str(shown.exception)
    assert not list(tmp_path.iterdir())


def test_a_terminal_shows_one_table_and_a_pipe_lines(cohort, tmp_path):
    from rich.console import Console

    config = open_config(cohort, out=str(tmp_path))
    board = Board(plan(config, [Row.of("na"), Row.of("xsa")], [42, 43]))
    terminal = Console(record=True, force_terminal=True, width=80, file=(tmp_path / "t").open("w"))
    with show_progress(terminal) as board.progress:
        board.set(board.cells[0], "running")
        board.set(board.cells[1], "failed", UserError("no luck"))
    text = terminal.export_text()
    terminal.file.close()
    assert all(word in text for word in ("1 running, 2 waiting, 1 failed", "42", "43", "epoch 0/2", "waiting"))
    pipe = Console(record=True, file=(tmp_path / "p").open("w"))
    with show_progress(pipe) as board.progress:
        board.set(board.cells[1], "failed", UserError("no luck"))
    pipe.file.close()
    assert pipe.export_text() == "toy xsa seed 42: FAILED twice, the rest goes on: no luck\n"


def test_settings_of_a_study_can_be_changed_for_all_arms_alike(cohort, app, tmp_path):
    written = ["--engine", "slurm", "--seeds", "42", "--set", "train.epochs=1", "--set", "window=5"]
    shown = CliRunner().invoke(app, [str(cohort), "--arms", "na,xsa", *written, "--out", str(tmp_path / "runs")])
    assert shown.exit_code == 0, shown.output
    app = typer.Typer()
    app.command()(studies.tune)
    shown = CliRunner().invoke(app, [str(cohort), *written, "--out", str(tmp_path / "tuned")])
    assert shown.exit_code == 0, shown.output
    for folder, number in (("runs", 2), ("tuned", 16)):
        (cells,) = (tmp_path / folder / "slurm").glob("*/cells.jsonl")  # of the study, not below a variant of it
        lines = cells.read_text().splitlines()
        configs = [json.loads(line)["config"] for line in lines]
        assert [(one["train"]["epochs"], one["window"]) for one in configs] == [(1, 5)] * number


def test_tables_go_where_they_are_asked_to_under_the_new_name_and_the_old(cohort, app, tmp_path):
    for option in ("--tables", "--output", "-o"):
        folder = tmp_path / option
        asked = [str(cohort), "--arms", "na,gated_srp", "--seeds", "42", "--bootstrap", "0", option, str(folder)]
        shown = CliRunner().invoke(app, asked)
        assert shown.exit_code == 0, shown.output
        assert (folder / "README.md").is_file()
