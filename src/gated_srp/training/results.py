"""The results of a run: the best weights, read once on validation and test, and the files that say what they gave."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pandas as pd
import torch
from safetensors import SafetensorError
from torch import Tensor

from gated_srp.data.loader import BagLoader
from gated_srp.data.prepared import open_header
from gated_srp.errors import Note, UserError, counted
from gated_srp.models import save_model
from gated_srp.tasks import Task, fit_temperature, selection_score
from gated_srp.tasks.metrics import FEWEST
from gated_srp.training.callbacks import RunCallbacks
from gated_srp.training.folder import RunFolder
from gated_srp.training.inputs import FeatureStatistics, TrainingData, evenly, slide_mean
from gated_srp.training.loop import Callbacks, Training, predict_logits, tied_epochs
from gated_srp.training.seen import seen_card


def validate(training: Training, inputs: TrainingData, callbacks: Callbacks) -> tuple[dict[str, float], float]:
    """Validation metrics at the level that scores, the loss among them, and the score that selects."""
    rows = inputs.rows("val")
    logits = _logits(training, rows, callbacks)
    loss = float(inputs.task.loss(logits, inputs.targets(rows)))
    slides = inputs.predictions(rows, logits)
    metrics = inputs.task.metrics(slides if inputs.score == "slide" else inputs.by_case(slides))
    return {"loss": loss, **metrics}, selection_score(inputs.task, metrics, loss)


def _logits(training: Training, rows: list[int], callbacks: Callbacks) -> Tensor:
    ranks, model, loader = training.ranks, training.model, training.loader
    return predict_logits(ranks, model, loader, rows, callbacks.bag, batch=training.batch, pack=training.pack)


@dataclass(frozen=True, eq=False)
class Results:
    """What a finished training gave. Tables by part (val, test) and level (slide, case)."""

    tables: dict[tuple[str, str], pd.DataFrame]
    metrics: dict[str, dict[str, dict[str, float] | None]]
    temperature: float
    facts: dict[str, Any]  # of the training set, for the card
    remarks: dict[str, dict[str, str]]  # beside metrics, by part and metric, at the level that scores
    ties: dict[str, Any]


def read_results(training: Training, inputs: TrainingData, callbacks: RunCallbacks) -> Results:
    """Predict with the best weights; the test slides are read here, once, and nowhere else."""
    if training.best is None:
        cure = "Lower train.lr, or check the features."
        raise UserError("no epoch gave a validation score that is a number", cure=cure)
    training.model.load_state_dict(training.best)
    tied = tied_epochs(training)
    if tied > 1:
        callbacks.say(_of_ties(training, inputs, tied).line)
    tables: dict[tuple[str, str], pd.DataFrame] = {}
    metrics: dict[str, dict[str, dict[str, float] | None]] = {}
    remarks: dict[str, dict[str, str]] = {}
    temperature, few = 1.0, len(inputs.rows("val"))
    if inputs.task.calibrates and few < FEWEST:
        callbacks.say(f"no temperature is fitted: {counted(few, 'validation slide')}, {FEWEST} are needed")
    for part in inputs.task.scored:
        rows = inputs.rows(part)
        logits = _logits(training, rows, callbacks)
        if part == "val":
            temperature = fit_temperature(inputs.task, logits, inputs.targets(rows))
        slides = inputs.predictions(rows, logits, temperature)
        cases = inputs.by_case(slides)
        scored = slides if inputs.score == "slide" else cases
        remarks[part] = inputs.task.remarks(scored) if len(scored) else {}
        tables |= {(part, "slide"): slides, (part, "case"): cases}
        metrics[part] = {"slide": _metrics(inputs.task, slides), "case": _metrics(inputs.task, cases)}
        if inputs.joined is not None:  # the bag of a patient says nothing of single slides
            del tables[part, "slide"]
            metrics[part]["slide"] = None
    facts = _training_facts(training, inputs, callbacks) | {"calibration_slides": few}
    facts["seen"] = seen_card(inputs.members, training.model.state_dict())
    return Results(tables, metrics, temperature, facts, remarks, {"rule": training.ties, "epochs": tied})


def _of_ties(training: Training, inputs: TrainingData, tied: int) -> Note:
    """That validation cannot tell the kept epoch from others."""
    progress, score = training.progress, training.progress.best_score
    rows = inputs.slides[inputs.slides["part"] == "val"]
    seen = (
        counted(rows["case"].nunique(), "validation patient")
        if inputs.score == "case"
        else counted(len(rows), "validation slide")
    )
    which = "the first of them" if training.ties == "first" else "the first with the lowest loss"
    said = f"{tied} of {progress.epoch} epochs have the best {inputs.task.select}, {score:.4f}, on {seen}; {which}, epoch {progress.best_epoch}, is kept"
    cure = "More validation slides tell epochs apart; select.ties: loss keeps the one with the lowest validation loss."
    return Note("warning", "ties", said, cure=cure if training.ties == "first" else "")


def write_results(run: RunFolder, results: Results, training: Training, about: Mapping[str, Any]) -> None:
    """All files of a finished run; metrics.json is the last, and says that it is finished."""
    for (part, level), table in results.tables.items():
        run.write_csv(f"predictions_{part}_{level}.csv", table)
    ends: dict[str, Any] = {
        "best_epoch": training.progress.best_epoch,
        "temperature": results.temperature,
        "ties": results.ties,
    }
    if (patience := training.settings.patience) is not None:
        ends["epochs"] = {"trained": training.progress.epoch, "of": training.settings.epochs, "patience": patience}
    card = {**about, **results.facts, **ends}
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
            **ends,
            "best_score": training.progress.best_score,
            "remarks": results.remarks,
            **results.metrics,
        },
    )


def _metrics(task: Task, table: pd.DataFrame) -> dict[str, float] | None:
    """None where the table has no truth (cases whose slides differ), or no row."""
    return task.metrics(table) if len(table) and set(task.truth) <= set(table) else None


def _training_facts(training: Training, inputs: TrainingData, callbacks: Callbacks) -> dict[str, Any]:
    """Feature statistics, strides and encoder of training slides, and what the task keeps of its predictions on them."""
    rows = inputs.rows("train")
    facts = _look_at_features(training.loader, rows)
    if inputs.task.judges_training:
        logits = _logits(training, rows, callbacks)
        facts |= inputs.task.training_facts(inputs.by_case(inputs.predictions(rows, logits)))
    return facts


def _look_at_features(loader: BagLoader, rows: list[int]) -> dict[str, Any]:
    means: list[Tensor] = []
    strides, encoders, slides = set(), set(), loader.dataset.members
    chosen = evenly(loader.dataset.member_rows(rows))
    for bag in loader.epoch(chosen) if slides is loader.dataset else map(slides.__getitem__, chosen):
        means.append(slide_mean(bag.features))
        header = open_header(bag.path, loader.dataset.settings)
        strides |= {(float(bag.stride), bag.unit, header.stride_um)} if header.stride_known else set()
        encoders.add(bag.encoder)
    return {
        "features": FeatureStatistics.fit(torch.stack(means)).as_card(),
        "stride": [
            {"value": value, "unit": unit, "um": um} for value, unit, um in sorted(strides, key=lambda one: one[:2])
        ],
        "encoder": next(iter(encoders)) if len(encoders) == 1 else None,
    }
