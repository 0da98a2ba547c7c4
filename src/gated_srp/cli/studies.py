"""Commands on results of many runs."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from typer import Argument, Option

from gated_srp.cli.options import Change, Cohort, Out, Repeats, Seeds
from gated_srp.cli.runs import changes
from gated_srp.cli.screen import say, show_progress
from gated_srp.errors import UserError, counted
from gated_srp.files import as_stored, write_json

if TYPE_CHECKING:
    from gated_srp.study.comparison import CompareResult
    from gated_srp.study.engine import Cost
    from gated_srp.study.reproduction import ReproducedStudy
    from gated_srp.study.targets import TargetsResult

_LONG = 3600.0  # seconds from which on a person is asked


Jobs = Annotated[
    int | None,
    Option("--jobs", "-j", min=1, help="Cells at a time; by default as many as cores, memory and devices allow."),
]
Margin = Annotated[float, Option(help="A difference that counts as worse, for whether an arm is no worse.")]
Yes = Annotated[bool, Option("--yes", "-y", help="Do not ask before a study of more than an hour.")]
Engine = Annotated[
    Literal["local", "ray", "slurm"],
    Option(help="This machine, a Ray cluster, or a Slurm script that you submit yourself."),
]
Address = Annotated[str | None, Option("--address", help="Of the Ray cluster, e.g. auto or ray://host:10001.")]


def compare(
    cohort: Cohort,
    arms: Annotated[
        str | None,
        Option(help="E.g. na,gated_srp,gated_srp@train.gate_lr=10, instead of the YAML's; all: every arm that fits."),
    ] = None,
    seeds: Seeds = None,
    quick: Annotated[
        bool, Option("--quick", help="A fair small version: fewer epochs and seeds for all arms alike.")
    ] = False,
    reference: Annotated[
        str | None, Option("--reference", "-r", help="The arm to compare with; na, or else the first arm.")
    ] = None,
    out: Out = None,
    tables: Annotated[Path | None, Option(help="Folder for tables and figures; OUT/COHORT/comparison.")] = None,
    output: Annotated[Path | None, Option("--output", "-o", hidden=True, help="The name of --tables in 0.2.")] = None,
    change: Change = None,
    bootstrap: Annotated[int, Option(min=0, help="How often patients are resampled.")] = 200,
    margin: Margin = 0.01,
    targets: Annotated[
        str | None,
        Option(help="Columns to predict, a study each and one summary, e.g. er,her2,score:regression."),
    ] = None,
    jobs: Jobs = None,
    yes: Yes = False,
    engine: Engine = "local",
    address: Address = None,
) -> None:
    """Train arms x seeds on identical splits and say what the paired differences show. Run it again to resume."""
    import gated_srp

    with _study(jobs, yes, engine, address) as running:
        how: dict[str, Any] = {
            "arms": _words(arms, "--arms"),
            "seeds": _numbers(seeds),
            "reference": reference,
            "quick": quick,
            "settings": changes(change),
            "out": out,
            "tables": tables or output,
            "bootstrap": bootstrap,
            "margin": margin,
        }
        if targets is None:
            found: CompareResult | TargetsResult = gated_srp.compare(cohort, **how, **running)
        else:
            found = gated_srp.compare_targets(cohort, _words(targets, "--targets"), **how, **running)
    if not _submitted(found.scripts):
        say(f"\n{found.verdict}")
        say(f"written: {found.folder} ({counted(len(found.files), 'file')})")
    if found.failed:
        raise typer.Exit(1)


def crossval(
    cohort: Cohort,
    folds: Annotated[
        int | None, Option("--folds", "-k", min=2, help="How many; the YAML's, those of its split, or 5.")
    ] = None,
    arms: Annotated[str | None, Option(help="E.g. na,gated_srp, on the same folds; gated_srp if not set.")] = None,
    seed: Annotated[int | None, Option(min=0, help="Of folds, start weights, order; the YAML's first.")] = None,
    reference: Annotated[
        str | None, Option("--reference", "-r", help="The arm to compare with; na, or else the first arm.")
    ] = None,
    out: Out = None,
    tables: Annotated[Path | None, Option(help="Folder for the tables; OUT/COHORT/crossval.")] = None,
    change: Change = None,
    bootstrap: Repeats = 1000,
    jobs: Jobs = None,
    yes: Yes = False,
    engine: Engine = "local",
    address: Address = None,
) -> None:
    """Train all folds, pool the out-of-fold predictions, score them with intervals over patients. Run it again to resume."""
    import gated_srp

    with _study(jobs, yes, engine, address) as running:
        which: dict[str, Any] = {"folds": folds, "arms": _words(arms, "--arms"), "seed": seed, "reference": reference}
        where: dict[str, Any] = {"settings": changes(change), "out": out, "tables": tables, "bootstrap": bootstrap}
        found = gated_srp.crossval(cohort, **which, **where, **running)
    if not _submitted(found.scripts):
        say(f"\n{found.verdict}")
        say(f"written: {found.folder} ({counted(len(found.files), 'file')})")
    if found.failed:
        raise typer.Exit(1)


def arms() -> None:
    """List the models that --arm, --arms and the YAML's `arms` name: what each does, and which task it is not made for."""
    from gated_srp.models import ARMS

    for name, arm in ARMS.items():
        refused = f"; not for {' or '.join(arm.refuses)}" if arm.refuses else ""
        say(f"{name:<26} {arm.about}{refused}")


def tune(
    cohort: Cohort,
    arm: Annotated[str, Option(help="The arm whose gate is tuned.")] = "gated_srp",
    seeds: Seeds = None,
    gate_lr: Annotated[
        str | None, Option("--gate-lr", help="Also try these factors on the gates' learning rate, e.g. 1,10.")
    ] = None,
    quick: Annotated[bool, Option("--quick", help="Fewer epochs and seeds; for `compare --quick`.")] = False,
    out: Out = None,
    change: Change = None,
    jobs: Jobs = None,
    yes: Yes = False,
    engine: Engine = "local",
    address: Address = None,
) -> None:
    """Choose delta and hidden width on validation, within each seed, and freeze them for `compare`; report the optimism."""
    import gated_srp

    with _study(jobs, yes, engine, address) as running:
        how = {
            "settings": changes(change),
            "out": out,
            "gate_lr": tuple(map(_factor, _words(gate_lr, "--gate-lr"))),
            **running,
        }
        found = gated_srp.tune(cohort, arm=arm, seeds=_numbers(seeds), quick=quick, **how)
    if not _submitted(found.scripts):
        say(found.verdict)
        say(f"written: {found.files[0]}; `gated-srp compare` shows it as {arm}_tuned")
    if found.failed:
        raise typer.Exit(1)


def reproduce(
    name: Annotated[
        str, Argument(help="A table or figure of the paper, e.g. survival, or `all`; --list names them.")
    ] = "",
    features: Annotated[
        list[str] | None, Option(help="Folder of feature files (ADP: of images), or COHORT=FOLDER; repeatable.")
    ] = None,
    labels: Annotated[
        list[str] | None, Option(help="Folder of the public label files, or COHORT=PATH; repeatable.")
    ] = None,
    cohorts: Annotated[str | None, Option(help="Only these of the study's cohorts, e.g. KIRC,KIRP.")] = None,
    seeds: Seeds = None,
    out: Annotated[Path, Option(help="Where runs, tables and figures are written.")] = Path("runs"),
    change: Change = None,
    dry_run: Annotated[bool, Option("--dry-run", help="List the cells with their settings; run nothing.")] = False,
    listing: Annotated[bool, Option("--list", help="Name all studies.")] = False,
    jobs: Jobs = None,
    yes: Yes = False,
    engine: Engine = "local",
    address: Address = None,
) -> None:
    """Repeat a study of the paper: its rows and columns, with the published numbers and the differences beside ours."""
    import gated_srp

    if listing or not name:
        _list_studies()
        return
    with _study(jobs, yes, engine, address) as running:
        found = gated_srp.reproduce(
            name,
            features=_by_cohort(features, "features"),
            labels=_by_cohort(labels, "labels"),
            cohorts=_words(cohorts, "--cohorts"),
            seeds=_numbers(seeds),
            out=out,
            settings=changes(change),
            dry_run=dry_run,
            **running,
        )
    if dry_run:
        for one in found.studies:
            _show_plan(one)
        say(f"{counted(found.runs, 'distinct run')}")
    elif not _submitted(found.scripts):
        for one in found.studies:
            if one.study.command:
                say(f"{one.study.name}: run `{one.study.command}`")
            if one.text:
                say(f"\n{one.text}")
            if one.files:
                say(f"written: {one.folder} ({counted(len(one.files), 'file')})")
    if found.failed:
        raise typer.Exit(1)


def stats(
    results: Annotated[
        list[Path],
        Argument(
            help="A table with the columns cohort, arm, seed, metric, value; or predictions of any tool, a table per model."
        ),
    ],
    reference: Annotated[
        str, Option("--reference", "-r", help="The arm, or the name of the table, that others are compared with.")
    ] = "na",
    json: Annotated[Path | None, Option(help="Also write everything to this file.")] = None,
    ratio: Annotated[float | None, Option(min=0.0, help="Test set over training set; 0.2 / 0.7 if unknown.")] = None,
    lower: Annotated[list[str] | None, Option(help="A metric of which less is better; repeatable.")] = None,
    runs: Annotated[Path | None, Option(help="Run folders COHORT/ARM/seed42: also resample their patients.")] = None,
    repeats: Repeats = 1000,
    margin: Margin = 0.01,
) -> None:
    """Say what paired results from anywhere show, and no more: intervals, tests, power, a verdict in words."""
    import gated_srp

    found = gated_srp.stats(
        results[0] if len(results) == 1 else results,
        reference=reference,
        ratio=ratio,
        lower_is_better=lower or (),
        runs=runs,
        repeats=repeats,
        margin=margin,
    )
    if json is not None:
        write_json(json, found.as_json())
    for line in found.verdict.split("\n"):
        say(line)


def simulate(
    study: Annotated[Path, Argument(help="The plan: dials, grid, seeds, arms; docs/evidence/simulation.yaml is one.")],
    out: Annotated[Path, Option("--out", "-o", help="Folder for runs in progress and figures.")] = Path("simulation"),
    table: Annotated[
        Path | None, Option(help="Results, run by run; what it has is not computed again. OUT/results.csv.")
    ] = None,
) -> None:
    """Generated cohorts with a known truth, over two dials at a time: where does an arm help? Run it again to resume."""
    import gated_srp

    with show_progress() as progress:
        found = gated_srp.simulate(study, out=out, table=table, progress=progress)
    for row in found.differences.itertuples():
        say(
            f"{row.diagram} {row.x}, {row.y}: {row.arm} {row.difference:+.4f} ({row.low:+.4f} to {row.high:+.4f}), n {row.n}"
        )
    say(f"written: {', '.join(map(str, found.files))}")


# What the studies share ----------------------------------------------------------------------------------------------


@contextmanager
def _study(jobs: int | None, yes: bool, engine: str, address: str | None) -> Iterator[dict[str, Any]]:
    """The arguments of a flow that say how it runs. A person, if there is one, is asked before more than an hour.

    A study that is declined ends with status 1.
    """
    from gated_srp.study.engine import Declined

    def confirm(cost: Cost) -> bool:
        asks = cost.seconds > _LONG and not yes and sys.stdin.isatty()
        return typer.confirm("Start?", default=True) if asks else True

    with show_progress() as progress:
        try:
            how = {"jobs": jobs, "engine": engine, "address": address}
            yield how | {"confirm": confirm, "progress": progress}
        except Declined:
            raise typer.Exit(1) from None


def _submitted(scripts: Sequence[Path]) -> bool:
    """Whether there are only Slurm scripts."""
    for script in scripts:
        say(f"written: {script}")
    if scripts:
        commands = "; ".join(f"sbatch {shlex.quote(str(script))}" for script in scripts)
        say(f"Submit with `{commands}`; when it is done, run this command again to see the results.")
    return bool(scripts)


def _list_studies() -> None:
    from gated_srp.study.paper import read_studies, studies_folder

    for study in read_studies("all", studies_folder()):
        about = (
            f"{counted(len(study.columns), 'cohort')} x {counted(len(study.rows), 'row')}"
            if study.rows
            else "nothing to train"
        )
        say(f"{study.name:<20} {study.title} ({about})")
    say(f"{'all':<20} all of these, runs that several need counted once")


def _show_plan(one: ReproducedStudy) -> None:
    """Every cell with its settings, untuned rows apart."""
    study, plan = one.study, one.plan()
    extra = plan["untuned"].astype(bool)
    own, more = plan[~extra], plan[extra]
    what = (
        f"drawn by `{study.command}`" if study.command else counted(len(own), "cell") if study.rows else "drawn at once"
    )
    say(f"{study.name}: {study.title}; {what}")
    for part in (own, more):
        if part is more and len(more):
            say(f"{study.name}, beside them: {counted(len(more), 'cell')} of untuned rows")
        for cell in part.itertuples():
            say(f"  {cell.cohort:<11} {cell.row:<36} seed {cell.seed}  {cell.settings}")


def _by_cohort(given: list[str] | None, option: str) -> dict[str, Path]:
    """``DIR`` is for all cohorts, ``KGH=DIR`` for one."""
    from gated_srp.config.presets import find_cohort

    found: dict[str, Path] = {}
    for item in given or []:
        cohort, equals, place = item.partition("=")
        if not equals or Path(item).exists():
            cohort, place = "", item
        stored = as_stored(place)
        if not stored.exists():
            what, cure = "no such file or folder", "Expected a path, or COHORT=PATH."
            raise UserError(what, where=f"--{option} {item}", cure=cure)
        found[find_cohort(cohort).name if cohort else ""] = stored.absolute()
    return found


def _words(given: str | None, option: str) -> tuple[str, ...]:
    """What an option names, each once; nothing where it is not given. One that names nothing would pass for one that was not given."""
    found = tuple(dict.fromkeys(word.strip() for word in (given or "").split(",") if word.strip()))
    if given is not None and not found:
        cure = "Write names with commas between them, or leave the option out."
        raise UserError(f"{given!r} names nothing", where=option, cure=cure)
    return found


def _factor(word: str) -> float:
    try:
        return float(word)
    except ValueError:
        raise UserError(f"{word!r} is no number", where="--gate-lr", cure="Expected e.g. 1,10.") from None


def _numbers(given: str | None) -> tuple[int, ...]:
    """
    >>> _numbers("42-44,50")
    (42, 43, 44, 50)
    """
    found: list[int] = []
    for word in _words(given, "--seeds"):
        first, dash, last = word.partition("-")
        if not first.isdigit() or (dash and not last.isdigit()):
            raise UserError(f"{word!r} is no seed", where=f"--seeds {given}", cure="Expected e.g. 42,43,44 or 42-46.")
        if dash and int(last) < int(first):
            raise UserError(f"{word!r} has no seed in it", where=f"--seeds {given}", cure=f"Write {last}-{first}.")
        found += range(int(first), int(last if dash else first) + 1)
    return tuple(dict.fromkeys(found))
