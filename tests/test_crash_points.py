"""Killed at a file operation, or told there that the disk is full, a command that is started again ends with the same bytes.

A few operations of each command are tried here; `make torture` tries all of them.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

HERE = Path(__file__).parent
MEMORY = Path("/dev/shm")  # where waiting for the disk costs nothing
TASKS = ("cache:kill:5", "extract:kill:7", "extract:fail:12", "train:kill:37", "train:fail:53", "compare:kill:113")


@pytest.mark.slow
def test_started_again_after_a_kill_or_a_full_disk_a_command_ends_with_the_same_bytes():
    place = MEMORY if os.access(MEMORY, os.W_OK) else None
    with tempfile.TemporaryDirectory(dir=place) as folder:
        command = [sys.executable, str(HERE / "crash_points.py"), folder, *TASKS]
        ended = subprocess.run(command, capture_output=True, text=True, check=False)
    found = [json.loads(line) for line in ended.stdout.splitlines()]
    assert len(found) == len(TASKS), ended.stderr
    assert [one["wrong"] for one in found] == [[]] * len(TASKS)
    assert sum(one["tried"] for one in found) >= 20
    assert {kind for one in found for kind in one["kinds"]} >= {"open", "write", "fsync", "replace", "unlink"}


def test_the_harness_sees_a_file_that_is_written_in_place(tmp_path):
    """A writer that is not whole or nothing must be found wrong, or the test above shows nothing."""
    script = tmp_path / "careless.py"
    script.write_text(CARELESS)
    command = [sys.executable, str(script), str(HERE), str(tmp_path)]
    found = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    assert found["tried"] == 3 and [one.split(" ")[0] for one in found["wrong"]] == ["write"]


CARELESS = """
import json, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
import crash_points

def careless(inputs, out):
    out.mkdir(exist_ok=True)
    if not (out / "a.txt").exists() or not (out / "a.txt").read_text():
        (out / "a.txt").write_text("words")

crash_points.COMMANDS["careless"] = careless
(Path(sys.argv[2]) / "inputs").mkdir()
print(json.dumps(crash_points.check("careless", Path(sys.argv[2]))))
"""
