"""Running the cells of a study: what they will take, and where they run: on this machine, on a Ray cluster, or by a Slurm script.

Ray (extra ``cluster``): run folders are on storage that all machines share. A cell is a task with its needs; when its machine is
lost, Ray starts it on another one, where it continues from its last state.
Slurm: a file of cells and the script of a job array with one task per cell are written; nothing is submitted.
"""

from __future__ import annotations

import json
import logging
import math
import os
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from gated_srp.config.cohort import CohortData, preparation
from gated_srp.data.bag import BagError
from gated_srp.data.prepared import open_header
from gated_srp.data.splits import PARTS
from gated_srp.errors import Interrupted, UserError
from gated_srp.files import write_whole
from gated_srp.machine import Machine, Trunk, run_seconds, this_machine
from gated_srp.models import find_arm
from gated_srp.progress import Event, Progress, silent, spoken
from gated_srp.study.cells import Cell, distinct, refuse_mismatches
from gated_srp.study.engine import Board, Slot, local_slots, run_local
from gated_srp.study.worker import COMMAND, last_words, reply
from gated_srp.training.results import evenly

EngineName = Literal["local", "ray", "slurm"]
_LOG = logging.getLogger(__name__)
_LOOKED_AT = 50  # slides whose headers are read
_START = 5.0  # seconds in which a process imports and reads its table
_STATE = 4  # weights, two moments and the best weights: what an unfinished run keeps


class Declined(Exception):
    """The study was not started because ``confirm`` said no."""


@dataclass(frozen=True)
class Cost:
    """What the cells still to run will take, roughly: ``memory`` (bytes) of the largest slide seen, the rest of all together."""

    cells: int = 0
    seconds: float = 0.0
    disk: float = 0.0
    memory: float = 1.0


@dataclass(frozen=True)
class Running:
    """How to run: cells at a time (None: as many as fit), where, who is asked first, who is told how far it is."""

    jobs: int | None = None
    engine: EngineName = "local"
    address: str | None = None  # of the Ray cluster
    confirm: Callable[[Cost], bool] = lambda cost: True
    progress: Progress = silent

    def say(self, text: str) -> None:
        self.progress(Event("study", text=text))


@dataclass(frozen=True)
class Ran:
    """``failed``: reasons by cell; ``script``: Slurm's, which must be submitted before there is anything to see."""

    failed: Mapping[str, UserError]
    script: Path | None = None


def run_cells(cells: Sequence[Cell], data: Mapping[str, CohortData], running: Running) -> Ran:
    """Check what is there, say what is to come, and run what is missing; ``data`` by cohort.

    Raises:
        Declined: ``running.confirm`` said no.
        Interrupted: stopped with Ctrl-C; running cells have saved their states.
    """
    refuse_mismatches(cells, data)
    board = Board(tuple(cells), running.progress)
    machine = this_machine()
    ahead = cost(cells, data, machine)
    running.say(f"{len(board.cells)} cells, {len(board.cells) - ahead.cells} finished before, {ahead.cells} to run")
    if not ahead.cells:
        return Ran({})
    if running.engine == "slurm":
        return Ran({}, _slurm_script(board, ahead))
    slots = local_slots(running.jobs or ahead.cells, 1.0 if running.jobs else ahead.memory)
    ahead = replace(ahead, seconds=ahead.seconds / len({slot.device for slot in slots}))
    where = f"the cluster at {running.address or 'hand'}" if running.engine == "ray" else f"this machine, {_at(slots)}"
    running.say(
        f"roughly {spoken(ahead.seconds)} on {machine.name}, {_bytes(ahead.disk)} on disk, {_bytes(ahead.memory)} of memory per "
        f"cell; runs on {where}"
    )
    if not running.confirm(ahead):
        raise Declined
    try:
        if running.engine == "ray":
            run_ray(board, address=running.address, memory=ahead.memory)
        else:
            run_local(board, slots)
    except KeyboardInterrupt:
        raise Interrupted(
            "stopped; running cells have saved their states. Start the same command again to go on."
        ) from None
    failed = {str(cell): board[cell].error or UserError("failed") for cell in board.of("failed")}
    for cell, error in failed.items():
        _LOG.error("failed twice: %s: %s", cell, error)
    return Ran(failed)


def _at(slots: Sequence[Slot]) -> str:
    return f"{len(slots)} at a time, {slots[0].threads} thread{'s' if slots[0].threads > 1 else ''} each"


def _bytes(count: float) -> str:
    return f"{count / 1e9:.1f} GB" if count >= 1e8 else f"{count / 1e6:.0f} MB"


# What it will take ---------------------------------------------------------------------------------------------------


def cost(cells: Iterable[Cell], data: Mapping[str, CohortData], machine: Machine) -> Cost:
    """A rough estimate from the headers of a few slides: the others are taken to be like them."""
    seconds = disk = 0.0
    memory = 1.0
    left = [cell for cell in distinct(cells) if not cell.run.finished]
    seen: dict[str, _Slides] = {}
    for cell in left:
        if cell.cohort not in seen:
            seen[cell.cohort] = _look_at(data[cell.cohort], cell)
        slides, model = seen[cell.cohort], cell.config.model
        trunk = Trunk(slides.width, model.dim, model.depth, dense=find_arm(cell.arm).dense)
        parts = {part: [slides.typical] * count for part, count in slides.counts.items()}
        seconds += run_seconds(trunk, parts, epochs=cell.config.train.epochs, rate=machine.rate) + _START
        disk += 4.0 * (12 * model.dim**2 * model.depth + slides.width * model.dim)
        memory = max(memory, trunk.memory(slides.largest * cell.config.at_once))
    disk += _STATE * disk / len(left) if left else 0.0
    return Cost(len(left), seconds, disk, memory)


@dataclass(frozen=True)
class _Slides:
    """Channels, patches of a typical and of the largest slide, and slides by part."""

    width: int
    typical: int
    largest: int
    counts: dict[str, int]


def _look_at(data: CohortData, cell: Cell) -> _Slides:
    frame = data.slides(cell.seed, cell.fold)
    settings = preparation(data.config)
    sizes, width = [], 1
    for row in evenly(list(range(len(frame))), _LOOKED_AT):
        try:
            rows, width = open_header(frame["file"].iloc[row], settings).shape
        except BagError:  # the run itself says which file and why
            continue
        sizes.append(min(rows, data.config.cap or rows))
    counts = frame["part"].value_counts()
    sizes = sizes or [1]
    return _Slides(width, sum(sizes) // len(sizes), max(sizes), {part: int(counts.get(part, 0)) for part in PARTS})


# Slurm ---------------------------------------------------------------------------------------------------------------

_SLACK = 3.0  # of the estimated time; a task that runs out of it continues when it is submitted again
_NOTICE = 120  # seconds before the end at which Slurm asks a task to save and leave


def _slurm_script(board: Board, ahead: Cost) -> Path:
    import torch

    waiting = board.of("waiting")
    folder, gpu = waiting[0].config.out / "slurm", torch.cuda.is_available()
    return write_job_array(folder, waiting, seconds=ahead.seconds / ahead.cells, memory=ahead.memory, gpu=gpu)


def write_job_array(
    folder: Path, cells: Sequence[Cell], *, seconds: float, memory: float, gpu: bool, threads: int = 4
) -> Path:
    """``cells.jsonl`` and ``job.sh``; ``seconds`` and ``memory`` (bytes) of the largest cell, roughly. All paths are absolute."""
    folder = folder.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "logs").mkdir(exist_ok=True)
    write_whole(folder / "cells.jsonl", "".join(json.dumps(cell.spec()) + "\n" for cell in cells))
    minutes = max(30, math.ceil(_SLACK * seconds / 60))
    gigabytes = max(4, math.ceil(1.5 * memory / 1e9))
    lines = [
        "#!/bin/bash",
        f"# {len(cells)} cells of a gated-srp study. Submit with: sbatch {shlex.quote(str(folder / 'job.sh'))}",
        "# Time and memory are rough; change them to what your cluster wants. A task that was cut short continues from its last",
        "# state when the script is submitted again; finished ones end at once.",
        "#SBATCH --job-name=gated-srp",
        f"#SBATCH --array=0-{len(cells) - 1}",
        f"#SBATCH --time={minutes}",
        f"#SBATCH --mem={gigabytes}G",
        f"#SBATCH --cpus-per-task={threads}",
        *(["#SBATCH --gres=gpu:1"] if gpu else []),
        f"#SBATCH --signal=B:TERM@{_NOTICE}",
        "#SBATCH --requeue",
        f"#SBATCH --output={str(folder / 'logs' / '%A_%a.txt').replace(' ', chr(92) + ' ')}",
        "",
        'export OMP_NUM_THREADS="$SLURM_CPUS_PER_TASK" MKL_NUM_THREADS="$SLURM_CPUS_PER_TASK"',
        # exec: Slurm's notice then reaches the training itself, which saves its state.
        f"exec {shlex.quote(sys.executable)} -m gated_srp.study.worker {shlex.quote(str(folder / 'cells.jsonl'))} "
        '"$SLURM_ARRAY_TASK_ID"',
    ]
    path = folder / "job.sh"
    write_whole(path, "\n".join(lines) + "\n")
    path.chmod(0o755)
    return path


# Ray -----------------------------------------------------------------------------------------------------------------

_POLL = 0.5  # seconds
_LOST = 5  # machines that one cell may lose


def run_ray(
    board: Board, *, address: str | None = None, cpus: float = 2, memory: float = 0.0, command: Sequence[str] = ()
) -> None:
    """Run all waiting cells on the cluster at ``address`` (None: the one already connected to, else a new local one).

    ``cpus`` and ``memory`` (bytes) are what a cell asks for; a GPU too, where the cluster has any. ``command`` runs instead
    of `worker`, which each machine starts with its own Python.
    """
    ray = _ray()
    if not ray.is_initialized():
        ray.init(address=address, log_to_driver=False, include_dashboard=False)
    needs = _needs(ray, cpus, memory)
    task = ray.remote(**needs, max_retries=_LOST)(_ray_task)
    pending: dict[Any, Cell] = {}

    def submit(cell: Cell) -> None:
        board[cell].tries += 1
        pending[task.remote(cell.spec(), tuple(command), max(1, int(needs["num_cpus"])))] = cell
        board.set(cell, "running")

    try:
        for cell in board.of("waiting"):
            submit(cell)
        while pending:
            board.report()
            for reference in ray.wait(list(pending), num_returns=1, timeout=_POLL)[0]:
                cell = pending.pop(reference)
                try:
                    board[cell].seconds, error = ray.get(reference)
                except ray.exceptions.RayTaskError as failed:
                    error = UserError(str(failed.cause), kind="crash")
                except ray.exceptions.RayError as lost:
                    error = UserError(f"lost by the cluster: {type(lost).__name__}", kind="crash")
                if error is None and not cell.run.finished:
                    error = UserError("ended, but its folder is not on storage that this machine shares")
                if board.ended(cell, error):
                    submit(cell)
    finally:
        for reference in pending:
            ray.cancel(reference)


def _ray_task(spec: dict[str, Any], command: tuple[str, ...], threads: int) -> tuple[float, UserError | None]:
    """On one of the machines: seconds that the cell took, and its error. Its process ends when this one does."""
    start = time.monotonic()
    share = {name: str(threads) for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")}  # Ray has set them to 1
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as output:
        process = subprocess.Popen(
            command or COMMAND,  # that of this machine: Ray imports this module there
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=output,
            text=True,
            env={**os.environ, **share},
        )
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(json.dumps(spec) + "\n")
        process.stdin.flush()
        found = reply(process.stdout.readline())
        process.stdin.close()
        status = process.wait()
        output.seek(0)
        error = found[0] if found else last_words(output.read(), status) if status else None
    return time.monotonic() - start, error


def _needs(ray: Any, cpus: float, memory: float) -> dict[str, Any]:
    """What a cell asks for: never more processors than a machine of the cluster has, or it would wait for ever."""
    machines = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    most, room = (max((machine.get(name, 0) for machine in machines), default=0) for name in ("CPU", "memory"))
    if memory > room:
        raise UserError(
            f"no machine of the cluster has the {memory / 1e9:.1f} GB that the largest slide needs (most: {room / 1e9:.1f} GB)",
            cure="Set a `cap`, or train.checkpointing: true.",
        )
    gpu = {"num_gpus": 1} if any(machine.get("GPU", 0) >= 1 for machine in machines) else {}
    return {"num_cpus": min(cpus, most), "memory": int(memory), **gpu}


def _ray() -> Any:
    try:
        import ray  # type: ignore[import-not-found,unused-ignore]
    except ModuleNotFoundError:
        raise UserError("--engine ray needs the extra `cluster`: pip install 'gated-srp[cluster]'.") from None
    return ray
