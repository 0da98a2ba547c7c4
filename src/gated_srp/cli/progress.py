"""A progress bar in a terminal, plain lines elsewhere; both on the error stream, so that output can be piped."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from gated_srp.cli.screen import progress_console


@contextmanager
def counting(what: str) -> Iterator[Callable[[int], Callable[[object], None]]]:
    """``with counting("files") as of: step = of(1000)``, then ``step(anything)`` once an item."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    console = progress_console()
    if not console.is_terminal:
        yield lambda total: _lines(console.print, what, total)
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as bar:

        def of(total: int) -> Callable[[object], None]:
            task = bar.add_task(what, total=total)
            return lambda item: bar.advance(task)

        yield of


def _lines(say: Callable[[str], None], what: str, total: int) -> Callable[[object], None]:
    """A line at each tenth."""
    done = 0

    def step(item: object) -> None:
        nonlocal done
        done += 1
        if done == total or done * 10 // total > (done - 1) * 10 // total:
            say(f"{what}: {done} of {total}")

    return step
