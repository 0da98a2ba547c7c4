"""The folder of a run: its lock, its files, and everything that is read back of it.

    run = RunFolder("runs/BRACS/gated_srp/seed42")
    run.metrics("test"), run.history, run.gates, run.predictions("test", "slide"), run.card

config.yaml  environment.json  split.csv  features.csv  log.txt    written when a run begins
state.pt     state_before.pt   history.csv  gates.csv              while it trains; the states are removed at the end
predictions_PART_LEVEL.csv  model.safetensors  metrics.json        at the end; metrics.json is the last and says that it is finished
"""

from __future__ import annotations

import importlib.metadata
import json
import math
import platform
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cached_property
from html import escape
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pandas as pd
import torch
import yaml

from gated_srp import __version__
from gated_srp.config.cohort import CohortConfig
from gated_srp.config.load import for_arm
from gated_srp.data.files.siblings import may_be_same
from gated_srp.errors import UserError
from gated_srp.files import has_its_checksum, with_checksum, write_whole
from gated_srp.records import (
    Environment,
    Metrics,
    Record,
    Settings,
    checked,
    csv_text,
    read_record,
    read_rows,
    unreadable,
)
from gated_srp.training.state import before

PRETRAINED = "pretrained"  # the folder below ``out`` that `pretrain` writes into
HISTORY = ("epoch", "split", "metric", "value")
_PACKAGES = ("torch", "numpy", "pandas", "h5py", "safetensors", "scipy", "torchmetrics", "torchsurv")
# Settings that change where or how fast a run is computed, not what it computes.
_FREE = {"out", "cache.folder", "train.workers", "train.log", "train.checkpointing"}
_LATER: dict[str, Any] = {
    "train.gate_lr": 1.0,
    "train.pack": None,
    "select": {"ties": "first"},
    "bag": "slide",
}  # what versions did that lacked a setting
_TEXT = ("slide", "case", "label", "predicted")
_OTHER = "Choose another `out`, or remove the folder."
_RECORDS: dict[str, type[Record]] = {"environment.json": Environment, "metrics.json": Metrics}


@dataclass(frozen=True)
class RunFolder:
    """The files of one run. What is not there yet reads as empty, or as None; what cannot be read is a `UserError`."""

    path: Path

    def __post_init__(self) -> None:
        object.__setattr__(self, "path", Path(self.path))

    @classmethod
    def of(cls, config: CohortConfig, *, arm: str, seed: int, fold: int = 0) -> RunFolder:
        """Where the run of an arm and a seed (and a fold) lives."""
        suffix = f"_fold{fold}" if config.folds else ""
        return cls(config.out / config.name / arm / f"seed{seed}{suffix}")

    @property
    def state(self) -> Path:
        """The state of an unfinished training."""
        return self.path / "state.pt"

    @property
    def model(self) -> Path:
        """The finished model."""
        return self.path / "model.safetensors"

    @property
    def finished(self) -> bool:
        return (self.path / "metrics.json").is_file()

    @property
    def begun(self) -> bool:
        """Whether there is a state to go on from."""
        return self.state.is_file() or before(self.state).is_file()

    # Reading ---------------------------------------------------------------------------------------------------------

    @property
    def settings(self) -> dict[str, Any]:
        """config.yaml, everything resolved."""
        path = self.path / "config.yaml"
        try:
            content = yaml.safe_load(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, yaml.YAMLError, RecursionError) as error:
            raise unreadable(path, error, _OTHER) from None
        return {} if content is None else checked(content, Settings, where=path, cure=_OTHER)

    @property
    def environment(self) -> dict[str, Any]:
        """Versions, device, precision, threads, start weights."""
        return self.read_json("environment.json")

    @property
    def results(self) -> dict[str, Any]:
        """metrics.json: what was trained, the best epoch, metrics by part and level. Empty while it trains."""
        return self.read_json("metrics.json")

    def metrics(self, part: str = "test", level: str | None = None) -> dict[str, float]:
        """Metrics of val or test, at the level that scores or the one named; not a number where undefined."""
        found = self.results
        values = (found.get(part) or {}).get(level or found.get("score")) or {}
        return {name: math.nan if value is None else float(value) for name, value in values.items()}

    @property
    def history(self) -> pd.DataFrame:
        """Columns epoch, split, metric, value: losses and validation metrics of every epoch."""
        return self._csv("history.csv", texts=("split", "metric"), numbers=("epoch", "value"), needed=HISTORY)

    @property
    def gates(self) -> pd.DataFrame:
        """Statistics of beta per epoch and layer."""
        return self._csv("gates.csv", numbers=("epoch", "layer", "mean"))

    def predictions(self, part: str = "test", level: str = "slide") -> pd.DataFrame:
        """Predictions of val or test, one row per slide or per case."""
        return read_predictions(self.path / f"predictions_{part}_{level}.csv")

    @property
    def split(self) -> pd.DataFrame | None:
        """Units (slides or patients) in the first column and their part in ``split``; None where there is none."""
        if not (self.path / "split.csv").is_file():
            return None
        return self._csv("split.csv", texts=None, needed=("split",))

    @property
    def features(self) -> pd.DataFrame:
        """Fingerprints of the files that it was begun with, as text; empty in runs of versions that kept none."""
        return self._csv("features.csv", texts=None)

    @cached_property
    def card(self) -> dict[str, Any]:
        """What the finished model's file says of itself."""
        from gated_srp.models.store import load_card

        return load_card(self.model)

    def read_json(self, name: str) -> dict[str, Any]:
        """Its content; nothing where there is no such file. What was damaged since it was written is refused."""
        cure = "Remove this file and start the same command again: the run is trained anew, with the same numbers."
        cure, path = cure if name == "metrics.json" else _OTHER, self.path / name
        try:
            content = read_record(path, _RECORDS.get(name, Record), cure=cure)
        except FileNotFoundError:
            return {}
        if not has_its_checksum(content):
            raise unreadable(path, "damaged: its content does not fit its checksum", cure)
        return content

    def _csv(self, name: str, **columns: Any) -> pd.DataFrame:
        try:
            return read_rows(self.path / name, cure=_OTHER, **columns)
        except FileNotFoundError:
            return pd.DataFrame(columns=list(columns.get("needed") or ()))

    def _repr_html_(self) -> str:
        if not self.finished:
            return f"<p><b>{escape(str(self.path))}</b>: {'not finished' if self.begun else 'not begun'}</p>"
        found = self.results
        scores = pd.DataFrame({part: self.metrics(part) for part in ("val", "test")})
        arm, seed, epoch, score = (found.get(name, "?") for name in ("arm", "seed", "best_epoch", "score"))
        about = f"{arm}, seed {seed}, best epoch {epoch}, scored by {score}"
        return f"<p><b>{escape(str(self.path))}</b>: {escape(about)}</p>{scores.to_html()}"

    # Writing ---------------------------------------------------------------------------------------------------------

    def write_settings(self, settings: Mapping[str, Any]) -> None:
        text = yaml.safe_dump(dict(settings), sort_keys=False, allow_unicode=True)
        write_whole(self.path / "config.yaml", text)

    def write_json(self, name: str, content: Mapping[str, Any]) -> None:
        content = with_checksum(defined(content))
        write_whole(self.path / name, json.dumps(content, indent=2, allow_nan=False) + "\n")

    def write_csv(self, name: str, frame: pd.DataFrame) -> None:
        write_whole(self.path / name, csv_text(frame))

    def write_rows(self, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        self.write_csv(name, pd.DataFrame(list(rows), columns=list(columns)))

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Nobody else may take the folder meanwhile; the system frees it when this process ends, however it ends.

        What a process that was killed left here is removed: drafts, and the states of a run that is finished.
        """
        from filelock import FileLock, Timeout

        lock = FileLock(self.path / ".lock", timeout=0)
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            lock.acquire()
        except Timeout:
            raise UserError(
                "another process is training this run",
                where=self.path,
                cure="Wait for it, or stop it; this one changed nothing.",
            ) from None
        except OSError as error:
            raise UserError(
                f"cannot be written ({error.strerror})", where=self.path, cure="Choose another `out`."
            ) from None
        try:
            for left in self.leftovers():
                with suppress(OSError):  # it does no harm
                    left.unlink()
            yield
        finally:
            lock.release()

    @contextmanager
    def nothing_unbegun(self) -> Iterator[None]:
        """A run that is refused before it has begun leaves no folder of its own behind. Within `lock`."""
        new = {path.name for path in self.path.iterdir()} <= {".lock"}
        try:
            yield
        except UserError:
            if new and not (self.begun or self.finished):
                shutil.rmtree(self.path, ignore_errors=True)
                with suppress(OSError):  # those of the arm and of the cohort, if nothing else is in them
                    self.path.parent.rmdir()
                    self.path.parent.parent.rmdir()
            raise

    def leftovers(self) -> list[Path]:
        """Files that a process left which was killed while it wrote, or just before it removed its states."""
        drafts = [path for path in self.path.glob(".*.*") if path.is_file()]
        return drafts + [path for path in (before(self.state), self.state) if self.finished and path.is_file()]

    def refuse_other_settings(self, settings: Mapping[str, Any]) -> None:
        """What is in the folder must have been made, or begun, with these settings."""
        if not (self.finished or self.begun):
            return
        if not (there := self.settings):
            raise unreadable(self.path / "config.yaml", "it is missing or empty", _OTHER)
        if different := differences(there, dict(settings)):
            raise UserError(
                f"holds a run with other settings: {'; '.join(different)}",
                where=self.path,
                cure="Choose another `out`, or remove the folder.",
            )

    def refuse_other_slides(self, now: str) -> None:
        """It must have been made, or begun, with these slides, labels and parts (`slides_hash` of them); finished runs of old versions do not say."""
        if now != self.environment.get("slides_hash", now if self.finished else None):
            raise UserError(
                "was begun with other slides, labels or parts than the table, the split and the files now give",
                where=self.path,
                cure="Restore them, choose another `out`, or remove the folder.",
                kind="other_slides",
            )


def pretraining_place(config: CohortConfig, out: Path) -> CohortConfig:
    """The same cohort, its runs where `pretrain` writes: OUT/pretrained/COHORT/ARM/seed42."""
    return config.model_copy(update={"out": out / PRETRAINED})


def read_predictions(path: str | Path) -> pd.DataFrame:
    """A predictions table; ids and class names stay text, whatever they spell, and numbers are the ones that were written."""
    cure = "Run `gated-srp evaluate` again: it needs the column case and whole rows."
    try:
        return read_rows(Path(path), texts=_TEXT, needed=("case",), cure=cure)
    except FileNotFoundError as error:
        raise unreadable(path, error.strerror, cure) from None


def settings_of(config: CohortConfig, *, arm: str, seed: int) -> dict[str, Any]:
    """What a run's config.yaml says: everything resolved, its own arm and seed alone."""
    return for_arm(config, arm).resolved(arm) | {"seeds": [seed]}


def differences(there: Any, asked: Any, name: str = "") -> list[str]:
    """Settings that differ, ``train.lr 0.0002, asked 0.0001``; those that cannot change a result are not compared.

    >>> differences({"train": {"lr": 1.0, "workers": 1}}, {"train": {"lr": 2.0, "workers": 0}})
    ['train.lr 1.0, asked 2.0']
    >>> differences({"encoder": "vit_b16"}, {"encoder": "vit_b16_torchvision"})
    []
    """
    if name in _FREE:
        return []
    there = _LATER.get(name) if there is None else there
    if isinstance(there, dict) and isinstance(asked, dict):
        keys = list(dict.fromkeys([*there, *asked]))
        return [d for k in keys for d in differences(there.get(k), asked.get(k), f"{name}.{k}".lstrip("."))]
    same = there == asked or (there is None and asked is False)  # off, and unknown to the version that made the folder
    if name == "encoder" and there and asked:
        same = may_be_same(there, asked)  # the folder may have the old name of several
    return [] if same else [f"{name} {there}, asked {asked}"]


def departures(settings: Mapping[str, Any], card: Mapping[str, Any] = MappingProxyType({})) -> list[str]:
    """Settings of a run that change what is learnt from the slides, where they are not as in the paper, in words for people.

    >>> departures({"train": {"class_weights": "balanced", "sampling": None}}, {"class_weights": {"benign": 0.6, "tumour": 3}})
    ['classes are weighted in the training loss (balanced): benign 0.6, tumour 3']
    """
    train, found = settings.get("train") or {}, []
    if settings.get("bag") == "patient":
        found.append("a bag is a patient: all slides side by side, sorted by name, without neighbours across slides")
    if beside := settings.get("covariates"):
        names = [*(beside.get("numeric") or ()), *(beside.get("categorical") or ())]
        found.append(f"the head sees covariates beside the slide: {', '.join(map(str, names))}")
    if regions := settings.get("regions"):
        inside, outside = (" or ".join(regions.get(key) or ()) for key in ("only", "exclude"))
        parts = [f"inside {inside}" if inside else "", f"outside {outside}" if outside else ""]
        found.append(f"patches {' and '.join(filter(None, parts))} alone, as drawn in {regions.get('annotations')}")
    if settings.get("features_low"):
        found.append("patches of two magnifications are one bag: neighbours within each, and a parent for fine patches")
    if asked := train.get("class_weights"):
        how = " (balanced)" if isinstance(asked, str) else ""
        weights = card.get("class_weights") or (asked if isinstance(asked, Mapping) else {})
        listed = ", ".join(f"{name} {weight:.4g}" for name, weight in weights.items())
        found.append(f"classes are weighted in the training loss{how}{f': {listed}' if listed else ''}")
    if train.get("sampling"):
        found.append("training slides are drawn with replacement, every class equally often")
    if train.get("init"):
        found.append("starts from weights that were pretrained on masked patches, without labels")
    if train.get("loss"):
        found.append(f"training loss: {train['loss']}")
    return found


def defined(content: Any) -> Any:
    """The same with None where a number is not defined: JSON has no other word for it."""
    if isinstance(content, Mapping):
        return {key: defined(value) for key, value in content.items()}
    if isinstance(content, list | tuple):
        return [defined(value) for value in content]
    return None if isinstance(content, float) and not math.isfinite(content) else content


def environment(**facts: Any) -> dict[str, Any]:
    """What is used, for environment.json. ``threads`` and ``precision`` are taken up again when a run goes on."""
    return {
        "started": f"{datetime.now(UTC):%Y-%m-%d %H:%M:%S} UTC",
        "command": sys.argv,
        "versions": versions(),
        "platform": platform.platform(),
        **facts,
        "threads": torch.get_num_threads(),
    }


def versions() -> dict[str, str]:
    """Of Python, of this package and of what computes."""
    found = {"python": platform.python_version(), "gated_srp": __version__}
    for name in _PACKAGES:
        with suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found
