"""The local engine: runs cells on this machine, as many at a time as fit, each in a worker process.

A worker runs one cell after the other, so that imports are paid once; when it crashes, it takes the cell it was running and no other.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import tempfile
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Literal

from gated_srp.errors import UserError
from gated_srp.progress import Event, Progress, silent, spoken
from gated_srp.study.cells import Cell, distinct
from gated_srp.study.worker import COMMAND, last_words, reply

State = Literal["waiting", "running", "finished", "failed"]
TRIES = 2
_POLL = 0.1  # seconds
_GRACE = 60.0  # seconds that cells have to save their state when the study is stopped
_SPARE = 0.8  # share of the free memory that cells may take together


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
        self.report(f"{cell}: {self._words(cell)}")

    def report(self, text: str = "") -> None:
        """Also called without a change, so that whoever shows the board can renew it."""
        self.progress(Event("cells", len(self.of("finished")), len(self.cells), text, self))

    def ended(self, cell: Cell, error: UserError | None) -> bool:
        """Record how a try ended; whether the cell is to be tried again."""
        if error is None:
            self.set(cell, "finished")
        elif self[cell].tries < TRIES:
            self.set(cell, "waiting", error)
            return True
        else:
            self.set(cell, "failed", error)
        return False

    def _words(self, cell: Cell) -> str:
        status = self[cell]
        if status.state == "running":
            return "started again" if status.tries > 1 else "started"
        if status.state == "finished":
            count = f"({len(self.of('finished'))} of {len(self.cells)})"
            return f"finished in {spoken(status.seconds)}, {score(cell)} {count}"
        again = "failed and will be tried once more" if status.state == "waiting" else "FAILED twice, the rest goes on"
        return f"{again}: {status.error}"


def score(cell: Cell) -> str:
    """The test score of a finished cell by the metric that selects, e.g. ``c_index 0.7213``."""
    try:
        value = cell.metrics().get(cell.config.metric, math.nan)
    except UserError:
        value = math.nan
    return f"{cell.config.metric} –" if math.isnan(value) else f"{cell.config.metric} {value:.4f}"


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
    """As many as cores, memory and devices have room for, each cell needing ``need`` bytes; they share the threads."""
    import torch

    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    most = min(cells, cores)
    if torch.cuda.is_available():
        sizes = [torch.cuda.get_device_properties(n).total_memory for n in range(torch.cuda.device_count())]
        rooms = [max(1, min(most, int(_SPARE * size // need))) for size in sizes]
        # The first place on every device before the second on any.
        devices = [number for layer in range(max(rooms)) for number, room in enumerate(rooms) if layer < room]
        places: Sequence[int | None] = devices
    else:
        places = [None] * max(1, min(most, int(_SPARE * free_memory() // need)))
    count = max(1, min(most, len(places)))
    return tuple(Slot(max(1, cores // count), device) for device in places[:count])


def free_memory() -> float:
    """Bytes that programs may still take."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        return next(float(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
    except (OSError, StopIteration):
        return float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")) / 2


# Running -------------------------------------------------------------------------------------------------------------


def run_local(board: Board, slots: Sequence[Slot], *, command: Sequence[str] = COMMAND) -> None:
    """Run all waiting cells; a failed one is tried once more, after the others, and then stays failed while the rest goes on.

    Stopped by an exception (Ctrl-C), the cells save their states first. ``command`` starts a process that behaves as `worker` does.
    """
    queue, workers = deque(board.of("waiting")), [_Worker(slot, command) for slot in slots]
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
        _stop(workers)


class _Worker:
    """The process of a slot: started when first needed, and anew after an error."""

    cell: Cell | None = None
    began = 0.0
    process: subprocess.Popen[str] | None = None

    def __init__(self, slot: Slot, command: Sequence[str]) -> None:
        self._slot, self._command = slot, command

    def start(self, cell: Cell) -> None:
        if self.process is not None and self.process.poll() is not None:
            self.end()
        process = self.process = self.process or self._launch()
        assert process.stdin is not None
        self.cell, self.began = cell, time.monotonic()
        self._read = os.fstat(self._replies.fileno()).st_size
        with suppress(BrokenPipeError):  # ended at once: its status says why
            process.stdin.write(json.dumps(cell.spec()) + "\n")
            process.stdin.flush()

    @property
    def ended(self) -> bool:
        """Whether the cell is: the process has replied, or is gone."""
        assert self.process is not None
        return self.process.poll() is not None or reply(self._said()) is not None

    def result(self) -> UserError | None:
        """Why the cell failed, None if it did not; the worker is then free, with a new process if it failed."""
        assert self.cell is not None and self.process is not None
        cell, self.cell = self.cell, None
        found, status = reply(self._said()), self.process.poll()
        if found is not None:
            error = found[0]
        elif status == 0 and cell.run.finished:
            return None
        else:
            self._output.seek(0)
            error = last_words(self._output.read(), status or 0)
        if error is None and not cell.run.finished:
            error = UserError("ended without a result", kind="crash")
        if error is not None:
            self.end()
        return error

    def close(self) -> None:
        """Close its input: a cell in training saves its state, and the process ends."""
        if self.process is not None and self.process.stdin is not None:
            with suppress(BrokenPipeError):
                self.process.stdin.close()

    def end(self, patience: float = _GRACE) -> None:
        """Close it, wait until it is gone, and kill it if it does not go."""
        self.close()
        if self.process is not None:
            try:
                self.process.wait(patience)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
            self._replies.close()
            self._output.close()
        self.process = None

    def _launch(self) -> subprocess.Popen[str]:
        # Files, not pipes: a worker that prints much is not blocked, and one that is killed leaves no reader waiting.
        self._replies, self._output = _temporary(), _temporary()
        return subprocess.Popen(
            self._command,
            stdin=subprocess.PIPE,
            stdout=self._replies,
            stderr=self._output,
            text=True,
            env=self._slot.environment(),
        )

    def _said(self) -> str:
        return os.pread(self._replies.fileno(), 1 << 20, self._read).decode(errors="replace")


def _temporary() -> IO[str]:
    return tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")


def _stop(workers: Sequence[_Worker]) -> None:
    """All at once: they save at the same time."""
    for worker in workers:
        worker.close()
    deadline = time.monotonic() + _GRACE
    for worker in workers:
        worker.end(max(0.0, deadline - time.monotonic()))
