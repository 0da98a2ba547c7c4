"""A run is a folder OUT/COHORT/ARM/seed42: who may write into it, whether it is finished, and its files.

config.yaml, split.csv, environment.json   at the start         history.csv, gates.csv   after each epoch
model.safetensors, predictions_{val,test}_{slide,case}.csv, and last metrics.json: a run with metrics.json is finished
log.txt   everything that was said              state.pt   while unfinished: all that is needed to go on
"""

import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
import yaml

from gated_srp.config.schema import CohortConfig
from gated_srp.errors import UserError
from gated_srp.files import write_whole

HISTORY = ("epoch", "split", "metric", "value")
# Settings that change where or how fast a run is computed, not what it computes.
_FREE = {"out", "cache.folder", "train.workers", "train.log", "train.checkpointing"}
_held: set[int] = set()  # descriptors of locks held by this process


def _let_go() -> None:
    """In a forked child (a loader's worker): a lock lives as long as anyone holds it, and only its owner may."""
    for descriptor in _held:
        with suppress(OSError):
            os.close(descriptor)
    _held.clear()


os.register_at_fork(after_in_child=_let_go)


@dataclass(frozen=True)
class RunFolder:
    """The files of one run."""

    path: Path

    @classmethod
    def of(cls, config: CohortConfig, *, arm: str, seed: int, fold: int = 0) -> "RunFolder":
        """Where the run of an arm and a seed (and a fold) lives."""
        suffix = f"_fold{fold}" if config.folds else ""
        return cls(config.out / config.name / arm / f"seed{seed}{suffix}")

    @property
    def state(self) -> Path:
        return self.path / "state.pt"

    @property
    def finished(self) -> bool:
        return (self.path / "metrics.json").is_file()

    @property
    def begun(self) -> bool:
        return self.state.is_file()

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Nobody else may take the folder meanwhile; the system frees it when this process ends, however it ends."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(self.path / ".lock", os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as error:
            raise UserError(f"{self.path}: cannot be written ({error.strerror}). Choose another `out`.") from None
        _held.add(descriptor)
        try:
            self._take(descriptor)
            yield
        finally:
            _held.discard(descriptor)
            os.close(descriptor)

    def _take(self, descriptor: int) -> None:
        import fcntl

        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(
                f"{self.path}: another process is training this run. Wait for it, or stop it; this one changed nothing."
            ) from None
        for draft in self.path.glob(".*.*"):  # of a process that was killed while it wrote
            if draft.is_file():
                draft.unlink(missing_ok=True)

    def refuse_other_settings(self, settings: Mapping[str, Any]) -> None:
        """What is in the folder must have been made, or begun, with these settings."""
        if not (self.finished or self.begun):
            return
        try:
            there = yaml.safe_load((self.path / "config.yaml").read_text(encoding="utf-8"))
        except (OSError, yaml.YAMLError) as error:
            raise UserError(f"{self.path}/config.yaml: cannot be read ({error}). Choose another `out`.") from None
        different = differences(there, dict(settings))
        if different:
            raise UserError(
                f"{self.path}: holds a run with other settings: {'; '.join(different)}. Choose another `out`, or remove the folder."
            )

    def write_settings(self, settings: Mapping[str, Any]) -> None:
        text = yaml.safe_dump(dict(settings), sort_keys=False, allow_unicode=True)
        write_whole(self.path / "config.yaml", text)

    def write_json(self, name: str, content: Mapping[str, Any]) -> None:
        write_whole(self.path / name, json.dumps(defined(content), indent=2, allow_nan=False) + "\n")

    def read_json(self, name: str) -> dict[str, Any]:
        """Its content; nothing where there is no such file."""
        try:
            content: dict[str, Any] = json.loads((self.path / name).read_text(encoding="utf-8"))
        except FileNotFoundError:
            return {}
        except (OSError, ValueError) as error:
            raise UserError(f"{self.path / name}: cannot be read ({error}). Choose another `out`.") from None
        return content

    def write_csv(self, name: str, frame: pd.DataFrame) -> None:
        write_whole(self.path / name, frame.to_csv(index=False, lineterminator="\n"))

    def write_rows(self, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        self.write_csv(name, pd.DataFrame(list(rows), columns=list(columns)))


def settings_of(config: CohortConfig, *, arm: str, seed: int) -> dict[str, Any]:
    """What a run's config.yaml says: everything resolved, its own arm and seed alone."""
    return config.resolved(arm) | {"seeds": [seed]}


def differences(there: Any, asked: Any, name: str = "") -> list[str]:
    """Settings that differ, ``train.lr 0.0002, asked 0.0001``; those that cannot change a result are not compared.

    >>> differences({"train": {"lr": 1.0, "workers": 1}}, {"train": {"lr": 2.0, "workers": 0}})
    ['train.lr 1.0, asked 2.0']
    """
    if name in _FREE:
        return []
    if isinstance(there, dict) and isinstance(asked, dict):
        keys = list(dict.fromkeys([*there, *asked]))
        return [d for k in keys for d in differences(there.get(k), asked.get(k), f"{name}.{k}".lstrip("."))]
    return [] if there == asked else [f"{name} {there}, asked {asked}"]


def defined(content: Any) -> Any:
    """The same with None where a number is not defined: JSON has no other word for it."""
    if isinstance(content, Mapping):
        return {key: defined(value) for key, value in content.items()}
    if isinstance(content, list | tuple):
        return [defined(value) for value in content]
    return None if isinstance(content, float) and not math.isfinite(content) else content
