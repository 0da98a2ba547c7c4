"""One run from settings to finished folder: `train`."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from safetensors import SafetensorError
from torch import Tensor

from gated_srp.config.cohort import CohortConfig
from gated_srp.config.load import with_changes
from gated_srp.data.bag import BagError
from gated_srp.data.loader import BagLoader
from gated_srp.data.prepared import open_header
from gated_srp.data.splits import write_split
from gated_srp.errors import UserError
from gated_srp.models import ARMS, SlideModel, build_model, save_model
from gated_srp.progress import Event, Progress, silent
from gated_srp.tasks import Task, fit_temperature, selection_score
from gated_srp.training.callbacks import RunCallbacks, stop_on_signals
from gated_srp.training.folder import RunFolder, environment, load_checkpoint, save_checkpoint, settings_of, versions
from gated_srp.training.inputs import FeatureStatistics, TrainingData, evenly, load_inputs, slide_mean
from gated_srp.training.loop import Callbacks, Training, fit, predict_logits
from gated_srp.training.optim import file_hash, freeze_all_but_gates, start_weights
from gated_srp.training.ranks import Ranks, accelerator, choose_precision, launch


def train(
    cohort: str | Path | CohortConfig,
    *,
    arm: str | None = None,
    seed: int | None = None,
    fold: int = 0,
    out: str | Path | None = None,
    settings: Mapping[str, Any] | None = None,
    init: str | Path | None = None,
    devices: int = 1,
    save_every: float = 300.0,
    progress: Progress = silent,
) -> RunFolder:
    """Train one run: one arm, one seed, one fold. An unfinished run goes on where it was; a finished one is left alone.

    Args:
        cohort: the cohort's YAML, or its config.
        arm: which model, see `gated_srp.models.ARMS`; None: Gated SRP, or the first of the cohort's arms where it has none.
        seed: of the split, the start weights and the order of slides; None: the cohort's first.
        fold: where the cohort sets ``folds``.
        out: where runs are written, instead of the cohort's ``out``.
        settings: settings of the YAML to change, e.g. ``{"train.epochs": 5}``.
        init: start weights: a run's model.safetensors, or a published checkpoint.
        devices: processes that share the bags of each update; the numbers stay the same up to rounding.
        save_every: seconds between saved states within an epoch.
        progress: called after each bag (stage ``bags``), and with a line of text (stage ``train``) after each epoch.

    Returns:
        The finished run's folder, OUT/COHORT/ARM/seed42: ``path``, ``metrics("test")``, ``history``, ``gates``,
        ``predictions("test", "slide")``, ``card``. Interrupted by a signal, it raises `Interrupted`; calling it again goes on.

    Example:
        >>> import gated_srp
        >>> run = gated_srp.train("cohort.yaml", settings={"train.epochs": 5})  # doctest: +SKIP
        >>> run.metrics("test")  # doctest: +SKIP
    """
    config = with_changes(cohort, settings, out)
    arm = arm or config.main_arm
    job = Job(config, arm, config.seeds[0] if seed is None else seed, fold, Path(init) if init else None, devices)
    run = job.run
    run.refuse_other_settings(job.settings)
    if run.finished:
        progress(Event("train", text=f"{run.path}: finished before; nothing to do"))
        return run
    _check(job)
    recorded = run.environment if run.begun else {}
    precision = choose_precision(recorded.get("precision", config.train.precision), accelerator())
    launch(partial(_work, job=job, save_every=save_every), devices, precision, progress)
    return run


@dataclass(frozen=True)
class Job:
    """One run to do."""

    config: CohortConfig
    arm: str
    seed: int
    fold: int = 0
    init: Path | None = None
    devices: int = 1

    @property
    def run(self) -> RunFolder:
        return RunFolder.of(self.config, arm=self.arm, seed=self.seed, fold=self.fold)

    @property
    def settings(self) -> dict[str, Any]:
        return settings_of(self.config, arm=self.arm, seed=self.seed)


def _check(job: Job) -> None:
    """Refusals that need no data."""
    if job.arm not in ARMS:
        build_model(job.arm, in_dim=1, num_outputs=1)  # says which there are
    if job.devices < 1:
        raise UserError(f"{job.devices}, expected 1 or more.", where="devices")
    if job.config.train.only == "gate" and job.init is None and not job.run.begun:
        cure = "Name the base with --init model.safetensors."
        raise UserError("gate fits the gates of a trained base", where="train.only", cure=cure)
    recorded = (job.run.environment.get("init") or {}) if job.run.begun else {}
    if job.init is not None and job.run.begun and file_hash(job.init) != recorded.get("sha256"):
        raise UserError(
            f"was begun from {recorded.get('path', 'fresh weights')}, not from {job.init}",
            where=job.run.path,
            cure="Choose another `out`, or remove the folder.",
        )


def _work(ranks: Ranks, progress: Progress, *, job: Job, save_every: float) -> None:
    """What each rank does: rank 0 holds the folder, all compute."""
    run = job.run
    with run.lock() if ranks.first else nullcontext():
        if ranks.agree(run.finished):  # someone else finished it meanwhile
            return
        with stop_on_signals() as stop:
            _train(job, RunCallbacks(run, ranks, progress, stop, save_every))


def _train(job: Job, callbacks: RunCallbacks) -> None:
    run, ranks = job.run, callbacks.ranks
    inputs = load_inputs(job.config, job.seed, job.fold)
    if not run.begun:
        for note in inputs.notes:
            callbacks.say(note.line)
    with BagLoader(inputs.bags, workers=job.config.train.workers) as loader:
        for line in loader.notes:
            callbacks.say(line)
        training = _prepare(job, inputs, loader, callbacks)
        callbacks.begin(training, inputs, job.settings)
        try:
            fit(training, inputs.rows("train"), lambda: validate(training, inputs, callbacks), callbacks)
            results = read_results(training, inputs, callbacks)
        except Exception as error:
            callbacks.rescue(training, error)
            raise
        finally:
            callbacks.close()
        if ranks.first:
            write_results(run, results, training, _about(job, inputs, ranks.precision))
            run.state.unlink(missing_ok=True)
            found = results.metrics["test"][inputs.score] or {}
            said = ", ".join(f"{name} {value:.4f}" for name, value in found.items()) or "no slides"
            callbacks.say(f"{run.path}: finished. Best epoch {training.progress.best_epoch}; test: {said}")
        ranks.wait()


def _prepare(job: Job, inputs: TrainingData, loader: BagLoader, callbacks: RunCallbacks) -> Training:
    """Model, optimiser and, where a state is saved, all as it was. A new run writes its settings and its first state."""
    run, train, ranks = job.run, job.config.train, callbacks.ranks
    model = build_model(
        job.arm,
        in_dim=_width(inputs),
        num_outputs=inputs.task.num_outputs,
        seed=job.seed,
        **job.config.sizes(job.arm),
    )
    if reason := model.refuses.get(inputs.task.name):
        raise UserError(f"arm {job.arm!r} is not made for this task: {reason}")
    _refuse_other_input(job, model)
    model.checkpointing = train.checkpointing
    begun = ranks.agree(run.begun)
    if job.init is not None and not begun:
        for line in start_weights(model, job.init, all_of_trunk=train.only == "gate"):
            callbacks.say(line)
    if train.only == "gate":
        freeze_all_but_gates(model, job.arm)
    training = Training(ranks, model.to(ranks.device), inputs.task, loader, train, job.seed)
    if begun:
        saved = run.environment
        torch.set_num_threads(saved.get("threads", torch.get_num_threads()))
        _refuse_other_slides(run, inputs, saved.get("slides_hash"))
        training.restore(load_checkpoint(run.state))
        callbacks.say(f"{run.path}: goes on at epoch {training.progress.epoch + 1}, bag {training.progress.bags}")
    elif ranks.first:
        run.write_settings(job.settings)
        write_split(inputs.split, run.path / "split.csv")
        start = None if job.init is None else {"path": str(job.init.absolute()), "sha256": file_hash(job.init)}
        facts = environment(device=str(ranks.device), devices=job.devices, precision=ranks.precision, init=start)
        run.write_json("environment.json", facts | {"slides_hash": inputs.hash})
        save_checkpoint(training.checkpoint(), run.state)  # from here on the run is begun
        count = sum(p.numel() for p in model.parameters())
        callbacks.say(f"{run.path}: {job.arm}, {count:,} parameters, {ranks.device}, precision {ranks.precision}")
    ranks.wait()
    return training


def _width(inputs: TrainingData) -> int:
    """Channels of the first training slide that can be read."""
    rows, error = inputs.rows("train"), None
    for row in rows:
        try:
            return open_header(inputs.bags.files[row], inputs.bags.settings).shape[1]
        except BagError as found:
            error = error or found
    raise error or UserError("no training slide")


def _refuse_other_input(job: Job, model: SlideModel) -> None:
    """Arms of images have learned positions; arms of slides would see pixels for features."""
    images = job.config.images is not None
    if model.images == images:
        return
    kinds = ("slides", "images")
    fitting = [name for name, arm in ARMS.items() if arm.images == images]
    raise UserError(
        f"arm {job.arm!r} is for {kinds[model.images]}, but the cohort is one of {kinds[images]}",
        cure=f"Arms for them: {', '.join(fitting)}.",
    )


def _refuse_other_slides(run: RunFolder, inputs: TrainingData, recorded: str | None) -> None:
    if inputs.hash != recorded:
        raise UserError(
            "was begun with other slides, labels or parts than the table, the split and the files now give",
            where=run.path,
            cure="Restore them, choose another `out`, or remove the folder.",
        )


def _about(job: Job, inputs: TrainingData, precision: str) -> dict[str, Any]:
    """The card of the run's model, results aside."""
    bags = inputs.bags.settings
    return {
        "cohort": job.config.name,
        "arm": job.arm,
        "seed": job.seed,
        "fold": job.fold,
        "task": inputs.task.name,
        **inputs.task.card(),
        "select": inputs.task.select,
        "score": inputs.score,
        **{key: getattr(bags, key) for key in ("order", "window", "lattice", "cap", "dtype")},
        **({} if bags.images is None else {"images": asdict(bags.images)}),
        "split_hash": inputs.split.hash,
        "precision": precision,
        "gate_lr": job.config.train.gate_lr,
        "versions": versions(),
    }


# Results: the best weights, read once on validation and test ------------------------------------------------------------


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
    for part in ("val", "test"):
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
