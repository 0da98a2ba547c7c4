"""Commands that use finished runs on other slides."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gated_srp.cli.screen import LOG, say

if TYPE_CHECKING:
    import pandas as pd

    from gated_srp.errors import Note
    from gated_srp.training.evaluate import Evaluation

FORCE = "Go on with another stride, or an encoder's name that we do not know, than in training."


def predict(
    runs: Annotated[list[Path], typer.Argument(help="Run folders, or model files; several are averaged.")],
    features: Annotated[
        Path, typer.Argument(help="A folder of feature files (of images, for a model of images), or one of them.")
    ],
    output: Annotated[Path, typer.Option("--output", "-o", help="Where to write the table.")] = Path("predictions.csv"),
    features_key: Annotated[str | None, typer.Option(help="Name of the feature array, where it is unusual.")] = None,
    coords_key: Annotated[str | None, typer.Option(help="Name of the position array, where it is unusual.")] = None,
    stride: Annotated[float | None, typer.Option(help="Distance of patches, where the file's is wrong.")] = None,
    workers: Annotated[int, typer.Option(min=0, help="Processes that read ahead.")] = 1,
    force: Annotated[bool, typer.Option("--force", help=FORCE)] = False,
) -> None:
    """Predict slides without labels: calibrated probabilities, or risk and survival."""
    from gated_srp.cli.progress import show_progress
    from gated_srp.training.predict import files_for
    from gated_srp.training.predict import predict as run
    from gated_srp.training.trained import open_runs

    _prepare_folder(output.parent, output)
    trained = open_runs(runs)
    files = files_for(trained[0], features)
    say(f"model: {trained[0]}\n{len(files)} files in {features}", err=True)
    with show_progress() as progress:
        found = run(
            trained,
            files,
            features_key=features_key,
            coords_key=coords_key,
            stride=stride,
            force=force,
            workers=workers,
            progress=progress,
        )
    _say(found.notes, found.skipped)
    table = found.table
    far = table[table["unlike_training"]].sort_values("training_distance", ascending=False)
    for slide, distance in zip(far["slide"].head(10), far["training_distance"], strict=False):
        LOG.warning(
            "unlike the training slides: %s, %.1f times as far from them as the farthest of theirs", slide, distance
        )
    if len(far) > 10:
        LOG.warning("... and %d more; see the column unlike_training", len(far) - 10)
    by = "1 run" if len(runs) == 1 else f"the mean of {len(runs)} runs"
    say(f"{len(table)} slides predicted by {by}, {len(found.skipped)} skipped, {len(far)} unlike training")
    for line in found.summary():
        say(line)
    for path in found.write(output):
        say(f"written: {path}")


def evaluate(
    run: Annotated[Path, typer.Argument(help="A run's folder, or its model file.")],
    cohort: Annotated[Path, typer.Argument(help="The YAML of a labelled cohort.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder of the results.")] = Path("evaluation"),
    score: Annotated[str | None, typer.Option("--score", help="slide or case; as in training if not set.")] = None,
    repeats: Annotated[int, typer.Option("--repeats", min=1, help="How often patients are resampled.")] = 1000,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Of the resampling.")] = 0,
    force: Annotated[bool, typer.Option("--force", help=FORCE)] = False,
) -> None:
    """Score a run on another labelled cohort, with intervals over resampled patients."""
    from gated_srp.cli.progress import show_progress
    from gated_srp.training.evaluate import evaluate as run_on

    _prepare_folder(output, output / "evaluation.json")
    with show_progress() as progress:
        found = run_on(
            run,
            cohort,
            score=score,  # type: ignore[arg-type]
            repeats=repeats,
            seed=seed,
            force=force,
            progress=progress,
        )
    _say(found.notes, found.skipped)
    for line in _report(found):
        say(line)
    for path in found.write(output):
        say(f"written: {path}")


def _report(found: "Evaluation") -> list[str]:
    lines = [
        f"\n{found.run.path} on {found.cohort}: {len(found.slides)} slides of {found.patients} patients, "
        f"scored by {found.score}",
        f"  {'metric':<20}{'value':>8}   95 % interval",
    ]
    for row in found.metrics.to_dict("records"):
        name = f"  {row['metric']:<20}"
        if row["value"] != row["value"]:
            lines.append(f"{name}{'-':>8}   not defined on these labels")
            continue
        few = "" if row["resamples"] == found.repeats else f"   (defined in {row['resamples']} of {found.repeats})"
        few += "   (every draw gives the same: too few errors to tell)" if row["low"] == row["high"] else ""
        lines.append(f"{name}{row['value']:>8.4f}   {row['low']:.4f} to {row['high']:.4f}{few}")
    lines.append(
        f"  intervals: percentiles over {found.repeats:,} draws of {found.patients} patients, seed {found.seed}"
    )
    return lines + [f"  {line}" for line in (found.findings.lines if found.findings else ())]


def _say(notes: "tuple[Note, ...]", skipped: "pd.DataFrame") -> None:
    for note in notes:
        say(f"note: {note}", err=True) if note.level == "note" else LOG.warning("%s", note.line)
    for row in skipped.itertuples():
        LOG.warning("skipped: %s: %s", row.file, row.problem)


def _prepare_folder(folder: Path, target: Path) -> None:
    """Whether the results can be written is asked before hours of computing, not after."""
    import os

    from gated_srp.errors import UserError

    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        what = f"cannot be made ({error.strerror})"
        raise UserError(what, where=folder, cure="Choose another place with -o.") from None
    if target.is_dir():
        what = f"is a folder, expected a file to write, e.g. -o {target / 'predictions.csv'}."
        raise UserError(what, where=target)
    if not os.access(folder, os.W_OK):
        raise UserError("cannot be written", where=folder, cure="Choose another place with -o.")
