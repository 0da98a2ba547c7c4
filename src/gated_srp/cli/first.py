"""The first and the last thing that a user runs: init, demo, report."""

from pathlib import Path
from typing import Annotated

import typer


def init(
    folder: Annotated[Path, typer.Argument(help="The folder of feature files, as the extractor left it.")],
    table: Annotated[Path, typer.Argument(help="The spreadsheet of slides or patients: csv, tsv, xlsx, parquet.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="Where to write the YAML.")] = Path("cohort.yaml"),
    sheet: Annotated[str | None, typer.Option("--sheet", help="Of an xlsx; the first.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Write over a file that is there.")] = False,
) -> None:
    """Look at a folder and a spreadsheet and write cohort.yaml; what cannot be seen is left as a choice in a comment."""
    from gated_srp.init import write_cohort

    draft = write_cohort(folder, table, output, sheet=sheet, force=force)
    for line in draft.seen:
        typer.echo(line)
    typer.echo(f"written: {output}")
    for choice in draft.choices:
        typer.secho(f"to choose in {output}: {choice}", fg="yellow")
    typer.echo(f"next: gated-srp check {output}")
