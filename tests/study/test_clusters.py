"""Cells on clusters: a Slurm script that can be read, and a Ray cluster that loses a machine."""

import json
import re
import subprocess
import sys
from collections.abc import Callable

import pytest
from study.study_cells import cells, finish
from training.toy_cohorts import open_config, write_cohort

from gated_srp.study.cells import Cell, Row, plan
from gated_srp.study.engine import Board, run_ray, write_job_array
from gated_srp.training.train import train

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
        f"exec {sys.executable} -m gated_srp.study.worker '{script.parent}/cells.jsonl' \"$SLURM_ARRAY_TASK_ID\""
        in text
    )
    assert script.parent.parent == tmp_path / "a folder"
    specs = script.with_name("cells.jsonl").read_text().splitlines()
    assert [Cell.from_spec(json.loads(line)) for line in specs] == list(found)


def test_a_task_of_the_array_does_its_line_and_leaves_a_finished_cell_alone(tmp_path):
    found = cells(tmp_path)
    finish(found[2])
    script = write_job_array(tmp_path / "slurm", found, seconds=1, memory=1, gpu=False)
    command = [sys.executable, "-m", "gated_srp.study.worker", str(script.with_name("cells.jsonl")), "2"]
    assert subprocess.run(command, check=False, stdin=subprocess.DEVNULL).returncode == 0


@pytest.fixture
def two_machines():
    """A Ray cluster of two machines with room for one cell each, and a head that runs none; the machines may be taken away."""
    ray = pytest.importorskip("ray", reason="the extra `cluster` is not installed")
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0})
    try:
        nodes = [cluster.add_node(num_cpus=1) for _ in range(2)]
        ray.init(address=cluster.address, log_to_driver=False)
        cluster.wait_for_nodes()
        yield cluster, nodes
    finally:
        ray.shutdown()
        cluster.shutdown()


def lose_one(cluster, nodes, found, begun) -> Callable[[object], None]:
    """A progress callback that takes one machine away when all cells have begun."""

    def tick(event) -> None:
        if len(nodes) == 2 and all(begun(cell) for cell in found):
            cluster.remove_node(nodes.pop(), allow_graceful=False)

    return tick


@pytest.mark.filterwarnings("ignore")  # Ray's own
def test_a_lost_machines_cell_goes_on_elsewhere_from_its_last_state(tmp_path, two_machines):
    cluster, nodes = two_machines
    script = tmp_path / "cell.py"
    script.write_text(CELL)
    found = cells(tmp_path / "runs", ("na", "xsa"), (42,))
    board = Board(found, lose_one(cluster, nodes, found, lambda cell: (cell.key / "step").exists()))
    run_ray(board, command=(sys.executable, str(script)))
    assert len(nodes) == 1
    assert [board[cell].state for cell in found] == ["finished", "finished"]
    starts = sorted((cell.key / "starts").read_text().split() for cell in found)
    assert starts[0] == ["0"]
    assert len(starts[1]) == 2 and int(starts[1][1]) > 0


@pytest.mark.filterwarnings("ignore")  # Ray's own
def test_training_that_loses_its_machine_ends_with_the_bytes_of_training_that_does_not(tmp_path, two_machines):
    cluster, nodes = two_machines
    cohort = write_cohort(tmp_path, slides=24, train={"epochs": 20})
    found = plan(open_config(cohort), [Row.of("na"), Row.of("gated_srp")], [42])
    board = Board(found, lose_one(cluster, nodes, found, lambda cell: cell.epochs_done() > 2))
    run_ray(board)
    assert len(nodes) == 1
    assert [(board[cell].state, board[cell].tries) for cell in found] == [("finished", 1)] * 2
    went_on = [re.findall(r"goes on at epoch (\d+)", (cell.key / "log.txt").read_text()) for cell in found]
    assert sorted(map(len, went_on)) == [0, 1]
    assert int(next(filter(None, went_on))[0]) > 2
    for cell in plan(open_config(cohort, out=str(tmp_path / "alone")), [Row.of("na"), Row.of("gated_srp")], [42]):
        run = train(cell.config, arm=cell.arm, seed=42).path
        there = next(one for one in found if one.arm == cell.arm).key
        names = {path.name for path in run.iterdir()}
        assert {path.name for path in there.iterdir()} == names  # no state, no draft is left
        for name in names - {"config.yaml", "environment.json", "features.csv", "log.txt"}:  # places and times
            assert (run / name).read_bytes() == (there / name).read_bytes(), name
