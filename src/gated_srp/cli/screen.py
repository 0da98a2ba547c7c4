"""What a command prints: results with `say`, warnings and errors with standard logging, and all of it to the file of --log.

Levels: INFO is what `say` has printed already; DEBUG is what --verbose adds; the rest goes to the error stream in any case.

    with show_progress() as progress:
        result = gated_srp.predict(runs, folder, progress=progress)

Bars, counts and their texts go to the error stream, so that output can be piped; an `Event` that only has a text is `say`'s.

stage     in a terminal                             elsewhere
cells     the table of cells, renewed each second   its text, a line per change of a cell
bags      a bar with its text                       its text, a line every half minute
patches   a bar named by its text                   nothing
others    a bar; its text as a line above           its text as a line, else a count at each tenth
"""

from __future__ import annotations

import io
import logging
import os
import re
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from gated_srp.errors import UserError
from gated_srp.progress import Event, Progress, spoken

if TYPE_CHECKING:
    from rich.console import Console, Group

    from gated_srp.study.cells import Cell
    from gated_srp.study.engine import Board

LOG = logging.getLogger("gated_srp")
_COLOURS = {logging.DEBUG: "bright_black", logging.WARNING: "yellow", logging.ERROR: "red", logging.CRITICAL: "red"}
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
_EVERY = 30.0  # seconds between plain lines of a text that changes all the time
_RENEW = 1.0  # seconds between two tables of cells


@dataclass
class Screen:
    """The options before the command, as `begin` has set them."""

    quiet: bool = False
    debug: bool = False


SCREEN = Screen()


def begin(*, verbose: bool = False, quiet: bool = False, debug: bool = False, log: Path | None = None) -> None:
    """Set what is printed, and written to the log file, from now on."""
    if verbose and quiet:
        raise UserError("--verbose and --quiet together: choose one of them.")
    SCREEN.quiet, SCREEN.debug = quiet, debug
    screen = _Errors(logging.DEBUG if verbose else logging.INFO)
    logging.basicConfig(handlers=[screen, *([_file(log)] if log else [])], level=logging.WARNING, force=True)
    LOG.setLevel(logging.DEBUG)


def say(text: str = "", *, bold: bool = False, err: bool = False) -> None:
    """Print a result or a step of the work; --quiet leaves it out."""
    text = visible(text)
    if not SCREEN.quiet:
        _echo(typer.style(text, bold=True) if bold else text, err=err)
    LOG.info("%s", text.strip("\n"))


def give(text: str) -> None:
    """Print what was asked for as data, whatever --quiet says."""
    _echo(text, err=False)


def say_written(paths: Iterable[Path]) -> None:
    for path in paths:
        say(f"written: {path}")


@contextmanager
def console() -> Iterator[Console]:
    """``with console() as page: page.print(table)``: rich's console, under the same options as `say`."""
    page = _console(file=io.StringIO() if SCREEN.quiet else None, record=True, markup=False)
    yield page
    LOG.info("%s", page.export_text().strip("\n"))


def visible(text: str) -> str:
    r"""Names come from files and tables of others: what would command the terminal is printed as text.

    >>> print(visible("a\x1b[2Jb"))
    a\x1b[2Jb
    """
    return _CONTROL.sub(lambda sign: f"\\x{ord(sign[0]):02x}", text)


def _console(**options: Any) -> Console:
    from rich.console import Console

    class Plain(Console):
        def render_str(self, text: str, **how: Any) -> Any:  # every string that is printed, cells of tables too
            return super().render_str(visible(text), **how)

    return Plain(**options)


class _Errors(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        if record.levelno != logging.INFO:  # `say` has printed it already
            _echo(typer.style(visible(record.getMessage()), fg=_COLOURS.get(record.levelno)), err=True)


def _file(path: Path) -> logging.Handler:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handler = logging.FileHandler(path, encoding="utf-8", errors="backslashreplace")
    except OSError as error:
        what = f"cannot be written ({error.strerror})"
        raise UserError(what, where=f"--log {path}", cure="Choose another file.") from None
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    return handler


def _echo(text: str, *, err: bool) -> None:
    """Without colours if NO_COLOR is set (no-color.org), or outside a terminal: click strips them from pipes and files."""
    typer.echo(text, err=err, color=False if os.environ.get("NO_COLOR") else None)


# Progress ------------------------------------------------------------------------------------------------------------


@contextmanager
def show_progress(console: Console | None = None) -> Iterator[Progress]:
    """A callback for the functions of the API; what it has drawn is gone at the end, what it has printed stays."""
    if console is None:
        console = _console(stderr=True, quiet=SCREEN.quiet, highlight=False)
    shown = _Terminal(console) if console.is_terminal and not console.quiet else _Lines(console)
    try:
        yield shown
    finally:
        shown.close()


class _Lines:
    def __init__(self, console: Console) -> None:
        self._console = console
        self._last = time.monotonic()

    def __call__(self, event: Event) -> None:
        if event.total is None:
            say(event.text)
        elif event.stage == "bags":
            now = time.monotonic()
            if now - self._last > _EVERY:
                self._last = now
                self._line(f"{event.done}/{event.total} {event.stage}, {event.text}")
        elif event.text and event.stage != "patches":
            self._line(event.text)
        elif event.stage not in ("patches", "cells") and _new_tenth(event.done, event.total):
            self._line(f"{event.stage}: {event.done} of {event.total}")

    def close(self) -> None:
        pass

    def _line(self, text: str) -> None:
        LOG.info("%s", text)
        self._console.print(text, markup=False, soft_wrap=True)


def _new_tenth(done: int, total: int) -> bool:
    """
    >>> [done for done in range(26) if _new_tenth(done, 25)]
    [3, 5, 8, 10, 13, 15, 18, 20, 23, 25]
    """
    return 0 < done <= total and done * 10 // total > (done - 1) * 10 // total


class _Terminal:
    def __init__(self, console: Console) -> None:
        self._console = console
        self._bars: Any = None  # rich's Progress
        self._tasks: dict[str, Any] = {}
        self._live: Any = None
        self._board: Any = None
        self._renewed = 0.0

    def __call__(self, event: Event) -> None:
        if event.total is None:
            say(event.text)
        elif event.stage == "cells":
            self._cells(event)
        else:
            self._bar(event)

    def close(self) -> None:
        if self._live is not None:
            self._live.update(cell_table(self._board), refresh=True)
            self._live.stop()
        if self._bars is not None:
            self._bars.stop()

    def _bar(self, event: Event) -> None:
        if self._bars is None:
            self._bars = _bars(self._console)
        above = event.stage not in ("bags", "patches")
        if above and event.text:
            LOG.info("%s", visible(event.text))
            self._bars.console.print(event.text, markup=False, soft_wrap=True)
        name = event.text if event.stage == "patches" else event.stage
        if event.stage not in self._tasks:
            self._tasks[event.stage] = self._bars.add_task(name, total=event.total, text="")
        text = "" if above or event.stage == "patches" else event.text
        self._bars.update(
            self._tasks[event.stage], completed=event.done, total=event.total, description=name, text=text
        )

    def _cells(self, event: Event) -> None:
        if event.text:
            LOG.info("%s", event.text)
        self._board = event.data
        if self._live is None:
            from rich.live import Live

            self._live = Live(console=self._console, auto_refresh=False, redirect_stdout=sys.stdout.isatty())
            self._live.start()
        if time.monotonic() - self._renewed > _RENEW:
            self._renewed = time.monotonic()
            self._live.update(cell_table(event.data), refresh=True)


def _bars(console: Console) -> Any:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, Task, TextColumn, TimeRemainingColumn
    from rich.text import Text

    class Remaining(TimeRemainingColumn):
        def render(self, task: Task) -> Text:
            return Text() if task.fields["text"] else super().render(task)  # such a text says what is left

    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        Remaining(),
        TextColumn("{task.fields[text]}", markup=False),
    )
    bars = Progress(*columns, console=console, transient=True, redirect_stdout=sys.stdout.isatty())
    bars.start()
    return bars


# A study -------------------------------------------------------------------------------------------------------------


def cell_table(board: Board) -> Group:
    """Rows are arms of a cohort, columns seeds."""
    from rich.console import Group
    from rich.table import Table

    units = list(dict.fromkeys(cell.unit for cell in board.cells))
    at = {(cell.cohort, cell.row, cell.unit): cell for cell in board.cells}
    counts = {state: len(board.of(state)) for state in ("finished", "running", "waiting", "failed")}
    summary = ", ".join(f"{count} {state}" for state, count in counts.items() if count)
    table = Table(pad_edge=False)
    cohorts = len({cell.cohort for cell in board.cells}) > 1
    for name in (*(["cohort", "arm"] if cohorts else ["arm"]), *units):
        table.add_column(name, no_wrap=True)
    for cohort, row in dict.fromkeys((cell.cohort, cell.row) for cell in board.cells):
        texts = [_state(at[cohort, row, unit], board) if (cohort, row, unit) in at else "" for unit in units]
        table.add_row(*([cohort] if cohorts else []), row, *texts)
    return Group(f"{summary}{_time_left(board)}", table)  # not the table's title, which would be folded to its width


def _state(cell: Cell, board: Board) -> str:
    from gated_srp.study.engine import score

    status = board[cell]
    if status.state == "finished":
        return f"[green]{score(cell, board.part)}[/]"
    if status.state == "running":
        return f"[cyan]epoch {cell.epochs_done()}/{cell.config.train.epochs}[/]"
    if status.state == "failed":
        return "[bold red]failed[/]"
    return "[yellow]again[/]" if status.tries else "[dim]waiting[/]"


def _time_left(board: Board) -> str:
    """An estimate from the cells that this study has finished."""
    took = [board[cell].seconds for cell in board.of("finished") if not board[cell].before]
    todo, running = len(board.of("waiting")), len(board.of("running"))
    if not took or not (todo or running):
        return ""
    mean = sum(took) / len(took)
    return f"; about {spoken(mean * (todo + running / 2) / max(running, 1))} left"
