"""The flow of a study at the command line: plan, say what it costs, run, show, write."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
import typer

from gated_srp.checks.estimate import this_machine
from gated_srp.cli.matrix_view import showing
from gated_srp.cli.screen import LOG, progress_console, say
from gated_srp.config.cohort import CohortData, open_cohort
from gated_srp.config.schema import CohortConfig
from gated_srp.errors import UserError
from gated_srp.study.cells import Cell, Row, plan, quick_version, refuse_mismatches, refuse_unpaired
from gated_srp.study.collect import collect, compare_cells
from gated_srp.study.cost import Cost, cost
from gated_srp.study.engine import Board, Slot, local_slots, run_local
from gated_srp.study.ray_engine import run_ray
from gated_srp.study.slurm import write_job_array
from gated_srp.training.progress import spoken

_LONG = 3600.0  # seconds from which on a person is asked


@dataclass(frozen=True)
class Running:
    """How to run: cells at a time (None: as many as fit), whether not to ask, and where."""

    jobs: int | None = None
    yes: bool = False
    engine: Literal["local", "ray", "slurm"] = "local"
    address: str | None = None


def compare_arms(
    config: CohortConfig,
    *,
    arms: Sequence[str],
    seeds: Sequence[int],
    quick: bool,
    reference: str | None,
    output: Path | None,
    bootstrap: int,
    running: Running,
) -> list[Cell]:
    """`gated-srp compare`; the cells that failed."""
    from gated_srp.reports.study import write_comparison
    from gated_srp.study.tune import tuned_rows

    mark = ""
    if quick:
        config, seeds, mark = quick_version(config, seeds)
        say(mark)
    against = reference or ("na" if "na" in arms else arms[0])
    if against not in arms:
        raise UserError(f"--reference {against!r} is not among the arms: {', '.join(arms)}. Name one of them.")
    more, notes = tuned_rows(config, arms, seeds)
    cells = plan(config, [*(Row.of(arm) for arm in arms), *more], seeds)
    board = run_cells(cells, {config.name: open_cohort(config)}, running)
    results = collect(cells)
    failed = board.of("failed")
    for cell in failed:
        LOG.error("failed twice: %s: %s", cell, board[cell].said)
    comparison = compare_cells(cells, results, against, repeats=bootstrap, notes=(*([mark] if mark else []), *notes))
    folder = output or config.out / config.name / "comparison"
    title = f"{config.name}{' (quick)' if mark else ''}"
    written = write_comparison(folder, cells, results, comparison, title=title, mark=mark)
    say("\n" + (folder / "README.md").read_text(encoding="utf-8"))
    say(f"written: {folder} ({len(written)} files)")
    return failed


def tune_gate(config: CohortConfig, *, arm: str, seeds: Sequence[int], quick: bool, running: Running) -> None:
    """`gated-srp tune`."""
    from gated_srp.reports.study import write
    from gated_srp.study.collect import split_ratio
    from gated_srp.study.tune import choose, freeze, optimism, tuning_cells, tuning_table

    if quick:
        config, seeds, mark = quick_version(config, seeds)
        say(mark)
    cells = tuning_cells(config, arm, seeds)
    board = run_cells(cells, {config.name: open_cohort(config)}, running)
    for cell in board.of("failed"):
        LOG.error("failed twice: %s: %s", cell, board[cell].said)
    refuse_unpaired(cells)
    table = tuning_table(cells)
    choices = choose(table)
    path = freeze(config, arm, choices)
    write(path.with_name("tuning.csv"), table.to_csv(index=False, lineterminator="\n"))
    for choice in choices:
        say(
            f"seed {choice.unit}: delta {choice.delta:g}, h {choice.hidden_dim}; {config.metric} {choice.validation:.4f} on "
            f"validation, {choice.test:.4f} on test (untuned {choice.start_validation:.4f}, {choice.start_test:.4f})"
        )
    found = optimism(choices, split_ratio(cells))
    interval = "" if math.isnan(found.gain.low) else f" (95 % interval {found.gain.low:+.4f} to {found.gain.high:+.4f})"
    say(
        f"optimism: validation promised {found.chosen:+.4f} more than the test gave, {found.by_choosing:+.4f} of it by choosing "
        f"(untuned: {found.start:+.4f}).\ngain of tuning on test: {found.gain.mean:+.4f}{interval}. Choosing on the test set would "
        f"have shown {found.peeking:+.4f} more, none of it real.\nwritten: {path}; `gated-srp compare` shows it as {arm}_tuned"
    )


def run_cells(cells: Sequence[Cell], data: Mapping[str, CohortData], running: Running) -> Board:
    """Check what is there, say what is to come, ask if it is long, and run what is missing."""
    refuse_mismatches(cells, data)
    board = Board(tuple(cells))
    machine = this_machine()
    ahead = cost(cells, data, machine)
    finished = len(board.cells) - ahead.cells
    say(f"{len(board.cells)} cells, {finished} finished before, {ahead.cells} to run")
    if not ahead.cells:
        return board
    if running.engine == "slurm":
        _write_slurm(board, ahead, gpu=torch.cuda.is_available())
        raise typer.Exit
    slots = local_slots(running.jobs or ahead.cells, 1.0 if running.jobs else ahead.memory)
    seconds = ahead.seconds / len({slot.device for slot in slots})
    where = (
        f"the cluster at {running.address or 'hand'}" if running.engine == "ray" else f"this machine, {_places(slots)}"
    )
    say(
        f"roughly {spoken(seconds)} on {machine.name}, {_bytes(ahead.disk)} on disk, {_bytes(ahead.memory)} of memory a cell; "
        f"runs on {where}"
    )
    if seconds > _LONG and not running.yes and sys.stdin.isatty() and not typer.confirm("Start?", default=True):
        raise typer.Exit(1)
    with showing(board, progress_console()) as tick:
        try:
            if running.engine == "ray":
                run_ray(board, address=running.address, memory=ahead.memory, tick=tick)
            else:
                run_local(board, slots, tick=tick)
        except KeyboardInterrupt:
            LOG.warning("stopped; running cells have saved their states. Start the same command again to go on.")
            raise typer.Exit(130) from None
    return board


def _write_slurm(board: Board, ahead: Cost, *, gpu: bool) -> None:
    waiting = board.of("waiting")
    folder = waiting[0].config.out / "slurm"
    path = write_job_array(folder, waiting, seconds=ahead.seconds / ahead.cells, memory=ahead.memory, gpu=gpu)
    say(
        f"written: {path}\nSubmit it with `sbatch {path}`; when it is done, start this command again to see the results."
    )


def _places(slots: Sequence[Slot]) -> str:
    each = f"{slots[0].threads} thread{'s' if slots[0].threads > 1 else ''} each"
    return f"{len(slots)} at a time, {each}"


def _bytes(count: float) -> str:
    return f"{count / 1e9:.1f} GB" if count >= 1e8 else f"{count / 1e6:.0f} MB"
