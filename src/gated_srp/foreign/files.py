"""Gates as a file of their own: safetensors with a JSON card, written whole or not at all. No pickle."""

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gated_srp.errors import UserError
from gated_srp.files import write_whole

FORMAT = 1
_MARK = ".correction."
_SETTINGS = ("delta", "hidden_dim", "window", "layers")


def save(path: Path, gates: dict[str, Tensor], card: dict[str, Any]) -> None:
    from safetensors.torch import save as serialised

    full = {"format": FORMAT, "kind": "gated-srp gates", **card}
    tensors = {name: value.detach().cpu().contiguous() for name, value in gates.items()}
    write_whole(path, serialised(tensors, metadata={"card": json.dumps(full, sort_keys=True)}))


def load(path: Path, gates: dict[str, Tensor], card: dict[str, Any]) -> None:
    """Fill the gates in place; nothing is changed where the file does not fit."""
    theirs, tensors = _of_folder(path, card) if path.is_dir() else _of_file(path)
    for key in _SETTINGS:
        if theirs.get(key) != card[key]:
            raise UserError(
                f"saved with {key} {theirs.get(key)}, this model has {card[key]}",
                where=path,
                cure="Attach with the same settings.",
            )
    if {n: t.shape for n, t in tensors.items()} != {n: t.shape for n, t in gates.items()}:
        raise UserError(
            "its tensors do not fit the gates of this model",
            where=path,
            cure="Expected gates of the same architecture.",
        )
    with torch.no_grad():
        for name, gate in gates.items():
            gate.copy_(tensors[name])


def _of_file(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    metadata, tensors = _read(path)
    card = json.loads(metadata.get("card", "{}"))
    if card.get("kind") != "gated-srp gates" or card.get("format", 0) > FORMAT:
        raise UserError(
            f"no card of gated-srp gates, format up to {FORMAT}", where=path, cure="Expected what handle.save wrote."
        )
    return card, tensors


def _of_folder(folder: Path, ours: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Gates inside a folder of save_pretrained: the card is in its config, the tensors under whatever names its layers have there."""
    config = folder / "config.json"
    card = json.loads(config.read_text()).get("gated_srp") if config.is_file() else None
    found = {}
    for path in sorted(folder.glob("*.safetensors")):
        found.update(_read(path, _MARK)[1])
    if not isinstance(card, dict) or not found:
        raise UserError(
            "no gates in this folder (a config.json with 'gated_srp', and tensors of 'correction')",
            where=folder,
            cure="Expected a folder that save_pretrained wrote of an attached model, or a file of handle.save.",
        )
    # transformers renames layers on the way to a file and back; their order stays.
    layers = sorted({name.rpartition(_MARK)[0] for name in found}, key=_natural)
    if len(layers) != len(ours["layers"]):
        return card, found
    names = dict(zip(layers, ours["layers"], strict=True))
    tensors = {}
    for name, value in found.items():
        layer, _, rest = name.rpartition(_MARK)
        tensors[f"{names[layer]}.{rest}"] = value
    return card, tensors


def _natural(name: str) -> list[Any]:
    return [int(part) if part.isdigit() else part for part in name.split(".")]


def _read(path: Path, mark: str = "") -> tuple[dict[str, str], dict[str, Tensor]]:
    """Metadata and the tensors whose names contain ``mark``."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, "pt") as file:
            names = [name for name in file.keys() if mark in name]  # noqa: SIM118 (not a mapping)
            return file.metadata() or {}, {name: file.get_tensor(name) for name in names}
    except (SafetensorError, OSError) as error:
        raise UserError(
            f"not a readable file of gates ({error})", where=path, cure="Expected what handle.save wrote."
        ) from error
