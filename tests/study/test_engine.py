"""The local engine, with a stand-in for training: a process that reads its cell and does as the seed says."""

import json
import os
import sys
import time

import pytest
from study.study_cells import cells, finish

from gated_srp.study.engine import Board, Slot, local_slots, run_local
from gated_srp.study.worker import write_job_array

CELL = """
import json, os, signal, sys, pathlib
cell = json.loads(sys.stdin.readline())
folder = pathlib.Path(cell["config"]["out"], "toy", cell["arm"], f"seed{cell['seed']}")
folder.mkdir(parents=True, exist_ok=True)
with (folder / "tries").open("a") as file:
    file.write(os.environ["OMP_NUM_THREADS"] + "\\n")
if cell["seed"] == 13:
    print(json.dumps({"error": {"what": "this seed is unlucky", "where": "seed 13"}}), flush=True)
    sys.exit(2)
if cell["seed"] == 9:
    os.kill(os.getpid(), signal.SIGKILL)
if cell["seed"] == 7 and len((folder / "tries").read_text().split()) < 2:
    sys.exit("once")
if cell["seed"] == 99:
    sys.stdin.read()  # waits for its lifeline
    (folder / "saved").write_text("")
    sys.exit(130)
(folder / "metrics.json").write_text("{}")
"""


@pytest.fixture
def command(tmp_path):
    path = tmp_path / "cell.py"
    path.write_text(CELL)
    return (sys.executable, str(path))


def tries(cell) -> int:
    path = cell.key / "tries"
    return len(path.read_text().split()) if path.exists() else 0


def test_a_half_done_matrix_runs_what_is_missing(tmp_path, command):
    found = cells(tmp_path, seeds=(1, 2))
    finish(found[0])
    finish(found[3])
    board = Board(found)
    told = []
    board.progress = lambda event: told.append((event.text, event.done, event.total)) if event.text else None
    run_local(board, [Slot(1)], command=command)
    assert [tries(cell) for cell in found] == [0, 1, 1, 0]
    assert len(board.of("finished")) == 4
    assert [(text.split(", ")[0], *counts) for text, *counts in told] == [
        ("toy gated_srp seed 1: started", 2, 4),
        ("toy gated_srp seed 1: finished in 0 s", 3, 4),
        ("toy na seed 2: started", 3, 4),
        ("toy na seed 2: finished in 0 s", 4, 4),
    ]


def test_a_cell_that_always_fails_is_tried_twice_while_the_rest_goes_on(tmp_path, command):
    found = cells(tmp_path, ("na",), (13, 1, 2))
    board = Board(found)
    run_local(board, [Slot(1)], command=command)
    assert [board[cell].state for cell in found] == ["failed", "finished", "finished"]
    error = board[found[0]].error
    assert (error.where, error.what, str(error)) == ("seed 13", "this seed is unlucky", "seed 13: this seed is unlucky")
    assert [tries(cell) for cell in found] == [2, 1, 1]


def test_a_cell_that_fails_once_is_finished_by_its_second_try(tmp_path, command):
    found = cells(tmp_path, ("na",), (7,))
    board = Board(found)
    run_local(board, [Slot(1)], command=command)
    assert (board[found[0]].state, tries(found[0])) == ("finished", 2)


def test_a_process_that_is_killed_takes_its_own_cell_only(tmp_path, command):
    found = cells(tmp_path, ("na",), (9, 1))
    board = Board(found)
    run_local(board, [Slot(1), Slot(1)], command=command)
    assert [board[cell].state for cell in found] == ["failed", "finished"]
    assert str(board[found[0]].error) == "ended by SIGKILL, perhaps for lack of memory"


def test_a_process_that_ends_well_without_a_result_has_failed(tmp_path):
    found = cells(tmp_path, ("na",), (1,))
    board = Board(found)
    run_local(board, [Slot(1)], command=(sys.executable, "-c", "input()"))
    assert (board[found[0]].state, str(board[found[0]].error)) == ("failed", "ended with status 0")


def test_cells_that_run_when_the_study_is_stopped_may_save(tmp_path, command):
    found = cells(tmp_path, ("na",), (99, 1))

    def stop(event):
        if tries(found[0]):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_local(Board(found, stop), [Slot(1)], command=command)
    assert (found[0].key / "saved").exists()
    assert tries(found[1]) == 0


def test_a_cell_ends_when_the_process_that_started_it_is_killed(tmp_path):
    """The real cell: it is waiting for a lock, and its parent's end of the lifeline closes."""
    import subprocess

    cell = cells(tmp_path, ("na",), (1,))[0]
    with cell.run.lock():
        process = subprocess.Popen([sys.executable, "-m", "gated_srp.study.worker"], stdin=subprocess.PIPE, text=True)
        process.stdin.write(json.dumps(cell.spec()) + "\n")
        process.stdin.flush()
        time.sleep(0.2)
        process.stdin.close()
        assert process.wait(60) == -15


WORKER = """
import json, os, pathlib, sys
for line in sys.stdin:
    cell = json.loads(line)
    folder = pathlib.Path(cell["config"]["out"], "toy", cell["arm"], f"seed{cell['seed']}")
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "pids").open("a") as file:
        file.write(f"{os.getpid()} ")
    if cell["seed"] == 13 and len((folder / "pids").read_text().split()) < 2:
        os._exit(3)
    (folder / "metrics.json").write_text("{}")
    print("{}", flush=True)
"""


def test_a_worker_runs_one_cell_after_the_other_and_is_replaced_when_it_crashes(tmp_path):
    (tmp_path / "worker.py").write_text(WORKER)
    found = cells(tmp_path, ("na",), (1, 2, 13, 3))
    board = Board(found)
    run_local(board, [Slot(1)], command=(sys.executable, str(tmp_path / "worker.py")))
    assert [board[cell].state for cell in found] == ["finished"] * 4
    one, two, crashed, three = [(cell.key / "pids").read_text().split() for cell in found]
    assert one == two == crashed[:1] and three == crashed[1:] and one != three


def test_cells_share_the_threads_and_the_memory(monkeypatch):
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    cores = len(os.sched_getaffinity(0))
    assert len(local_slots(100, 1.0)) == cores
    assert local_slots(1, 1.0) == (Slot(cores),)
    assert local_slots(100, 1e18) == (Slot(cores),)


@pytest.mark.parametrize("name", ["OMP_NUM_THREADS", "MKL_NUM_THREADS"])
def test_a_users_number_of_threads_is_never_raised(monkeypatch, tmp_path, name):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(8)))
    monkeypatch.setenv(name, "2")
    assert [slot.threads for slot in local_slots(1, 1.0)] == [2]
    assert local_slots(1, 1.0)[0].environment()["OMP_NUM_THREADS"] == "2"
    assert [slot.threads for slot in local_slots(8, 1.0)] == [1] * 8
    assert "--cpus-per-task=2\n" in write_job_array(tmp_path, [], seconds=1, memory=1, gpu=False).read_text()
    monkeypatch.setenv(name, "not a number")
    assert [slot.threads for slot in local_slots(1, 1.0)] == [8]


def test_a_cell_sees_its_own_device_only(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4, 6")
    assert Slot(3, 1).environment()["CUDA_VISIBLE_DEVICES"] == "6"
    assert Slot(3, 1).environment()["OMP_NUM_THREADS"] == "3"
