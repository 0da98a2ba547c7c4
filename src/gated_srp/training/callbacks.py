"""Who looks on while a run trains: saves its state, writes its tables, shows its progress, and ends it when asked."""

import signal
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from lightning.fabric import Fabric

from gated_srp.data.loader import SlideBag
from gated_srp.errors import Interrupted, UserError
from gated_srp.training.checkpoint import save_checkpoint
from gated_srp.training.folder import HISTORY, RunFolder
from gated_srp.training.gates import COLUMNS
from gated_srp.training.inputs import Material
from gated_srp.training.loggers import Logger, open_loggers
from gated_srp.training.loop import Training
from gated_srp.training.progress import Report, Speed, memory


@dataclass
class Stop:
    """Whether somebody asked to stop, and how."""

    signal: int | None = None


@dataclass(eq=False)
class Keeper:
    """The `Watch` of a run: saves its state, writes its tables, shows its progress, and ends it when asked."""

    run: RunFolder
    fabric: Fabric
    report: Report
    stop: Stop
    save_every: float  # seconds
    loggers: list[Logger] = field(default_factory=list)
    saved: float = field(default_factory=time.monotonic)

    def begin(self, training: Training, material: Material, settings: Mapping[str, Any]) -> None:
        """The training starts, or goes on from where it stands."""
        progress, train = training.progress, training.settings
        self.training = training
        self.total = len(material.rows("train")) + len(material.rows("val"))  # bags of an epoch
        self.speed = Speed((train.epochs - progress.epoch) * self.total - progress.bags)
        self.seen = progress.bags
        if self.fabric.global_rank == 0:
            self.loggers = open_loggers(train.log, self.run.path, settings)
            self._write_tables(training)  # a run may have been killed between its state and its tables

    def bag(self, bag: SlideBag) -> None:
        self.speed.add(len(bag.features) * self.fabric.world_size, bags=self.fabric.world_size)
        self.seen += self.fabric.world_size
        if self.stop.signal is not None and self.fabric.world_size == 1:
            raise self._interrupted()
        progress = self.training.progress
        loss = f"loss {progress.loss / progress.bags:.4f}, " if progress.bags else ""
        now = f"epoch {progress.epoch + 1}" if progress.epoch < self.training.settings.epochs else "results"
        self.report.show(min(self.seen, self.total), self.total, f"{now}, {loss}{self._pace()}")

    def window(self, training: Training) -> None:
        self._heed()
        if self.fabric.global_rank == 0 and time.monotonic() - self.saved >= self.save_every:
            self._save(training)

    def epoch(self, training: Training) -> None:
        progress = training.progress
        self.seen = 0
        if self.fabric.global_rank == 0:
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
            self.report.say(f"epoch {progress.epoch}/{training.settings.epochs}: {said}{best}; {self._pace()}")
        self._heed()

    def rescue(self, training: Training, error: Exception) -> None:
        """Something went wrong: keep what was learnt up to the last window."""
        unfinished = training.progress.epoch < training.settings.epochs
        if self.fabric.global_rank == 0 and unfinished and not training.stepping:
            with suppress(UserError):  # a full disk: the state before is still there, and the first error matters
                self._save(training)
        if self.stop.signal is not None and not isinstance(error, Interrupted):
            raise self._interrupted() from error  # a signal to the whole group also ends the loader's workers
        self.report.say(f"stopped: {error}")

    def close(self) -> None:
        for logger in self.loggers:
            logger.close()

    def _save(self, training: Training) -> None:
        save_checkpoint(training.checkpoint(), self.run.state)
        self.saved = time.monotonic()

    def _write_tables(self, training: Training) -> None:
        self.run.write_rows("history.csv", HISTORY, training.progress.history)
        self.run.write_rows("gates.csv", COLUMNS, training.progress.gate_history)

    def _heed(self) -> None:
        """Stop if any rank was asked to."""
        asked = torch.tensor(float(self.stop.signal is not None), device=self.fabric.device)
        if self.fabric.world_size > 1:
            self.fabric.all_reduce(asked, reduce_op="sum")
        if asked > 0:
            raise self._interrupted()

    def _interrupted(self) -> Interrupted:
        return Interrupted(f"{self.run.path}: stopped and saved. Start the same command again to go on.")

    def _pace(self) -> str:
        return f"{self.speed.patches:,.0f} patches/s, {memory(self.fabric.device)}, {self.speed.left} left"


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


@contextmanager
def handlers(wanted: dict[signal.Signals, Any]) -> Iterator[None]:
    """Signal handlers for a while; only the main thread may set them."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, handler) for number, handler in wanted.items()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
