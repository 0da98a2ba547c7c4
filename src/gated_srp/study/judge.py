"""Our numbers beside the published ones: the difference, and whether seeds alone could explain it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
from scipy import stats

from gated_srp.study.published import PublishedTable
from gated_srp.study.reproduce import Study

_PRINTED = 0.00005  # half of the last printed digit
RULE = (
    "compatible: the 95 % interval of (our mean - published mean) contains zero. Student's interval for two samples of seeds, ours "
    "and the paper's five, with one pooled spread; where the paper prints no standard deviation, ours stands in for it; half of the "
    "last printed digit is granted. In brackets how far off a mean may be: it says that seeds alone could explain the difference, "
    "not that there is none."
)


@dataclass(frozen=True)
class Judgement:
    """Our mean against a published one; ``word``: compatible, not compatible, or not judged."""

    difference: float
    low: float
    high: float
    word: str


def judge(values: Sequence[float], published: float, std: float | None = None, *, seeds: int = 5) -> Judgement:
    """By `RULE`. One seed is judged by the published spread; where there is none either, it is not judged.

    >>> judge([0.70, 0.72, 0.74], 0.73, 0.02).word, judge([0.70, 0.70, 0.71], 0.90, 0.01).word
    ('compatible', 'not compatible')
    """
    ours, n = np.asarray(values, dtype=np.float64), len(values)
    difference = float(ours.mean()) - published if n else math.nan
    # Not Welch's interval: with two or three seeds its few degrees of freedom would call anything compatible.
    freedom = (n - 1) + (0 if std is None else seeds - 1)
    if not n or not freedom:
        return Judgement(difference, math.nan, math.nan, "not judged")
    squares = float(((ours - ours.mean()) ** 2).sum()) + (0.0 if std is None else (seeds - 1) * std**2)
    error = math.sqrt(squares / freedom * (1 / n + 1 / seeds))
    reach = _PRINTED + float(stats.t.ppf(0.975, freedom)) * error
    word = "compatible" if abs(difference) <= reach else "not compatible"
    return Judgement(difference, difference - reach, difference + reach, word)


def beside_published(study: Study, results: pd.DataFrame) -> pd.DataFrame:
    """One line a number of the paper's table (and one a number of further rows): ours, published, difference, verdict."""
    lines = []
    for row in study.all_rows:
        for cohort, metrics in study.columns.items():
            for metric in metrics:
                mine = results[
                    (results["cohort"] == cohort) & (results["arm"] == row.name) & (results["metric"] == metric)
                ]
                values = mine["value"].dropna().to_numpy(np.float64)
                printed, std = (_number(table, row.name, cohort, metric) for table in (study.published, study.std))
                found = judge([], 0.0) if printed is None else judge(list(values), printed, std)
                lines.append(
                    {
                        "row": row.name,
                        "cohort": cohort,
                        "metric": metric,
                        "mean": values.mean() if len(values) else math.nan,
                        "std": values.std(ddof=1) if len(values) > 1 else math.nan,
                        "seeds": len(values),
                        "published": math.nan if printed is None else printed,
                        "published_std": math.nan if std is None else std,
                        "difference": found.difference,
                        "low": found.low,
                        "high": found.high,
                        "verdict": "not published" if printed is None else found.word if len(values) else "not run",
                    }
                )
    frame = pd.DataFrame(lines)
    return _beside_base(frame, study.rows[0].name) if study.kind == "runtime" else frame


def _beside_base(lines: pd.DataFrame, base: str) -> pd.DataFrame:
    """With ratios to the base row: what a machine's speed and memory have in common with another machine's. Nothing is judged."""
    own = lines[lines["row"] == base].set_index(["cohort", "metric"])
    at = pd.MultiIndex.from_frame(lines[["cohort", "metric"]])
    ratios = {
        name: lines[column].to_numpy() / own[column].reindex(at).to_numpy()
        for name, column in (("times_base", "mean"), ("published_times_base", "published"))
    }
    verdict = lines["verdict"].replace(["compatible", "not compatible"], "not judged")
    return lines.assign(**ratios, low=math.nan, high=math.nan, verdict=verdict)


def _number(table: PublishedTable | None, row: str, cohort: str, metric: str) -> float | None:
    if table is None:
        return None
    frame = table.frame
    found = frame.loc[(frame["name"] == row) & (frame["cohort"] == cohort) & (frame["metric"] == metric), "value"]
    return float(found.iloc[0]) if len(found) else None
