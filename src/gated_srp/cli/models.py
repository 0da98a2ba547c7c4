"""Commands on model files."""

from pathlib import Path
from typing import Annotated

import typer

from gated_srp.cli.screen import say


def convert(
    checkpoint: Annotated[
        Path, typer.Argument(help="A checkpoint of the published release (best.pt), of any of its trainers.")
    ],
    output: Annotated[Path, typer.Option("--output", "-o", help="Where to write the model.")] = Path(
        "model.safetensors"
    ),
    classes: Annotated[
        str, typer.Option(help="Names of the outputs in their order, such as A,B,C; `predict` needs them.")
    ] = "",
) -> None:
    """Turn a published checkpoint into a model file of ours, without running pickled code."""
    from gated_srp.models import convert

    names = [name.strip() for name in classes.split(",") if name.strip()]
    model = convert(checkpoint, output, classes=names)
    count = sum(p.numel() for p in model.parameters())
    said = f"classes {', '.join(names)}" if names else "outputs without names (--classes A,B,C gives them theirs)"
    say(f"{output}: arm {model.settings['arm']}, {count:,} parameters, {said}, from {checkpoint}")
