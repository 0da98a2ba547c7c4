"""The process that trains cells: one after the other as each by itself; and speed and memory, measured on a small cohort."""

import json
import subprocess

from training.toy_cohorts import open_config, write_cohort

from gated_srp.study.cells import Row, plan
from gated_srp.study.engine import Board, Slot, run_local
from gated_srp.study.worker import COMMAND, last_words, measure_cell, reply


def test_the_second_cell_of_a_worker_is_what_a_process_of_its_own_gives(tmp_path):
    cohort = write_cohort(tmp_path, slides=16, train={"epochs": 1})
    rows = [Row.of("gated_srp"), Row.of("na")]
    found = plan(open_config(cohort), rows, [42])
    board = Board(found)
    run_local(board, [Slot(1)])
    assert [board[cell].state for cell in found] == ["finished", "finished"]
    alone = plan(open_config(cohort, out=str(tmp_path / "alone")), rows, [42])[1]
    (tmp_path / "cells.jsonl").write_text(json.dumps(alone.spec()) + "\n")
    command = [*COMMAND, str(tmp_path / "cells.jsonl"), "0"]
    assert subprocess.run(command, env=Slot(1).environment(), check=False).returncode == 0
    for name in ("history.csv", "predictions_test_slide.csv", "metrics.json", "model.safetensors"):
        assert (found[1].key / name).read_bytes() == (alone.key / name).read_bytes()
    threads = [cell.run.read_json("environment.json")["threads"] for cell in (*found, alone)]
    assert threads == [1, 1, 1]


def test_an_error_comes_back_with_its_parts(tmp_path):
    cell = plan(open_config(write_cohort(tmp_path, slides=16), table=str(tmp_path / "no.csv")), [Row.of("na")], [42])[0]
    with subprocess.Popen(COMMAND, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        process.stdin.write(json.dumps(cell.spec()) + "\n")
        process.stdin.flush()
        error, _ = reply(process.stdout.readline())
        assert process.wait() == 2
    assert error.where.endswith("no.csv") and error.what and error.kind


def test_a_process_without_a_reply_is_judged_by_how_it_ended():
    assert reply("") is None and reply("{") is None
    assert str(last_words("", -11)) == "ended by SIGSEGV"
    assert str(last_words("Traceback\nMemoryError: no room\n", 1)) == "MemoryError: no room"


def test_speed_and_memory_are_measured_and_leave_no_run_behind(tmp_path):
    config = open_config(write_cohort(tmp_path, slides=16))
    cell = plan(config, [Row("Gated SRP", "gated_srp", {"train.epochs": 1})], [42])[0]
    found = measure_cell(cell.spec())
    assert set(found) == {"peak_reserved_gib", "train_wsi_per_second", "test_wsi_per_second"}
    assert found["train_wsi_per_second"] > 0
    assert found["test_wsi_per_second"] > 0
    assert 0.05 < found["peak_reserved_gib"] < 64  # of this whole process
    assert not cell.key.exists()
