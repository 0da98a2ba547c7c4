"""Cells on many machines through Ray (extra ``cluster``). Run folders lie on storage that all machines share.

A cell is a task with its needs. When its machine is lost, Ray starts it on another one, where it goes on from its last state.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from gated_srp.errors import UserError
from gated_srp.study.cells import Cell
from gated_srp.study.engine import COMMAND, TRIES, Board, Status

_POLL = 0.5  # seconds
_LOST = 5  # machines that one cell may lose


def run_ray(
    board: Board,
    *,
    address: str | None = None,
    cpus: float = 2,
    memory: float = 0.0,
    tick: Callable[[], None] = lambda: None,
    command: Sequence[str] = (),
) -> None:
    """Run all waiting cells on the cluster at ``address`` (None: the one already connected to, else a new local one).

    ``cpus`` and ``memory`` (bytes) are what a cell asks for; a GPU too, where the cluster has any. ``command`` runs instead
    of `gated_srp.study.cell`, which each machine starts with its own Python.
    """
    ray = _ray()
    if not ray.is_initialized():
        ray.init(address=address, log_to_driver=False, include_dashboard=False)
    needs = _needs(ray, cpus, memory)
    task = ray.remote(**needs, max_retries=_LOST)(_cell)
    pending: dict[Any, Cell] = {}

    def submit(cell: Cell) -> None:
        board[cell].tries += 1
        pending[task.remote(cell.spec(), tuple(command), max(1, int(needs["num_cpus"])))] = cell
        board.set(cell, "running")

    try:
        for cell in board.of("waiting"):
            submit(cell)
        while pending:
            tick()
            for reference in ray.wait(list(pending), num_returns=1, timeout=_POLL)[0]:
                cell = pending.pop(reference)
                said = _failure(ray, reference, board[cell], cell)
                if said is None:
                    board.set(cell, "finished")
                elif board[cell].tries < TRIES:
                    board.set(cell, "waiting", said)
                    submit(cell)
                else:
                    board.set(cell, "failed", said)
    finally:
        for reference in pending:
            ray.cancel(reference)


def _needs(ray: Any, cpus: float, memory: float) -> dict[str, Any]:
    """What a cell asks for: never more processors than a machine of the cluster has, or it would wait for ever."""
    machines = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    most, room = (max((machine.get(name, 0) for machine in machines), default=0) for name in ("CPU", "memory"))
    if memory > room:
        raise UserError(
            f"no machine of the cluster has the {memory / 1e9:.1f} GB that the largest slide needs (most: {room / 1e9:.1f} GB). "
            "Set a `cap`, or train.checkpointing: true."
        )
    gpu = {"num_gpus": 1} if any(machine.get("GPU", 0) >= 1 for machine in machines) else {}
    return {"num_cpus": min(cpus, most), "memory": int(memory), **gpu}


def _cell(spec: dict[str, Any], command: tuple[str, ...], threads: int) -> float:
    """In a worker: seconds that the cell took. A process of its own, whose lifeline is this worker."""
    import json
    import os
    import subprocess

    start = time.monotonic()
    share = {name: str(threads) for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")}  # Ray has set them to 1
    process = subprocess.Popen(
        command or COMMAND,  # that of this machine: Ray imports this module there
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, **share},
    )
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write(json.dumps(spec) + "\n")
    process.stdin.flush()
    lines = [line for line in process.stdout.read().splitlines() if line.strip()]
    if code := process.wait():
        raise RuntimeError(lines[-1].removeprefix("error: ") if lines else f"ended with status {code}")
    return time.monotonic() - start


def _failure(ray: Any, reference: Any, status: Status, cell: Cell) -> str | None:
    try:
        status.seconds = ray.get(reference)
    except ray.exceptions.RayTaskError as error:
        return str(error.cause)
    except ray.exceptions.RayError as error:
        return f"lost by the cluster: {type(error).__name__}"
    return None if cell.run.finished else "ended, but its folder is not on storage that this machine shares"


def _ray() -> Any:
    try:
        import ray  # type: ignore[import-not-found,unused-ignore]
    except ModuleNotFoundError:
        raise UserError("--engine ray needs the extra `cluster`: pip install 'gated-srp[cluster]'.") from None
    return ray
