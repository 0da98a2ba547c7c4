"""The first and the last thing that a user runs: init, demo, report."""

from pathlib import Path
from typing import Annotated

import typer

from gated_srp.cli.screen import LOG, say


def init(
    folder: Annotated[Path, typer.Argument(help="The folder of feature files, as the extractor left it.")],
    table: Annotated[Path, typer.Argument(help="The spreadsheet of slides or patients: csv, tsv, xlsx, parquet.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="Where to write the YAML.")] = Path("cohort.yaml"),
    sheet: Annotated[str | None, typer.Option("--sheet", help="Of an xlsx; the first.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Write over a file that is there.")] = False,
) -> None:
    """Look at a folder and a spreadsheet and write cohort.yaml; what cannot be seen is left as a choice in a comment."""
    import gated_srp

    draft = gated_srp.init(folder, table, out=output, sheet=sheet, force=force)
    for note in draft.notes:
        if note not in draft.choices:
            say(str(note))
    say(f"written: {output}")
    for choice in draft.choices:
        LOG.warning("to choose in %s: %s", output, choice)
    say(f"next: gated-srp check {output}")


def demo(
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder of the demo.")] = Path("gated-srp-demo"),
) -> None:
    """Generate a cohort, compare four attentions on it and write a report; about three minutes. Start it again to go on."""
    import shlex
    import time

    from gated_srp.cli import app
    from gated_srp.demo import generate, steps

    begun = time.monotonic()
    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined] # a group's; the options before it stay
    fresh = generate(output)
    say(f"{output}: generated slides, {'written' if fresh else 'there already'}; about.txt says how they are made")
    for step in steps(output):
        say(f"\n# {step.words}\n$ gated-srp {shlex.join(step.command)}", bold=True)
        status = commands[step.command[0]](list(step.command[1:]), standalone_mode=False)
        if status:
            raise typer.Exit(int(status))
    say(f"\n{time.monotonic() - begun:.0f} s. On your own data: gated-srp init FOLDER TABLE, then the commands above.")
    say(f"The report: {(output / 'report.html').absolute()}")


def report(
    folder: Annotated[Path, typer.Argument(help="A run, a comparison, a reproduction, or a folder above them.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="The page.")] = Path("report.html"),
) -> None:
    """Write one self-contained page: the verdict in words, tables, figures, heatmaps, slides, how to reproduce."""
    import gated_srp

    written = gated_srp.report(folder, out=output)
    say(f"written: {output} ({written.size / 1e6:.1f} MB, opens in any browser, loads nothing)")
