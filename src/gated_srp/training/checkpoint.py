"""The full state of an unfinished training."""

import io
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gated_srp.errors import UserError
from gated_srp.files import write_whole

FORMAT = 1


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
