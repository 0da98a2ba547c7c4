"""Parts that share several classes fairly although a unit (patient, site) brings a vector of them: BRACS's rule."""

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

Vector = npt.NDArray[np.float64]


def balanced_parts(vectors: Mapping[str, Vector], parts: int) -> list[list[str]]:
    """Units, those with rare and many classes first, each to the part where the whole stays nearest to even.

    The published rule also draws permutations that decide nothing; they are left out. The order of summation does
    decide: many choices are equal but for rounding, so the score is numpy's sum over all parts at once, as published.
    """
    vectors = {unit: np.asarray(vector, float) for unit, vector in vectors.items()}
    total = np.sum(list(vectors.values()), axis=0)
    even, even_size = total / parts, total.sum() / parts
    rarity = np.maximum(total, 1)

    def first(unit: str) -> tuple[float, int, float, str]:
        vector = vectors[unit]
        return -float(np.sum(vector / rarity)), -int((vector > 0).sum()), -vector.sum(), unit

    held = np.zeros((parts, len(total)))  # (P, classes)
    chosen: list[list[str]] = [[] for _ in range(parts)]
    for unit in sorted(vectors, key=first):
        keys = []
        for part in range(parts):
            after = held.copy()
            after[part] += vectors[unit]
            sizes = after.sum(axis=1)
            unevenness = np.sum((after - even) ** 2 / (even + 1)) + 0.05 * np.sum(
                (sizes - even_size) ** 2 / (even_size + 1)
            )
            keys.append((float(unevenness), float(sizes[part]), part))
        best = min(keys)[2]
        held[best] += vectors[unit]
        chosen[best].append(unit)
    return chosen


def validation_part(parts: Sequence[Sequence[str]], vectors: Mapping[str, Vector]) -> list[str]:
    """The part most like a tenth of the pool; one that lacks a class only if all do."""

    def key(part: list[str]) -> tuple[float, int, float, list[str]]:
        held, pool = _sum(part, vectors), _sum(list(vectors), vectors)
        missing = int((held == 0).sum())
        return 1000 * missing + _distance(held, pool), missing, abs(held.sum() - round(0.1 * pool.sum())), part

    return min((sorted(part) for part in parts), key=key)


def nearest_part(parts: Sequence[Sequence[str]], vectors: Mapping[str, Vector]) -> list[str]:
    """The part most like a tenth of the pool, whatever it lacks: of few sites the fullest may be half the data."""
    pool = _sum(list(vectors), vectors)
    filled = [sorted(part) for part in parts if part]
    return min(filled, key=lambda part: (_distance(_sum(part, vectors), pool), part))


def _sum(units: Sequence[str], vectors: Mapping[str, Vector]) -> Vector:
    width = len(next(iter(vectors.values())))
    return np.sum([np.asarray(vectors[unit], float) for unit in units], axis=0) if units else np.zeros(width)


def _distance(held: Vector, pool: Vector) -> float:
    wanted, size = 0.1 * pool, 0.1 * pool.sum()
    return float(np.sum(np.abs(held - wanted) / (wanted + 1)) + 0.25 * abs(held.sum() - size) / (size + 1))
