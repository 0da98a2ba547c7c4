"""Before a study starts: what it will cost, and the question to a person when that is long."""

import io
import os
import sys

import pytest
import typer
from study import study_cells
from training.toy_cohorts import open_config, planted, write_cohort

from gated_srp.cli import studies
from gated_srp.config.cohort import open_cohort
from gated_srp.errors import Interrupted
from gated_srp.machine import Machine
from gated_srp.study import engine as running
from gated_srp.study.cells import Row, plan
from gated_srp.study.engine import cost

SLOW = Machine("an abacus", 1e4, 4e9)
FAST = Machine("a rocket", 1e15, 4e9)


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    return open_config(write_cohort(tmp_path_factory.mktemp("cohort"), slides=20, train={"epochs": 2}))


def cells(config):
    return plan(config, [Row.of("na"), Row.of("gated_srp")], [42, 43])


def test_time_and_space_are_counted_from_the_slides_and_the_model(config):
    found = cost(cells(config), {"toy": open_cohort(config)}, Machine("m", 1e6, 1e9))
    counts = open_cohort(config).slides(42, 0)["part"].value_counts()
    patches = sum(len(planted(i, 2.0).cells) for i in range(20)) // 20
    # 8 numbers a patch through 2 blocks of 24 channels, with the measured overhead of 1.3; backward is twice forward
    forward = 1.3 * patches * 2 * (12 * 24**2 * 2 + 8 * 24) / 1e6
    forward += 2 * 2 * 24 * 2 * 4**3 / 1e6 + 2 * 0.005  # 4 landmarks in 2 heads and blocks; and calling the blocks
    run = forward * (2 * (3 * counts["train"] + counts["val"]) + counts["val"] + counts["test"]) + 5
    assert found.cells == 4
    assert found.seconds == pytest.approx(4 * run)
    weights = 4 * (12 * 24**2 * 2 + 8 * 24)
    assert found.disk == pytest.approx((4 + 4) * weights)  # a model a cell, and the states of one that runs


def test_cells_that_are_finished_cost_nothing(config, monkeypatch):
    monkeypatch.setattr("gated_srp.training.folder.RunFolder.finished", True)
    found = cost(cells(config), {"toy": open_cohort(config)}, SLOW)
    assert (found.cells, found.seconds, found.disk) == (0, 0.0, 0.0)


def test_states_that_a_killed_process_left_in_a_finished_cell_go_at_the_next_start(tmp_path):
    done, other = study_cells.cells(tmp_path, seeds=(42,))
    for cell in (done, other):
        study_cells.finish(cell)
        (cell.key / "state.pt").write_bytes(b"left")
    with other.run.lock():  # which took them away already
        (other.key / "state.pt").write_bytes(b"somebody's")
        running.run_cells((done, other), {}, running.Running())
        assert (other.key / "state.pt").is_file(), "held by somebody else"
    assert not (done.key / "state.pt").exists()


def started(monkeypatch, config, machine, stdin, *, yes=False) -> tuple[bool, object]:
    """Whether cells were started, and the exit if there was one; training itself is left out."""
    ran = []
    monkeypatch.setattr(running, "this_machine", lambda: machine)
    monkeypatch.setattr(running, "run_local", lambda board, slots: ran.append(board))
    monkeypatch.setattr(sys, "stdin", stdin)
    try:
        with studies._study(None, yes, "local", None) as how:
            running.run_cells(cells(config), {"toy": open_cohort(config)}, running.Running(**how))
    except typer.Exit as stopped:
        return bool(ran), stopped.exit_code
    return bool(ran), None


def terminal(typed: bytes):
    """A person's end of a real pseudo-terminal, who has typed this."""
    master, slave = os.openpty()
    os.write(master, typed)
    return os.fdopen(slave, "r")


@pytest.mark.parametrize(("typed", "begins", "status"), [(b"n\n", False, 1), (b"y\n", True, None), (b"\n", True, None)])
def test_a_person_is_asked_before_more_than_an_hour(monkeypatch, config, capsys, typed, begins, status):
    with terminal(typed) as stdin:
        assert started(monkeypatch, config, SLOW, stdin) == (begins, status)
    said = capsys.readouterr().out
    assert "4 cells, 0 finished before, 4 to run" in said
    assert "roughly" in said and "on disk" in said and "of memory per cell" in said
    assert said.index("roughly") < said.index("Start?")
    assert not config.out.exists()


@pytest.mark.parametrize(("machine", "options"), [(FAST, {}), (SLOW, {"yes": True})], ids=["short", "--yes"])
def test_a_person_is_not_asked_when_it_is_short_or_they_said_yes(monkeypatch, config, capsys, machine, options):
    with terminal(b"n\n") as stdin:
        assert started(monkeypatch, config, machine, stdin, **options) == (True, None)
    assert "Start?" not in capsys.readouterr().out


def test_nobody_is_asked_where_nobody_is(monkeypatch, config, capsys):
    assert started(monkeypatch, config, SLOW, io.StringIO("n\n")) == (True, None)
    assert "Start?" not in capsys.readouterr().out


def test_ctrl_c_is_an_exception_that_says_how_to_go_on(monkeypatch, config):
    def stopped(board, slots):
        raise KeyboardInterrupt

    monkeypatch.setattr(running, "run_local", stopped)
    with pytest.raises(Interrupted, match=r"running cells have saved their states\. Start the same command again"):
        running.run_cells(cells(config), {"toy": open_cohort(config)}, running.Running())
