"""Models as files of ours: safetensors with a JSON card, no pickle; and the one place that decides how such a file is read."""

import json
from pathlib import Path
from typing import Any

from torch import Tensor

from gated_srp.errors import UserError, counted
from gated_srp.files import as_stored, has_its_checksum, read_tensors, tensors_hash, write_tensors
from gated_srp.models.arms import build_model
from gated_srp.models.slide import SlideModel

FORMAT = 1
_SIZES = ("in_dim", "num_outputs", "dim", "depth", "num_heads", "num_patches", "hidden_dim", "covariates")
CONFIG = "config.json"  # beside the model file, in a folder that `save_pretrained` wrote: its card again
_EXPECTED = "Expected model.safetensors of a run, of gated-srp convert or of save_pretrained."


def save_model(model: SlideModel, path: Path, card: dict[str, Any] | None = None) -> None:
    """Weights, settings and what else the ``card`` says about the model."""
    write_tensors(Path(path), model.state_dict(), {"format": FORMAT, "settings": model.settings, **(card or {})})


def model_file(run: Path) -> Path:
    """The model.safetensors of a run's folder; anything but a folder is returned as it is."""
    run = as_stored(run)
    if not run.is_dir():
        return run
    file = run / "model.safetensors"
    if file.is_file():
        return file
    below = sorted(path.parent for path in run.glob("**/model.safetensors"))
    if below:
        some = " ".join(map(str, below[:3])) + (" ..." if len(below) > 3 else "")
        raise UserError(
            f"a folder of {counted(len(below), 'run')}, not a run", where=run, cure=f"Name those you mean: {some}"
        )
    cure = "It is unfinished: start `gated-srp train` again." if (run / "config.yaml").is_file() else "Is it a run?"
    raise UserError("no model.safetensors in this folder", where=run, cure=cure)


def load_card(path: Path, *, beside: bool = True) -> dict[str, Any]:
    """What a model file says about itself; without ``beside`` a config.json in its folder is not compared with it."""
    return _read(path, None, beside=beside)[0]


def _read(path: Path, only: str | None = "", *, beside: bool = True) -> tuple[dict[str, Any], dict[str, Tensor]]:
    card, tensors = read_tensors(path, called="model file", cure=_EXPECTED, only=only)
    config = _config(path.with_name(CONFIG)) if beside else {}
    if not card and config.get("tensors_sha256"):  # tools that save weights again drop what else a file says
        card = config
        if only is not None and card["tensors_sha256"] != tensors_hash(tensors):
            what = "damaged, or not the weights that config.json beside it describes"
            raise UserError(what, where=path, cure="Copy both again from where they are whole.", kind="damaged")
    if not card:
        kind = config.get("model_type") or ", ".join(map(str, config.get("architectures") or ()))
        other = f" (config.json beside it is of {str(kind)[:60]!r})" if kind else ""
        raise UserError(f"holds tensors but no card of gated-srp{other}", where=path, cure=_EXPECTED)
    if config.get("tensors_sha256") and config != card:
        cure = "Copy the folder again, or remove config.json: what the model file says itself counts."
        raise UserError(f"says something else than {path.name} beside it", where=path.with_name(CONFIG), cure=cure)
    if isinstance(card.get("format"), int) and card["format"] > FORMAT:
        what = f"written in format {card['format']}, this version reads up to {FORMAT}"
        raise UserError(what, where=path, cure="Update gated-srp.")
    from gated_srp.records import Card, checked  # pydantic, which building a model does not need

    return checked(card, Card, where=path, cure=_EXPECTED), tensors


def _config(path: Path) -> dict[str, Any]:
    """The card in config.json; that of another library as it is, nothing where there is none."""
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if not has_its_checksum(content):
            raise ValueError("its content does not fit its checksum")
    except (OSError, ValueError, RecursionError) as error:
        cure = f"Copy the folder again, or remove {path.name}: what the model file says itself counts."
        raise UserError(f"cannot be read ({error})", where=path, cure=cure, kind="damaged") from None
    return dict(content)


def load_model(path: str | Path) -> SlideModel:
    """The trained model of a run, on the processor and in evaluation mode.

    Args:
        path: a run's folder, or its ``model.safetensors``, or a file that ``gated-srp convert`` wrote, or a folder that
            ``save_pretrained`` wrote.

    Returns:
        A module that maps features ``(B, N, in_dim)`` and the `PatchGraph` of their patches to logits ``(B, outputs)``;
        ``model.settings`` says how it was built, ``model.card`` what the file says beside that.

    >>> import tempfile, gated_srp
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save_model(build_model("gated_srp", in_dim=8, num_outputs=2, dim=12), Path(folder) / "model.safetensors")
    ...     model = gated_srp.load_model(folder)
    >>> import torch
    >>> features, graph = torch.randn(6, 8), gated_srp.PatchGraph.from_grid(2, 3)
    >>> model(features[None], graph.with_features(features)).shape
    torch.Size([1, 2])
    """
    file = model_file(Path(path))
    card, weights = _read(file)
    try:
        _check_sizes(card["settings"], weights)
        model = build_model(**card["settings"])
        model.load_state_dict(weights)
    except UserError as error:
        raise error.changed(where=file, cure=error.cure or _EXPECTED) from None
    except (TypeError, ValueError, KeyError, RuntimeError, AttributeError, ArithmeticError, IndexError) as error:
        what = f"its card does not describe its weights ({' '.join(str(error).split())[:300]})"
        raise UserError(what, where=file, cure=_EXPECTED, kind="card") from None
    model.card = card
    return model.eval()


def _check_sizes(settings: dict[str, Any], weights: dict[str, Tensor]) -> None:
    """No size may be larger than what is stored: a card must not ask for memory."""
    largest = max((tensor.numel() for tensor in weights.values()), default=0)
    for name, value in settings.items():
        usual = 64 if name == "depth" else 1024  # a model without such a part keeps the default
        if name in _SIZES and not (isinstance(value, int) and 0 <= value <= max(largest, usual)):
            raise ValueError(f"{name} is {value!r:.60}, but its largest tensor has {largest} numbers")
