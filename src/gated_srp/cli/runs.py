"""The command that trains one run."""

from pathlib import Path
from typing import Annotated

import typer

from gated_srp.cli.screen import LOG


def train(
    cohort: Annotated[Path, typer.Argument(help="The cohort's YAML.")],
    arm: Annotated[str | None, typer.Option("--arm", help="Which model; gated_srp unless the YAML has others.")] = None,
    seed: Annotated[
        int | None, typer.Option("--seed", min=0, help="Split, start weights, order; the YAML's first.")
    ] = None,
    fold: Annotated[int, typer.Option("--fold", min=0, help="Where the YAML sets `folds`.")] = 0,
    init: Annotated[
        Path | None, typer.Option("--init", help="Start weights: a run's model.safetensors, or a published checkpoint.")
    ] = None,
    devices: Annotated[int, typer.Option("--devices", min=1, help="Processes that share the bags of an update.")] = 1,
    out: Annotated[
        Path | None, typer.Option("--out", help="Where runs are written, instead of the YAML's `out`.")
    ] = None,
    change: Annotated[list[str] | None, typer.Option("--set", help="A setting, e.g. --set train.epochs=5.")] = None,
) -> None:
    """Train one run, or go on with one that was interrupted: OUT/COHORT/ARM/seed42."""
    settings = changes(change or [])

    from gated_srp.cli.progress import show_progress
    from gated_srp.errors import Interrupted
    from gated_srp.training.train import train as run

    try:
        with show_progress() as progress:
            run(
                cohort,
                arm=arm,
                seed=seed,
                fold=fold,
                out=out,
                settings=settings,
                init=init,
                devices=devices,
                progress=progress,
            )
    except Interrupted as stopped:
        LOG.warning("%s", stopped)
        raise typer.Exit(130) from None


def changes(given: list[str]) -> dict[str, str]:
    """Settings given as ``--set train.epochs=5``, by name."""
    from gated_srp.errors import UserError

    found = {}
    for item in given:
        key, equals, value = item.partition("=")
        if not equals or not key:
            raise UserError("expected KEY=VALUE, e.g. --set train.epochs=5.", where=f"--set {item}")
        found[key] = value
    return found
