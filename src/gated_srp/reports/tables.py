"""Tables in the paper's form, as Markdown, LaTeX and CSV: a `Grid` of texts, and the grids that studies give."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import pandas as pd

from gated_srp.models import arm_title
from gated_srp.study.results import LOWER_IS_BETTER, Comparison

Tone = Literal["better", "worse"]
_COLOURS: dict[Tone, str] = {"better": "137333", "worse": "B3261E"}
_SIGNS: dict[Tone, str] = {"better": " ↑", "worse": " ↓"}
_METRICS = {
    "c_index": "C",
    "macro_f1": "F1",
    "accuracy": "Acc",
    "macro_auc": "AUC",
    "quadratic_kappa": "κq",
    "macro_map": "mAP",
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
    """Mean ± std over seeds, the best of a column bold, a tone only where the interval of the difference excludes zero."""
    columns = _columns(comparison)
    means, stds, counts = (_wide(results, columns, how) for how in ("mean", "std", "count"))
    certain = [cell for cell in comparison.cohorts if cell.test.excludes_zero]
    tones = {(cell.arm, str(cell.cohort), cell.metric): _tone(cell.test.mean, cell.metric) for cell in certain}
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
        f"Mean ± standard deviation over {int(counts.max().max())} seeds on the test set; the best of a column is bold. "
        f"↑ / ↓ (green / red): the 95 % interval of the paired difference to {reference} (Nadeau-Bengio, since seeds share slides) "
        "excludes zero; unmarked differences are not distinguishable from zero.",
    )
    return Grid(title, columns, tuple(rows), (*notes, *own))


def std_grid(results: pd.DataFrame, comparison: Comparison, *, title: str, notes: Sequence[str] = ()) -> Grid:
    """Standard deviations over seeds, the lowest of a column bold."""
    columns = _columns(comparison)
    stds = _wide(results, columns, "std")
    rows = []
    for arm in stds.index:
        found = stds.loc[arm].items()
        rows.append(
            (str(arm), tuple(Entry(mean_and_std(std, math.nan), bool(std == stds[c].min())) for c, std in found))
        )
    note = "Standard deviation over seeds; the lowest of a column is bold."
    return Grid(title, columns, tuple(rows), (*notes, note), "tab:std")


def mean_and_std(mean: float, std: float) -> str:
    """
    >>> mean_and_std(0.5, 0.01), mean_and_std(0.5, math.nan), mean_and_std(math.nan, math.nan)
    ('0.5000 ± 0.0100', '0.5000', '–')
    """
    return "–" if math.isnan(mean) else f"{mean:.4f}" + ("" if math.isnan(std) else f" ± {std:.4f}")


def best_of(values: pd.Series, metric: str) -> float:
    """The best value of a column; not a number where there is none."""
    return float(values.min() if metric in LOWER_IS_BETTER else values.max())


def tone_colour(difference: float, metric: str) -> str:
    """Green for better, red for worse, as ``#RRGGBB``; for differences whose interval excludes zero."""
    return f"#{_COLOURS[_tone(difference, metric)]}"


def _tone(difference: float, metric: str) -> Tone:
    return "better" if (difference < 0) == (metric in LOWER_IS_BETTER) else "worse"


def _columns(comparison: Comparison) -> tuple[Column, ...]:
    found = dict.fromkeys((str(cell.cohort), cell.metric) for cell in comparison.cohorts)
    order = list(dict.fromkeys(cohort for cohort, _ in found))
    return tuple(sorted(found, key=lambda column: order.index(column[0])))


def _wide(results: pd.DataFrame, columns: Sequence[Column], how: str) -> pd.DataFrame:
    """Arms x columns, arms in the order of the results."""
    grouped = results.groupby(["arm", "cohort", "metric"], sort=False)["value"].agg(how).unstack(["cohort", "metric"])
    wide = grouped.reindex(index=list(dict.fromkeys(results["arm"])), columns=pd.MultiIndex.from_tuples(columns))
    return wide.fillna(0) if how == "count" else wide


# How to write it -----------------------------------------------------------------------------------------------------


def markdown(grid: Grid) -> str:
    """A table that is aligned as plain text, too."""
    heads = [f"{short(cohort)} {metric_name(metric)}" for cohort, metric in grid.columns]
    body = [[arm_title(name), *(_marked(entry) for entry in entries)] for name, entries in grid.rows]
    table = [["", *heads], *body]
    widths = [max(len(row[i]) for row in table) for i in range(len(table[0]))]
    lines = [
        "| " + " | ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)) + " |" for row in table
    ]
    rule = "|" + "|".join(f"{'-' * (width + 1)}{':' if i else '-'}" for i, width in enumerate(widths)) + "|"
    notes = [f"\n{note}" for note in grid.notes]
    return "\n".join([f"**{grid.title}**", "", lines[0], rule, *lines[1:], *notes]) + "\n"


def latex(grid: Grid) -> str:
    """booktabs; needs ``\\usepackage{amssymb,booktabs,xcolor}``."""
    groups: list[tuple[str, int]] = []
    for cohort, _ in grid.columns:
        if groups and groups[-1][0] == cohort:
            groups[-1] = (cohort, groups[-1][1] + 1)
        else:
            groups.append((cohort, 1))
    head = " & ".join(rf"\multicolumn{{{n}}}{{c}}{{\textbf{{{tex(short(cohort))}}}}}" for cohort, n in groups)
    rules, start = [], 2
    for _, n in groups:
        rules.append(rf"\cmidrule(lr){{{start}-{start + n - 1}}}")
        start += n
    metrics = " & ".join(rf"\textit{{{tex(metric_name(metric))}}}" for _, metric in grid.columns)
    body = [f"{tex(arm_title(name))} & " + " & ".join(map(_tex_entry, entries)) + r" \\" for name, entries in grid.rows]
    caption = tex(" ".join(grid.notes).replace("↑ / ↓ (green / red)", "Green / red"))
    lines = [
        r"% \usepackage{amssymb,booktabs,xcolor}",
        r"\begin{table}[ht]",
        r"\centering",
        rf"\caption{{\textbf{{{tex(grid.title)}.}} {caption}}}",
        rf"\label{{{grid.label}}}",
        rf"\begin{{tabular}}{{@{{}}l{'c' * len(grid.columns)}@{{}}}}",
        r"\toprule",
        rf"\textbf{{Method}} & {head} \\",
        "".join(rules),
        rf"& {metrics} \\",
        r"\midrule",
        *body,
        r"\bottomrule",
        r"\end{tabular}",
        r"\end{table}",
    ]
    return "\n".join(lines) + "\n"


def as_csv(grid: Grid) -> str:
    """Plain texts, one row per arm; marks and notes are in the other formats only."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["arm", *(f"{cohort} {metric}" for cohort, metric in grid.columns)])
    for name, entries in grid.rows:
        writer.writerow([name, *(entry.text for entry in entries)])
    return text.getvalue()


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


def _tex_entry(entry: Entry) -> str:
    text = tex(entry.text)
    text = rf"\textbf{{{text}}}" if entry.bold else text
    return rf"\textcolor[HTML]{{{_COLOURS[entry.tone]}}}{{{text}}}" if entry.tone else text
