"""Cells on clusters: a Slurm script that can be read, and a Ray cluster that loses a machine."""

import json
import subprocess
import sys
import time

import pytest
from study.study_cells import cells, finish

from gated_srp.study.engine import Board
from gated_srp.study.matrix import Cell
from gated_srp.study.slurm import write_job_array

# Eight steps of which each is saved; ends when its lifeline does; says where it began.
CELL = """
import json, pathlib, select, sys
cell = json.loads(sys.stdin.readline())
folder = pathlib.Path(cell["config"]["out"], "toy", cell["arm"], f"seed{cell['seed']}")
folder.mkdir(parents=True, exist_ok=True)
state = folder / "step"
step = int(state.read_text()) if state.exists() else 0
with (folder / "starts").open("a") as file:
    file.write(f"{step}\\n")
while step < 8:
    if select.select([sys.stdin], [], [], 0.5)[0]:
        sys.exit(130)
    step += 1
    state.write_text(str(step))
(folder / "metrics.json").write_text("{}")
"""


def test_the_slurm_script_runs_one_cell_a_task(tmp_path):
    found = cells(tmp_path / "my runs")
    script = write_job_array(tmp_path / "a folder", found, seconds=3600, memory=10e9, gpu=True)
    text = script.read_text()
    assert subprocess.run(["bash", "-n", str(script)], check=False).returncode == 0
    for line in ("--array=0-3", "--time=180", "--mem=15G", "--gres=gpu:1", "--signal=B:TERM@120", "--requeue"):
        assert f"#SBATCH {line}\n" in text
    assert (
        f"exec {sys.executable} -m gated_srp.study.cell '{tmp_path}/a folder/cells.jsonl' \"$SLURM_ARRAY_TASK_ID\""
        in text
    )
    specs = (tmp_path / "a folder" / "cells.jsonl").read_text().splitlines()
    assert [Cell.from_spec(json.loads(line)) for line in specs] == list(found)


def test_a_task_of_the_array_does_its_line_and_leaves_a_finished_cell_alone(tmp_path):
    found = cells(tmp_path)
    finish(found[2])
    script = write_job_array(tmp_path / "slurm", found, seconds=1, memory=1, gpu=False)
    command = [sys.executable, "-m", "gated_srp.study.cell", str(script.with_name("cells.jsonl")), "2"]
    assert subprocess.run(command, check=False, stdin=subprocess.DEVNULL).returncode == 0


@pytest.mark.filterwarnings("ignore")  # Ray's own
def test_a_lost_machines_cell_goes_on_elsewhere_from_its_last_state(tmp_path):
    ray = pytest.importorskip("ray", reason="the extra `cluster` is not installed")
    from ray.cluster_utils import Cluster

    from gated_srp.study.ray_engine import run_ray

    script = tmp_path / "cell.py"
    script.write_text(CELL)
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0})
    try:
        nodes = [cluster.add_node(num_cpus=1) for _ in range(2)]
        ray.init(address=cluster.address, log_to_driver=False)
        cluster.wait_for_nodes()
        found = cells(tmp_path / "runs", ("na", "xsa"), (42,))
        board = Board(found)
        begun: list[float] = []

        def lose_one() -> None:
            if len(nodes) == 2 and all((cell.key / "step").exists() for cell in found):
                begun.append(time.monotonic())
                if len(begun) > 2:
                    cluster.remove_node(nodes.pop(), allow_graceful=False)

        run_ray(board, command=(sys.executable, str(script)), tick=lose_one)
        assert len(nodes) == 1
        assert [board[cell].state for cell in found] == ["finished", "finished"]
        starts = sorted((cell.key / "starts").read_text().split() for cell in found)
        assert starts[0] == ["0"]
        assert len(starts[1]) == 2 and int(starts[1][1]) > 0
    finally:
        ray.shutdown()
        cluster.shutdown()
