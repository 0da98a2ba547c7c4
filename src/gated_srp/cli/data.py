"""Commands on cohorts and their tables."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer

from gated_srp.cli.screen import LOG, console, say
from gated_srp.errors import UserError


def splits(
    cohort: Annotated[str, typer.Argument(help="A cohort of the paper, e.g. CAMELYON17 or TCGA-KIRC.")],
    labels: Annotated[Path, typer.Option("--labels", help="Folder of the public label files, or the file itself.")],
    seed: Annotated[int, typer.Option("--seed", min=0, help="The paper's are 42 to 46.")] = 42,
    output: Annotated[Path, typer.Option("--output", "-o", help="Where to write the split.")] = Path("split.csv"),
) -> None:
    """Write the published split of a cohort: one row per slide or patient, with train, val or test."""
    from gated_srp.config.presets import find_cohort
    from gated_srp.data.splits import assign_parts, write_split

    preset = find_cohort(cohort)
    table = preset.read_labels(labels)
    split = preset.read_split(labels, seed, table=table)
    slides = assign_parts(split, table).value_counts()
    write_split(split, output)
    for note in (*table.notes, *split.notes):
        say(note.line)
    for part, count in split.counts.items():
        say(f"{part:>5}  {count:>6} by {split.unit}  {slides.get(part, 0):>6} slides")
    say(f"{output}: {split.source}, hash {split.hash[:12]}")


def check(
    cohort: Annotated[Path, typer.Argument(help="The cohort's YAML, or a folder of feature files.")],
    deep: Annotated[bool, typer.Option("--deep", help="Read the feature values too: NaN, infinity, damage.")] = False,
    output: Annotated[Path | None, typer.Option("--json", help="Write everything here too.")] = None,
    quarantine: Annotated[
        Path | None, typer.Option("--quarantine", help="Write the list of files to leave out, one per line.")
    ] = None,
) -> None:
    """Say what was found, what is wrong and what to do. Exit status 1 when something must be fixed."""
    import json

    import gated_srp
    from gated_srp.cli.check_view import show
    from gated_srp.cli.progress import show_progress
    from gated_srp.files import write_whole

    with show_progress() as progress:
        found = gated_srp.check(cohort, deep=deep, quarantine=quarantine, progress=progress)
    if output is not None:
        write_whole(output, json.dumps(found.to_json(), indent=2, allow_nan=False) + "\n")
    with console() as page:
        show(found, page)
    for path in (output, quarantine):
        if path is not None:
            say(f"written: {path}")
    if not found.ok:
        raise typer.Exit(1)


def redundancy(
    cohort: Annotated[
        Path | None, typer.Argument(help="The cohort's YAML, or a folder of feature files; none with --images.")
    ] = None,
    run: Annotated[
        Path | None, typer.Option("--run", help="A run's folder, or a model file: measure tokens instead of features.")
    ] = None,
    layer: Annotated[
        int | None, typer.Option("--layer", min=1, help="With --run: after which attention layer; the first.")
    ] = None,
    images: Annotated[
        Path | None, typer.Option("--images", help="Measure a folder of ordinary photographs instead of slides.")
    ] = None,
    encoder: Annotated[
        str | None, typer.Option("--encoder", "-e", help="With --images: what turns their patches into features.")
    ] = None,
    weights: Annotated[
        Path | None, typer.Option("--weights", help="With --images: the encoder's weights, without internet.")
    ] = None,
    size: Annotated[
        int | None, typer.Option("--size", min=8, help="With --images: pixels of a patch; the encoder's own.")
    ] = None,
    slides: Annotated[
        int | None, typer.Option("--slides", min=1, help="At most so many slides or photographs, evenly chosen.")
    ] = None,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Of the random patches.")] = 0,
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder of the figure and the table.")] = Path(
        "redundancy"
    ),
) -> None:
    """Show how alike neighbouring patches are, beside random ones: the paper's Fig. 1c on your slides, or on photographs."""
    from gated_srp.cli.progress import show_progress
    from gated_srp.reports.redundancy import measure_cohort, measure_folder

    _refuse_mixed(
        {"COHORT": cohort, "--run": run, "--layer": layer},
        {"--images": images, "--encoder": encoder, "--weights": weights, "--size": size},
    )
    with show_progress() as progress:
        if images is not None and encoder is not None:
            found = measure_folder(
                images, encoder, weights=weights, size=size, at_most=slides, seed=seed, progress=progress
            )
        else:
            assert cohort is not None
            found = measure_cohort(cohort, run=run, layer=layer or 1, at_most=slides, seed=seed, progress=progress)
    for reason in found.left_out:
        LOG.warning("left out: %s", reason)
    paths = found.write(output)
    for line in found.lines():
        say(line)
    for path in paths:
        say(f"written: {path}")


def _refuse_mixed(of_slides: Mapping[str, object], of_images: Mapping[str, object]) -> None:
    """Slides or photographs, not both: each has arguments (the first of them needed) that mean nothing to the other."""
    slides, photographs = ([name for name, value in own.items() if value is not None] for own in (of_slides, of_images))
    if slides and photographs:
        what = (
            f"{', '.join(slides)} and {', '.join(photographs)} together: it measures slides (COHORT, with --run "
            "perhaps) or photographs (--images FOLDER --encoder NAME)"
        )
        raise UserError(what, where="redundancy", cure="Give one of them, and call it twice to compare.")
    if of_images["--images"] is not None and of_images["--encoder"] is None:
        cure = (
            "Name the one that your slides' features come from, e.g. --encoder uni_v2; --encoder efficientnet_lite0 "
            "needs no download."
        )
        raise UserError("no encoder was named", where="redundancy --images", cure=cure)
    if of_slides["COHORT"] is None and of_images["--images"] is None:
        given = next(iter(slides + photographs), None)
        what = f"{'nothing' if given is None else f'{given}, but nothing'} to measure was named"
        cure = (
            "Expected a cohort's YAML or a folder of feature files, or --images FOLDER --encoder NAME for photographs."
        )
        raise UserError(what, where="redundancy", cure=cure)
