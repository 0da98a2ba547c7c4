"""What happens around the loop of a run: its state is saved, its tables written, its progress reported, and it ends when asked to.

Numbers of an epoch also go to TensorBoard, Weights & Biases or MLflow, if installed and named in ``train.log``.
"""

import hashlib
import logging
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Protocol

import torch

from gated_srp.data.loader import SlideBag
from gated_srp.errors import Interrupted, UserError
from gated_srp.machine import peak_memory
from gated_srp.progress import Event, Progress, silent, spoken
from gated_srp.training.folder import HISTORY, RunFolder
from gated_srp.training.inputs import TrainingData
from gated_srp.training.loop import COLUMNS, Training
from gated_srp.training.ranks import Ranks, handlers
from gated_srp.training.state import save_checkpoint

_LOG = logging.getLogger(__name__)


@dataclass
class Stop:
    """Whether somebody asked to stop, and how."""

    signal: int | None = None


@dataclass(eq=False)
class RunCallbacks:
    """The `Callbacks` of a run. Rank 0 writes; every rank stops when any rank was asked to."""

    run: RunFolder
    ranks: Ranks
    progress: Progress = silent
    stop: Stop = field(default_factory=Stop)
    save_every: float = 300.0  # seconds
    given: Sequence[Any] = ()  # loggers that `train` was given
    loggers: list["Logger"] = field(default_factory=list)
    saved: float = field(default_factory=time.monotonic)

    def begin(self, training: Training, inputs: TrainingData, settings: Mapping[str, Any]) -> None:
        """The training starts, or goes on from where it stands."""
        progress, train = training.progress, training.settings
        self.training = training
        self.total = train.epoch_bags(len(inputs.rows("train"))) + len(inputs.rows("val"))  # bags of an epoch
        self.speed = Speed((train.epochs - progress.epoch) * self.total - progress.bags)
        self.seen = progress.bags
        if self.ranks.first:
            self.loggers = open_loggers(train.log, self.run.path, settings) + [
                Given(one, settings) for one in self.given
            ]
            self._write_tables(training)  # a run may have been killed between its state and its tables

    def bag(self, bag: SlideBag) -> None:
        self.speed.add(len(bag.features) * self.ranks.count, bags=self.ranks.count)
        self.seen += self.ranks.count
        if self.stop.signal is not None and self.ranks.count == 1:
            raise self._interrupted()
        if self.ranks.first and self.progress is not silent:
            progress = self.training.progress
            loss = f"loss {progress.loss / progress.bags:.4f}, " if progress.bags else ""
            now = f"epoch {progress.epoch + 1}" if not self.training.over else "results"
            self.progress(Event("bags", min(self.seen, self.total), self.total, f"{now}, {loss}{self._pace()}"))

    def window(self, training: Training) -> None:
        self._stop_if_asked()
        if self.ranks.first and time.monotonic() - self.saved >= self.save_every:
            self._save(training)

    def epoch(self, training: Training) -> None:
        progress = training.progress
        self.seen = 0
        if self.ranks.first:
            self._save(training)
            self._write_tables(training)
            now = {
                f"{split}/{name}": value for epoch, split, name, value in progress.history if epoch == progress.epoch
            }
            gates = {f"gate/beta_layer{row[1]}": row[2] for row in progress.gate_history if row[0] == progress.epoch}
            for logger in self.loggers:
                logger.log(progress.epoch, now | gates)
            shown = ("train/loss", "val/loss", f"val/{training.task.select}")
            said = ", ".join(f"{name} {now[name]:.4f}" for name in shown)
            best = " (best so far)" if progress.best_epoch == progress.epoch else ""
            self.say(f"epoch {progress.epoch}/{training.settings.epochs}: {said}{best}; {self._pace()}", data=now)
        self._stop_if_asked()

    def rescue(self, training: Training, error: Exception) -> None:
        """Something went wrong: keep what was learnt up to the last window."""
        if self.ranks.first and not training.over and not training.stepping:
            # A full disk, or no memory for a copy: the state before is still there, and the first error matters.
            with suppress(UserError, MemoryError, RuntimeError):
                self._save(training)
        if self.stop.signal is not None and not isinstance(error, Interrupted):
            raise self._interrupted() from error  # a signal to the whole group also ends the loader's workers
        self.write(f"stopped: {error}")  # whoever called is told by the error itself

    def close(self) -> None:
        for logger in self.loggers:
            logger.close(finished=self.training.over)

    def say(self, text: str, data: Any = None) -> None:
        """One line, now: to whoever watches, and to log.txt."""
        if self.ranks.first:
            self.write(text)
            self.progress(Event("train", text=text, data=data))

    def write(self, text: str) -> None:
        """To log.txt alone."""
        if not self.ranks.first:
            return
        _LOG.info("%s", text)
        log = self.run.path / "log.txt"
        with suppress(OSError), log.open("a", encoding="utf-8") as file:  # a full disk must not end a run here
            file.write(f"{datetime.now(UTC):%Y-%m-%d %H:%M:%S} {text}\n")

    def _save(self, training: Training) -> None:
        save_checkpoint(training.checkpoint(), self.run.state)
        self.saved = time.monotonic()

    def _write_tables(self, training: Training) -> None:
        self.run.write_rows("history.csv", HISTORY, training.progress.history)
        self.run.write_rows("gates.csv", COLUMNS, training.progress.gate_history)

    def _stop_if_asked(self) -> None:
        asked = torch.tensor(float(self.stop.signal is not None), device=self.ranks.device)
        self.ranks.sum(asked)
        if asked > 0:
            raise self._interrupted()

    def _interrupted(self) -> Interrupted:
        return Interrupted(f"{self.run.path}: stopped and saved. Start the same command again to go on.")

    def _pace(self) -> str:
        return f"{self.speed.patches:,.0f} patches/s, {memory(self.ranks.device)}, {self.speed.left} left"


@contextmanager
def stop_on_signals() -> Iterator[Stop]:
    """Ctrl-C and a scheduler's SIGTERM ask to stop; a second Ctrl-C ends at once, with the last saved state."""
    stop = Stop()

    def ask(number: int, frame: object) -> None:
        if stop.signal is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        stop.signal = number

    with handlers({signal.SIGINT: ask, signal.SIGTERM: ask}):
        yield stop


class Speed:
    """Patches per second, and how long the rest will take at the pace so far."""

    def __init__(self, bags: int) -> None:
        self._start = time.monotonic()
        self._bags = bags  # still to do
        self._done = self._patches = 0

    def add(self, patches: int, *, bags: int = 1) -> None:
        self._done += bags
        self._patches += patches

    @property
    def patches(self) -> float:
        """Per second."""
        return self._patches / max(time.monotonic() - self._start, 1e-9)

    @property
    def left(self) -> str:
        """Time left, as a person says it."""
        pace = (time.monotonic() - self._start) / max(self._done, 1)
        return spoken(pace * max(self._bags - self._done, 0))


def memory(device: torch.device) -> str:
    """The most memory held so far: the accelerator's, or the process's."""
    if device.type == "cuda":
        return f"{torch.cuda.max_memory_allocated(device) / 2**30:.1f} GB"
    peak = peak_memory()
    return "memory unknown" if peak is None else f"{peak / 2**30:.1f} GB"


# Loggers -------------------------------------------------------------------------------------------------------------


class Logger(Protocol):
    """Takes the numbers of an epoch, named ``val/macro_f1`` and the like; numbering starts at 1."""

    def log(self, epoch: int, values: Mapping[str, float]) -> None:
        """One epoch."""

    def close(self, *, finished: bool) -> None:
        """The training ends, or is left before its end."""


class TensorBoard:
    """Event files in the run's folder ``tensorboard``."""

    def __init__(self, folder: Path, settings: Mapping[str, Any]) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(folder / "tensorboard"))

    def log(self, epoch: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, epoch)

    def close(self, *, finished: bool) -> None:
        self._writer.close()


class WeightsAndBiases:
    """A run named COHORT/ARM/seed42; an interrupted training goes on in the same one."""

    def __init__(self, folder: Path, settings: Mapping[str, Any]) -> None:
        import wandb  # type: ignore[import-not-found, unused-ignore]

        digest = hashlib.sha256(str(folder).encode()).hexdigest()[:16]
        self._run = wandb.init(
            project="gated-srp",
            name=run_name(folder),
            id=digest,
            resume="allow",
            dir=str(folder),
            config=dict(settings),
        )

    def log(self, epoch: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=epoch)

    def close(self, *, finished: bool) -> None:
        self._run.finish()


class MLflow:
    """A run of the experiment gated-srp, where MLflow is set up to keep them; an interrupted training goes on in the same one."""

    def __init__(self, folder: Path, settings: Mapping[str, Any]) -> None:
        import mlflow  # type: ignore[import-not-found, unused-ignore]

        self._mlflow = mlflow
        mlflow.set_experiment("gated-srp")
        begun = RunFolder(folder).environment.get("started")  # a training that is begun anew has a time of its own
        identity = hashlib.sha256(f"{run_name(folder)} {begun}".encode()).hexdigest()[:16]
        same = mlflow.search_runs(
            experiment_names=["gated-srp"],
            filter_string=f"tags.gated_srp_run = '{identity}'",
            max_results=1,
            output_format="list",
        )
        if same:
            mlflow.start_run(run_id=same[0].info.run_id)
        else:
            mlflow.start_run(run_name=run_name(folder), tags={"gated_srp_run": identity})
        mlflow.log_params({key: str(value)[:500] for key, value in settings.items()})

    def log(self, epoch: int, values: Mapping[str, float]) -> None:
        self._mlflow.log_metrics({name.replace("@", "_"): value for name, value in values.items()}, step=epoch)

    def close(self, *, finished: bool) -> None:
        self._mlflow.end_run("FINISHED" if finished else "KILLED")


class Given:
    """An object that was given to `train`: a logger of lightning.pytorch, or whatever has its ``log_metrics(values, step=...)``."""

    def __init__(self, logger: Any, settings: Mapping[str, Any]) -> None:
        self._logger = logger
        getattr(logger, "log_hyperparams", lambda settings: None)(dict(settings))

    def log(self, epoch: int, values: Mapping[str, float]) -> None:
        self._logger.log_metrics(dict(values), step=epoch)

    def close(self, *, finished: bool) -> None:
        getattr(self._logger, "save", lambda: None)()
        getattr(self._logger, "finalize", lambda status: None)("success" if finished else "failed")


LOGGERS: dict[str, Callable[[Path, Mapping[str, Any]], Logger]] = {
    "tensorboard": TensorBoard,
    "wandb": WeightsAndBiases,
    "mlflow": MLflow,
}


def check_loggers(loggers: Sequence[Any], devices: int) -> None:
    """Refuses what cannot log."""
    for one in loggers:
        if callable(getattr(one, "log_metrics", None)):
            continue
        what = f"{type(one).__name__} has no log_metrics(values, step=...)"
        raise UserError(
            what, where="loggers", cure="Give a logger of lightning.pytorch; others are named in train.log."
        )
    if loggers and devices > 1:
        cure = "Name tensorboard, wandb or mlflow in train.log instead."
        raise UserError("an object of this process cannot log for several", where="loggers", cure=cure)


def open_loggers(names: Sequence[str], folder: Path, settings: Mapping[str, Any]) -> list[Logger]:
    """The loggers of ``train.log``."""
    opened: list[Logger] = []
    for name in names:
        try:
            opened.append(LOGGERS[name](folder, settings))
        except ImportError as error:
            raise UserError(
                f"train.log names {name!r}, but the package {error.name or name!r} is not installed",
                cure=f"Install it: pip install {name}; or take it out of train.log (history.csv and gates.csv are written anyway).",
            ) from None
    return opened


def run_name(folder: Path) -> str:
    """COHORT/ARM/seed42.

    >>> run_name(Path("runs/BRACS/gated_srp/seed42"))
    'BRACS/gated_srp/seed42'
    """
    return "/".join(folder.parts[-3:])
