"""How well a map finds what was drawn: scores of one slide, the free-response curve of many, intervals over resampled patients.

Higher values are taken to say "here": an area of 0.5 is chance, below it low values mark what was drawn.

Shapes: L patches, S slides, T thresholds, P patients, R resamples (the first row: every patient once), M metrics.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from gated_srp.study.statistics import LEVEL
from gated_srp.tasks.metrics import average_precision, roc_auc

if TYPE_CHECKING:
    from shapely import Geometry

    from gated_srp.srp.graph import PatchGraph

RATES = (0.25, 0.5, 1.0, 2.0, 4.0, 8.0)  # false positives per slide at which CAMELYON16 averages the sensitivity
PER_SLIDE = ("auroc", "auprc", "pointing", "dice")
METRICS = (*PER_SLIDE, "froc")
_MERGED_UM = 75.0  # regions nearer than this are one lesion, as in CAMELYON16
_INSIDE = 1e-3  # of a patch: squares that only touch a region do not hit it
_CANDIDATES = 201  # thresholds that are tried
Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]


# One slide ------------------------------------------------------------------------------------------------------------


def score(values: Floats, truth: Bools, threshold: float = math.nan) -> dict[str, float]:
    """By patches, (L,): areas under the ROC and precision-recall curves, the pointing game, Dice at a threshold.

    Undefined (not a number) where there is no positive patch, or none else.

    >>> score(np.array([0.9, 0.1, 0.8, 0.2]), np.array([True, False, True, False]), 0.5)
    {'auroc': 1.0, 'auprc': 1.0, 'pointing': 1.0, 'dice': 1.0}
    """
    if truth.all() or not truth.any():
        return dict.fromkeys(PER_SLIDE, math.nan)
    found = values >= threshold
    dice = math.nan if math.isnan(threshold) else float(2 * (found & truth).sum() / (found.sum() + truth.sum()))
    top = values == values.max()  # several patches may share the highest value
    areas = roc_auc(values, truth), average_precision(values, truth)
    return dict(zip(PER_SLIDE, (*areas, float(truth[top].mean()), dice), strict=True))


def best_threshold(slides: Sequence[tuple[Floats, Bools]]) -> float:
    """The threshold with the highest mean Dice over slides that have positives; not a number where none has."""
    slides = [(values, truth) for values, truth in slides if truth.any() and not truth.all()]
    if not slides:
        return math.nan
    pooled = np.concatenate([values for values, _ in slides])
    tried = np.unique(np.quantile(pooled, np.linspace(0, 1, _CANDIDATES)))  # (T,)
    total = np.zeros(len(tried))
    for values, truth in slides:
        chosen, hit = at_least(values, tried), at_least(values[truth], tried)
        total += 2 * hit / (chosen + truth.sum())
    return float(tried[total.argmax()])


def at_least(values: Floats, thresholds: Floats) -> Floats:
    """How many of the values are as large as each threshold, (T,)."""
    return (len(values) - np.searchsorted(np.sort(values), thresholds, side="left")).astype(np.float64)


# Lesions and detections -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Lesions:
    """The lesions of a slide and which patches overlap them: ``lesion[i]`` is overlapped by ``patch[i]``."""

    count: int
    patch: NDArray[np.int64]
    lesion: NDArray[np.int64]


def find_lesions(shape: Geometry, corners: Floats, side: float, mpp: float | None) -> Lesions:
    """Separate pieces of the drawn area; those nearer than 75 microns are one, where the size of a pixel is known."""
    import shapely

    parts = shapely.get_parts(shape)
    parts = parts[~shapely.is_empty(parts)]
    none = np.empty(0, np.int64)
    if not len(parts):
        return Lesions(0, none, none)
    owner = np.arange(len(parts))
    if mpp:
        reach = _MERGED_UM / 2 / mpp
        grown = shapely.get_parts(
            shapely.union_all(shapely.buffer(shapely.simplify(parts, reach / 10), reach, quad_segs=4))
        )
        piece, group = shapely.STRtree(grown).query(shapely.point_on_surface(parts), predicate="intersects")
        owner[piece] = group
    edge = side * _INSIDE
    boxes = shapely.box(*(corners + edge).T, *(corners + side - edge).T)
    patch, part = shapely.STRtree(parts).query(boxes, predicate="intersects")
    numbers, owner = np.unique(owner, return_inverse=True)
    return Lesions(len(numbers), patch, owner[part])


@dataclass(frozen=True, eq=False)
class Detections:
    """Values of a map's detections on one slide: those that hit nothing, and of each lesion the highest that hits it."""

    false: Floats
    hits: Floats  # minus infinity: not hit


def detect(values: Floats, graph: PatchGraph, lesions: Lesions) -> Detections:
    """Detections are patches with a higher value than each of their neighbours; of equal ones the first."""
    order = np.empty(len(values), np.int64)
    order[np.lexsort((-np.arange(len(values)), values))] = np.arange(len(values))  # no two are equal
    neighbours, offsets = graph.neighbours.numpy(), graph.offsets.numpy()
    padded = np.append(order[neighbours], -1)
    highest = np.maximum.reduceat(padded, offsets[:-1])
    peak = (order > highest) | (np.diff(offsets) == 0)
    hits = np.full(lesions.count, -math.inf)
    hitting = peak[lesions.patch]
    np.maximum.at(hits, lesions.lesion[hitting], values[lesions.patch[hitting]])
    peak[lesions.patch] = False
    return Detections(np.asarray(values[peak], np.float64), hits)


def froc_curve(slides: Sequence[Detections], weights: Floats | None = None) -> tuple[Floats, Floats]:
    """False positives per slide and sensitivity, both (R, T + 1), from the highest threshold on; it starts at 0, 0.

    ``weights`` (R, S): how often each slide counts; once if not given. Sensitivity is not a number without lesions.
    """
    weights = np.ones((1, len(slides))) if weights is None else weights
    false = np.sort(np.concatenate([one.false for one in slides]))
    hits = np.concatenate([one.hits for one in slides])
    hits = np.unique(hits[np.isfinite(hits)])
    # Between two hits the sensitivity is constant, whatever the weights: of the thresholds there the two ends are enough.
    above = np.searchsorted(false, hits, side="right")
    tried = np.unique(np.concatenate([hits, false[above[above < len(false)]], false[:1]]))[::-1]
    wrong = np.stack([at_least(one.false, tried) for one in slides])  # (S, T)
    right = np.stack([at_least(one.hits, tried) for one in slides])
    lesions = weights @ np.array([len(one.hits) for one in slides], float)  # (R,)
    with np.errstate(invalid="ignore", divide="ignore"):
        rate = weights @ wrong / weights.sum(1, keepdims=True)
        sensitivity = weights @ right / lesions[:, None]
    start = np.zeros((len(weights), 1))
    none = np.where(lesions[:, None] > 0, 0.0, math.nan)
    return np.concatenate([start, rate], 1), np.concatenate([none, sensitivity], 1)


def froc(slides: Sequence[Detections], weights: Floats | None = None) -> Floats:
    """CAMELYON16's score, (R,): the mean sensitivity at 1/4, 1/2, 1, 2, 4 and 8 false positives per slide."""
    if not slides:
        return np.full(1 if weights is None else len(weights), math.nan)
    rates, sensitivities = froc_curve(slides, weights)
    return np.array([np.interp(RATES, x, y).mean() for x, y in zip(rates, sensitivities, strict=True)])


# Over patients --------------------------------------------------------------------------------------------------------


class Patients:
    """Resamples of patients, the same for every run and value: how often each is drawn, (R, P)."""

    def __init__(self, cases: Sequence[str], *, repeats: int, seed: int) -> None:
        self.place = {case: number for number, case in enumerate(sorted(set(cases)))}
        rng, size = np.random.default_rng(seed), len(self.place)
        times = repeats if size > 1 else 0  # one patient has no interval
        drawn = [np.bincount(rng.integers(0, size, size), minlength=size) for _ in range(times)]
        self.counts = np.array([np.ones(size, np.int64), *drawn], np.float64)

    def weights(self, cases: Sequence[str]) -> Floats:
        """(R, S): how often each slide counts."""
        return self.counts[:, [self.place[case] for case in cases]]


def weighted_means(weights: Floats, values: Floats) -> Floats:
    """(R, S) and (S, M) -> (R, M): means over slides in which a metric is defined."""
    known = ~np.isnan(values)
    with np.errstate(invalid="ignore", divide="ignore"):
        return (weights @ np.where(known, values, 0.0)) / (weights @ known.astype(np.float64))


def mean_over_runs(samples: Sequence[Floats]) -> Floats:
    """(R,) of each run -> (R,): the mean of those that are numbers; a resample without the class in any run has none."""
    stacked = np.stack(samples)
    with np.errstate(invalid="ignore"):
        found: Floats = np.nansum(stacked, axis=0) / (~np.isnan(stacked)).sum(0)
    return found


class Interval(NamedTuple):
    """A number with its 95 % percentile interval over resampled patients, and the deviation of the resamples."""

    value: float
    low: float
    high: float
    deviation: float


def interval(samples: Floats) -> Interval:
    """Of (R,) numbers, the first of which is the one of all patients."""
    drawn = samples[1:][~np.isnan(samples[1:])]
    if len(drawn) < 2:
        return Interval(float(samples[0]), math.nan, math.nan, math.nan)
    low, high = np.quantile(drawn, (LEVEL / 2, 1 - LEVEL / 2))
    return Interval(float(samples[0]), float(low), float(high), float(drawn.std(ddof=1)))
