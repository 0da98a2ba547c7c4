"""One run from settings to finished folder: `train_run`."""

import signal
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing
from lightning.fabric import Fabric

from gated_srp.config.schema import CohortConfig
from gated_srp.data.bag import BagError
from gated_srp.data.loader import BagLoader
from gated_srp.data.prepared import open_header
from gated_srp.data.splits.rules import write_split
from gated_srp.errors import Interrupted, UserError
from gated_srp.models import ARMS, SlideModel, build_model, find_arm
from gated_srp.training.callbacks import Keeper, handlers, stop_on_signals
from gated_srp.training.checkpoint import load_checkpoint, save_checkpoint
from gated_srp.training.folder import RunFolder, settings_of
from gated_srp.training.inputs import Material, gather
from gated_srp.training.loop import Training, fit
from gated_srp.training.progress import Report
from gated_srp.training.results import describe_bags, evaluate, read_results, write_results
from gated_srp.training.start import (
    accelerator,
    choose_precision,
    environment,
    file_hash,
    freeze_all_but_gates,
    start_weights,
    versions,
)


@dataclass(frozen=True)
class Job:
    """One run to do. ``save_every``: seconds between states within an epoch."""

    config: CohortConfig
    arm: str
    seed: int
    fold: int = 0
    init: Path | None = None
    devices: int = 1
    save_every: float = 300.0
    quiet: bool = False

    @property
    def run(self) -> RunFolder:
        return RunFolder.of(self.config, arm=self.arm, seed=self.seed, fold=self.fold)

    @property
    def settings(self) -> dict[str, Any]:
        return settings_of(self.config, arm=self.arm, seed=self.seed)


def train_run(
    config: CohortConfig,
    *,
    arm: str,
    seed: int,
    fold: int = 0,
    init: Path | None = None,
    devices: int = 1,
    save_every: float = 300.0,
    quiet: bool = False,
) -> Path:
    """Train one arm with one seed and give its folder. An unfinished run goes on; a finished one is left alone.

    ``init``: start weights (a model file or a published checkpoint). ``devices``: processes that share the bags of each window.
    """
    job = Job(config, arm, seed, fold, init, devices, save_every, quiet)
    run = job.run
    run.refuse_other_settings(job.settings)
    if run.finished:
        Report(None, quiet=quiet).say(f"{run.path}: finished before; nothing to do")
        return run.path
    _check(job)
    kind = accelerator()
    recorded = run.read_json("environment.json") if run.begun else {}
    precision = choose_precision(recorded.get("precision", config.train.precision), kind)
    fabric = Fabric(
        accelerator=kind,
        devices=devices,
        strategy="auto" if devices == 1 else "ddp_spawn",
        precision="bf16-mixed" if precision == "bf16" else "32-true",
    )
    if devices == 1:
        fabric.launch(lambda fabric: _work(fabric, job, precision))
    else:
        _launch_ranks(fabric, job, precision)
    return run.path


def _check(job: Job) -> None:
    """Refusals that need no data."""
    find_arm(job.arm)
    if job.devices < 1:
        raise UserError(f"devices: {job.devices}, expected 1 or more.")
    if job.config.train.only == "gate" and job.init is None and not job.run.begun:
        raise UserError(
            "train.only: gate fits the gates of a trained base. Name the base with --init model.safetensors."
        )
    recorded = (job.run.read_json("environment.json").get("init") or {}) if job.run.begun else {}
    if job.init is not None and job.run.begun and file_hash(job.init) != recorded.get("sha256"):
        raise UserError(
            f"{job.run.path}: was begun from {recorded.get('path', 'fresh weights')}, not from {job.init}. "
            "Choose another `out`, or remove the folder."
        )


# One process, or one of several --------------------------------------------------------------------------------------


def _launch_ranks(fabric: Fabric, job: Job, precision: str) -> None:
    """Run `_work` in processes of its own; their errors come back as ours, and signals reach them."""
    errors = torch.multiprocessing.get_context("spawn").SimpleQueue()

    def forward(number: int, frame: object) -> None:
        for child in torch.multiprocessing.active_children():
            child.terminate()

    with handlers({signal.SIGINT: lambda number, frame: None, signal.SIGTERM: forward}):
        try:
            fabric.launch(partial(_work_reporting, job=job, precision=precision, errors=errors))
        except Exception:
            if errors.empty():
                raise
            kind, message = errors.get()
            raise {"Interrupted": Interrupted}.get(kind, UserError)(message) from None


def _work_reporting(fabric: Fabric, job: Job, precision: str, errors: Any) -> None:
    try:
        _work(fabric, job, precision)
    except (UserError, Interrupted) as error:
        errors.put(("Interrupted" if isinstance(error, Interrupted) else "UserError", str(error)))
        raise RuntimeError(str(error)) from error  # an exception that needs no arguments survives the way back


def _work(fabric: Fabric, job: Job, precision: str) -> None:
    """What each rank does: rank 0 holds the folder, all compute."""
    first = fabric.global_rank == 0
    run = job.run
    with run.lock() if first else nullcontext():
        if fabric.broadcast(run.finished):  # someone else finished it meanwhile
            return
        report = Report(run.path / "log.txt" if first else None, quiet=job.quiet or not first)
        try:
            with stop_on_signals() as stop:
                _train(fabric, job, Keeper(run, fabric, report, stop, job.save_every), precision)
        finally:
            report.close()


def _train(fabric: Fabric, job: Job, keeper: Keeper, precision: str) -> None:
    run, report = job.run, keeper.report
    material = gather(job.config, job.seed, job.fold)
    if not run.begun:
        for note in material.notes:
            report.say(note)
    with BagLoader(material.bags, workers=job.config.train.workers) as loader:
        for note in loader.notes:
            report.say(note)
        training = _prepare(fabric, job, material, loader, keeper, precision)
        keeper.begin(training, material, job.settings)
        try:
            fit(training, material.rows("train"), lambda: evaluate(training, material, keeper), keeper)
            results = read_results(training, material, keeper)
        except Exception as error:
            keeper.rescue(training, error)
            raise
        finally:
            keeper.close()
        if fabric.global_rank == 0:
            write_results(run, results, training, _about(job, material, precision))
            run.state.unlink(missing_ok=True)
            found = results.metrics["test"][material.score] or {}
            said = ", ".join(f"{name} {value:.4f}" for name, value in found.items())
            report.say(f"{run.path}: finished. Best epoch {training.progress.best_epoch}; test: {said or 'no slides'}")
        fabric.barrier()


def _prepare(
    fabric: Fabric, job: Job, material: Material, loader: BagLoader, keeper: Keeper, precision: str
) -> Training:
    """Model, optimiser and, where a state is saved, all as it was. A new run writes its settings and its first state."""
    run, train = job.run, job.config.train
    model = build_model(
        job.arm,
        in_dim=_width(material),
        num_outputs=material.task.num_outputs,
        seed=job.seed,
        **job.config.sizes(job.arm),
    )
    if reason := model.refuses.get(material.task.name):
        raise UserError(f"arm {job.arm!r} is not made for this task: {reason}")
    _refuse_other_input(job, model)
    model.checkpointing = train.checkpointing
    begun = fabric.broadcast(run.begun)
    if job.init is not None and not begun:
        for note in start_weights(model, job.init, all_of_trunk=train.only == "gate"):
            keeper.report.say(note)
    if train.only == "gate":
        freeze_all_but_gates(model, job.arm)
    training = Training(fabric, model.to(fabric.device), material.task, loader, train, job.seed)
    if begun:
        saved = run.read_json("environment.json")
        torch.set_num_threads(saved.get("threads", torch.get_num_threads()))
        _refuse_other_slides(run, material, saved.get("slides_hash"))
        training.restore(load_checkpoint(run.state))
        at = f"epoch {training.progress.epoch + 1}, bag {training.progress.bags}"
        keeper.report.say(f"{run.path}: goes on at {at}")
    elif fabric.global_rank == 0:
        run.write_settings(job.settings)
        write_split(material.split, run.path / "split.csv")
        facts = environment(device=str(fabric.device), devices=job.devices, precision=precision, init=job.init)
        run.write_json("environment.json", facts | {"slides_hash": material.hash})
        save_checkpoint(training.checkpoint(), run.state)  # from here on the run is begun
        count = sum(p.numel() for p in model.parameters())
        keeper.report.say(f"{run.path}: {job.arm}, {count:,} parameters, {fabric.device}, precision {precision}")
    fabric.barrier()
    return training


def _width(material: Material) -> int:
    """Channels of the first training slide that can be read."""
    rows, error = material.rows("train"), None
    for row in rows:
        try:
            return open_header(material.bags.files[row], material.bags.settings).shape[1]
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
        f"arm {job.arm!r} is for {kinds[model.images]}, but the cohort is one of {kinds[images]}. Arms for them: {', '.join(fitting)}."
    )


def _refuse_other_slides(run: RunFolder, material: Material, recorded: str | None) -> None:
    if material.hash != recorded:
        raise UserError(
            f"{run.path}: was begun with other slides, labels or parts than the table, the split and the files now give. "
            "Restore them, choose another `out`, or remove the folder."
        )


def _about(job: Job, material: Material, precision: str) -> dict[str, Any]:
    """The card of the run's model, results aside."""
    return {
        "cohort": job.config.name,
        "arm": job.arm,
        "seed": job.seed,
        "fold": job.fold,
        "task": material.task.name,
        **material.task.card(),
        "select": material.task.select,
        "score": material.score,
        **describe_bags(material.bags.settings),
        "split_hash": material.split.hash,
        "precision": precision,
        "versions": versions(),
    }
