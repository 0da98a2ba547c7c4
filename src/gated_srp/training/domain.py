"""What the training slides' features look like, so that a slide unlike them can be flagged.

Shapes: S slides, N patches, C channels.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

MOST_SLIDES = 256  # that are looked at, evenly spaced over the training slides
_FAR = 3.0  # times the farthest training slide is "unlike"


@dataclass(frozen=True)
class FeatureStatistics:
    """Mean and spread over training slides of a slide's mean feature, and how far single training slides lie from it."""

    slides: int
    mean: list[float]  # (C,)
    std: list[float]  # (C,)
    median_distance: float
    largest_distance: float

    @classmethod
    def fit(cls, means: Tensor) -> FeatureStatistics:
        """From the mean features of training slides, (S, C)."""
        means = means.double()
        centre, spread = means.mean(0), means.std(0, correction=0)
        far = torch.stack([_distance(mean, centre, spread) for mean in means])
        return cls(len(means), _short(centre), _short(spread), float(far.median()), float(far.max()))

    def distance(self, features: Tensor) -> float:
        """Root mean square over channels of how many spreads a slide's mean feature, (N, C), lies from the training mean."""
        mean = slide_mean(features).double().cpu()
        return float(_distance(mean, torch.tensor(self.mean).double(), torch.tensor(self.std).double()))

    def unlike(self, features: Tensor) -> bool:
        """Whether a slide lies far beyond every training slide."""
        return self.distance(features) > _FAR * max(self.largest_distance, 1.0)

    def as_card(self) -> dict[str, Any]:
        """For the card of a model file; ``FeatureStatistics(**card["features"])`` reads it."""
        return asdict(self)


def slide_mean(features: Tensor) -> Tensor:
    """(N, C) -> (C,), in float32 whatever the features' type."""
    return features.mean(0, dtype=torch.float32)


def evenly(rows: list[int], most: int = MOST_SLIDES) -> list[int]:
    """At most so many of the rows, evenly spaced.

    >>> evenly([10, 11, 12, 13, 14], 3)
    [10, 12, 14]
    """
    if len(rows) <= most:
        return rows
    return [rows[round(i * (len(rows) - 1) / (most - 1))] for i in range(most)]


def _distance(mean: Tensor, centre: Tensor, spread: Tensor) -> Tensor:
    # A channel that never varied in training counts in units of its own size, so that a change in it is still seen.
    unit = torch.where(spread > 0, spread, centre.abs().clamp_min(1e-6))
    return ((mean - centre) / unit).square().mean().sqrt()


def _short(values: Tensor) -> list[float]:
    return [float(f"{value:.6g}") for value in values.tolist()]
