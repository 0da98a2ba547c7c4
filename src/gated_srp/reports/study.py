"""The folder of a study: results.csv, comparison.json or reproduction.csv, tables, figures and one page of words."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from gated_srp.files import write_whole
from gated_srp.models import arm_title
from gated_srp.reports.tables import Entry, Grid, best_of, comparison_grid, formats, mean_and_std, metric_name, std_grid
from gated_srp.study.cells import Cell
from gated_srp.study.paper import Study
from gated_srp.study.results import Comparison
from gated_srp.study.statistics import RULE

Line = Mapping[Any, Any]  # a row of reproduction.csv
_MACHINES = (
    "Speed and memory belong to a machine, so they are not judged: what may be compared with the authors' GPU are the ratios. On a "
    "processor GiB is the most that the whole process held, libraries and loaded slides too; on a GPU what PyTorch had reserved."
)


def _write(folder: Path, texts: Mapping[str, str], grids: Mapping[str, Grid]) -> list[Path]:
    """Texts by file name, and each grid in all formats."""
    tables = {f"{name}.{ending}": text for name, grid in grids.items() for ending, text in formats(grid).items()}
    every = {**texts, **tables}
    for name, text in every.items():
        write_whole(folder / name, text)
    return [folder / name for name in every]


# A comparison ---------------------------------------------------------------------------------------------------------


def write_comparison(
    folder: Path, cells: Sequence[Cell], results: pd.DataFrame, comparison: Comparison, *, title: str, mark: str = ""
) -> list[Path]:
    """Everything that a comparison shows, into ``folder``; ``mark`` (of a quick version) is in each file."""
    from gated_srp.reports.figures import draw_comparison

    notes = (mark,) if mark else ()
    grids = {
        "table": comparison_grid(results, comparison, title=title, notes=notes),
        "table_std": std_grid(results, comparison, title=f"{title}: standard deviations", notes=notes),
    }
    content = comparison.as_json() | {"runs": _folders(cells, folder)} | ({"quick": mark} if mark else {})
    marked = results.assign(note=mark) if mark else results
    texts = {
        "results.csv": marked.to_csv(index=False, lineterminator="\n"),
        "comparison.json": json.dumps(content, indent=2, allow_nan=False) + "\n",
        "README.md": "\n".join(_readme(comparison, grids["table"], cells)) + "\n",
    }
    return _write(folder, texts, grids) + draw_comparison(folder / "figures", cells, results, comparison, mark=mark)


def _folders(cells: Sequence[Cell], folder: Path) -> dict[str, str]:
    """The run folder of every finished cell, relative to the comparison's: both may be moved together."""
    here = folder.absolute()
    done = [cell for cell in cells if cell.run.finished]
    return {str(cell): Path(os.path.relpath(cell.key.absolute(), here)).as_posix() for cell in done}


def _readme(comparison: Comparison, grid: Grid, cells: Sequence[Cell]) -> Iterator[str]:
    yield f"# {grid.title}\n"
    yield formats(grid)["md"].split("\n", 2)[2]
    yield "## What this shows\n"
    across = comparison.across if len({cell.cohort for cell in cells}) > 1 else ()
    for found in (*comparison.cohorts, *across):
        where = "over all cohorts" if found.cohort is None else found.cohort
        against = f"{arm_title(found.arm)} against {arm_title(comparison.reference)}"
        line = f"- {against}, {where}, {metric_name(found.metric)}: {found.verdict}."
        if drawn := found.bootstrap:
            line += f" Over resampled patients: {drawn.difference:+.4f} ({drawn.low:+.4f} to {drawn.high:+.4f})."
        yield line
    yield from (f"- missing: {cell} is not finished." for cell in cells if not cell.run.finished)
    yield from (f"- note: {note}." for note in comparison.notes)


# A study of the paper, done again -------------------------------------------------------------------------------------


def write_reproduction(folder: Path, study: Study, lines: pd.DataFrame, notes: tuple[str, ...] = ()) -> list[Path]:
    """``reproduction.csv`` (one line per number) and ``table`` in all formats. ``lines``: of `beside_published`."""
    texts = {"reproduction.csv": lines.to_csv(index=False, lineterminator="\n")}
    return _write(folder, texts, {"table": reproduction_grid(study, lines, notes)})


def reproduction_grid(study: Study, lines: pd.DataFrame, notes: tuple[str, ...] = ()) -> Grid:
    """A few lines per row: ours, the published value, and our difference to it with the verdict (of a runtime: ratios to the base)."""
    columns = tuple((cohort, metric) for cohort, metrics in study.columns.items() for metric in metrics)
    at = {(line["row"], line["cohort"], line["metric"]): line for line in lines.to_dict("records")}
    best = {c: best_of(lines[(lines["cohort"] == c[0]) & (lines["metric"] == c[1])]["mean"], c[1]) for c in columns}
    rows: list[tuple[str, tuple[Entry, ...]]] = []
    for row in dict.fromkeys(lines["row"]):
        found = [at[(row, *column)] for column in columns]
        ours = tuple(
            Entry(mean_and_std(one["mean"], one["std"]), bool(one["mean"] == best[c]))
            for c, one in zip(columns, found, strict=True)
        )
        rows.append((row, ours))
        if any(not math.isnan(one["published"]) for one in found):
            published = [Entry(mean_and_std(one["published"], one["published_std"])) for one in found]
            rows.append(("– published", tuple(published)))
            if study.kind == "runtime":
                rows += _ratios(study, found)
            else:
                rows.append(("– difference", tuple(map(_difference, found))))
    title = f"{study.title}, reproduced" if study.published else study.title
    return Grid(title, columns, tuple(rows), (*notes, *_about(study, lines)))


def _about(study: Study, lines: pd.DataFrame) -> tuple[str, ...]:
    """Where the published numbers are from, how many agree, and by which rule."""
    if study.published is None:
        return ("Nothing published to compare with.",)
    source = f"Published: {study.published.source}."
    if study.kind == "runtime":
        return source, _MACHINES
    counts = lines["verdict"].value_counts()
    judged = {word: int(counts.get(word, 0)) for word in ("compatible", "not compatible", "not judged", "not run")}
    summary = "; ".join(f"{count} {word}" for word, count in judged.items() if count)
    return source, f"Of the published numbers: {summary}.", f"Rule: {RULE}"


def _ratios(study: Study, found: Sequence[Line]) -> list[tuple[str, tuple[Entry, ...]]]:
    """Ours and the published over the base's; nothing for the base itself."""
    base = study.rows[0].name
    if found[0]["row"] == base:
        return []
    names = {f"– ours / {base}": "times_base", f"– published / {base}": "published_times_base"}
    return [(name, tuple(_times(one[key]) for one in found)) for name, key in names.items()]


def _times(ratio: float) -> Entry:
    return Entry("–" if math.isnan(ratio) else f"{ratio:.2f} ×")


def _difference(line: Line) -> Entry:
    if math.isnan(line["difference"]):
        return Entry("–")
    reach = (line["high"] - line["low"]) / 2
    signs = {"compatible": f" (±{reach:.4f}) ✓ compatible", "not compatible": f" (±{reach:.4f}) ✗ not compatible"}
    return Entry(f"{line['difference']:+.4f}{signs.get(line['verdict'], ' ' + line['verdict'])}".replace("-", "−"))
