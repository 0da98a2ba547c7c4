"""What a person sees of a run: a bar on a terminal, plain lines elsewhere, and every line in log.txt."""

import logging
import resource
import sys
import time
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

_LOG = logging.getLogger(__name__)
_SPARSE = 30.0  # seconds between plain lines


class Report:
    """Says things on the console unless ``quiet``, and in a log file if there is one."""

    def __init__(self, log: Path | None, *, quiet: bool = False) -> None:
        self._log = log
        self._console = None if quiet else Console(highlight=False, soft_wrap=True)
        self._bar: Progress | None = None
        self._told = time.monotonic()

    def say(self, text: str) -> None:
        """One line, now."""
        _LOG.info("%s", text)
        if self._log is not None:
            with (
                suppress(OSError),
                self._log.open("a", encoding="utf-8") as file,
            ):  # a full disk must not end a run here
                file.write(f"{datetime.now(UTC):%Y-%m-%d %H:%M:%S} {text}\n")
        if self._console is not None:
            self._console.print(text, markup=False)

    def show(self, done: int, total: int, text: str) -> None:
        """Progress: moves the bar, or says a line now and then."""
        if self._console is None:
            return
        if not self._console.is_terminal:
            if time.monotonic() - self._told > _SPARSE:
                self._told = time.monotonic()
                self._console.print(f"{done}/{total} bags, {text}", markup=False)
            return
        if self._bar is None:
            self._bar = Progress(BarColumn(), TextColumn("{task.description}"), console=self._console, transient=True)
            self._bar.start()
            self._bar.add_task(text, total=total)
        self._bar.update(self._bar.task_ids[0], completed=done, total=total, description=text)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None


class Speed:
    """Patches a second, and how long the rest will take at the pace so far."""

    def __init__(self, bags: int) -> None:
        self._start = time.monotonic()
        self._bags = bags  # still to do, in bags
        self._done = self._patches = 0

    def add(self, patches: int, *, bags: int = 1) -> None:
        self._done += bags
        self._patches += patches

    @property
    def patches(self) -> float:
        """A second."""
        return self._patches / max(time.monotonic() - self._start, 1e-9)

    @property
    def left(self) -> str:
        """Time left, as a person says it."""
        pace = (time.monotonic() - self._start) / max(self._done, 1)
        return spoken(pace * max(self._bags - self._done, 0))


def spoken(seconds: float) -> str:
    """
    >>> spoken(42), spoken(600), spoken(9000)
    ('42 s', '10 min', '2.5 h')
    """
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def memory(device: torch.device) -> str:
    """The most memory held so far: the accelerator's, or the process's."""
    if device.type == "cuda":
        return f"{torch.cuda.max_memory_allocated(device) / 2**30:.1f} GB"
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return f"{peak / 2**30 if sys.platform == 'darwin' else peak / 2**20:.1f} GB"
