"""One run from settings to finished folder: `train`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from gated_srp.config.cohort import CohortConfig, open_cohort
from gated_srp.config.load import arm_notes, for_arm, with_changes
from gated_srp.config.reach import gate_reach, gates_moved
from gated_srp.data.bag import BagError
from gated_srp.data.loader import BagLoader
from gated_srp.data.prepared import open_header
from gated_srp.data.splits import write_split
from gated_srp.errors import UserError, counted
from gated_srp.models import ARMS, SlideModel, build_model, find_arm, load_card, model_file
from gated_srp.progress import Event, Progress, silent
from gated_srp.training.callbacks import RunCallbacks, check_loggers, stop_on_signals
from gated_srp.training.folder import RunFolder, departures, environment, settings_of, versions
from gated_srp.training.inputs import TrainingData, check_files, fingerprints, load_inputs, refuse_other_inputs
from gated_srp.training.loop import Training, fit
from gated_srp.training.optim import file_hash, freeze_all_but_gates, start_weights
from gated_srp.training.ranks import Ranks, accelerator, choose_precision, launch
from gated_srp.training.results import read_results, validate, write_results
from gated_srp.training.state import before, load_newest, save_checkpoint


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
    deep: bool = False,
    loggers: Sequence[Any] = (),
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
        init: start weights: a run (of `pretrain`, say) or its model.safetensors, or a published checkpoint.
        devices: processes that share the bags of each update; the numbers stay the same up to rounding.
        save_every: seconds between saved states within an epoch.
        deep: know feature files again by all of their bytes, not by a sample of them.
        loggers: of lightning.pytorch, or others with ``log_metrics(values, step=epoch)``, beside those that ``train.log`` names.
        progress: called after each file's header (stage ``files``) and each bag (``bags``), and with a line of text (stage ``train``) after each epoch.

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
    seed = config.seeds[0] if seed is None else seed
    said, config = tuple(note.line for note in arm_notes(config, arm)), for_arm(config, arm)
    job = Job(config, arm, seed, fold, devices=devices, deep=deep, said=said)
    start = model_file(Path(init)) if init else None
    if config.train.init and not init:
        from gated_srp.training.pretrain import pretrained_model  # not above: few runs start from one

        start = pretrained_model(job)
    return run_job(replace(job, init=start), save_every=save_every, loggers=loggers, progress=progress)


def run_job(job: Job, *, save_every: float, loggers: Sequence[Any] = (), progress: Progress = silent) -> RunFolder:
    """Begin a run, go on with it, or leave it alone where it is finished."""
    run, config, devices = job.run, job.config, job.devices
    _check(job)
    check_loggers(loggers, devices)
    if run.finished:
        for line in (*_leave_alone(job), "finished before; nothing to do"):
            progress(Event("train", text=f"{run.path}: {line}"))
        return run
    run.refuse_other_settings(job.settings)
    recorded = run.environment.get("precision") if run.begun else None
    precision = choose_precision(recorded or config.train.precision, accelerator())
    if recorded and precision != recorded:
        what = f"was begun in {recorded}, which this machine lacks: it would go on in {precision}, as another run"
        cure = "Go on where it was begun, choose another `out`, or remove the folder."
        raise UserError(what, where=run.path, cure=cure)
    launch(partial(_work, job=job, save_every=save_every, loggers=loggers), devices, precision, progress)
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
    deep: bool = False
    said: tuple[str, ...] = ()  # what the arm takes of the cohort in another way than it is set

    @property
    def which(self) -> dict[str, Any]:
        return {"arm": self.arm, "seed": self.seed, "fold": self.fold}

    @property
    def run(self) -> RunFolder:
        return RunFolder.of(self.config, **self.which)

    @property
    def settings(self) -> dict[str, Any]:
        return settings_of(self.config, arm=self.arm, seed=self.seed)

    @property
    def gates_known(self) -> bool:
        """Whether its gates start from learned ones: how far they could get from zero then says nothing."""
        card = load_card(self.init) if self.init is not None and self.init.suffix == ".safetensors" else {}
        return bool(card) and find_arm(card["settings"]["arm"]).gated

    def load(self) -> TrainingData:
        return load_inputs(self.config, self.seed, self.fold)


def _check(job: Job) -> None:
    """Refusals that come first: a fold without a folder of its own would pass for the first."""
    if job.arm not in ARMS:
        build_model(job.arm, in_dim=1, num_outputs=1)  # says which there are
    if job.devices < 1:
        raise UserError(f"{job.devices}, expected 1 or more.", where="devices")
    if job.arm in ARMS and ARMS[job.arm].needs_covariates and job.config.covariates is None:
        cure = "Name columns of the table with `covariates: {numeric: [...], categorical: [...]}`, or another arm."
        raise UserError("it sees covariates alone, and the cohort names none", where=f"arm {job.arm!r}", cure=cure)
    if job.arm in ARMS and ARMS[job.arm].scales > 1 and job.config.features_low is None:
        cure = "Name the folder of the lower magnification with `features_low`, or another arm."
        raise UserError("it sees two magnifications, and the cohort has one", where=f"arm {job.arm!r}", cure=cure)
    if not 0 <= job.fold < (job.config.folds.number if job.config.folds else 1):
        open_cohort(job.config).split(job.seed, job.fold)  # says how many there are


def _leave_alone(job: Job) -> list[str]:
    """A finished run is compared with what is asked for and its results are read; what a killed process left there goes. Gives what to say."""
    run = job.run
    run.refuse_other_settings(job.settings)
    _ = run.results
    refuse_other_weights(job)
    if run.leftovers():
        with suppress(UserError), run.lock():  # another process holds it, or nobody may write there
            pass
    if "slides_hash" not in run.environment:
        return []
    try:
        inputs = job.load()
    except UserError as error:  # whoever keeps runs alone may still ask for them
        return [f"warning: whether its slides and labels are those of now cannot be told: {error}"]
    if gone := sorted(set(run.features.get("slide", ())) - set(inputs.members["slide"])):
        of = f"{len(gone)} of its slides have no label or no file now, e.g. {gone[0]!r}"
        return [f"warning: {of}: whether it is what the table now gives cannot be told"]
    run.refuse_other_slides(inputs.hash)
    return []


def _refuse_other_start(job: Job, precision: str) -> None:
    """What is in the folder must be this run. Asked when it is held: before, another process may still have begun it."""
    job.run.refuse_other_settings(job.settings)
    if job.config.train.only == "gate" and job.init is None and not job.run.begun:
        cure = "Name the base with --init model.safetensors."
        raise UserError("gate fits the gates of a trained base", where="train.only", cure=cure)
    if job.run.begun and job.init is not None:  # otherwise it goes on from whatever it was begun from
        refuse_other_weights(job)
    if job.run.begun and job.run.environment.get("precision", precision) != precision:
        what = "was begun by another process just now, in another precision"
        raise UserError(what, where=job.run.path, cure="Start the same command again.")


def refuse_other_weights(job: Job) -> None:
    """A run that is there must have been begun from the start weights that are named now; from fresh ones where neither option nor setting names any."""
    recorded, train = job.run.environment.get("init") or {}, job.config.train
    named = job.init or train.init or train.only
    if (job.init is not None and file_hash(job.init) != recorded.get("sha256")) or (recorded and not named):
        raise UserError(
            f"was begun from {recorded.get('path', 'fresh weights')}, not from {job.init or 'fresh weights'}",
            where=job.run.path,
            cure="Choose another `out`, or remove the folder.",
        )


def _work(ranks: Ranks, progress: Progress, *, job: Job, save_every: float, loggers: Sequence[Any]) -> None:
    """What each rank does: rank 0 holds the folder, all compute."""
    run = job.run
    inputs = job.load()
    if not run.begun:  # a run that goes on knows its files again by their fingerprints
        found = check_files(inputs, job.config, progress if ranks.first else silent)
        inputs = replace(inputs, notes=(*inputs.notes, *found))
    with run.lock() if ranks.first else nullcontext(), run.nothing_unbegun() if ranks.first else nullcontext():
        if ranks.first:
            _refuse_other_start(job, ranks.precision)
        if ranks.agree(run.finished):  # someone else finished it meanwhile
            return
        with stop_on_signals() as stop:
            _train(job, inputs, RunCallbacks(run, ranks, progress, stop, save_every, loggers))


def _train(job: Job, inputs: TrainingData, callbacks: RunCallbacks) -> None:
    run, ranks = job.run, callbacks.ranks
    if not run.begun:
        reach = None if job.gates_known else gate_reach(job.config, len(inputs.rows("train")), job.arm)
        for note in (*inputs.notes, *([reach.note(job.arm)] if reach else [])):
            callbacks.say(note.line)
        for line in (*job.said, *departures(job.settings, inputs.task.card())):
            callbacks.say(line)
    with BagLoader(inputs.bags, workers=job.config.train.workers) as loader:
        for line in loader.notes:
            callbacks.say(line)
        training = _prepare(job, inputs, loader, callbacks)
        callbacks.begin(training, inputs, job.settings)
        try:
            fit(training, inputs.rows("train"), lambda: validate(training, inputs, callbacks), callbacks)
            if (left := training.settings.epochs - training.progress.epoch) > 0:
                idle = counted(training.progress.epoch - training.progress.best_epoch, "epoch")
                rest = f"{left} of {training.settings.epochs} are left out"
                callbacks.say(f"stopped early, {idle} without a better one (train.patience); {rest}")
            results = read_results(training, inputs, callbacks)
        except Exception as error:
            from gated_srp.training.memory import memory_error

            callbacks.rescue(training, error := memory_error(error))
            raise error
        finally:
            callbacks.close()
        if ranks.first:
            write_results(run, results, training, _about(job, inputs, ranks.precision))
            for state in (before(run.state), run.state):
                with suppress(OSError):  # or at the next start
                    state.unlink()
            last = inputs.task.scored[-1]
            found = results.metrics[last][inputs.score] or {}
            beside = {name: f" ({remark})" for name, remark in results.remarks[last].items()}
            said = (
                ", ".join(f"{name} {value:.4f}{beside.get(name, '')}" for name, value in found.items()) or "no slides"
            )
            callbacks.say(f"{run.path}: finished. Best epoch {training.progress.best_epoch}; {last}: {said}")
            if len(gates := run.gates):
                callbacks.say(f"gates in the last epoch: {gates_moved(gates)}")
        ranks.wait()


def _prepare(job: Job, inputs: TrainingData, loader: BagLoader, callbacks: RunCallbacks) -> Training:
    """Model, optimiser and, where a state is saved, all as it was. A new run writes its settings and its first state."""
    run, train, ranks = job.run, job.config.train, callbacks.ranks
    model = build_model(
        job.arm,
        in_dim=_width(inputs),
        num_outputs=inputs.task.num_outputs,
        seed=job.seed,
        covariates=inputs.covariates.width if inputs.covariates else 0,
        masked=inputs.task.masked,
        **job.config.sizes(job.arm),
    )
    if reason := model.refuses.get(inputs.task.name):
        raise UserError(f"arm {job.arm!r} is not made for this task: {reason}")
    _refuse_other_input(job, model)
    model.checkpointing = train.checkpointing
    begun = ranks.agree(run.begun)
    start = None
    if job.init is not None and not begun:
        start, said = _start(job, model, inputs)
        for line in said:
            callbacks.say(line)
    if train.only == "gate":
        freeze_all_but_gates(model, job.arm)
    training = Training(ranks, model.to(ranks.device), inputs.task, loader, train, job.seed)
    training.ties, training.sampling = job.config.select.ties, inputs.sampling
    if begun:
        saved = run.environment
        torch.set_num_threads(saved.get("threads", torch.get_num_threads()))
        notes = refuse_other_inputs(run, inputs, deep=job.deep)
        if ranks.first and run.features.empty:
            run.write_csv("features.csv", fingerprints(inputs.bags, deep=job.deep))
        state, damaged = load_newest(run.state)
        for note in (*notes, *damaged):
            callbacks.say(f"{run.path}: {note.line}")
        training.restore(state)
        callbacks.say(f"{run.path}: goes on at epoch {training.progress.epoch + 1}, bag {training.progress.bags}")
    elif ranks.first:
        run.write_settings(job.settings)
        write_split(inputs.split, run.path / "split.csv")
        facts = environment(device=str(ranks.device), devices=job.devices, precision=ranks.precision, init=start)
        run.write_json("environment.json", facts | {"slides_hash": inputs.hash, "slides": len(inputs.members)})
        run.write_csv("features.csv", fingerprints(inputs.bags, deep=job.deep))
        save_checkpoint(training.checkpoint(), run.state)  # from here on the run is begun
        count = sum(p.numel() for p in model.parameters())
        callbacks.say(f"{run.path}: {job.arm}, {count:,} parameters, {ranks.device}, precision {ranks.precision}")
        if train.pack and not model.packs:
            callbacks.say(f"train.pack: {job.arm} takes one bag at a time, so this run does")
    ranks.wait()
    return training


def _start(job: Job, model: SlideModel, inputs: TrainingData) -> tuple[dict[str, Any], list[str]]:
    """The start weights go into the model: what the run keeps of them, and what to say."""
    assert job.init is not None
    facts: dict[str, Any] = {"path": str(job.init.absolute()), "sha256": file_hash(job.init)}
    notes: list[str] = []
    card = load_card(job.init) if job.init.suffix == ".safetensors" else {}
    if card:
        from gated_srp.training.pretrain import check_start  # not above: few runs have start weights with a card

        found, notes = check_start(card, model, inputs, where=job.init, only=job.config.train.only)
        facts |= found
    return facts, start_weights(model, job.init, all_of_trunk=job.config.train.only == "gate") + notes


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


def _low(inputs: TrainingData) -> dict[str, Any]:
    from gated_srp.data.two_scales import ratios  # not above: rarely so

    return {"ratio": ratios([inputs.bags.files[row] for row in inputs.rows("train")], inputs.bags.settings)}


def _about(job: Job, inputs: TrainingData, precision: str) -> dict[str, Any]:
    """The card of the run's model, results aside."""
    bags, start = inputs.bags.settings, job.run.environment.get("init")
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
        **({} if bags.regions is None else {"regions": bags.regions.rule}),
        **({} if bags.features_low is None else {"features_low": _low(inputs)}),
        "split_hash": inputs.split.hash,
        **({"init": {key: one for key, one in start.items() if key != "path"}} if start else {}),
        "precision": precision,
        "gate_lr": job.config.train.gate_lr,
        **({"pack": job.config.train.pack} if job.config.train.pack else {}),
        **({"bag": "patient", "bag_order": "slide name"} if inputs.joined is not None else {}),
        **({"sampling": job.config.train.sampling} if job.config.train.sampling else {}),
        **({"covariates": inputs.covariates.card()} if inputs.covariates else {}),
        "versions": versions(),
    }
