"""The flow of `gated-srp reproduce`: plan all cells, run the missing ones, put ours beside the published."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from gated_srp.checks.estimate import this_machine
from gated_srp.cli.screen import LOG, say
from gated_srp.cli.study_run import Running, run_cells
from gated_srp.config.cohort import CohortData, open_cohort
from gated_srp.errors import UserError
from gated_srp.study.cells import Cell, distinct
from gated_srp.study.collect import collect, compare_cells
from gated_srp.study.reproduce import (
    Sources,
    Study,
    paper_settings,
    plan_study,
    read_studies,
    studies_folder,
    study_names,
)
from gated_srp.study.results import COLUMNS

Plan = tuple[Study, tuple[Cell, ...], tuple[str, ...]]


def list_studies() -> None:
    """Name and title of each."""
    folder = studies_folder()
    for name in study_names(folder):
        study = read_studies(name, folder)[0]
        about = f"{len(study.columns)} cohorts x {len(study.rows)} rows" if study.rows else "nothing to train"
        say(f"{name:<20} {study.title} ({about})")
    say(f"{'all':<20} all of these, runs that several need counted once")


def reproduce_studies(
    name: str, sources: Sources, *, cohorts: Sequence[str], seeds: Sequence[int], dry_run: bool, running: Running
) -> bool:
    """Whether a cell failed."""
    everything = read_studies(name, studies_folder())
    studies = [study.only(cohorts) for study in everything]
    if cohorts and not any(study.columns for study in studies):
        there = ", ".join(dict.fromkeys(cohort for study in everything for cohort in study.columns)) or "none"
        raise UserError(f"--cohorts {','.join(cohorts)}: {name} has no such cohort. Its cohorts: {there}.")
    plans = [(study, *plan_study(study, sources, cohorts=cohorts, seeds=seeds)) for study in studies]
    for note in dict.fromkeys(note for _, _, notes in plans for note in notes):
        say(f"note: {note}")
    if dry_run:
        show_plans(plans)
        return False
    data, missing = _open(plans)
    plans = [(study, tuple(c for c in cells if _files(c) not in missing), notes) for study, cells, notes in plans]
    trained = [cell for study, cells, _ in plans if study.kind != "runtime" for cell in cells]
    failed = False
    if trained:
        board = run_cells(trained, data, running)
        for cell in board.of("failed"):
            failed = True
            LOG.error("failed twice: %s: %s", cell, board[cell].said)
    for study, cells, notes in plans:
        _write(sources.out / "reproduce" / study.name, study, cells, notes)
    return failed


def show_plans(plans: Sequence[Plan]) -> None:
    """Every cell with its settings, untuned rows apart, and how many distinct runs that is."""
    everything: list[Cell] = []
    for study, cells, _ in plans:
        paper = {row.name for row in study.rows}
        own = [cell for cell in cells if cell.row in paper]
        more = [cell for cell in cells if cell.row not in paper]
        what = (
            f"drawn by `{study.command}`" if study.command else f"{len(own)} cells" if study.rows else "drawn at once"
        )
        say(f"{study.name}: {study.title}; {what}")
        for cell in own:
            say(_line(cell))
        if more:
            say(f"{study.name}, beside them: {len(more)} cells of untuned rows")
            for cell in more:
                say(_line(cell))
        everything += cells
    say(f"{len(distinct(everything))} distinct runs")


def _line(cell: Cell) -> str:
    return f"  {cell.cohort:<11} {cell.row:<36} seed {cell.unit}  {paper_settings(cell)}"


def _files(cell: Cell) -> tuple[str, str | None]:
    return cell.cohort, cell.config.encoder


def _open(plans: Sequence[Plan]) -> tuple[dict[str, CohortData], set[tuple[str, str | None]]]:
    """The cohorts by name; and cohorts and encoders whose files are missing: they are left out, and it is said why."""
    data: dict[str, CohortData] = {}
    missing: set[tuple[str, str | None]] = set()
    for cell in {_files(cell): cell for _, cells, _ in plans for cell in cells}.values():
        try:
            found = open_cohort(cell.config)
            data.setdefault(cell.cohort, found)
        except UserError as error:
            missing.add(_files(cell))
            LOG.warning("note: %s, %s: left out. %s", cell.cohort, cell.config.encoder, error)
    if missing and not data:
        raise UserError(
            "no cohort of this study has its files. Name them with --features and --labels, or look with --dry-run."
        )
    return data, missing


def _write(folder: Path, study: Study, cells: Sequence[Cell], notes: tuple[str, ...]) -> None:
    from gated_srp.reports.figures import draw_signed_gate, draw_trajectories

    if study.kind == "elsewhere":
        say(f"{study.name}: run `{study.command}`")
    elif study.kind == "signed-gate":
        _say(draw_signed_gate(folder / "signed_gate"))
    elif study.kind == "trajectories":
        for name, cohorts in study.panels.items():
            runs = {c: [cell.key for cell in cells if cell.cohort == c and cell.run.finished] for c in cohorts}
            present = {cohort: paths for cohort, paths in runs.items() if paths}
            _say(draw_trajectories(present, folder / f"trajectories_{name}", title=study.rows[0].name))
    elif cells:
        _write_table(folder, study, cells, notes)


def _write_table(folder: Path, study: Study, cells: Sequence[Cell], notes: tuple[str, ...]) -> None:
    from gated_srp.models import find_arm
    from gated_srp.reports.reproduction import write_reproduction
    from gated_srp.reports.study import write_comparison
    from gated_srp.study.judge import beside_published

    if study.kind == "runtime":
        results, notes = measured(cells), (*notes, f"Measured on {this_machine().name}.")
    else:
        results = collect(cells)
    _say(write_reproduction(folder, study, beside_published(study, results), notes))
    say("\n" + (folder / "table.md").read_text(encoding="utf-8"))
    rows = [row.name for row in study.rows if row.name in set(results["arm"])]
    if study.kind == "table" and len(rows) > 1:
        bases = [row.name for row in study.rows if row.name in rows and find_arm(row.arm).base == row.arm]
        reference = (bases or rows[-1:])[0]
        comparison = compare_cells(cells, results, reference, repeats=0, notes=notes)
        _say(write_comparison(folder / "comparison", cells, results, comparison, title=study.title))


def measured(cells: Sequence[Cell]) -> pd.DataFrame:
    """Runtime, cell by cell with nothing beside it; results in the usual form."""
    from gated_srp.study.runtime import measure

    rows = []
    for cell in cells:
        found = measure(cell)
        say(f"{cell}: " + ", ".join(f"{name} {value:.3f}" for name, value in found.items()))
        rows += [(cell.cohort, cell.row, cell.unit, name, value) for name, value in found.items()]
    return pd.DataFrame(rows, columns=list(COLUMNS))


def _say(paths: Sequence[Path]) -> None:
    if paths:
        say(f"written: {paths[0].parent} ({len(paths)} files)")
