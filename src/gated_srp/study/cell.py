"""One cell in a process of its own: ``python -m gated_srp.study.cell [FILE NUMBER]``.

Without arguments the cell comes as one line of JSON on standard input, which is then the lifeline: when it closes, whoever
started this process is gone, and the run stops with its state saved. With arguments it is line NUMBER (from 0) of FILE.
"""

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gated_srp.errors import UserError

if TYPE_CHECKING:
    from gated_srp.study.cells import Cell

_PATIENCE = 60.0  # seconds that a predecessor has to save its state and leave
STOPPED = 130


def run_cell(spec: Mapping[str, Any]) -> Path:
    """Train the cell, or go on with it, or leave it alone if it is finished."""
    from gated_srp.study.cells import Cell
    from gated_srp.training import train_run

    cell = Cell.from_spec(spec)
    _wait_for_predecessor(cell)
    return train_run(cell.config, arm=cell.arm, seed=cell.seed, fold=cell.fold, quiet=True)


def _wait_for_predecessor(cell: "Cell") -> None:
    """The study before this one may have been killed a moment ago; its cells are just saving."""
    deadline = time.monotonic() + _PATIENCE
    while (cell.run.path / ".lock").exists():
        try:
            with cell.run.lock():
                return
        except UserError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.5)


def _watch_lifeline() -> None:
    while os.read(0, 1):  # not through sys.stdin, whose lock would hold up the end of this process
        pass
    os.kill(os.getpid(), signal.SIGTERM)


def main() -> int:
    """0 finished, 2 a user's mistake (said on standard error), 130 stopped with its state saved."""
    if len(sys.argv) > 2:
        line = Path(sys.argv[1]).read_text(encoding="utf-8").splitlines()[int(sys.argv[2])]
    else:
        line = sys.stdin.readline()
        threading.Thread(target=_watch_lifeline, daemon=True).start()
    from gated_srp.training import Interrupted

    try:
        run_cell(json.loads(line))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except Interrupted as stopped:
        print(stopped, file=sys.stderr)
        return STOPPED
    return 0


if __name__ == "__main__":
    sys.exit(main())
