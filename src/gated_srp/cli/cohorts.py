"""Commands on cohorts, from the folder of files to a first look at them: demo, init, check, splits, redundancy."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from typer import Argument, Option

from gated_srp.cli.screen import LOG, console, give, say, say_written, show_progress
from gated_srp.errors import UserError
from gated_srp.files import write_json

if TYPE_CHECKING:
    from rich.console import Console

    from gated_srp.checks.check import Check
    from gated_srp.data.splits import Split
    from gated_srp.data.table import Table
    from gated_srp.errors import Note

_COLOURS = {"error": "bold red", "warning": "bold yellow", "note": "bold blue"}
_PLACES = 5  # places named in full before "and N more"
_ALIKE = 20  # notes of one kind that are listed


def init(
    folder: Annotated[Path | None, Argument(help="The folder of feature files, as the extractor left it.")] = None,
    table: Annotated[
        Path | None, Argument(help="The spreadsheet of slides or patients: csv, tsv, xlsx, parquet.")
    ] = None,
    source: Annotated[
        Path | None, Option("--from", help="STAMP's config.yaml, or a task folder of Patho-Bench, that says the rest.")
    ] = None,
    output: Annotated[Path, Option("--out", "-o", help="Where to write the YAML.")] = Path("cohort.yaml"),
    sheet: Annotated[str | None, Option(help="Of an xlsx; the first.")] = None,
    target: Annotated[
        list[str] | None, Option(help="The column to predict; several times for labels of 0 and 1.")
    ] = None,
    case: Annotated[str | None, Option(help="The column of patients; none if no patient has two slides.")] = None,
    slides: Annotated[
        Path | None, Option(help="A table of slides and their patients, if TABLE is of patients.")
    ] = None,
    force: Annotated[bool, Option("--force", help="Write over a file that is there.")] = False,
) -> None:
    """Look at a folder and a spreadsheet and write cohort.yaml; what cannot be seen is left as a choice in a comment."""
    import gated_srp

    named: dict[str, Any] = {"sheet": sheet, "target": target, "case": case, "slides": slides, "force": force}
    draft = gated_srp.init(folder, table, source=source, out=output, **named)
    for note in draft.notes:
        if note not in draft.choices:
            say(str(note))
    say(
        f"written: {output}, and {output.with_suffix('.schema.json').name} beside it, with which editors complete its keys"
    )
    for choice in draft.choices:
        LOG.warning("to choose in %s: %s", output, choice)
    say(f"next: gated-srp check {output}")


def schema() -> None:
    """Print the JSON schema of a cohort's YAML, with which editors complete and check it: gated-srp schema > cohort.schema.json"""
    import json

    from gated_srp.config.schema import json_schema

    give(json.dumps(json_schema(), indent=1))


def demo(
    output: Annotated[Path, Option("--out", "-o", help="Folder of the demo.")] = Path("gated-srp-demo"),
) -> None:
    """Generate a cohort, compare five models on it and write a report; about three minutes. Start it again to go on."""
    import shlex
    import time

    from gated_srp.cli import app
    from gated_srp.demo import generate, outcome, steps

    begun = time.monotonic()
    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined] # a group's; the options before it stay
    fresh = generate(output)
    say(f"{output}: generated slides, {'written' if fresh else 'there already'}; about.txt says how they are made")
    for step in steps(output):
        say(f"\n# {step.words}\n$ gated-srp {shlex.join(step.command)}", bold=True)
        status = commands[step.command[0]](list(step.command[1:]), standalone_mode=False)
        if status:
            raise typer.Exit(int(status))
    say("")
    for line in outcome(output):
        say(line)
    say(f"\n{time.monotonic() - begun:.0f} s. On your own data: gated-srp init FOLDER TABLE, then the commands above.")
    say(f"The report: {(output / 'report.html').absolute()}")


def splits(
    cohort: Annotated[str, Argument(help="Your cohort's YAML, or a cohort of the paper: CAMELYON17, TCGA-KIRC, ...")],
    labels: Annotated[
        Path | None, Option(help="For a cohort of the paper: folder of the public label files, or the file itself.")
    ] = None,
    seed: Annotated[int | None, Option(min=0, help="The YAML's first; the paper's are 42 to 46.")] = None,
    fold: Annotated[int, Option(min=0, help="Which one, where the YAML sets `folds` or its split has several.")] = 0,
    output: Annotated[
        Path | None, Option("--out", "-o", help="Where to write: split.csv, or with --format a folder, splits.")
    ] = None,
    layout: Annotated[
        Literal["clam", "stamp", "patho-bench"] | None,
        Option(
            "--format", help="Write a folder as this tool reads it: every fold, or every seed where there are none."
        ),
    ] = None,
) -> None:
    """Write a split, one row per slide or patient with train, val or test: that of your cohort, or a published one."""
    from gated_srp.data.splits import assign_parts, write_split

    table, found = _find_splits(cohort, labels, seed, fold, every=layout is not None)
    for note in dict.fromkeys((*table.notes, *(note for split in found for note in split.notes))):
        say(note.line)
    for split in found:
        parts = assign_parts(split, table)
        for part, count in split.counts.items():
            rows = table.frame[parts == part]
            tally = table.kind.tally(rows, table.classes)
            tally = {name: number for name, number in tally.get("classes", tally).items() if isinstance(number, int)}
            said = ", ".join(f"{name} {number}" for name, number in tally.items())
            say(
                f"{part:>5}  {count:>6} by {split.unit}  {len(rows):>6} {'slide ' if len(rows) == 1 else 'slides'}  {said}"
            )
        if layout is not None:
            say(f"{split.source}, hash {split.hash[:12]}")
    if layout is None:
        write_split(found[0], output := output or Path("split.csv"))
        say(f"{output}: {found[0].source}, hash {found[0].hash[:12]}")
    else:
        from gated_srp.data.exported_splits import export_splits

        say_written(export_splits(found, table, output or Path("splits"), layout))


def _find_splits(
    cohort: str, labels: Path | None, seed: int | None, fold: int, *, every: bool
) -> tuple[Table, list[Split]]:
    """One split of a cohort, or every: its folds, else its seeds unless one is named."""
    if Path(cohort).suffix in (".yaml", ".yml"):
        from gated_srp.config.cohort import open_cohort
        from gated_srp.config.load import load_config

        config = load_config(cohort, {"labels": str(labels)} if labels else None)
        data = open_cohort(config)
        seeds = config.seeds if seed is None else (seed,)
        if not every:
            return data.table, [data.split(seeds[0], fold)]
        if config.folds:
            return data.table, [data.split(seeds[0], number) for number in range(config.folds.number)]
        splits = [data.split(one) for one in seeds]
        return data.table, list({split.hash: split for split in splits}.values())
    from gated_srp.config.cohort import SEEDS
    from gated_srp.config.presets import find_cohort

    preset = find_cohort(cohort)
    if labels is None:
        cure = "Give the folder of its public label files: --labels FOLDER. For a cohort of your own, name its YAML."
        raise UserError("the split is drawn from the labels, and --labels is not set", where=cohort, cure=cure)
    table = preset.read_labels(labels)
    seeds = (seed,) if seed is not None else SEEDS if every else SEEDS[:1]
    return table, [preset.read_split(labels, one, table=table) for one in seeds]


def check(
    cohort: Annotated[Path, Argument(help="The cohort's YAML, or a folder of feature files.")],
    deep: Annotated[bool, Option("--deep", help="Read the feature values too: NaN, infinity, damage.")] = False,
    output: Annotated[Path | None, Option("--json", help="Write everything here too.")] = None,
    quarantine: Annotated[Path | None, Option(help="Write the list of files to leave out, one per line.")] = None,
) -> None:
    """Say what was found, what is wrong and what to do. Exit status 1 when something must be fixed."""
    import gated_srp

    with show_progress() as progress:
        found = gated_srp.check(cohort, deep=deep, quarantine=quarantine, progress=progress)
    if output is not None:
        write_json(output, found.to_json())
    with console() as page:
        _show(found, page, quarantine)
    say_written(path for path in (output, quarantine) if path is not None)
    if not found.ok:
        raise typer.Exit(1)


def redundancy(
    cohort: Annotated[Path | None, Argument(help="The cohort's YAML, or a folder of feature files.")] = None,
    run: Annotated[
        Path | None, Option(help="A run's folder, or a model file: measure its tokens after attention.")
    ] = None,
    layer: Annotated[int | None, Option(min=1, help="With --run: after which attention layer; the first.")] = None,
    images: Annotated[Path | None, Option(help="A folder of ordinary photographs, alone or beside the slides.")] = None,
    encoder: Annotated[
        str | None, Option("--encoder", "-e", help="With --images: what turns their patches into features.")
    ] = None,
    weights: Annotated[Path | None, Option(help="With --images: the encoder's weights, without internet.")] = None,
    size: Annotated[int | None, Option(min=8, help="With --images: pixels of a patch; the encoder's own.")] = None,
    slides: Annotated[int | None, Option(min=1, help="At most so many slides or photographs, evenly chosen.")] = None,
    seed: Annotated[int, Option(min=0, help="Of the random patches.")] = 0,
    output: Annotated[Path, Option("--out", "-o", help="Folder of the figure and the table.")] = Path("redundancy"),
) -> None:
    """Show how alike neighbouring patches are, beside random ones: the paper's Fig. 1c on your slides, on photographs, or on both."""
    from gated_srp.reports.redundancy import Measured, Together, measure_cohort, measure_folder, measure_together

    cutting = {"--encoder": encoder, "--weights": weights, "--size": size}
    _refuse_incomplete(cohort, images, cutting, {"--run": run, "--layer": layer})
    found: Measured | Together
    with show_progress() as progress:
        shared: dict[str, Any] = {
            "run": run,
            "layer": layer or 1,
            "at_most": slides,
            "seed": seed,
            "progress": progress,
        }
        if images is None or encoder is None:
            assert cohort is not None
            found = measure_cohort(cohort, **shared)
        elif cohort is None:
            found = measure_folder(images, encoder, weights=weights, size=size, **shared)
        else:
            found = measure_together(cohort, images, encoder, weights=weights, size=size, **shared)
    for reason in found.left_out:
        LOG.warning("left out: %s", reason)
    paths = found.write(output)
    for line in found.lines():
        say(line)
    say_written(paths)


def _refuse_incomplete(
    cohort: Path | None, images: Path | None, cutting: Mapping[str, object], of_run: Mapping[str, object]
) -> None:
    """Slides, photographs or both; what belongs to photographs or to a run means nothing without them."""
    given = [name for name, value in {**cutting, **of_run}.items() if value is not None]
    if cohort is None and images is None:
        what = f"{given[0]}, but nothing to measure was named" if given else "nothing to measure was named"
        cure = (
            "Expected a cohort's YAML or a folder of feature files, or --images FOLDER --encoder NAME for photographs."
        )
        raise UserError(what, where="redundancy", cure=cure)
    if images is None and (odd := [name for name in cutting if name in given]):
        raise UserError(f"{odd[0]} is for photographs", where="redundancy", cure="Name their folder: --images FOLDER.")
    if images is not None and cutting["--encoder"] is None:
        cure = "Name the one that your slides' features come from, e.g. --encoder uni_v2; --encoder efficientnet_lite0 needs no download."
        raise UserError("no encoder was named", where="redundancy --images", cure=cure)
    if of_run["--layer"] is not None and of_run["--run"] is None:
        raise UserError("--layer is a layer of a run", where="redundancy", cure="Name it: --run RUN.")


# How `check` shows what it found: a table of facts, then notes by level and kind, then the verdict ------------------------


def _show(check: Check, console: Console, quarantine: Path | None) -> None:
    """Print a check for a reader who has never seen one."""
    from rich.table import Table
    from rich.text import Text

    from gated_srp.checks.findings import facts_in_words

    folders = {str(file.path.parent) for file in check.files}
    home = os.path.join(os.path.commonpath(folders), "") if folders else ""  # paths are shown below it
    facts = Table(show_header=False, box=None, pad_edge=False, title=f"check of {check.name}", title_justify="left")
    facts.add_column(style="bold", no_wrap=True)
    facts.add_column(overflow="fold")
    for name, text in [("folder", home or "-"), *facts_in_words(check.facts)]:
        facts.add_row(name, text)
    console.print(facts, markup=False)
    for (level, kind, cure), alike in groupby(check.notes, key=lambda f: (f.level, f.kind, f.cure)):
        shortened = [replace(note, where=tuple(w.removeprefix(home) for w in note.where)) for note in alike]
        _show_kind(level, kind, cure, alike=shortened, console=console)
    tally = {name: sum(f.level == name for f in check.notes) for name in _COLOURS}
    counts = ", ".join(f"{count} {name}{'' if count == 1 else 's'}" for name, count in tally.items() if count)
    console.print()
    if check.ok:
        console.print(Text(f"Ready{f': {counts}' if counts else ', no issues found'}.", style="bold green"))
    else:
        console.print(Text(f"Not ready: {counts}. Fix the errors, then check again.", style="bold red"))
        if check.quarantine and check.facts["files"]["usable"]:
            listed, first = quarantine or "broken.txt", "" if quarantine else "--quarantine broken.txt, then "
            line = f"To go on without them: {first}`exclude: {listed}` in the YAML."
            if "slides" not in check.facts:  # a folder has no YAML
                line = f"To move them away: {first}\n  mkdir broken && xargs -d '\\n' -a {listed} mv -n -t broken/"
            console.print(line, markup=False, highlight=False)
    if not check.facts["files"]["deep"]:
        console.print("The feature values were not read; --deep looks for NaN, infinity and damage in them.")


def _show_kind(level: str, kind: str, cure: str, *, alike: Sequence[Note], console: Console) -> None:
    from rich.padding import Padding
    from rich.text import Text

    def indented(text: Text) -> None:
        console.print(Padding(text, (0, 0, 0, 2), expand=False))

    count = f" ({len(alike)} times)" if len(alike) > 1 else ""
    console.print()
    console.print(Text.assemble((level, _COLOURS[level]), " ", (kind.replace("_", " "), "bold"), count))
    for note in alike[:_ALIKE]:
        one = len(note.where) == 1 and level == "error"
        indented(Text(f"{note.where[0]}: {note.what}" if one else note.what))
        if note.where and not one:
            more = len(note.where) - _PLACES
            places = ", ".join(note.where[:_PLACES]) + (f" and {more:,} more" if more > 0 else "")
            indented(Text(f"in {places}", style="dim"))
    if len(alike) > _ALIKE:
        indented(Text(f"... and {len(alike) - _ALIKE} more; --json FILE lists all"))
    indented(Text.assemble(("do: ", "bold green"), cure))
