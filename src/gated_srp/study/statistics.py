"""Paired statistics: what a set of differences allows one to say, and no more.

A difference is arm minus reference on the same seed (or fold, or cohort). Undefined is not a number, never a warning.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import stats

if TYPE_CHECKING:
    import pandas as pd

NAN = float("nan")
LEVEL = 0.05
POWER = 0.8
MOST_SEEDS = 10_000
MARGIN = 0.01  # a difference that counts as worse
RATIO = 0.2 / 0.7  # test to train, of the paper's splits


@dataclass(frozen=True)
class TTest:
    """A mean with its 95 % interval, and the test of the mean against zero."""

    mean: float
    low: float = NAN
    high: float = NAN
    t: float = NAN
    df: int = 0
    p: float = NAN

    @property
    def excludes_zero(self) -> bool:
        """Whether the interval lies on one side of zero; never without an interval."""
        return self.low > 0 or self.high < 0


@dataclass(frozen=True)
class Paired:
    """Everything that differences of one cohort and metric say.

    ``corrected`` is the corrected resampled t-test (Nadeau and Bengio, 2003): seeds draw their splits from the same
    slides, so their differences are not independent and the plain test is too sure of itself. It keeps its 5 % as long
    as differences of two seeds correlate by no more than ratio / (1 + ratio).
    """

    n: int
    spread: float
    ratio: float
    plain: TTest
    corrected: TTest
    wilcoxon_p: float
    wins: int
    losses: int
    ties: int

    @property
    def seeds_needed(self) -> int | None:
        """For the corrected test to show this difference; None where no number of seeds on these data is enough."""
        return seeds_needed(self.plain.mean, self.spread, self.ratio)

    @property
    def seeds_needed_plain(self) -> int | None:
        """The same for the plain test."""
        return seeds_needed(self.plain.mean, self.spread)


def t_test(differences: ArrayLike, shared: float = 0.0) -> TTest:
    """Two-sided one-sample t-test with variance s^2 (1/n + shared); shared = 0 is the plain paired test.

    Without spread there is no test: all zero gives p = 1, all equal to another number gives no p at all.

    >>> round(t_test([0.0147, 0.0401, 0.0319, 0.0261, 0.0217]).p, 4)
    0.0034
    """
    values = _tidy(differences)
    n = len(values)
    mean = float(values.mean()) if n else NAN
    if n < 2:
        return TTest(mean)
    if not values.any():
        return TTest(0.0, 0.0, 0.0, NAN, n - 1, 1.0)
    if (values == values[0]).all():
        return TTest(mean, df=n - 1)
    error = float(values.std(ddof=1)) * math.sqrt(1 / n + shared)
    reach = float(stats.t.ppf(1 - LEVEL / 2, n - 1)) * error
    t = mean / error
    return TTest(mean, mean - reach, mean + reach, t, n - 1, float(2 * stats.t.sf(abs(t), n - 1)))


def t_shifted(test: TTest, margin: float, *, lower: bool = False) -> tuple[float, float]:
    """The end of a test's interval at which the arm is worst, more being better, and the one-sided p of "worse by the margin".

    Without an interval neither is a number.
    """
    mean, end = (-test.mean, -test.high) if lower else (test.mean, test.low)
    if math.isnan(test.low):
        return NAN, NAN
    if end == mean:  # every difference is zero
        return end, 0.0
    error = (mean - end) / float(stats.t.ppf(1 - LEVEL / 2, test.df))
    return end, float(stats.t.sf((mean + margin) / error, test.df))


def paired(differences: ArrayLike, ratio: float = RATIO, *, lower_is_better: bool = False) -> Paired:
    """All statistics of the differences of one cohort; ``ratio`` is the size of the test set over the training set."""
    values = _tidy(differences)
    better = -values if lower_is_better else values
    wins, losses, ties = (int(which.sum()) for which in (better > 0, better < 0, values == 0))
    tests = t_test(values), t_test(values, ratio), wilcoxon_p(values)
    spread = float(values.std(ddof=1)) if len(values) > 1 else NAN
    return Paired(len(values), spread, ratio, *tests, wins, losses, ties)


def wilcoxon_p(differences: ArrayLike) -> float:
    """Wilcoxon's signed-rank test, two-sided, zeros dropped, exact for up to 12 differences also with ties.

    With five seeds it can never fall below 0.0625.
    """
    values = _tidy(differences)
    if not len(values):
        return NAN
    values = values[values != 0]
    if not len(values):
        return 1.0
    if len(values) > 12:
        return float(stats.wilcoxon(values, method="approx", correction=True).pvalue)
    ranks = stats.rankdata(np.abs(values))
    signs = np.array(np.meshgrid(*[(0, 1)] * len(values))).reshape(len(values), -1)
    null = np.abs(ranks @ signs - ranks.sum() / 2)
    return float(np.mean(null >= abs(ranks[values > 0].sum() - ranks.sum() / 2) - 1e-9))


def holm(p_values: ArrayLike) -> NDArray[np.float64]:
    """Holm's adjusted p-values; undefined ones stay so and do not count in the family.

    >>> holm([0.01, 0.04, float("nan"), 0.03]).round(4).tolist()
    [0.03, 0.06, nan, 0.06]
    """
    p = np.asarray(p_values, dtype=np.float64)
    adjusted = np.full(p.shape, NAN)
    known = np.flatnonzero(~np.isnan(p))
    order = known[np.argsort(p[known], kind="stable")]
    steps = p[order] * np.arange(len(order), 0, -1)
    adjusted[order] = np.minimum(np.maximum.accumulate(steps), 1.0) if len(order) else steps
    return adjusted


def seeds_needed(mean: float, spread: float, shared: float = 0.0) -> int | None:
    """Fewest seeds whose test at 5 % finds a true difference ``mean`` four times in five; None if beyond reach.

    >>> seeds_needed(0.5, 1.0)  # the textbook's paired t-test at half a standard deviation
    34
    """
    if math.isnan(mean) or math.isnan(spread) or mean == 0 or spread == 0:
        return None

    def power(n: int) -> float:
        shift = abs(mean) / (spread * math.sqrt(1 / n + shared))
        if shift > 30:  # far beyond any critical value worth asking for, where the distribution function fails
            return 1.0
        critical = stats.t.ppf(1 - LEVEL / 2, n - 1)
        return float(stats.nct.sf(critical, n - 1, shift) + stats.nct.cdf(-critical, n - 1, shift))

    low, high = 1, 2  # power(low) too small, grow high until enough
    while power(high) < POWER:
        low, high = high, high * 2
        if high > MOST_SEEDS:
            return None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if power(middle) >= POWER else (middle, high)
    return high


# Against a published number ------------------------------------------------------------------------------------------

_PRINTED = 0.00005  # half of the last printed digit
RULE = (
    "compatible: the 95 % interval of (our mean - published mean) contains zero. Student's interval for two samples of seeds, ours "
    "and the paper's five, with one pooled spread; where the paper prints no standard deviation, ours stands in for it; half of the "
    "last printed digit is granted. In brackets how far off a mean may be: it says that seeds alone could explain the difference, "
    "not that there is none."
)


class Judgement(NamedTuple):
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
    difference = float(ours.mean()) - published if n else NAN
    # Not Welch's interval: with two or three seeds its few degrees of freedom would call anything compatible.
    freedom = (n - 1) + (0 if std is None else seeds - 1)
    if not n or not freedom:
        return Judgement(difference, NAN, NAN, "not judged")
    squares = float(((ours - ours.mean()) ** 2).sum()) + (0.0 if std is None else (seeds - 1) * std**2)
    error = math.sqrt(squares / freedom * (1 / n + 1 / seeds))
    reach = _PRINTED + float(stats.t.ppf(0.975, freedom)) * error
    word = "compatible" if abs(difference) <= reach else "not compatible"
    return Judgement(difference, difference - reach, difference + reach, word)


# Over patients -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Bootstrap:
    """A difference with the 95 % percentile interval over resampled patients."""

    difference: float
    low: float
    high: float
    repeats: int  # those in which the metric was defined in every pair
    asked: int = 0

    def __str__(self) -> str:
        fewer = (
            f", {self.repeats:,} of {self.asked:,} draws: undefined in the others" if self.repeats < self.asked else ""
        )
        return f"{self.difference:+.4f} ({self.low:+.4f} to {self.high:+.4f}{fewer})"


def paired_bootstrap(
    pairs: Sequence[tuple[pd.DataFrame, pd.DataFrame]],
    metrics: Callable[[pd.DataFrame], Mapping[str, float]],
    *,
    repeats: int = 1000,
    seed: int = 0,
) -> dict[str, Bootstrap]:
    """Resample patients; each pair is (arm, reference) predictions of one seed with the column ``case``.

    A patient drawn twice counts twice in both arms and in every seed's test set that has the patient; a difference is
    the mean over seeds.
    """
    pairs = [_aligned(*pair) for pair in pairs]
    place = {case: i for i, case in enumerate(sorted({case for first, _ in pairs for case in first["case"]}))}
    patients = [first["case"].map(place).to_numpy(np.int64) for first, _ in pairs]
    rng = np.random.default_rng(seed)

    def differences(counts: NDArray[np.int64]) -> dict[str, float]:
        parts: dict[str, list[float]] = {}
        for (first, second), patient in zip(pairs, patients, strict=True):
            rows = np.repeat(np.arange(len(patient)), counts[patient])
            theirs = metrics(second.iloc[rows])
            for name, value in metrics(first.iloc[rows]).items():
                parts.setdefault(name, []).append(value - theirs[name])
        return {name: float(np.mean(values)) for name, values in parts.items()}

    if not place:
        return {}
    size = len(place)
    drawn = [differences(np.bincount(rng.integers(0, size, size), minlength=size)) for _ in range(repeats)]
    found = {}
    for name, difference in differences(np.ones(size, dtype=np.int64)).items():
        defined = [one[name] for one in drawn if not math.isnan(one[name])]
        low, high = np.quantile(defined, (LEVEL / 2, 1 - LEVEL / 2)) if defined else (NAN, NAN)
        found[name] = Bootstrap(difference, float(low), float(high), len(defined), repeats)
    return found


def _aligned(first: pd.DataFrame, second: pd.DataFrame) -> tuple[pd.DataFrame, pd.DataFrame]:
    """The rows that both have, in one order."""
    key = ["case", "slide"] if "slide" in first and "slide" in second else ["case"]
    a, b = first.set_index(key, drop=False), second.set_index(key, drop=False)
    both = a.index.intersection(b.index).sort_values()
    return a.loc[both].reset_index(drop=True), b.loc[both].reset_index(drop=True)


def _tidy(differences: ArrayLike) -> NDArray[np.float64]:
    # 0.72 - 0.71 and 0.73 - 0.72 are the same difference; the last bits of a float say otherwise.
    values: NDArray[np.float64] = np.asarray(differences, dtype=np.float64).round(12)
    return values


# DeLong --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class AucDifference:
    """Two areas under the ROC curve on the same patients: their difference with DeLong's 95 % interval and two-sided p."""

    first: float
    second: float
    error: float  # standard error of the difference
    low: float
    high: float
    p: float

    @property
    def difference(self) -> float:
        return self.first - self.second


def delong(
    positive: ArrayLike, scores: ArrayLike, clusters: ArrayLike | None = None
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Areas under the ROC curves of several scores of the same rows, and their covariance.

    DeLong, DeLong and Clarke-Pearson (1988); rows of one cluster (a patient with several slides) are not independent, and their
    components are summed first (Obuchowski, 1997). With one row per cluster both are the same.

    Args:
        positive: (n,) truth.
        scores: (n, models).
        clusters: (n,) whose row it is; None: each its own.

    Returns:
        Areas (models,) and covariance (models, models); not a number where one of the two groups has fewer than two clusters.

    Example:
        >>> areas, covariance = delong([0, 0, 1, 1], [[0.1], [0.4], [0.35], [0.8]])
        >>> round(float(areas[0]), 4), round(float(covariance[0, 0]), 4)
        (0.75, 0.125)
    """
    truth, values = np.asarray(positive, dtype=bool), np.asarray(scores, dtype=np.float64)
    who = np.unique(np.arange(len(truth)) if clusters is None else np.asarray(clusters), return_inverse=True)[1]
    m, n = int(truth.sum()), int((~truth).sum())
    if not (m and n):
        return np.full(values.shape[1], NAN), np.full((values.shape[1],) * 2, NAN)
    every = stats.rankdata(values, axis=0)
    component = np.empty_like(values)  # of each row: how much of the other group it outranks
    component[truth] = (every[truth] - stats.rankdata(values[truth], axis=0)) / n
    component[~truth] = 1 - (every[~truth] - stats.rankdata(values[~truth], axis=0)) / m
    areas = component[truth].mean(0)
    sums = np.zeros((2, who.max() + 1, values.shape[1]))  # (groups, clusters, models)
    for group, rows in enumerate((truth, ~truth)):
        np.add.at(sums[group], who[rows], component[rows] - areas)
    counts = [len(np.unique(who[rows])) for rows in (truth, ~truth)]
    if min(counts) < 2:
        return areas, np.full((values.shape[1],) * 2, NAN)
    both, clusters_in_all = sums[0].T @ sums[1], who.max() + 1
    own = [c / (c - 1) * (one.T @ one) / size**2 for c, one, size in zip(counts, sums, (m, n), strict=True)]
    return areas, own[0] + own[1] + clusters_in_all / (clusters_in_all - 1) * (both + both.T) / (m * n)


def compare_areas(
    positive: ArrayLike, first: ArrayLike, second: ArrayLike, clusters: ArrayLike | None = None
) -> AucDifference:
    """The difference of two scores' areas on the same rows, by `delong`. Without spread there is no test."""
    (a, b), covariance = delong(positive, np.column_stack([np.asarray(first), np.asarray(second)]), clusters)
    variance = float(covariance[0, 0] + covariance[1, 1] - 2 * covariance[0, 1])
    if not variance > 1e-18:
        same = variance <= 1e-18 and abs(a - b) < 1e-12
        return AucDifference(float(a), float(b), 0.0 if same else NAN, *((0.0, 0.0, 1.0) if same else (NAN, NAN, NAN)))
    error = math.sqrt(variance)
    reach = float(stats.norm.ppf(1 - LEVEL / 2)) * error
    return AucDifference(
        float(a),
        float(b),
        error,
        float(a - b) - reach,
        float(a - b) + reach,
        float(2 * stats.norm.sf(abs(a - b) / error)),
    )
