"""Commands that make and use single runs and model files: pretrain, train, predict, embed, evaluate, convert."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from typer import Argument, Option

from gated_srp.cli.options import (
    Change,
    Cohort,
    Coords,
    Deep,
    Devices,
    Fold,
    Force,
    Low,
    Out,
    Repeats,
    Run,
    Seconds,
    Stride,
    Whose,
    Within,
)
from gated_srp.cli.screen import LOG, say, say_written, show_progress
from gated_srp.errors import Note, UserError, counted

if TYPE_CHECKING:
    import pandas as pd

    from gated_srp.training.evaluate import Evaluation


def train(
    cohort: Cohort,
    arm: Annotated[str | None, Option(help="Which model; gated_srp unless the YAML has others.")] = None,
    seed: Annotated[int | None, Option(min=0, help="Split, start weights, order; the YAML's first.")] = None,
    fold: Fold = 0,
    init: Annotated[
        Path | None, Option(help="Start weights: a run (of `pretrain`, say), its model, or a published checkpoint.")
    ] = None,
    devices: Devices = 1,
    save_every: Seconds = 300.0,
    deep: Deep = False,
    out: Out = None,
    change: Change = None,
) -> None:
    """Train one run, or go on with one that was interrupted: OUT/COHORT/ARM/seed42."""
    settings = changes(change)

    from gated_srp.training.train import train as run

    with show_progress() as progress:
        which: dict[str, Any] = {"arm": arm, "seed": seed, "fold": fold, "out": out, "settings": settings}
        how: dict[str, Any] = {"init": init, "devices": devices, "save_every": save_every, "deep": deep}
        run(cohort, **which, **how, progress=progress)


def pretrain(
    cohort: Cohort,
    arm: Annotated[str | None, Option(help="Which model; gated_srp unless the YAML has others.")] = None,
    seed: Annotated[int | None, Option(min=0, help="Split, start weights, order, masks; the YAML's first.")] = None,
    fold: Fold = 0,
    mask: Annotated[float, Option(help="Share of a slide's patches that is masked.")] = 0.5,
    block: Annotated[
        int, Option(min=1, help="Side of the windows that are masked together, in patches; 1: single ones.")
    ] = 3,
    unlabelled: Annotated[
        list[Path] | None,
        Option(help="Folder of further feature files, without a row in the table; repeat for several."),
    ] = None,
    devices: Devices = 1,
    save_every: Seconds = 300.0,
    deep: Deep = False,
    out: Out = None,
    change: Change = None,
) -> None:
    """Pretrain without labels, on masked patches, or go on with it: OUT/pretrained/COHORT/ARM/seed42."""
    settings = changes(change)

    from gated_srp.training.pretrain import pretrain as run

    with show_progress() as progress:
        which: dict[str, Any] = {"arm": arm, "seed": seed, "fold": fold, "out": out, "settings": settings}
        how: dict[str, Any] = {"mask": mask, "block": block, "unlabelled": unlabelled or ()}
        how |= {"devices": devices, "save_every": save_every, "deep": deep}
        found = run(cohort, **which, **how, progress=progress)
    named = f"--arm {found.results['arm']} --seed {found.results['seed']}" + (f" --fold {fold}" if fold else "")
    same = [f"--out {out}"] * bool(out) + [f"--set {one}" for one in change or () if not one.startswith("train.")]
    labelled = found.settings.get("table") or found.settings.get("labels")
    first = f"{cohort} {named}" if labelled else f"LABELLED.yaml --arm {found.results['arm']}"
    said = " ".join([f"Next: gated-srp train {first} --init {found.path}", *same])
    say(said if labelled else f"{said}\nLABELLED.yaml: a cohort of other patients, with labels.")


def changes(given: list[str] | None) -> dict[str, str]:
    """Settings given as ``--set train.epochs=5``, by name."""
    found = {}
    for item in given or ():
        key, equals, value = item.partition("=")
        if not equals or not key:
            raise UserError("expected KEY=VALUE, e.g. --set train.epochs=5.", where=f"--set {item}")
        found[key] = value
    return found


def predict(
    runs: Annotated[list[Path], Argument(help="Run folders, or model files; several are averaged.")],
    features: Annotated[
        Path, Argument(help="A folder of feature files (of images, for a model of images), or one of them.")
    ],
    output: Annotated[Path, Option("--out", "-o", help="Where to write the table.")] = Path("predictions.csv"),
    features_key: Annotated[str | None, Option(help="Name of the feature array, where it is unusual.")] = None,
    coords_key: Annotated[str | None, Option(help="Name of the position array, where it is unusual.")] = None,
    coords: Coords = None,
    table: Whose = None,
    annotations: Within = None,
    features_low: Low = None,
    stride: Stride = None,
    workers: Annotated[int, Option(min=0, help="Processes that read ahead.")] = 1,
    force: Force = False,
    layout: Annotated[
        Literal["stamp"] | None,
        Option("--format", help="Write patients with the columns of STAMP's patient-preds.csv."),
    ] = None,
    budget: Annotated[
        float | None,
        Option(
            help="Share of each slide's patches that the models see, e.g. 0.5; the most homogeneous are thinned out."
        ),
    ] = None,
    curve: Annotated[
        Path | None,
        Option("--budget-curve", help="Instead, write here what shares of the patches do to logits and time; one run."),
    ] = None,
) -> None:
    """Predict slides without labels: probabilities, raw and calibrated, or risk and survival."""
    keys: dict[str, Any] = {
        "features_key": features_key,
        "coords_key": coords_key,
        "coords": coords,
        "table": table,
        "annotations": annotations,
        "features_low": features_low,
        "stride": stride,
        "force": force,
    }
    if curve is not None:
        if layout or budget is not None:
            what = "goes with neither --format nor --budget"
            raise UserError(what, where="--budget-curve", cure="Leave them out: it predicts with shares of its own.")
        return _budget_curve(runs, features, curve, **keys)
    from gated_srp.training.known import files_for
    from gated_srp.training.predict import predict as run
    from gated_srp.training.trained import open_runs

    _prepare_folder(output.parent, output)
    trained = open_runs(runs)
    files = files_for(trained[0], features)
    say(f"model: {trained[0]}\n{counted(len(files), 'file')} in {features}", err=True)
    with show_progress() as progress:
        found = run(trained, files, **keys, workers=workers, budget=budget, progress=progress)
    _say(found.notes, found.skipped)
    rows = found.table
    far = rows[rows["unlike_training"]].sort_values("training_distance", ascending=False)
    for slide, distance in zip(far["slide"].head(10), far["training_distance"], strict=False):
        words = "unlike the training slides: %s, %.1f times as far from them as the farthest of theirs"
        LOG.warning(words, slide, distance)
    if len(far) > 10:
        LOG.warning("... and %d more; see the column unlike_training", len(far) - 10)
    by = "1 run" if len(runs) == 1 else f"the mean of {len(runs)} runs"
    what = "patient" if trained[0].patients else "slide"
    say(f"{counted(len(rows), what)} predicted by {by}, {len(found.skipped)} skipped, {len(far)} unlike training")
    for line in found.summary():
        say(line)
    say_written(found.write(output, layout))


def _budget_curve(runs: list[Path], features: Path, out: Path, **how: Any) -> None:
    from gated_srp.reports.budget import budget_curve

    if len(runs) > 1:
        raise UserError(counted(len(runs), "run"), where="--budget-curve", cure="Name one run.")
    _prepare_folder(out, out / "budget.csv")
    with show_progress() as progress:
        found = budget_curve(runs[0], features, **how, progress=progress)
    _say(found.notes, found.skipped)
    for line in found.words():
        say(line)
    say_written(found.write(out))


def embed(
    run: Run,
    features: Annotated[Path, Argument(help="A folder of feature files, or one of them.")],
    output: Annotated[
        Path, Option("--out", "-o", help="NAME.h5, NAME.h5ad (AnnData), or a folder for one file per slide (TRIDENT).")
    ] = Path("embeddings.h5"),
    patches: Annotated[bool, Option("--patches", help="Also write the tokens of patches, one file per slide.")] = False,
    features_key: Annotated[str | None, Option(help="Name of the feature array, where it is unusual.")] = None,
    coords_key: Annotated[str | None, Option(help="Name of the position array, where it is unusual.")] = None,
    coords: Coords = None,
    table: Whose = None,
    annotations: Within = None,
    features_low: Low = None,
    stride: Stride = None,
    workers: Annotated[int, Option(min=0, help="Processes that read ahead.")] = 1,
    force: Force = False,
) -> None:
    """Turn slides into vectors: what a run's model gives its head, for other tools."""
    from gated_srp.training.embed import embed as run_on

    keys: dict[str, Any] = {"features_key": features_key, "coords_key": coords_key, "coords": coords, "table": table}
    with show_progress() as progress:
        how: dict[str, Any] = {"stride": stride, "force": force, "workers": workers, "progress": progress}
        how |= {"annotations": annotations, "features_low": features_low}
        found = run_on(run, features, out=output, patches=patches, **keys, **how)
    _say(found.notes, found.skipped)
    count, width = found.features.shape
    what = "patient" if found.run.patients else "slide"
    say(f"{counted(count, what)} as vectors of {width} numbers, {len(found.skipped)} skipped")
    say_written(found.written[-3:])
    if len(found.written) > 3:
        say(f"and {counted(len(found.written) - 3, 'other file')}")


def evaluate(
    run: Run,
    cohort: Annotated[Path, Argument(help="The YAML of a labelled cohort.")],
    output: Annotated[Path, Option("--out", "-o", help="Folder of the results.")] = Path("evaluation"),
    score: Annotated[str | None, Option(help="slide or case; as in training if not set.")] = None,
    repeats: Repeats = 1000,
    seed: Annotated[int, Option(min=0, help="Of the resampling.")] = 0,
    force: Force = False,
    allow_overlap: Annotated[
        bool, Option("--allow-overlap", help="Score slides and patients of the model's training too; results say so.")
    ] = False,
    layout: Annotated[
        Literal["stamp"] | None, Option("--format", help="Also write patient-preds.csv with the columns of STAMP's.")
    ] = None,
) -> None:
    """Score a run on another labelled cohort, with intervals over resampled patients."""
    from gated_srp.training.evaluate import evaluate as run_on

    _prepare_folder(output, output / "evaluation.json")
    with show_progress() as progress:
        how: dict[str, Any] = {"score": score, "repeats": repeats, "seed": seed, "force": force}
        found = run_on(run, cohort, **how, allow_overlap=allow_overlap, progress=progress)
    _say(found.notes, found.skipped)
    for line in _report(found):
        say(line)
    say_written(found.write(output, layout))


def _report(found: "Evaluation") -> list[str]:
    lines = [
        f"\n{found.run.path} on {found.cohort}: {counted(len(found.slides), 'slide')} of {counted(found.patients, 'patient')}, "
        f"scored by {found.score}",
        f"  {'metric':<20}{'value':>8}   95 % interval",
    ]
    lines.insert(1, f"  {found.external[1]}")
    for row in found.metrics.to_dict("records"):
        name = f"  {row['metric']:<20}"
        if row["value"] != row["value"]:
            lines.append(f"{name}{'-':>8}   not defined on these labels")
            continue
        few = "" if row["resamples"] == found.repeats else f"   (defined in {row['resamples']} of {found.repeats})"
        few += (
            "   (every draw gives the same: too few errors to tell)"
            if f"{row['low']:.4f}" == f"{row['high']:.4f}"
            else ""
        )
        few += f"   ({found.remarks[row['metric']]})" if row["metric"] in found.remarks else ""
        lines.append(f"{name}{row['value']:>8.4f}   {row['low']:.4f} to {row['high']:.4f}{few}")
    lines.append(
        f"  intervals: percentiles over {found.repeats:,} draws of {counted(found.patients, 'patient')}, seed {found.seed}"
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


def convert(
    checkpoint: Annotated[
        Path, Argument(help="A checkpoint of the published release (best.pt), of any of its trainers.")
    ],
    output: Annotated[Path, Option("--out", "-o", help="Where to write the model.")] = Path("model.safetensors"),
    classes: Annotated[
        str, Option(help="Names of the outputs in their order, such as A,B,C; `predict` needs them.")
    ] = "",
) -> None:
    """Turn a published checkpoint into a model file of ours, without running pickled code."""
    from gated_srp.models import convert

    names = [name.strip() for name in classes.split(",") if name.strip()]
    model = convert(checkpoint, output, classes=names)
    count = sum(p.numel() for p in model.parameters())
    said = f"classes {', '.join(names)}" if names else "outputs without names (--classes A,B,C gives them theirs)"
    say(f"{output}: arm {model.settings['arm']}, {count:,} parameters, {said}, from {checkpoint}")
