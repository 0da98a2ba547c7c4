"""The files of a study: its tables in the paper's form as Markdown, LaTeX and CSV, its numbers, figures and one page of words."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any, Literal

import pandas as pd

from gated_srp.errors import counted
from gated_srp.files import write_whole
from gated_srp.models import arm_title
from gated_srp.study.cells import Cell
from gated_srp.study.paper import Study
from gated_srp.study.results import LOWER_IS_BETTER, Comparison
from gated_srp.study.statistics import RULE

Tone = Literal["better", "worse"]
_COLOURS: dict[Tone, str] = {"better": "137333", "worse": "B3261E"}
_SIGNS: dict[Tone, str] = {"better": " ↑", "worse": " ↓"}
_METRICS = {
    "c_index": "C",
    "macro_f1": "F1",
    "accuracy": "Acc",
    "auroc": "AUROC",
    "auprc": "AUPRC",
    "froc": "FROC",
    "dice": "Dice",
    "pointing": "pointing game",
    "macro_auc": "AUC",
    "quadratic_kappa": "κq",
    "macro_map": "mAP",
    "pearson": "r",
    "r2": "R²",
    "mae": "MAE",
    "balanced_accuracy": "Bal. acc",
    "peak_reserved_gib": "GiB",
    "train_wsi_per_second": "train WSI/s",
    "test_wsi_per_second": "test WSI/s",
}
_TEX = {
    "&": r"\&",
    "%": r"\%",
    "_": r"\_",
    "#": r"\#",
    "±": r"$\pm$",
    "κq": r"$\kappa_q$",
    "δ": r"$\delta$",
    "β": r"$\beta$",
}
_TEX |= {"−": "$-$", "✓": r"$\checkmark$", "✗": r"$\times$", "<": r"\textless{}", ">": r"\textgreater{}"}
Column = tuple[str, str]  # cohort, metric
Line = Mapping[Any, Any]  # a row of reproduction.csv
_MACHINES = (
    "Speed and memory belong to a machine, so they are not judged: what may be compared with the authors' GPU are the ratios. On a "
    "processor GiB is the most that the whole process held, libraries and loaded slides too; on a GPU what PyTorch had reserved."
)


@dataclass(frozen=True)
class Entry:
    """A cell's text; ``bold`` and ``tone`` as the paper marks them."""

    text: str
    bold: bool = False
    tone: Tone | None = None


@dataclass(frozen=True)
class Grid:
    """Named rows of entries under columns of cohort and metric; ``notes`` go below (or into the caption)."""

    title: str
    columns: tuple[Column, ...]
    rows: tuple[tuple[str, tuple[Entry, ...]], ...]
    notes: tuple[str, ...] = ()
    label: str = "tab:results"


# What to show --------------------------------------------------------------------------------------------------------


def comparison_grid(results: pd.DataFrame, comparison: Comparison, *, title: str, notes: Sequence[str] = ()) -> Grid:
    """Mean ± std over seeds, the best of a column bold, a tone only for a difference that is claimed."""
    columns = _columns(comparison)
    means, stds, counts = (_wide(results, columns, how) for how in ("mean", "std", "count"))
    certain = [cell for cell in comparison.cohorts if cell.claimed]
    tones = {(cell.arm, str(cell.cohort), cell.metric): tone_of(cell.test.mean, cell.metric) for cell in certain}
    rows = []
    for arm in means.index:
        entries = []
        for column in columns:
            mean, std, count = means.loc[arm, column], stds.loc[arm, column], counts.loc[arm, column]
            fewer = "" if count == counts[column].max() or math.isnan(mean) else f" (n={int(count)})"
            text = mean_and_std(mean, std) + fewer
            best = bool(mean == best_of(means[column], column[1]))
            entries.append(Entry(text, best, tones.get((str(arm), *column))))
        rows.append((str(arm), tuple(entries)))
    reference = arm_title(comparison.reference)
    own = (
        f"Mean ± standard deviation over {counted(int(counts.max().max()), 'seed')} on the test set; the best of a column is bold. "
        f"↑ / ↓ (green / red): the 95 % interval of the paired difference to {reference} (Nadeau-Bengio, since seeds share slides) "
        "excludes zero, and p after Holm's correction is below 0.05; unmarked differences are not distinguishable from zero.",
    )
    return Grid(title, columns, tuple(rows), (*notes, *own))


def std_grid(results: pd.DataFrame, comparison: Comparison, *, title: str, notes: Sequence[str] = ()) -> Grid:
    """Standard deviations over seeds, the lowest of a column bold."""
    columns = _columns(comparison)
    stds = _wide(results, columns, "std")
    rows = tuple(
        (str(arm), tuple(Entry(mean_and_std(std), bool(std == stds[c].min())) for c, std in found.items()))
        for arm, found in stds.iterrows()
    )
    note = "Standard deviation over seeds; the lowest of a column is bold."
    return Grid(title, columns, rows, (*notes, note), "tab:std")


def mean_and_std(mean: float, std: float = math.nan) -> str:
    """
    >>> mean_and_std(0.5, 0.01), mean_and_std(0.5), mean_and_std(math.nan)
    ('0.5000 ± 0.0100', '0.5000', '–')
    """
    return "–" if math.isnan(mean) else f"{mean:.4f}" + ("" if math.isnan(std) else f" ± {std:.4f}")


def best_of(values: pd.Series, metric: str) -> float:
    """The best value of a column; not a number where there is none."""
    return float(values.min() if metric in LOWER_IS_BETTER else values.max())


def tone_colour(difference: float, metric: str) -> str:
    """Green for better, red for worse, as ``#RRGGBB``; for differences whose interval excludes zero."""
    return f"#{_COLOURS[tone_of(difference, metric)]}"


def tone_of(difference: float, metric: str) -> Tone:
    """Of a difference that is certain."""
    return "better" if (difference < 0) == (metric in LOWER_IS_BETTER) else "worse"


def _columns(comparison: Comparison) -> tuple[Column, ...]:
    found = list(dict.fromkeys((str(cell.cohort), cell.metric) for cell in comparison.cohorts))
    order = [cohort for cohort, _ in found]
    return tuple(sorted(found, key=lambda column: order.index(column[0])))


def _wide(results: pd.DataFrame, columns: Sequence[Column], how: str) -> pd.DataFrame:
    """Arms x columns, arms in the order of the results."""
    grouped = results.groupby(["arm", "cohort", "metric"], sort=False)["value"].agg(how).unstack(["cohort", "metric"])
    wide = grouped.reindex(index=list(dict.fromkeys(results["arm"])), columns=pd.MultiIndex.from_tuples(columns))
    return wide.fillna(0) if how == "count" else wide


# How to write it -----------------------------------------------------------------------------------------------------


def markdown(grid: Grid) -> str:
    """A table that is aligned as plain text, too."""
    heads = ["", *(f"{short(cohort)} {metric_name(metric)}" for cohort, metric in grid.columns)]
    table = [heads, *([arm_title(name), *map(_marked, entries)] for name, entries in grid.rows)]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    lines = [f"| {' | '.join(map(str.ljust, row, widths))} |" for row in table]
    rule = "|" + "|".join(f"{'-' * (width + 1)}{':' if i else '-'}" for i, width in enumerate(widths)) + "|"
    notes = [f"\n{note}" for note in grid.notes]
    return "\n".join([f"**{grid.title}**", "", lines[0], rule, *lines[1:], *notes]) + "\n"


def latex(grid: Grid) -> str:
    """booktabs; needs ``\\usepackage{amssymb,booktabs,xcolor}``."""
    from jinja2 import Environment, PackageLoader

    braces: dict[str, Any] = {
        "variable_start_string": "<<",
        "variable_end_string": ">>",
    }  # TeX is full of the usual ones
    braces |= {"block_start_string": "<%", "block_end_string": "%>"}
    templates = PackageLoader("gated_srp.reports")
    environment = Environment(loader=templates, trim_blocks=True, keep_trailing_newline=True, **braces)
    environment.filters["tex"] = tex
    groups, first = [], 2
    for cohort, columns in groupby(grid.columns, key=lambda column: column[0]):
        last = first + len(list(columns)) - 1
        groups.append((short(cohort), first, last))
        first = last + 1
    names = {"metric_name": metric_name, "arm_title": arm_title, "colours": _COLOURS}
    return environment.get_template("table.tex.j2").render(grid=grid, groups=groups, **names)


def as_csv(grid: Grid) -> str:
    """Plain texts, one row per arm; marks and notes are in the other formats only."""
    heads = ["arm", *(f"{cohort} {metric}" for cohort, metric in grid.columns)]
    rows = [[name, *(entry.text for entry in entries)] for name, entries in grid.rows]
    return pd.DataFrame(rows, columns=heads).to_csv(index=False, lineterminator="\n")


def formats(grid: Grid) -> Mapping[str, str]:
    """The grid by file ending."""
    return {"md": markdown(grid), "tex": latex(grid), "csv": as_csv(grid)}


def short(cohort: str) -> str:
    """As in the paper's heads.

    >>> short("TCGA-KIRC"), short("CAMELYON16")
    ('KIRC', 'CAM16')
    """
    return cohort.removeprefix("TCGA-").replace("CAMELYON", "CAM")


def metric_name(metric: str) -> str:
    return _METRICS.get(metric, metric.replace("_", " "))


def tex(text: str) -> str:
    """
    >>> tex("5 % of a_b ± 1")
    '5 \\\\% of a\\\\_b $\\\\pm$ 1'
    """
    for sign, command in _TEX.items():
        text = text.replace(sign, command)
    return text


def _marked(entry: Entry) -> str:
    text = f"**{entry.text}**" if entry.bold else entry.text
    return text + (_SIGNS[entry.tone] if entry.tone else "")


# Into a folder ---------------------------------------------------------------------------------------------------------


def _write(folder: Path, texts: dict[str, str], grids: Mapping[str, Grid]) -> list[Path]:
    """Texts by file name, and each grid in all formats."""
    texts |= {f"{name}.{ending}": text for name, grid in grids.items() for ending, text in formats(grid).items()}
    for name, text in texts.items():
        write_whole(folder / name, text)
    return [folder / name for name in texts]


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
    # Run folders are relative to the comparison's: both may be moved together.
    done, here = [cell for cell in cells if cell.run.finished], folder.absolute()
    runs = {str(cell): Path(os.path.relpath(cell.key.absolute(), here)).as_posix() for cell in done}
    content = comparison.as_json() | {"runs": runs} | ({"quick": mark} if mark else {})
    marked = results.assign(note=mark) if mark else results
    texts = {
        "results.csv": marked.to_csv(index=False, lineterminator="\n"),
        "comparison.json": json.dumps(content, indent=2, allow_nan=False) + "\n",
        "README.md": "\n".join(_readme(comparison, grids["table"], cells)) + "\n",
    }
    return _write(folder, texts, grids) + draw_comparison(folder / "figures", cells, results, comparison, mark=mark)


def _readme(comparison: Comparison, grid: Grid, cells: Sequence[Cell]) -> Iterator[str]:
    yield f"# {grid.title}\n"
    yield formats(grid)["md"].split("\n", 2)[2]
    yield "## What this shows\n"
    across = comparison.across if len({cell.cohort for cell in cells}) > 1 else ()
    for found in (*comparison.cohorts, *across):
        where = "over all cohorts" if found.cohort is None else found.cohort
        against = f"{arm_title(found.arm)} against {arm_title(comparison.reference)}"
        line = f"- {against}, {where}, {metric_name(found.metric)}: {'; '.join(filter(None, (found.verdict, found.no_worse)))}."
        if drawn := found.bootstrap:
            line += f" Over resampled patients: {drawn.difference:+.4f} ({drawn.low:+.4f} to {drawn.high:+.4f})."
        yield line
    yield from (f"- missing: {cell} is not finished." for cell in cells if not cell.run.finished)
    yield from (f"- note: {note.removesuffix('.')}." for note in comparison.notes)


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
        marked = [bool(one["mean"] == best[c]) for c, one in zip(columns, found, strict=True)]
        ours = [Entry(mean_and_std(one["mean"], one["std"]), bold) for one, bold in zip(found, marked, strict=True)]
        rows.append((row, tuple(ours)))
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
    judged = {
        word: int(counts.get(word, 0))
        for word in ("compatible", "not compatible", "not judged", "incomplete", "not run")
    }
    summary = "; ".join(f"{count} {word}" for word, count in judged.items() if count)
    return source, f"Of the published numbers: {summary}.", f"Rule: {RULE}"


def _ratios(study: Study, found: Sequence[Line]) -> list[tuple[str, tuple[Entry, ...]]]:
    """Ours and the published over the base's; nothing for the base itself."""
    base = study.rows[0].name
    if found[0]["row"] == base:
        return []
    names = {f"– ours / {base}": "times_base", f"– published / {base}": "published_times_base"}
    shown = [["–" if math.isnan(one[key]) else f"{one[key]:.2f} ×" for one in found] for key in names.values()]
    return [(name, tuple(map(Entry, texts))) for name, texts in zip(names, shown, strict=True)]


def _difference(line: Line) -> Entry:
    if math.isnan(line["difference"]):
        return Entry("–")
    if line["verdict"] == "incomplete":
        slides = f"{line['slides']:,.0f} of {line['paper_slides']:,.0f} slides"
        return Entry(f"{line['difference']:+.4f}, {slides}: not judged".replace("-", "−"))
    reach = (line["high"] - line["low"]) / 2
    signs = {"compatible": f" (±{reach:.4f}) ✓ compatible", "not compatible": f" (±{reach:.4f}) ✗ not compatible"}
    return Entry(f"{line['difference']:+.4f}{signs.get(line['verdict'], ' ' + line['verdict'])}".replace("-", "−"))
