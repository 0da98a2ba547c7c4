"""Commands on cohorts and their tables."""

from pathlib import Path
from typing import Annotated

import typer


def splits(
    cohort: Annotated[str, typer.Argument(help="A cohort of the paper, e.g. CAMELYON17 or TCGA-KIRC.")],
    labels: Annotated[Path, typer.Option("--labels", help="Folder of the public label files, or the file itself.")],
    seed: Annotated[int, typer.Option("--seed", min=0, help="The paper's are 42 to 46.")] = 42,
    output: Annotated[Path, typer.Option("--output", "-o", help="Where to write the split.")] = Path("split.csv"),
) -> None:
    """Write the published split of a cohort: one row a slide or patient, with train, val or test."""
    from gated_srp.data.cohorts import find_cohort
    from gated_srp.data.splits import assign_parts, write_split

    preset = find_cohort(cohort)
    table = preset.read_labels(labels)
    split = preset.read_split(labels, seed, table=table)
    slides = assign_parts(split, table).value_counts()
    write_split(split, output)
    for note in (*table.notes, *split.notes):
        typer.echo(note)
    for part, count in split.counts.items():
        typer.echo(f"{part:>5}  {count:>6} by {split.unit}  {slides.get(part, 0):>6} slides")
    typer.echo(f"{output}: {split.source}, hash {split.hash[:12]}")
