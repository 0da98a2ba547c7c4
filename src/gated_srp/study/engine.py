"""Where cells run: on this machine, as many at a time as fit. Each is a process of its own: a crash takes one cell only."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Literal

from gated_srp.study.cells import Cell, distinct

State = Literal["waiting", "running", "finished", "failed"]
TRIES = 2
COMMAND = (sys.executable, "-m", "gated_srp.study.cell")  # given a cell's `spec` as a line; ends when its input closes
_POLL = 0.1  # seconds
_GRACE = 60.0  # seconds that cells have to save their state when the study is stopped
_SPARE = 0.8  # share of the free memory that cells may take together


@dataclass
class Status:
    """Of one cell: its state, how often it was tried, and what it said when it failed."""

    state: State = "waiting"
    tries: int = 0
    said: str = ""
    seconds: float = 0.0  # of the last try
    before: bool = False  # finished before this study began


@dataclass(frozen=True)
class Slot:
    """Room for one cell at a time. ``device``: the number of the GPU it may see."""

    threads: int
    device: int | None = None


Tell = Callable[[Cell, Status], None]


@dataclass(eq=False)
class Board:
    """The state of every cell, by its folder; ``tell`` is called at each change."""

    cells: tuple[Cell, ...]
    tell: Tell = lambda cell, status: None
    status: dict[Path, Status] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.cells = distinct(self.cells)
        for cell in self.cells:
            done = cell.run.finished
            self.status[cell.key] = Status("finished" if done else "waiting", before=done)

    def __getitem__(self, cell: Cell) -> Status:
        return self.status[cell.key]

    def set(self, cell: Cell, state: State, said: str = "") -> None:
        status = self[cell]
        status.state, status.said = state, said
        self.tell(cell, status)

    def of(self, state: State) -> list[Cell]:
        return [cell for cell in self.cells if self[cell].state == state]


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


def run_local(
    board: Board, slots: Sequence[Slot], *, tick: Callable[[], None] = lambda: None, command: Sequence[str] = COMMAND
) -> None:
    """Run all waiting cells; a failed one is tried once more, after the others, and then stays failed while the rest goes on.

    ``tick`` is called several times a second. Stopped by an exception (Ctrl-C), the cells save their states first.
    """
    queue, free, running = deque(board.of("waiting")), deque(slots), list[_Process]()
    try:
        while queue or running:
            while queue and free:
                cell = queue.popleft()
                board[cell].tries += 1
                running.append(_Process.start(cell, free.popleft(), command))
                board.set(cell, "running")
            tick()
            time.sleep(_POLL)
            for process in [one for one in running if one.ended]:
                running.remove(process)
                free.append(process.slot)
                if _settle(board, process):
                    queue.append(process.cell)
    finally:
        stop(running)


def _settle(board: Board, process: _Process) -> bool:
    """Write down how a process ended; whether its cell is to be tried again."""
    cell, status = process.cell, board[process.cell]
    status.seconds = time.monotonic() - process.started
    said = process.failure()
    if said is None:
        board.set(cell, "finished")
    elif status.tries < TRIES:
        board.set(cell, "waiting", said)
        return True
    else:
        board.set(cell, "failed", said)
    return False


@dataclass(eq=False)
class _Process:
    """A cell that runs."""

    cell: Cell
    slot: Slot
    process: subprocess.Popen[str]
    output: IO[str]
    started: float

    @classmethod
    def start(cls, cell: Cell, slot: Slot, command: Sequence[str]) -> _Process:
        output = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115 - closed when it ends
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=subprocess.STDOUT,
            text=True,
            env=environment(slot),
        )
        assert process.stdin is not None
        with suppress(BrokenPipeError):  # ended at once: its status says why
            process.stdin.write(json.dumps(cell.spec()) + "\n")
            process.stdin.flush()
        return cls(cell, slot, process, output, time.monotonic())

    @property
    def ended(self) -> bool:
        return self.process.poll() is not None

    def failure(self) -> str | None:
        """Why it failed; None if it did not."""
        code = self.process.returncode
        self.output.seek(0)
        lines = [line for line in self.output.read().splitlines() if line.strip()]
        self.close()
        if code == 0 and self.cell.run.finished:
            return None
        if code < 0:
            name = signal.Signals(-code).name
            return f"ended by {name}" + (", perhaps for lack of memory" if name == "SIGKILL" else "")
        return lines[-1].removeprefix("error: ") if lines else f"ended with status {code}"

    def close(self) -> None:
        """Let go of the lifeline."""
        assert self.process.stdin is not None
        with suppress(BrokenPipeError):
            self.process.stdin.close()
        self.output.close()


def environment(slot: Slot) -> dict[str, str]:
    """Of a cell's process: its share of the threads, its device."""
    threads = {name: str(slot.threads) for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")}
    device = {} if slot.device is None else {"CUDA_VISIBLE_DEVICES": _visible(slot.device)}
    return {**os.environ, **threads, **device}


def _visible(number: int) -> str:
    """The name of the device that this process counts as ``number``."""
    told = os.environ.get("CUDA_VISIBLE_DEVICES")
    return told.split(",")[number].strip() if told else str(number)


def stop(running: Iterable[_Process]) -> None:
    """Ask all to save and leave; end those that do not within a minute."""
    waiting = list(running)
    for one in waiting:
        one.close()
    deadline = time.monotonic() + _GRACE
    for one in waiting:
        try:
            one.process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            one.process.kill()
            one.process.wait()
