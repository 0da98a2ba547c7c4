"""The end of a run: the best weights, read once on validation and test, and everything that is written about them.

Shapes: S training slides, N patches, C channels.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import pandas as pd
import torch
from safetensors import SafetensorError
from torch import Tensor

from gated_srp.data.loader import BagLoader
from gated_srp.data.prepared import Preparation, open_header
from gated_srp.errors import UserError
from gated_srp.models import save_model
from gated_srp.tasks import Task, fit_temperature, selection_score
from gated_srp.training.folder import RunFolder
from gated_srp.training.inputs import TrainingData
from gated_srp.training.loop import Callbacks, Training, predict_logits

PARTS = ("val", "test")
MOST_SLIDES = 256  # training slides whose features are summarised, evenly spaced over all of them
_FAR = 3.0  # times the farthest training slide is "unlike training"


def validate(training: Training, inputs: TrainingData, callbacks: Callbacks) -> tuple[dict[str, float], float]:
    """Validation metrics at the level that scores, the loss among them, and the score that selects."""
    rows = inputs.rows("val")
    logits = _logits(training, rows, callbacks)
    loss = float(inputs.task.loss(logits, inputs.targets(rows)))
    slides = inputs.predictions(rows, logits)
    metrics = inputs.task.metrics(slides if inputs.score == "slide" else inputs.by_case(slides))
    return {"loss": loss, **metrics}, selection_score(inputs.task, metrics, loss)


def _logits(training: Training, rows: list[int], callbacks: Callbacks) -> Tensor:
    return predict_logits(training.ranks, training.model, training.loader, rows, callbacks.bag, batch=training.batch)


@dataclass(frozen=True, eq=False)
class Results:
    """What a finished training gave. Tables by part (val, test) and level (slide, case)."""

    tables: dict[tuple[str, str], pd.DataFrame]
    metrics: dict[str, dict[str, dict[str, float] | None]]
    temperature: float
    facts: dict[str, Any]  # of the training set, for the card


def read_results(training: Training, inputs: TrainingData, callbacks: Callbacks) -> Results:
    """Predict with the best weights; the test slides are read here, once, and nowhere else."""
    if training.best is None:
        cure = "Lower train.lr, or check the features."
        raise UserError("no epoch gave a validation score that is a number", cure=cure)
    training.model.load_state_dict(training.best)
    tables: dict[tuple[str, str], pd.DataFrame] = {}
    metrics: dict[str, dict[str, dict[str, float] | None]] = {}
    temperature = 1.0
    for part in PARTS:
        rows = inputs.rows(part)
        logits = _logits(training, rows, callbacks)
        if part == "val":
            temperature = fit_temperature(inputs.task, logits, inputs.targets(rows))
        slides = inputs.predictions(rows, logits)
        cases = inputs.by_case(slides)
        tables |= {(part, "slide"): slides, (part, "case"): cases}
        metrics[part] = {"slide": _metrics(inputs.task, slides), "case": _metrics(inputs.task, cases)}
    return Results(tables, metrics, temperature, _training_facts(training, inputs, callbacks))


def write_results(run: RunFolder, results: Results, training: Training, about: Mapping[str, Any]) -> None:
    """All files of a finished run; metrics.json is the last, and says that it is finished."""
    for (part, level), table in results.tables.items():
        run.write_csv(f"predictions_{part}_{level}.csv", table)
    card = {**about, **results.facts, "temperature": results.temperature, "best_epoch": training.progress.best_epoch}
    try:
        save_model(training.model, run.model, card)
    except (OSError, SafetensorError) as error:
        cure = "Free some space, then start the same command again."
        raise UserError(f"cannot be written ({error})", where=run.model, cure=cure) from error
    keys = ("cohort", "arm", "seed", "fold", "score", "select", "split_hash")
    run.write_json(
        "metrics.json",
        {
            **{key: about[key] for key in keys},
            "best_epoch": training.progress.best_epoch,
            "best_score": training.progress.best_score,
            "temperature": results.temperature,
            **results.metrics,
        },
    )


def describe_bags(settings: Preparation) -> dict[str, Any]:
    """What a model's card says of how its bags are made."""
    images = {} if settings.images is None else {"images": asdict(settings.images)}
    return {key: getattr(settings, key) for key in ("order", "window", "lattice", "cap", "dtype")} | images


def _metrics(task: Task, table: pd.DataFrame) -> dict[str, float] | None:
    """None where the table has no truth (cases whose slides differ), or no row."""
    return task.metrics(table) if len(table) and set(task.truth) <= set(table) else None


def _training_facts(training: Training, inputs: TrainingData, callbacks: Callbacks) -> dict[str, Any]:
    """Feature statistics, strides and encoder of training slides, and what the task keeps of its predictions on them."""
    rows = inputs.rows("train")
    facts = _look_at_features(training.loader, evenly(rows))
    if inputs.task.judges_training:
        logits = _logits(training, rows, callbacks)
        facts |= inputs.task.training_facts(inputs.by_case(inputs.predictions(rows, logits)))
    return facts


def _look_at_features(loader: BagLoader, rows: list[int]) -> dict[str, Any]:
    means: list[Tensor] = []
    strides, encoders = set(), set()
    for bag in loader.epoch(rows):
        means.append(slide_mean(bag.features))
        um = open_header(bag.path, loader.dataset.settings).stride_um
        strides.add((float(bag.stride), bag.unit, um))
        encoders.add(bag.encoder)
    return {
        "features": FeatureStatistics.fit(torch.stack(means)).as_card(),
        "stride": [
            {"value": value, "unit": unit, "um": um} for value, unit, um in sorted(strides, key=lambda one: one[:2])
        ],
        "encoder": next(iter(encoders)) if len(encoders) == 1 else None,
    }


# What the training slides look like ----------------------------------------------------------------------------------


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
