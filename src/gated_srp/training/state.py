"""The state of an unfinished training as a file, state.pt, and the one before it, for when the newest is damaged."""

from __future__ import annotations

import hashlib
import io
import os
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gated_srp.bounded import try_out
from gated_srp.errors import Note, UserError
from gated_srp.files import write_whole

FORMAT = 1  # of state.pt
_MARK = b"sha256:"  # begins the comment of the zip file that a state is


@dataclass
class TrainingProgress:
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


@dataclass
class Checkpoint:
    """Everything of a training at one moment; ``best`` are the weights of the best epoch so far, None before the first."""

    progress: TrainingProgress
    model: dict[str, Tensor]
    optimiser: dict[str, Any]
    best: dict[str, Tensor] | None = None


def before(state: Path) -> Path:
    """Where the state before this one is kept."""
    return state.with_name(f"{state.stem}_before{state.suffix}")


def save_checkpoint(checkpoint: Checkpoint, path: Path) -> None:
    """Write the state with its checksum, as one file that opens without running pickled code; the last one is kept as `before`."""
    buffer = io.BytesIO()  # a full disk then shows itself as an OSError of our own write
    content = {f.name: getattr(checkpoint, f.name) for f in fields(checkpoint)}
    torch.save({"format": FORMAT, **content, "progress": asdict(checkpoint.progress)}, buffer)
    mark = _MARK + hashlib.sha256(buffer.getbuffer()).hexdigest().encode()
    buffer.seek(-2, os.SEEK_END)  # a zip file ends with the length of its comment, here 0, and the comment
    buffer.write(len(mark).to_bytes(2, "little") + mark)
    write_whole(path, buffer.getbuffer(), older=before(path))


def load_checkpoint(path: Path) -> Checkpoint:
    """Read a state, on the CPU."""
    try:
        data = path.read_bytes()
        plain, mark = data[: -len(_MARK) - 64], data[-len(_MARK) - 64 :]
        expected = hashlib.sha256(plain[:-2] + bytes(2)).hexdigest().encode()
        if mark.startswith(_MARK) and not mark.endswith(expected):  # versions 0.1 and 0.2 wrote none
            raise ValueError("it does not fit its checksum")
        if not mark.startswith(_MARK):
            try_out(_unpickle, path)
        content = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
        if content.pop("format", 0) > FORMAT:
            raise UserError("written by a newer version of gated-srp", where=path, cure="Update gated-srp.")
        return Checkpoint(**content | {"progress": TrainingProgress(**content["progress"])})
    except UserError:
        raise
    except Exception as error:  # torch raises many kinds for broken files
        what = f"the saved state cannot be read ({type(error).__name__}: {' '.join(str(error).split())[:120]})"
        cure = "Remove this file to train from the start."
        raise UserError(what, where=path, cure=cure, kind="damaged") from error


def _unpickle(path: Path) -> None:
    torch.load(path, map_location="cpu", weights_only=True)


def load_newest(path: Path) -> tuple[Checkpoint, tuple[Note, ...]]:
    """The newest state that is whole, with a note where that is the one before the last."""
    try:
        return load_checkpoint(path), ()
    except UserError as error:
        if error.kind != "damaged":
            raise
        try:
            found = load_checkpoint(before(path))
        except UserError:
            cure = f"Remove {path.name} and {before(path).name} to train from the start."
            raise error.changed(cure=cure) from None
        if not path.is_file():  # killed between two renames
            return found, ()
        path.unlink(missing_ok=True)  # or it would replace the good one at the next save
        return found, (Note("warning", "state", error.what, (path.name,), "The run goes on with the state before it."),)
