"""What a person sees of a study that runs: one live table of its cells in a terminal, a line an event elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from gated_srp.cli.screen import LOG

if TYPE_CHECKING:
    from rich.console import Console, Group

    from gated_srp.study.cells import Cell
    from gated_srp.study.engine import Board, Status

_LOOK = 1.0  # seconds between looks into the folders of running cells


@contextmanager
def showing(board: Board, console: Console) -> Iterator[Callable[[], None]]:
    """``with showing(board, console) as tick``: call ``tick`` often; changes of the board are shown by themselves."""
    lines = None if console.is_terminal else console
    board.tell = lambda cell, status: _say(lines, board, cell, status)
    if lines is not None or console.quiet:
        yield lambda: None
        return
    from rich.live import Live

    last = 0.0
    with Live(cell_table(board), console=console, auto_refresh=False) as live:

        def tick() -> None:
            nonlocal last
            if time.monotonic() - last > _LOOK:
                last = time.monotonic()
                live.update(cell_table(board), refresh=True)

        yield tick
        live.update(cell_table(board), refresh=True)


def _say(console: Console | None, board: Board, cell: Cell, status: Status) -> None:
    done = len(board.of("finished"))
    text = {
        "running": f"started{', once more' if status.tries > 1 else ''}",
        "finished": f"finished in {_spoken(status.seconds)}, {score(cell)} ({done} of {len(board.cells)})",
        "waiting": f"failed and will be tried once more: {status.said}",
        "failed": f"FAILED twice, the rest goes on: {status.said}",
    }[status.state]
    LOG.info("%s: %s", cell, text)
    if console is not None:
        console.print(f"{cell}: {text}", markup=False, soft_wrap=True)


def cell_table(board: Board) -> Group:
    """Rows are arms of a cohort, columns seeds."""
    from rich.console import Group
    from rich.table import Table

    units = list(dict.fromkeys(cell.unit for cell in board.cells))
    at = {(cell.cohort, cell.row, cell.unit): cell for cell in board.cells}
    counts = {state: len(board.of(state)) for state in ("finished", "running", "waiting", "failed")}
    told = ", ".join(f"{count} {state}" for state, count in counts.items() if count)
    table = Table(pad_edge=False)
    cohorts = len({cell.cohort for cell in board.cells}) > 1
    for head in (["cohort", "arm"] if cohorts else ["arm"], units):
        for name in head:
            table.add_column(name, no_wrap=True)
    for cohort, row in dict.fromkeys((cell.cohort, cell.row) for cell in board.cells):
        texts = [_state(at[cohort, row, unit], board) if (cohort, row, unit) in at else "" for unit in units]
        table.add_row(*([cohort] if cohorts else []), row, *texts)
    return Group(f"{told}{_left(board)}", table)  # not its title, which would be folded to its width


def _state(cell: Cell, board: Board) -> str:
    status = board[cell]
    if status.state == "finished":
        return f"[green]{score(cell)}[/]"
    if status.state == "running":
        return f"[cyan]epoch {epochs(cell)}/{cell.config.train.epochs}[/]"
    if status.state == "failed":
        return "[bold red]failed[/]"
    return "[yellow]again[/]" if status.tries else "[dim]waiting[/]"


def epochs(cell: Cell) -> int:
    """Epochs that a running cell has done."""
    try:
        with (cell.key / "history.csv").open(encoding="utf-8") as file:
            return max((int(line.split(",", 1)[0]) for line in file if line[:1].isdigit()), default=0)
    except OSError:
        return 0


def score(cell: Cell) -> str:
    """The test score of a finished cell on the metric that selects, e.g. ``c_index 0.7213``."""
    from gated_srp.errors import UserError

    try:
        found = (cell.run.read_json("metrics.json").get("test") or {}).get(cell.config.score) or {}
    except UserError:
        found = {}
    value = found.get(cell.config.metric)
    return f"{cell.config.metric} –" if value is None else f"{cell.config.metric} {value:.4f}"


def _left(board: Board) -> str:
    """An estimate from the cells that were finished here."""
    took = [board[cell].seconds for cell in board.of("finished") if not board[cell].before]
    todo, running = len(board.of("waiting")), len(board.of("running"))
    if not took or not (todo or running):
        return ""
    mean = sum(took) / len(took)
    return f"; about {_spoken(mean * (todo + running / 2) / max(running, 1))} left"


def _spoken(seconds: float) -> str:
    from gated_srp.training.progress import spoken

    return spoken(seconds)
