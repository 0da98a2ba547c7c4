"""Commands on model files."""

from pathlib import Path
from typing import Annotated

import typer

from gated_srp.cli.screen import say


def convert(
    checkpoint: Annotated[Path, typer.Argument(help="A checkpoint of the published release (best.pt).")],
    output: Annotated[Path, typer.Option("--output", "-o", help="Where to write the model.")] = Path(
        "model.safetensors"
    ),
) -> None:
    """Turn a published checkpoint into a model file of ours, without running pickled code."""
    from gated_srp.models import load_published, save_model

    model = load_published(checkpoint)
    save_model(model, output)
    count = sum(p.numel() for p in model.parameters())
    say(f"{output}: arm {model.settings['arm']}, {count:,} parameters, from {checkpoint}")
