"""The end of a run: the best weights, read once on validation and test, and everything that is written about them."""

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
from gated_srp.training.domain import FeatureStatistics, evenly, slide_mean
from gated_srp.training.folder import RunFolder
from gated_srp.training.inputs import Material
from gated_srp.training.loop import Training, Watch, predict_logits

PARTS = ("val", "test")


def evaluate(training: Training, material: Material, watch: Watch) -> tuple[dict[str, float], float]:
    """Validation metrics at the level that scores, the loss among them, and the score that selects."""
    rows = material.rows("val")
    logits = _logits(training, rows, watch)
    loss = float(material.task.loss(logits, material.targets(rows)))
    slides = material.predictions(rows, logits)
    metrics = material.task.metrics(slides if material.score == "slide" else material.by_case(slides))
    return {"loss": loss, **metrics}, selection_score(material.task, metrics, loss)


def _logits(training: Training, rows: list[int], watch: Watch) -> Tensor:
    return predict_logits(training.fabric, training.model, training.loader, rows, watch.bag, batch=training.batch)


@dataclass(frozen=True, eq=False)
class Results:
    """What a finished training gave. Tables by part (val, test) and level (slide, case)."""

    tables: dict[tuple[str, str], pd.DataFrame]
    metrics: dict[str, dict[str, dict[str, float] | None]]
    temperature: float
    facts: dict[str, Any]  # of the training set, for the card


def read_results(training: Training, material: Material, watch: Watch) -> Results:
    """Predict with the best weights; the test slides are read here, once, and nowhere else."""
    if training.best is None:
        raise UserError("no epoch gave a validation score that is a number. Lower train.lr, or check the features.")
    training.model.load_state_dict(training.best)
    tables: dict[tuple[str, str], pd.DataFrame] = {}
    metrics: dict[str, dict[str, dict[str, float] | None]] = {}
    temperature = 1.0
    for part in PARTS:
        rows = material.rows(part)
        logits = _logits(training, rows, watch)
        if part == "val":
            temperature = fit_temperature(material.task, logits, material.targets(rows))
        slides = material.predictions(rows, logits)
        cases = material.by_case(slides)
        tables |= {(part, "slide"): slides, (part, "case"): cases}
        metrics[part] = {"slide": _metrics(material.task, slides), "case": _metrics(material.task, cases)}
    return Results(tables, metrics, temperature, _training_facts(training, material, watch))


def write_results(run: RunFolder, results: Results, training: Training, about: Mapping[str, Any]) -> None:
    """All files of a finished run; metrics.json is the last, and says that it is finished."""
    for (part, level), table in results.tables.items():
        run.write_csv(f"predictions_{part}_{level}.csv", table)
    card = {**about, **results.facts, "temperature": results.temperature, "best_epoch": training.progress.best_epoch}
    try:
        save_model(training.model, run.path / "model.safetensors", card)
    except (OSError, SafetensorError) as error:
        raise UserError(
            f"{run.path / 'model.safetensors'}: cannot be written ({error}). Free some space, then start the same command again."
        ) from error
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


def _training_facts(training: Training, material: Material, watch: Watch) -> dict[str, Any]:
    """Feature statistics, strides and encoder of training slides, and what the task keeps of its predictions on them."""
    rows = material.rows("train")
    facts = _look_at(training.loader, evenly(rows))
    if material.task.judges_training:
        logits = _logits(training, rows, watch)
        facts |= material.task.training_facts(material.by_case(material.predictions(rows, logits)))
    return facts


def _look_at(loader: BagLoader, rows: list[int]) -> dict[str, Any]:
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
