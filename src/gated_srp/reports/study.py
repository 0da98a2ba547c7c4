"""The folder of a comparison: results.csv, comparison.json, tables, figures and one page of words that says what they show."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import pandas as pd

from gated_srp.files import write_whole
from gated_srp.models import arm_title
from gated_srp.reports.tables import Grid, comparison_grid, formats, metric_name, std_grid
from gated_srp.study.cells import Cell
from gated_srp.study.results import Comparison


def write_comparison(
    folder: Path, cells: Sequence[Cell], results: pd.DataFrame, comparison: Comparison, *, title: str, mark: str = ""
) -> list[Path]:
    """Everything that a comparison shows, into ``folder``; ``mark`` (of a quick version) stands in each file."""
    from gated_srp.reports.figures import draw_comparison

    notes = (mark,) if mark else ()
    grids = {
        "table": comparison_grid(results, comparison, title=title, notes=notes),
        "table_std": std_grid(results, comparison, title=f"{title}: standard deviations", notes=notes),
    }
    written = [write(folder / "results.csv", results_csv(results, mark))]
    content = comparison.as_json() | {"runs": _folders(cells, folder)} | ({"quick": mark} if mark else {})
    written.append(write(folder / "comparison.json", json.dumps(content, indent=2, allow_nan=False) + "\n"))
    written += write_grids(folder, grids)
    written.append(write(folder / "README.md", "\n".join(_words(comparison, grids["table"], cells)) + "\n"))
    return written + draw_comparison(folder / "figures", cells, results, comparison, mark=mark)


def _folders(cells: Sequence[Cell], folder: Path) -> dict[str, str]:
    """The run folder of every finished cell, relative to the comparison's: both may be moved together."""
    here = folder.absolute()
    return {
        str(cell): Path(os.path.relpath(cell.key.absolute(), here)).as_posix() for cell in cells if cell.run.finished
    }


def results_csv(results: pd.DataFrame, mark: str = "") -> str:
    """cohort, arm, seed, metric, value; a quick version says so in a column more, in every row."""
    return (results.assign(note=mark) if mark else results).to_csv(index=False, lineterminator="\n")


def write_grids(folder: Path, grids: dict[str, Grid]) -> list[Path]:
    """Each grid in all formats."""
    texts = {f"{name}.{ending}": text for name, grid in grids.items() for ending, text in formats(grid).items()}
    return [write(folder / name, text) for name, text in texts.items()]


def write(path: Path, text: str) -> Path:
    """Whole or not at all."""
    write_whole(path, text)
    return path


def _words(comparison: Comparison, grid: Grid, cells: Sequence[Cell]) -> Iterator[str]:
    yield f"# {grid.title}\n"
    yield formats(grid)["md"].split("\n", 2)[2]
    yield "## What this shows\n"
    for part in (comparison.cohorts, comparison.across if len({c.cohort for c in cells}) > 1 else ()):
        for cell in part:
            where = "over all cohorts" if cell.cohort is None else cell.cohort
            line = f"- {arm_title(cell.arm)} against {arm_title(comparison.reference)}, {where}, {metric_name(cell.metric)}: {cell.verdict}."
            drawn = cell.bootstrap
            over = (
                f" Over resampled patients: {drawn.difference:+.4f} ({drawn.low:+.4f} to {drawn.high:+.4f})."
                if drawn
                else ""
            )
            yield line + over
    yield from (f"- missing: {one} is not finished." for one in cells if not one.run.finished)
    for note in comparison.notes:
        yield f"- note: {note}."
