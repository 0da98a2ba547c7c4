"""Gates as a file of their own: safetensors with a JSON card, written whole or not at all. No pickle."""

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gated_srp.errors import UserError
from gated_srp.files import write_whole

FORMAT = 1
_SETTINGS = ("delta", "hidden_dim", "window", "layers")


def save(path: Path, gates: dict[str, Tensor], card: dict[str, Any]) -> None:
    from safetensors.torch import save as serialised

    full = {"format": FORMAT, "kind": "gated-srp gates", **card}
    tensors = {name: value.detach().cpu().contiguous() for name, value in gates.items()}
    write_whole(path, serialised(tensors, metadata={"card": json.dumps(full, sort_keys=True)}))


def load(path: Path, gates: dict[str, Tensor], card: dict[str, Any]) -> None:
    """Fill the gates in place; nothing is changed where the file does not fit."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, "pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a mapping)
    except (SafetensorError, OSError) as error:
        raise UserError(f"{path}: not a readable file of gates ({error}). Expected what handle.save wrote.") from error
    theirs = json.loads(metadata.get("card", "{}"))
    if theirs.get("kind") != "gated-srp gates" or theirs.get("format", 0) > FORMAT:
        raise UserError(f"{path}: no card of gated-srp gates, format up to {FORMAT}. Expected what handle.save wrote.")
    for key in _SETTINGS:
        if theirs.get(key) != card[key]:
            raise UserError(
                f"{path}: saved with {key} {theirs.get(key)}, this model has {card[key]}. Attach with the same settings."
            )
    if {n: t.shape for n, t in tensors.items()} != {n: t.shape for n, t in gates.items()}:
        raise UserError(
            f"{path}: its tensors do not fit the gates of this model. Expected gates of the same architecture."
        )
    with torch.no_grad():
        for name, gate in gates.items():
            gate.copy_(tensors[name])
