"""How a run starts: on which device, in which precision, from which weights, and what is written down about the machine."""

import hashlib
import importlib.metadata
import os
import platform
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from gated_srp import __version__
from gated_srp.errors import UserError
from gated_srp.machine import bf16_environment, has_bf16
from gated_srp.models import SlideModel, load_model, load_published
from gated_srp.training.optim import gate_parameters

Precision = Literal["32", "bf16"]
_PACKAGES = ("torch", "lightning", "numpy", "pandas", "h5py", "safetensors", "scipy", "torchmetrics", "torchsurv")


def accelerator() -> str:
    """The kind of device that trains: cuda, mps or cpu."""
    if torch.cuda.is_available():
        return "cuda"
    return "mps" if torch.backends.mps.is_available() else "cpu"


def choose_precision(wanted: str, kind: str) -> Precision:
    """``auto`` is bf16 on accelerators that have it, and 32 on a CPU; so is bf16 on a CPU that would emulate it.

    A model that was trained in bf16 on an accelerator thus predicts on any processor at its full speed.
    """
    if wanted == "auto":
        return "bf16" if kind == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False) else "32"
    if wanted == "bf16" and kind == "cpu":
        if not has_bf16():
            return "32"
        os.environ.update(bf16_environment())  # oneDNN reads it at the first bf16 product of this process
    return "bf16" if wanted == "bf16" else "32"


def environment(*, device: str, devices: int, precision: str, init: Path | None) -> dict[str, Any]:
    """What was used, for environment.json. ``threads`` and ``precision`` are taken up again when a run goes on."""
    return {
        "started": f"{datetime.now(UTC):%Y-%m-%d %H:%M:%S} UTC",
        "command": sys.argv,
        "versions": versions(),
        "platform": platform.platform(),
        "device": device,
        "devices": devices,
        "precision": precision,
        "threads": torch.get_num_threads(),
        "init": None if init is None else {"path": str(init.absolute()), "sha256": file_hash(init)},
    }


def versions() -> dict[str, str]:
    """Of Python, of this package and of what computes."""
    found = {"python": platform.python_version(), "gated_srp": __version__}
    for name in _PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def file_hash(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise UserError(
            f"--init {path}: cannot be read ({error.strerror}). Expected a model file or checkpoint."
        ) from None


def start_weights(model: SlideModel, checkpoint: Path, *, all_of_trunk: bool) -> list[str]:
    """Copy a model file's weights (model.safetensors, or a published checkpoint) into a model; notes on what was not copied.

    Gates that the file lacks start anew, and so does a head of another width unless ``all_of_trunk``.
    """
    source = (load_model if checkpoint.suffix == ".safetensors" else load_published)(checkpoint).state_dict()
    own = model.state_dict()
    gates = {name for name, _ in gate_parameters(model)}
    fresh = [name for name in own if name not in source or source[name].shape != own[name].shape]
    allowed = gates if all_of_trunk else gates | {name for name in own if name.startswith("head.")}
    if wrong := [name for name in fresh if name not in allowed]:
        there = tuple(source[wrong[0]].shape) if wrong[0] in source else "missing"
        raise UserError(
            f"--init {checkpoint}: does not fit this model: {wrong[0]} is {there}, expected {tuple(own[wrong[0]].shape)}. "
            "Use a checkpoint of the same encoder, trunk and sizes, or set `model` to its sizes."
        )
    model.load_state_dict({name: own[name] if name in fresh else source[name] for name in own})
    unused = [name for name in source if name not in own]
    notes = [f"start weights from {checkpoint}"]
    notes += [f"started anew, since the file has none that fit: {', '.join(fresh)}"] if fresh else []
    return notes + ([f"not used of the file: {', '.join(unused)}"] if unused else [])


def freeze_all_but_gates(model: nn.Module, arm: str) -> None:
    """``train.only: gate``: the trunk stays as it is."""
    gates = dict(gate_parameters(model))
    if not gates:
        raise UserError(f"train.only: gate, but arm {arm!r} has no gate to fit. Choose an arm such as gated_srp.")
    model.requires_grad_(False)
    for parameter in gates.values():
        parameter.requires_grad_(True)
