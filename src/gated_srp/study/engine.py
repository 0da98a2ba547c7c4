"""Running the cells of a study: what they will take, and where they run: on this machine, on a Ray cluster, or by a Slurm script.

This machine: as many at a time as fit, each in a `Worker` that runs one cell after the other, so that imports are paid once; when
it crashes, it takes the cell it was running and no other.
Ray (extra ``cluster``): run folders are on storage that all machines share. A cell is a task with its needs; when its machine is
lost, Ray starts it on another one, where it continues from its last state.
Slurm: a file of cells and the script of a job array with one task per cell are written; nothing is submitted.
"""

from __future__ import annotations

import logging
import math
import os
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from gated_srp.config.cohort import CohortData, preparation
from gated_srp.config.reach import trunk_of
from gated_srp.data.bag import BagError
from gated_srp.data.prepared import open_header
from gated_srp.data.splits import PARTS
from gated_srp.errors import Interrupted, UserError, counted
from gated_srp.machine import Machine, run_seconds, this_machine, total_memory
from gated_srp.progress import Event, Progress, silent, spoken
from gated_srp.study.cells import Cell, distinct, refuse_mismatches
from gated_srp.study.worker import COMMAND, GRACE, Worker, thread_limit, write_job_array
from gated_srp.training.inputs import evenly

EngineName = Literal["local", "ray", "slurm"]
State = Literal["waiting", "running", "finished", "failed"]
_LOG = logging.getLogger(__name__)
_LOOKED_AT = 50  # slides whose headers are read
_STATE = 4  # weights, two moments and the best weights: what an unfinished run keeps
TRIES = 2
_POLL = 0.1  # seconds
_SPARE = 0.8  # share of the free memory that cells may take together


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
    part: Literal["test", "val"] = "test"  # whose score is shown when a cell is finished

    def say(self, text: str) -> None:
        self.progress(Event("study", text=text))


@dataclass(frozen=True)
class Ran:
    """``failed``: reasons by cell; ``script``: Slurm's, which must be submitted before there is anything to see; ``notes``: on runs that were there."""

    failed: Mapping[str, UserError]
    script: Path | None = None
    notes: tuple[str, ...] = ()


def run_cells(cells: Sequence[Cell], data: Mapping[str, CohortData], running: Running) -> Ran:
    """Check what is there, say what is to come, and run what is missing; ``data`` by cohort.

    Raises:
        Declined: ``running.confirm`` said no.
        Interrupted: stopped with Ctrl-C; running cells have saved their states.
    """
    notes = refuse_mismatches(cells, data)
    for note in notes:
        running.say(f"note: {note}")
    for run in (cell.run for cell in distinct(cells) if cell.run.finished and cell.run.leftovers()):
        with suppress(UserError), run.lock():  # which removes what a killed process left; someone else may hold it
            pass
    board, machine = Board(tuple(cells), running.progress, running.part), this_machine()
    ahead = cost(cells, data, machine)
    running.say(
        f"{counted(len(board.cells), 'cell')}, {len(board.cells) - ahead.cells} finished before, {ahead.cells} to run"
    )
    if not ahead.cells:
        return Ran({}, notes=notes)
    if running.engine == "slurm":
        import torch

        waiting, each = board.of("waiting"), ahead.seconds / ahead.cells
        need: dict[str, Any] = {"seconds": each, "memory": ahead.memory, "gpu": torch.cuda.is_available()}
        return Ran({}, write_job_array(data[waiting[0].cohort].config.out / "slurm", waiting, **need))
    slots = local_slots(running.jobs or ahead.cells, 1.0 if running.jobs else ahead.memory)
    ahead = replace(ahead, seconds=ahead.seconds / len({slot.device for slot in slots}))
    here = f"this machine, {len(slots)} at a time, {counted(slots[0].threads, 'thread')} each"
    where = f"the cluster at {running.address or 'hand'}" if running.engine == "ray" else here
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
        how = "running cells have saved their states. Start the same command again to go on."
        raise Interrupted(f"stopped; {how}") from None
    failed = {str(cell): board[cell].error or UserError("failed") for cell in board.of("failed")}
    for cell, error in failed.items():
        _LOG.error("failed twice: %s: %s", cell, error)
    return Ran(failed, notes=notes)


def _bytes(count: float) -> str:
    return f"{count / 1e9:.1f} GB" if count >= 1e8 else f"{count / 1e6:.0f} MB"


# What it will take ---------------------------------------------------------------------------------------------------


def cost(cells: Iterable[Cell], data: Mapping[str, CohortData], machine: Machine) -> Cost:
    """A rough estimate from the headers of a few slides: the others are taken to be like them."""
    seconds = disk = 0.0
    memory = 1.0
    left = [cell for cell in distinct(cells) if not cell.run.finished]
    seen = {cohort: _look_at(data[cohort], cell) for cohort, cell in {cell.cohort: cell for cell in left[::-1]}.items()}
    for cell in left:
        model, (width, typical, largest, counts) = cell.config.model, seen[cell.cohort]
        trunk = trunk_of(cell.config, cell.arm, width)
        parts = {part: [typical] * count for part, count in counts.items()}
        how = {"epochs": cell.config.train.epochs, "at_once": cell.config.at_once}
        seconds += run_seconds(trunk, parts, rate=machine.rate, **how)
        disk += 4.0 * (12 * model.dim**2 * model.depth + width * model.dim)
        memory = max(memory, trunk.memory(cell.config.together(largest)))
    disk += _STATE * disk / len(left) if left else 0.0
    return Cost(len(left), seconds, disk, memory)


def _look_at(data: CohortData, cell: Cell) -> tuple[int, int, int, dict[str, int]]:
    """Channels, patches of a typical and of the largest bag, and bags by part."""
    frame = data.slides(cell.seed, cell.fold)
    settings = preparation(data.config)
    sizes, width = [], 1
    for row in evenly(list(range(len(frame))), _LOOKED_AT):
        try:
            rows, width = open_header(frame["file"].iloc[row], settings).shape
        except BagError:  # the run itself says which file and why
            continue
        sizes.append(min(rows, data.config.cap or rows))
    bags = frame.drop_duplicates(data.config.unit)
    each = frame[data.config.unit].value_counts()  # slides of a bag
    counts = bags["part"].value_counts()
    sizes = sizes or [1]
    typical, largest = sum(sizes) * len(frame) // (len(sizes) * len(bags)), max(sizes) * int(each.max())
    cap = data.config.cap or largest
    return width, min(typical, cap), min(largest, cap), {part: int(counts.get(part, 0)) for part in PARTS}


@dataclass
class Status:
    """Of one cell: its state, how often it was tried, and why it failed."""

    state: State = "waiting"
    tries: int = 0
    error: UserError | None = None
    seconds: float = 0.0  # of the last try
    before: bool = False  # finished before this study began


@dataclass(eq=False)
class Board:
    """The state of every cell, by its folder. Each change is reported to ``progress``, with the board as the event's data."""

    cells: tuple[Cell, ...]
    progress: Progress = silent
    part: Literal["test", "val"] = "test"
    status: dict[Path, Status] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.cells = distinct(self.cells)
        for cell in self.cells:
            done = cell.run.finished
            self.status[cell.key] = Status("finished" if done else "waiting", before=done)

    def __getitem__(self, cell: Cell) -> Status:
        return self.status[cell.key]

    def of(self, state: State) -> list[Cell]:
        return [cell for cell in self.cells if self[cell].state == state]

    def set(self, cell: Cell, state: State, error: UserError | None = None) -> None:
        status = self[cell]
        status.state, status.error = state, error
        if state == "running":
            words = "started again" if status.tries > 1 else "started"
        elif state == "finished":
            count = f"({len(self.of('finished'))} of {len(self.cells)})"
            words = f"finished in {spoken(status.seconds)}, {score(cell, self.part)} {count}"
        else:
            words = f"{'failed and will be tried once more' if state == 'waiting' else 'FAILED twice, the rest goes on'}: {error}"
        self.report(f"{cell}: {words}")

    def report(self, text: str = "") -> None:
        """Also called without a change, so that whoever shows the board can renew it."""
        self.progress(Event("cells", len(self.of("finished")), len(self.cells), text, self))

    def ended(self, cell: Cell, error: UserError | None) -> bool:
        """Record how a try ended; whether the cell is to be tried again."""
        again = error is not None and self[cell].tries < TRIES
        self.set(cell, "finished" if error is None else "waiting" if again else "failed", error)
        return again


def score(cell: Cell, part: str = "test") -> str:
    """The score of a finished cell by the metric that selects, e.g. ``c_index 0.7213``, on test unless it says otherwise."""
    try:
        value = cell.metrics(part).get(cell.config.metric, math.nan)
    except UserError:
        value = math.nan
    where = "" if part == "test" else " on validation"
    return f"{cell.config.metric} –{where}" if math.isnan(value) else f"{cell.config.metric} {value:.4f}{where}"


# Where ---------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Slot:
    """Room for one cell at a time. ``device``: the number of the GPU it may see."""

    threads: int
    device: int | None = None

    def environment(self) -> dict[str, str]:
        """Of the worker: its share of the threads, its device."""
        found = os.environ | {name: str(self.threads) for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")}
        if self.device is not None:
            visible = os.environ.get("CUDA_VISIBLE_DEVICES")  # then devices are counted within these
            found["CUDA_VISIBLE_DEVICES"] = visible.split(",")[self.device].strip() if visible else str(self.device)
        return found


def local_slots(cells: int, need: float) -> tuple[Slot, ...]:
    """As many as cores, memory and devices have room for, each cell needing ``need`` bytes; they share the threads.

    None gets more threads than the user's environment allows (`thread_limit`).
    """
    import torch

    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    most = min(cells, cores)
    places: list[int | None]
    if torch.cuda.is_available():
        sizes = [torch.cuda.get_device_properties(n).total_memory for n in range(torch.cuda.device_count())]
        rooms = [max(1, min(most, int(_SPARE * size // need))) for size in sizes]
        # The first place on every device before the second on any.
        places = [number for layer in range(max(rooms)) for number, room in enumerate(rooms) if layer < room]
    else:
        places = [None] * max(1, min(most, int(_SPARE * _free_memory() // need)))
    count = max(1, min(most, len(places)))
    threads = max(1, min(cores // count, thread_limit() or cores))
    return tuple(Slot(threads, device) for device in places[:count])


def _free_memory() -> float:
    """Bytes that programs may still take."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        return next(float(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
    except (OSError, StopIteration):
        return total_memory() / 2


# Running -------------------------------------------------------------------------------------------------------------


def run_local(board: Board, slots: Sequence[Slot], *, command: Sequence[str] = COMMAND) -> None:
    """Run all waiting cells; a failed one is tried once more, after the others, and then stays failed while the rest goes on.

    Stopped by an exception (Ctrl-C), the cells save their states first. ``command`` starts a process that behaves as `worker` does.
    """
    queue, workers = deque(board.of("waiting")), [Worker(slot.environment(), command) for slot in slots]
    try:
        while queue or any(worker.cell for worker in workers):
            for worker in workers:
                if queue and worker.cell is None:
                    cell = queue.popleft()
                    board[cell].tries += 1
                    worker.start(cell)
                    board.set(cell, "running")
            board.report()
            time.sleep(_POLL)
            for worker in workers:
                if (cell_ended := worker.cell) is not None and worker.ended:
                    board[cell_ended].seconds = time.monotonic() - worker.began
                    if board.ended(cell_ended, worker.result()):
                        queue.append(cell_ended)
    finally:
        for worker in workers:  # all at once: they save at the same time
            worker.close()
        deadline = time.monotonic() + GRACE
        for worker in workers:
            worker.end(max(0.0, deadline - time.monotonic()))


# Ray -----------------------------------------------------------------------------------------------------------------

_LOST = 5  # machines that one cell may lose


def run_ray(
    board: Board, *, address: str | None = None, cpus: float = 2, memory: float = 0.0, command: Sequence[str] = ()
) -> None:
    """Run all waiting cells on the cluster at ``address`` (None: the one already connected to, else a new local one).

    ``cpus`` and ``memory`` (bytes) are what a cell asks for; a GPU too, where the cluster has any. ``command`` runs instead
    of `worker`, which each machine starts with its own Python.
    """
    try:
        import ray  # type: ignore[import-not-found,unused-ignore]
    except ModuleNotFoundError:
        raise UserError(
            "--engine ray needs the extra `cluster`: pip install '.[cluster]' in the repository of gated-srp."
        ) from None
    if not ray.is_initialized():
        ray.init(address=address, log_to_driver=False, include_dashboard=False)
    needs = _needs(ray, min(cpus, thread_limit() or cpus), memory)
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
            for reference in ray.wait(list(pending), num_returns=1, timeout=5 * _POLL)[0]:
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
    # The command of this machine, since Ray imports this module there; Ray has set the number of threads to 1.
    worker = Worker(Slot(threads).environment(), command or COMMAND)
    try:
        worker.start(Cell.from_spec(spec))
        while not worker.ended:
            time.sleep(_POLL)
        return time.monotonic() - worker.began, worker.result()
    finally:
        worker.end()


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
