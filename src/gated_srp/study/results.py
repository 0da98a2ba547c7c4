"""A table of results from anywhere, compared with a reference arm: cohort, arm, seed, metric, value."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from html import escape
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from gated_srp.data.columns import pick_column
from gated_srp.data.spreadsheet import read_frame
from gated_srp.errors import UserError, counted
from gated_srp.records import parse_numbers
from gated_srp.study.statistics import LEVEL, MARGIN, RATIO, Bootstrap, Paired, TTest, holm, paired, t_shifted

REFERENCE = "na"  # the arm that others are compared with unless another is named
COLUMNS = ("cohort", "arm", "seed", "metric", "value")
LOWER_IS_BETTER = frozenset(
    {
        "brier",
        "integrated_brier",
        "calibration_error",
        "calibrated_brier",
        "calibrated_calibration_error",
        "loss",
        "mae",
        "peak_reserved_gib",
    }
)
_ENOUGH = 5  # seeds from which the number of seeds that are needed is estimated
_WORDS = ("no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")


def html(table: pd.DataFrame) -> str:
    """As a notebook shows a table of results."""
    return table.to_html(index=False, na_rep="")


@dataclass(frozen=True, eq=False, kw_only=True)
class StudyResult:
    """What the results of all flows have.

    Attributes:
        files: what was written.
        failed: the reason for each cell that failed twice.
        script: the Slurm script that is to be submitted; nothing has run yet then.
    """

    files: tuple[Path, ...] = ()
    failed: Mapping[str, UserError] = field(default_factory=dict)
    script: Path | None = None

    @property
    def scripts(self) -> tuple[Path, ...]:
        """All Slurm scripts: of several studies there is one each."""
        return (self.script,) if self.script else ()


@dataclass(frozen=True)
class Difference:
    """One arm against the reference by one metric: in one cohort over seeds, or (``cohort`` None) over cohorts."""

    cohort: str | None
    arm: str
    metric: str
    means: tuple[float, float]  # arm, reference
    stds: tuple[float, float]
    test: TTest  # the one that the verdict is about
    statistics: Paired
    missing: tuple[str, ...]  # seeds (or cohorts) that only one of the two has
    p_holm: float = math.nan
    verdict: str = ""
    bootstrap: Bootstrap | None = None  # over patients, where predictions exist
    margin: float = MARGIN
    p_no_worse: float = math.nan  # of "worse by the margin", one-sided, by the same test
    no_worse: str = ""  # what that allows one to say; nothing without an interval

    @property
    def claimed(self) -> bool:
        """The interval excludes zero and Holm's adjusted p is below 5 %."""
        return self.test.excludes_zero and self.p_holm < LEVEL

    def as_json(self) -> dict[str, Any]:
        found = self.statistics
        row: dict[str, Any] = {
            "cohort": self.cohort,
            "arm": self.arm,
            "metric": self.metric,
            "mean": self.means[0],
            "std": self.stds[0],
        }
        row |= {"reference_mean": self.means[1], "reference_std": self.stds[1], "n": found.n, **_test_json(found.plain)}
        row |= {name: getattr(found, name) for name in ("wilcoxon_p", "wins", "losses", "ties")}
        if self.cohort is None:  # cohorts share no data: one test, and what is counted are cohorts
            row["cohorts_needed"] = found.seeds_needed
        else:
            row["corrected"] = _test_json(found.corrected)
            row["seeds_needed"], row["seeds_needed_plain"] = found.seeds_needed, found.seeds_needed_plain
            row["bootstrap"] = self.bootstrap and asdict(self.bootstrap)
        more = ("p_holm", "claimed", "missing", "verdict", "margin", "p_no_worse", "no_worse")
        return row | {name: getattr(self, name) for name in more}


class InWords:
    """Says what it shows: ``verdict``, and ``print``."""

    @property
    def verdict(self) -> str:
        """What the differences show, in words."""
        return "\n".join(self._lines())

    def __str__(self) -> str:
        return self.verdict

    def _lines(self) -> Iterator[str]:
        raise NotImplementedError


@dataclass(frozen=True)
class Comparison(InWords):
    """All arms against one reference. Holm's families are the differences ``cohorts`` and ``across``.

    In a notebook it shows itself as its ``table``; ``print(comparison)`` gives the verdicts in words.
    """

    reference: str
    ratio: float
    cohorts: tuple[Difference, ...]
    across: tuple[Difference, ...]
    notes: tuple[str, ...]

    @property
    def table(self) -> pd.DataFrame:
        """One row per arm, metric and cohort (missing: over cohorts), with the interval and the verdict."""
        rows = [
            (
                d.cohort,
                d.arm,
                d.metric,
                *d.means,
                d.test.mean,
                d.test.low,
                d.test.high,
                d.statistics.n,
                d.p_holm,
                d.verdict,
                d.no_worse,
            )
            for d in (*self.cohorts, *self.across)
        ]
        names = "cohort arm metric mean reference difference low high n p_holm verdict no_worse"
        return pd.DataFrame(rows, columns=names.split())

    def _repr_html_(self) -> str:
        return f"<p>against {escape(self.reference)}</p>{html(self.table)}"

    def _lines(self) -> Iterator[str]:
        yield from (f"note: {note}" for note in self.notes)
        for title, found in (("per cohort, paired by seed", self.cohorts), ("across cohorts", self.across)):
            yield f"\n{title}, against {self.reference}"
            for one in found:
                where = one.metric if one.cohort is None else f"{one.cohort} {one.metric}"
                yield f"  {one.arm}, {where}: {one.means[0]:.4f} against {one.means[1]:.4f}; {one.verdict}"
                if one.no_worse:
                    yield f"      {one.no_worse}"
                about = one.statistics
                if about.n > 1:
                    corrected = "" if one.cohort is None else f"corrected {about.corrected.p:.4f}, "
                    yield (
                        f"      wins {about.wins}, losses {about.losses}, ties {about.ties}; p: t {about.plain.p:.4f}, "
                        f"{corrected}Wilcoxon {about.wilcoxon_p:.4f}, Holm {one.p_holm:.4f}"
                    )
                if one.bootstrap is not None:
                    yield f"      over resampled patients {one.bootstrap}"

    def as_json(self) -> dict[str, Any]:
        """Plain values; what is undefined is null."""
        return {
            "reference": self.reference,
            "test_train_ratio": self.ratio,
            "cohorts": [_null(one.as_json()) for one in self.cohorts],
            "across": [_null(one.as_json()) for one in self.across],
            "notes": list(self.notes),
        }


def read_results(results: str | Path | pd.DataFrame) -> tuple[pd.DataFrame, tuple[str, ...]]:
    """Results with text in all columns but ``value``, and notes on what is missing. An arm named "NA" stays an arm."""
    path: str | Path = "results"
    notes: list[str] = []
    if isinstance(results, pd.DataFrame):
        frame = results.map(lambda value: None if pd.isna(value) else str(value))
    else:
        path = results
        frame, found = read_frame(path)
        notes = [note.line for note in found]
    frame = frame.rename(columns={pick_column(frame, name, path): name for name in COLUMNS})[list(COLUMNS)]
    for name in COLUMNS[:-1]:
        if frame[name].isna().any():
            row = frame.index[frame[name].isna()][0]
            raise UserError(f"{name!r} is empty", where=f"{path}, row {row}", cure="Fill it in.")
    frame["seed"] = frame["seed"].str.removesuffix(".0")
    value = parse_numbers(frame["value"])
    strange = value.isna() & frame["value"].notna() & (frame["value"].str.casefold() != "nan") | np.isinf(value)
    if strange.any():
        row = frame.index[strange][0]
        what = f"value {frame['value'][row]!r} is no finite number"
        raise UserError(what, where=f"{path}, row {row}", cure="Correct it or empty it.")
    frame["value"] = value.astype(np.float64)
    if len(frame) and frame["value"].isna().all():
        raise UserError("the column 'value' is empty", where=path, cure="Fill in the numbers that are to be compared.")
    doubled = frame.duplicated(["cohort", "arm", "seed", "metric"])
    if doubled.any():
        row = frame.loc[frame.index[doubled][0]]
        cell = ", ".join(row[name] for name in COLUMNS[:-1])
        raise UserError(f"a second value for {cell}", where=f"{path}, row {row.name}", cure="Keep one row for each.")
    if frame["value"].isna().any():
        notes.append(f"left out: {counted(int(frame['value'].isna().sum()), 'row')} without a value")
    return frame.dropna(subset="value").reset_index(drop=True), tuple(notes)


def find_arm(results: pd.DataFrame, name: str) -> str:
    """The arm of this name, or the only one that differs in case alone."""
    arms: list[str] = list(dict.fromkeys(results["arm"]))
    alike = [arm for arm in arms if arm == name] or [arm for arm in arms if arm.casefold() == name.casefold()]
    if len(alike) != 1:
        what = f"reference {name!r} is not among the arms: {', '.join(arms) or 'none'}"
        raise UserError(what, cure="Name one of them.")
    return alike[0]


def check_margin(margin: float) -> None:
    """What "no worse" is asked by must be positive."""
    if not margin > 0:
        cure = "Say by how much counts as worse."
        raise UserError(f"{margin:g}, expected a positive number", where="margin", cure=cure)


def compare_results(
    results: pd.DataFrame,
    reference: str,
    *,
    ratio: float = RATIO,
    lower_is_better: Collection[str] = LOWER_IS_BETTER,
    notes: tuple[str, ...] = (),
    margin: float = MARGIN,
    unit: str = "seed",
) -> Comparison:
    """Every other arm against the reference, per cohort (paired by seed, or by another ``unit``) and across cohorts (paired by cohort)."""
    check_margin(margin)
    reference = find_arm(results, reference)
    cohorts = list(_cohort_cells(results, reference, ratio, lower_is_better))
    across = list(_across_cells(cohorts, lower_is_better))
    missing = (
        f"{d.cohort}, {d.metric}: {unit} {', '.join(d.missing)} of only one of {d.arm} and the reference; left out"
        for d in cohorts
        if d.missing
    )

    def judged(cells: list[Difference], unit: str) -> tuple[Difference, ...]:
        return tuple(_not_worse(list(judged_cells(cells, lower_is_better, unit)), lower_is_better, margin))

    return Comparison(reference, ratio, judged(cohorts, unit), judged(across, "cohort"), (*notes, *missing))


def _cohort_cells(
    results: pd.DataFrame, reference: str, ratio: float, lower_is_better: Collection[str]
) -> Iterator[Difference]:
    for (metric, cohort), part in results.groupby(["metric", "cohort"], sort=False):
        wide = part.pivot(index="seed", columns="arm", values="value")
        for arm in dict.fromkeys(part["arm"]):
            if arm == reference:
                continue
            both = wide.reindex(columns=[arm, reference])
            pairs = both.dropna()
            found = paired(pairs[arm] - pairs[reference], ratio, lower_is_better=metric in lower_is_better)
            missing = tuple(sorted(both.index[both.isna().sum(axis=1) == 1]))
            (mean, other), (std, other_std) = (map(float, part) for part in (pairs.mean(), pairs.std(ddof=1)))
            where = {"cohort": str(cohort), "arm": arm, "metric": str(metric), "missing": missing}
            yield Difference(
                **where, means=(mean, other), stds=(std, other_std), test=found.corrected, statistics=found
            )


def _across_cells(cells: list[Difference], lower_is_better: Collection[str]) -> Iterator[Difference]:
    for arm, metric in dict.fromkeys((cell.arm, cell.metric) for cell in cells):
        family = [cell for cell in cells if (cell.arm, cell.metric) == (arm, metric)]
        means = np.array([cell.means for cell in family if cell.statistics.n]).reshape(-1, 2)
        found = paired(means[:, 0] - means[:, 1], 0.0, lower_is_better=metric in lower_is_better)
        over = (float(means[:, 0].mean()), float(means[:, 1].mean())) if len(means) else (math.nan, math.nan)
        missing = tuple(str(cell.cohort) for cell in family if not cell.statistics.n)
        yield Difference(None, arm, metric, over, (math.nan, math.nan), found.plain, found, missing)


def judged_cells(cells: list[Difference], lower_is_better: Collection[str], unit: str) -> Iterator[Difference]:
    """With Holm's adjusted p over all of them, and in words."""
    adjusted = holm([cell.test.p for cell in cells])
    family = int(np.count_nonzero(~np.isnan(adjusted)))
    for cell, p in zip(cells, adjusted, strict=True):
        judged = replace(cell, p_holm=float(p))
        yield replace(judged, verdict=verdict(judged, unit, family=family, lower=cell.metric in lower_is_better))


def _not_worse(cells: list[Difference], lower_is_better: Collection[str], margin: float) -> Iterator[Difference]:
    """Whether each is no worse than the reference by the margin: the end of its interval, and Holm over the family."""
    tests = [t_shifted(cell.test, margin, lower=cell.metric in lower_is_better) for cell in cells]
    no_worse, worse = holm([p for _, p in tests]), holm([1 - p for _, p in tests])
    for cell, (end, p), better_than, worse_than in zip(cells, tests, no_worse, worse, strict=True):
        words = ""
        if not math.isnan(p):
            if p >= 1 - LEVEL / 2:
                words, after = f"worse by more than {margin:g}", worse_than
            elif end <= -margin:
                words, after = f"not shown to be no worse by more than {margin:g}", 0.0
            else:
                words, after = f"no worse by more than {margin:g}", better_than
            words += "" if after < LEVEL / 2 else " by itself, but not after Holm's correction"
        yield replace(cell, margin=margin, p_no_worse=p, no_worse=words)


def verdict(cell: Difference, unit: str, *, family: int, lower: bool) -> str:
    """What the interval allows one to say."""
    n, test = cell.statistics.n, cell.test
    count = f"{_WORDS[n] if n < len(_WORDS) else n} {unit}{'' if n == 1 else 's'}"
    every = f"both {unit}s" if n == 2 else f"all {count}"
    if n == 0:
        return f"nothing to compare: no {unit} has both arms"
    if n == 1:
        return f"one {unit}: {test.mean:+.4f}, without an interval and therefore without a claim"
    if cell.statistics.ties == n:
        return f"equal in {every}"
    if math.isnan(test.p):
        return f"the same difference, {test.mean:+.4f}, in {every}: no spread, hence no interval and no claim"
    interval = f"{test.mean:+.4f}, 95 % interval {test.low:+.4f} to {test.high:+.4f}"
    if not test.excludes_zero:
        needed, outlook = cell.statistics.seeds_needed, ""
        if unit == "fold":  # there are as many as there are; more of them would be smaller
            pass
        elif round(test.mean, 4) != 0 and n < _ENOUGH:  # the spread of so few is hardly known
            outlook = f"; {count} are too few to say how many would show it"
        elif round(test.mean, 4) != 0:
            none = f"; no number of {unit}s on these data would show a difference of this size"
            outlook = none if needed is None else f"; were it real, about {needed} {unit}s would show it"
        return f"not distinguishable from zero with {count} ({interval}){outlook}"
    side = "better" if (test.mean < 0) == lower else "worse"
    if not cell.claimed:
        return f"{side} by itself ({interval}), but not after Holm's correction over {family} comparisons: only a hint"
    return f"{side} ({interval})" + (f", also after Holm's correction over {family} comparisons" if family > 1 else "")


def _test_json(test: TTest) -> dict[str, Any]:
    return {"difference": test.mean, "interval": [test.low, test.high], "t": test.t, "df": test.df, "p": test.p}


def _null(value: Any) -> Any:
    """The same with None for what is no finite number, which JSON does not have."""
    if isinstance(value, dict):
        return {key: _null(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_null(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
