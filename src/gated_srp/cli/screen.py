"""What a command prints: results with `say`, warnings and errors with standard logging, and all of it to the file of --log.

Levels: INFO is what `say` has printed already; DEBUG is what --verbose adds; the rest goes to the error stream in any case.
"""

from __future__ import annotations

import io
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from gated_srp.errors import UserError

if TYPE_CHECKING:
    from rich.console import Console

LOG = logging.getLogger("gated_srp")
_COLOURS = {logging.DEBUG: "bright_black", logging.WARNING: "yellow", logging.ERROR: "red", logging.CRITICAL: "red"}


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
    if not SCREEN.quiet:
        _echo(typer.style(text, bold=True) if bold else text, err=err)
    LOG.info("%s", text.strip("\n"))


@contextmanager
def console(*, err: bool = False) -> Iterator[Console]:
    """``with console() as page: page.print(table)``: rich's console, under the same options as `say`."""
    from rich.console import Console

    page = Console(stderr=err, file=io.StringIO() if SCREEN.quiet else None, record=True)
    yield page
    LOG.info("%s", page.export_text().strip("\n"))


def progress_console() -> Console:
    """For bars and counts, which do not go to the log."""
    from rich.console import Console

    return Console(stderr=True, quiet=SCREEN.quiet, highlight=False)


class _Errors(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        if record.levelno != logging.INFO:  # `say` has printed it already
            _echo(typer.style(record.getMessage(), fg=_COLOURS.get(record.levelno)), err=True)


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
