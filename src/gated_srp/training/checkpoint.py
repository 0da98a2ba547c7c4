"""Files that are whole or not there: results, and the full state of an unfinished training."""

import io
import os
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gated_srp.errors import UserError

FORMAT = 1


def write_whole(path: Path, content: bytes | memoryview | str) -> None:
    """Write beside the target, force it to the disk, then replace: a reader sees the old file or the new one.

    A disk that is full (or any other failure to write) leaves the old file in place and nothing beside it.
    """
    beside = path.with_name(f".{path.name}.{os.getpid()}.part")
    data = content.encode() if isinstance(content, str) else content
    try:
        with beside.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, path)
    except OSError as error:
        raise UserError(
            f"{path}: cannot be written ({error.strerror}). What was saved before is untouched; free some space or mend the folder, "
            "then start the same command again: it goes on from there."
        ) from error
    finally:
        beside.unlink(missing_ok=True)


@dataclass
class Progress:
    """How far a training has come: with the weights and the optimiser, all that is needed to go on.

    It always stands at the end of a window: ``bags`` of the order of ``epoch`` are learnt, in ``step`` optimiser steps.
    """

    epoch: int = 0
    bags: int = 0
    step: int = 0
    loss: float = 0.0  # sum over the bags of this epoch
    gates: Tensor = field(default_factory=lambda: torch.zeros(0, 7, dtype=torch.float64))  # their sums too
    best_epoch: int = -1
    best_score: float = float("-inf")
    history: list[list[Any]] = field(default_factory=list)  # epoch, split, metric, value
    gate_history: list[list[Any]] = field(default_factory=list)  # rows of gates.csv

    def plain(self) -> dict[str, Any]:
        """As a dictionary of numbers, lists and a tensor."""
        return asdict(self)


@dataclass
class Checkpoint:
    """Everything of a training at one moment; ``best`` are the weights of the best epoch so far, None before the first."""

    progress: Progress
    model: dict[str, Tensor]
    optimiser: dict[str, Any]
    best: dict[str, Tensor] | None = None


def save_checkpoint(checkpoint: Checkpoint, path: Path) -> None:
    """Write the state as one file that opens without running pickled code."""
    buffer = io.BytesIO()  # a full disk then shows itself as an OSError of our own write
    content = {f.name: getattr(checkpoint, f.name) for f in fields(checkpoint)}
    torch.save({"format": FORMAT, **content, "progress": checkpoint.progress.plain()}, buffer)
    write_whole(path, buffer.getbuffer())


def load_checkpoint(path: Path) -> Checkpoint:
    """Read a state, on the CPU."""
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises many kinds for broken files
        raise UserError(
            f"{path}: the saved state cannot be read ({type(error).__name__}). Remove this file to train from the start."
        ) from error
    if content.pop("format", 0) > FORMAT:
        raise UserError(f"{path}: written by a newer version of gated-srp. Update it: pip install -U gated-srp.")
    return Checkpoint(**content | {"progress": Progress(**content["progress"])})
