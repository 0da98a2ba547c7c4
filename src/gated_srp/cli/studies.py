"""Commands on results of many runs."""

from collections.abc import Iterator
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gated_srp.cli.screen import say

if TYPE_CHECKING:
    from gated_srp.cli.study_run import Running
    from gated_srp.study.results import Comparison


class Engine(StrEnum):
    """Where cells run."""

    local = "local"
    ray = "ray"
    slurm = "slurm"


Jobs = Annotated[
    int | None, typer.Option("--jobs", "-j", min=1, help="Cells at a time; as many as cores, memory and devices allow.")
]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask before a study of more than an hour.")]
Where = Annotated[
    Engine, typer.Option("--engine", help="This machine, a Ray cluster, or a Slurm script to submit yourself.")
]
Address = Annotated[str | None, typer.Option("--address", help="Of the Ray cluster, e.g. auto or ray://host:10001.")]
Seeds = Annotated[str | None, typer.Option("--seeds", help="E.g. 42,43,44 or 42-46; those of the YAML.")]


def compare(
    cohort: Annotated[Path, typer.Argument(help="The cohort's YAML.")],
    arms: Annotated[str | None, typer.Option("--arms", help="E.g. na,xsa,gated_srp; those of the YAML.")] = None,
    seeds: Seeds = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="A fair small version: fewer epochs and seeds for all arms alike.")
    ] = False,
    reference: Annotated[
        str | None, typer.Option("--reference", "-r", help="What others are compared with; na, else the first arm.")
    ] = None,
    out: Annotated[Path | None, typer.Option("--out", help="Where runs are written, instead of the YAML's.")] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Folder of tables and figures; OUT/COHORT/comparison.")
    ] = None,
    bootstrap: Annotated[int, typer.Option("--bootstrap", min=0, help="How often patients are resampled.")] = 200,
    jobs: Jobs = None,
    yes: Yes = False,
    engine: Where = Engine.local,
    address: Address = None,
) -> None:
    """Train arms x seeds on identical splits, and say what the paired differences show. Start it again to go on."""
    from gated_srp.cli.study_run import compare_arms
    from gated_srp.config.load import load_config

    config = load_config(cohort, {"out": str(out)} if out else None)
    failed = compare_arms(
        config,
        arms=_words(arms) or config.arms,
        seeds=_numbers(seeds) or config.seeds,
        quick=quick,
        reference=reference,
        output=output,
        bootstrap=bootstrap,
        running=_running(jobs, yes, engine, address),
    )
    if failed:
        raise typer.Exit(1)


def tune(
    cohort: Annotated[Path, typer.Argument(help="The cohort's YAML.")],
    arm: Annotated[str, typer.Option("--arm", help="Whose gate.")] = "gated_srp",
    seeds: Seeds = None,
    quick: Annotated[bool, typer.Option("--quick", help="Fewer epochs and seeds; for `compare --quick`.")] = False,
    out: Annotated[Path | None, typer.Option("--out", help="Where runs are written, instead of the YAML's.")] = None,
    jobs: Jobs = None,
    yes: Yes = False,
    engine: Where = Engine.local,
    address: Address = None,
) -> None:
    """Choose delta and hidden width on validation, within each seed, and freeze them for `compare`; say the optimism."""
    from gated_srp.cli.study_run import tune_gate
    from gated_srp.config.load import load_config

    config = load_config(cohort, {"out": str(out)} if out else None)
    tune_gate(
        config,
        arm=arm,
        seeds=_numbers(seeds) or config.seeds,
        quick=quick,
        running=_running(jobs, yes, engine, address),
    )


def reproduce(
    name: Annotated[
        str, typer.Argument(help="A table or figure of the paper, e.g. survival; `all`; --list shows them.")
    ] = "",
    features: Annotated[
        list[str] | None,
        typer.Option("--features", help="Folder of feature files (ADP: of images), or COHORT=FOLDER; repeatable."),
    ] = None,
    labels: Annotated[
        list[str] | None, typer.Option("--labels", help="Folder of the public label files, or COHORT=PATH.")
    ] = None,
    cohorts: Annotated[str | None, typer.Option("--cohorts", help="Some of the study's, e.g. KIRC,KIRP.")] = None,
    seeds: Seeds = None,
    out: Annotated[Path, typer.Option("--out", help="Where runs, tables and figures are written.")] = Path("runs"),
    change: Annotated[list[str] | None, typer.Option("--set", help="A setting, e.g. --set train.workers=4.")] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="List the cells with their settings; run nothing.")
    ] = False,
    listing: Annotated[bool, typer.Option("--list", help="Name all studies.")] = False,
    jobs: Jobs = None,
    yes: Yes = False,
    engine: Where = Engine.local,
    address: Address = None,
) -> None:
    """Do a study of the paper again: its rows and columns, with the published numbers and the differences beside ours."""
    from gated_srp.cli.reproduce_run import list_studies, reproduce_studies
    from gated_srp.errors import UserError
    from gated_srp.study.reproduce import Sources

    if listing or not name:
        list_studies()
        return
    settings = {}
    for item in change or []:
        key, equals, value = item.partition("=")
        if not equals or not key:
            raise UserError(f"--set {item}: expected KEY=VALUE, e.g. --set train.workers=4.")
        settings[key] = value
    sources = Sources(_by_cohort(features, "features"), _by_cohort(labels, "labels"), out, settings)
    if reproduce_studies(
        name,
        sources,
        cohorts=_words(cohorts),
        seeds=_numbers(seeds),
        dry_run=dry_run,
        running=_running(jobs, yes, engine, address),
    ):
        raise typer.Exit(1)


def _by_cohort(given: list[str] | None, option: str) -> dict[str, Path]:
    """``DIR`` is for all cohorts, ``KGH=DIR`` for one."""
    from gated_srp.config.presets import find_cohort
    from gated_srp.errors import UserError

    found: dict[str, Path] = {}
    for item in given or []:
        cohort, equals, place = item.partition("=")
        if not equals or Path(item).exists():
            cohort, place = "", item
        path = Path(place)
        if not path.exists():
            raise UserError(f"--{option} {item}: no such file or folder. Expected a path, or COHORT=PATH.")
        found[find_cohort(cohort).name if cohort else ""] = path.absolute()
    return found


def _running(jobs: int | None, yes: bool, engine: Engine, address: str | None) -> "Running":
    from gated_srp.cli.study_run import Running

    return Running(jobs, yes, engine.value, address)


def _words(given: str | None) -> tuple[str, ...]:
    return tuple(dict.fromkeys(word.strip() for word in (given or "").split(",") if word.strip()))


def _numbers(given: str | None) -> tuple[int, ...]:
    """
    >>> _numbers("42-44,50")
    (42, 43, 44, 50)
    """
    from gated_srp.errors import UserError

    found: list[int] = []
    for word in _words(given):
        first, dash, last = word.partition("-")
        if not first.isdigit() or (dash and not last.isdigit()):
            raise UserError(f"--seeds {given}: {word!r} is no seed. Expected e.g. 42,43,44 or 42-46.")
        found += range(int(first), int(last if dash else first) + 1)
    return tuple(dict.fromkeys(found))


def stats(
    results: Annotated[Path, typer.Argument(help="A table with the columns cohort, arm, seed, metric, value.")],
    reference: Annotated[str, typer.Option("--reference", "-r", help="The arm that others are compared with.")] = "na",
    json: Annotated[Path | None, typer.Option("--json", help="Write everything here too.")] = None,
    ratio: Annotated[
        float | None, typer.Option("--ratio", min=0.0, help="Test set over training set; 0.2 / 0.7 if unknown.")
    ] = None,
    lower: Annotated[list[str] | None, typer.Option("--lower", help="A metric of which less is better.")] = None,
    runs: Annotated[
        Path | None, typer.Option("--runs", help="Run folders COHORT/ARM/seed42: resample their patients too.")
    ] = None,
    repeats: Annotated[int, typer.Option("--repeats", min=1, help="How often patients are resampled.")] = 1000,
) -> None:
    """Say what paired results from anywhere show, and no more: intervals, tests, power, a verdict in words."""
    from gated_srp.study.results import LOWER_IS_BETTER, compare, read_results
    from gated_srp.study.statistics import RATIO

    frame, notes = read_results(results)
    better_lower = LOWER_IS_BETTER | set(lower or ())
    if runs is None:
        comparison = compare(
            frame, reference, ratio=RATIO if ratio is None else ratio, lower_is_better=better_lower, notes=notes
        )
    else:
        from gated_srp.study.predictions import split_ratio, with_bootstrap  # needs torch, the rest does not

        ratio = (split_ratio(runs) or RATIO) if ratio is None else ratio
        comparison = compare(frame, reference, ratio=ratio, lower_is_better=better_lower, notes=notes)
        comparison = with_bootstrap(comparison, runs, repeats=repeats)
    if json is not None:
        _write_json(comparison.as_json(), json)
    for line in _lines(comparison):
        say(line)


def _lines(comparison: "Comparison") -> Iterator[str]:
    for note in comparison.notes:
        yield f"note: {note}"
    for title, cells in (("per cohort, paired by seed", comparison.cohorts), ("across cohorts", comparison.across)):
        yield f"\n{title}, against {comparison.reference}"
        for cell in cells:
            where = cell.metric if cell.cohort is None else f"{cell.cohort} {cell.metric}"
            yield f"  {cell.arm}, {where}: {cell.means[0]:.4f} against {cell.means[1]:.4f}; {cell.verdict}"
            found = cell.statistics
            if found.n > 1:
                corrected = "" if cell.cohort is None else f"corrected {found.corrected.p:.4f}, "
                yield (
                    f"      wins {found.wins}, losses {found.losses}, ties {found.ties}; p: t {found.plain.p:.4f}, "
                    f"{corrected}Wilcoxon {found.wilcoxon_p:.4f}, Holm {cell.p_holm:.4f}"
                )
            if cell.bootstrap is not None:
                drawn = cell.bootstrap
                yield f"      over resampled patients {drawn.difference:+.4f} ({drawn.low:+.4f} to {drawn.high:+.4f})"


def _write_json(content: object, path: Path) -> None:
    import json
    import os

    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    part.write_text(json.dumps(content, indent=2, allow_nan=False) + "\n", encoding="utf-8")
    os.replace(part, path)
