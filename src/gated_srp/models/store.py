"""Models as files: one safetensors file with a JSON card inside, written whole or not at all. No pickle."""

import json
from pathlib import Path
from typing import Any

from gated_srp.errors import UserError
from gated_srp.files import write_whole
from gated_srp.models.arms import build_model
from gated_srp.models.slide import SlideModel

FORMAT = 1


def save_model(model: SlideModel, path: Path, card: dict[str, Any] | None = None) -> None:
    """Weights, settings and what else the ``card`` says about the model."""
    from safetensors.torch import save

    full = {"format": FORMAT, "settings": model.settings, **(card or {})}
    tensors = {name: value.contiguous() for name, value in model.state_dict().items()}
    write_whole(Path(path), save(tensors, metadata={"card": json.dumps(full, sort_keys=True)}))


def model_file(run: Path) -> Path:
    """Of a run's folder its model.safetensors, else the file itself; a folder that is no run is told what to do."""
    if not run.is_dir():
        return run
    file = run / "model.safetensors"
    if file.is_file():
        return file
    below = sorted(path.parent for path in run.glob("**/model.safetensors"))
    if below:
        some = " ".join(map(str, below[:3])) + (" ..." if len(below) > 3 else "")
        raise UserError(f"{run}: a folder of {len(below)} runs, not a run. Name those you mean: {some}")
    cure = "It is unfinished: start `gated-srp train` again." if (run / "config.yaml").is_file() else "Is it a run?"
    raise UserError(f"{run}: no model.safetensors in this folder. {cure}")


def load_card(path: Path) -> dict[str, Any]:
    """What a model file says about itself."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, "pt") as file:
            metadata = file.metadata() or {}
    except (SafetensorError, OSError) as error:
        raise UserError(
            f"{path}: not a readable model file ({error}). Expected model.safetensors of a run, or of gated-srp convert."
        ) from error
    if "card" not in metadata:
        raise UserError(
            f"{path}: holds tensors but no card of gated-srp. Expected model.safetensors of a run, or of gated-srp convert."
        )
    card: dict[str, Any] = json.loads(metadata["card"])
    if card.get("format", 0) > FORMAT:
        raise UserError(
            f"{path}: written in format {card['format']}, this version reads up to {FORMAT}. Update gated-srp: pip install -U gated-srp."
        )
    return card


def load_model(path: Path) -> SlideModel:
    """The model of a file, in evaluation mode."""
    from safetensors.torch import load_file

    model = build_model(**load_card(path)["settings"])
    model.load_state_dict(load_file(path))
    return model.eval()
