"""Commands on cohorts and their tables."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gated_srp.cli.screen import LOG, console, say

if TYPE_CHECKING:
    from gated_srp.data.redundancy import Redundancy


def splits(
    cohort: Annotated[str, typer.Argument(help="A cohort of the paper, e.g. CAMELYON17 or TCGA-KIRC.")],
    labels: Annotated[Path, typer.Option("--labels", help="Folder of the public label files, or the file itself.")],
    seed: Annotated[int, typer.Option("--seed", min=0, help="The paper's are 42 to 46.")] = 42,
    output: Annotated[Path, typer.Option("--output", "-o", help="Where to write the split.")] = Path("split.csv"),
) -> None:
    """Write the published split of a cohort: one row per slide or patient, with train, val or test."""
    from gated_srp.config.presets import find_cohort
    from gated_srp.data.splits.rules import assign_parts, write_split

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
    """Say what was found, what is wrong and what to do. Exit status 1 when something must be mended."""
    import json

    from gated_srp.checks.check import check as check_cohort
    from gated_srp.cli.check_view import show
    from gated_srp.cli.progress import show_progress
    from gated_srp.files import write_whole

    with show_progress() as progress:
        found = check_cohort(cohort, deep=deep, quarantine=quarantine, progress=progress)
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
    from gated_srp.cli.progress import counting
    from gated_srp.cli.redundancy_run import measure_images, measure_slides, refuse_mixed

    refuse_mixed(
        {"COHORT": cohort, "--run": run, "--layer": layer},
        {"--images": images, "--encoder": encoder, "--weights": weights, "--size": size},
    )
    if images is not None and encoder is not None:
        with counting("photographs") as of:
            found = measure_images(images, encoder, weights=weights, size=size, at_most=slides, seed=seed, progress=of)
        what, unit = f"patch features of {encoder}", "photograph"
    else:
        assert cohort is not None
        with counting("slides") as of:
            found = measure_slides(cohort, run, layer=layer or 1, at_most=slides, seed=seed, progress=of)
        what, unit = "patch features" if run is None else "patch tokens after attention", "slide"
    _show_redundancy(found, output, what=what, unit=unit)


def _show_redundancy(found: "tuple[str, list[Redundancy], list[str]]", output: Path, *, what: str, unit: str) -> None:
    """Table, figure and the medians in words."""
    from gated_srp.data.redundancy import pooled, quantiles, write_table
    from gated_srp.reports.redundancy import draw_redundancy

    name, measured, left_out = found
    for reason in left_out:
        LOG.warning("left out: %s", reason)
    everything = pooled(measured, name=f"all {unit}s")
    write_table([*everything, *measured], output / "redundancy.csv")
    title = f"{name}: local redundancy of {what}"
    paths = draw_redundancy(measured, output / "redundancy", title=title, unit=unit)
    for one in everything:
        near, far = quantiles(one.neighbours), quantiles(one.random)
        say(
            f"{one.rows}: cosine to the neighbours' mean {near['median']:.3f} (half of the patches {near['q25']:.3f} to "
            f"{near['q75']:.3f}), to the mean of as many random patches {far['median']:.3f} ({far['q25']:.3f} to {far['q75']:.3f})"
        )
    count = len(measured) // len(everything)
    say(f"{len(everything[0].neighbours):,} patches with neighbours, {count:,} {unit}{'s' * (count != 1)}")
    for path in (output / "redundancy.csv", *paths):
        say(f"written: {path}")
