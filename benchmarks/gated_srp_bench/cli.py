"""`gated-srp bench`: speed and memory on this machine."""

import time
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gated_srp.cli.screen import console, say
from gated_srp.errors import UserError

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)

if TYPE_CHECKING:
    from gated_srp_bench.figures import Figure
    from gated_srp_bench.measure import Row


@app.command()
def bench(
    full: Annotated[
        bool, typer.Option("--full", help="Also 512 and 49,152 patches, long slides and epochs from disk.")
    ] = False,
    data: Annotated[bool, typer.Option("--data", help="How fast bags load instead.")] = False,
    training: Annotated[
        bool, typer.Option("--training", help="Epochs of 64 slides from disk against their bare steps instead.")
    ] = False,
    attach: Annotated[
        bool, typer.Option("--attach", help="What attach adds to a ViT-S/16 of others instead (3 minutes).")
    ] = False,
    extract: Annotated[
        bool, typer.Option("--extract", help="How fast a slide is extracted, beside the encoder alone, instead.")
    ] = False,
    arms: Annotated[
        str | None,
        typer.Option(
            help="What a patch costs in these arms (`all`, or names) beside NA instead; a file of --json keeps its others."
        ),
    ] = None,
    output: Annotated[Path | None, typer.Option("--json", help="Write the measurements here.")] = None,
    base: Annotated[
        Path | None,
        typer.Option(
            "--compare", help="Measurements of another run: fail where a ratio fell by more than both scatter."
        ),
    ] = None,
) -> None:
    """Ours against the textbook implementation: time and memory of prepare, predict and train, as ratios of one run."""
    import os

    from gated_srp.machine import bf16_environment

    os.environ.update(bf16_environment())
    if base is not None and (data or training or attach or extract or arms):
        raise UserError("compares the ratios of models alone", where="--compare", cure="Leave out the other option.")
    before = None if base is None else _figures_of(base)
    _describe_machine()
    if data:
        _bench_data(output)
    if training:
        _bench_training(output)
    if attach:
        _bench_attach(output)
    if extract:
        _bench_extract(output)
    if arms:
        _bench_arms(arms, output)
    if not (data or training or attach or extract or arms):
        found = _bench_models(full, output)
        if before is not None:
            _compare(found, before)


def _figures_of(path: Path) -> "list[Figure]":
    from gated_srp_bench.figures import figures, read_rows

    return figures(read_rows(path))


def _compare(found: "list[Figure]", before: "list[Figure]") -> None:
    from gated_srp_bench.figures import fallen

    worse = fallen(found, before)
    for here, there in worse:
        say(f"{here.tokens:,} patches, {here.name}: {here.words}, before {there.words}")
    if worse:
        raise typer.Exit(1)
    common = {(one.tokens, one.name) for one in found} & {(one.tokens, one.name) for one in before}
    say(f"none of {len(common)} ratios fell by more than both runs scatter")


def _bench_data(output: Path | None) -> None:
    from gated_srp_bench.loading import measure_loading

    rows = measure_loading()
    for row in rows:
        say(f"{row['what']:32} {row['seconds']:8.3f} s   {row['ratio']:6.2f} x the cache's second epoch")
    _write_json(rows, output)


def _bench_training(output: Path | None) -> None:
    from gated_srp_bench.figures import epoch_figures
    from gated_srp_bench.training import measure_training

    rows: list[Row] = []
    for dtype in ("float32", "bfloat16"):
        say(f"{dtype}: files are written, then six epochs of 64 slides (2,000 to 20,000 patches) ...")
        found = measure_training(dtype=dtype)
        rows += found
        _save(rows, output)
        _print_rows(found)
        _print_figures(list(epoch_figures(found)))


def _bench_attach(output: Path | None) -> None:
    from dataclasses import asdict

    from gated_srp_bench.attach import BOUND, measure_attach

    costs = measure_attach()
    for cost in costs:
        say(
            f"{cost.family:12} {cost.phase:8} untouched {cost.untouched:.3f} s, attached {cost.attached:.3f} s, "
            f"ratio {cost.ratio:.3f} (promised <= {BOUND}: {'yes' if cost.ratio <= BOUND else 'no'})"
        )
    _write_json([{**asdict(cost), "ratio": cost.ratio} for cost in costs], output)


def _bench_extract(output: Path | None) -> None:
    from dataclasses import asdict

    from gated_srp.machine import keep_freed_memory
    from gated_srp_bench.extract import BOUND, measure_extraction

    keep_freed_memory()  # as the command does
    found = measure_extraction()
    say(
        f"{found.encoder}: {found.patches:,} patches of a slide, {found.extraction:.1f} a second; the encoder alone {found.alone:.1f}; "
        f"share of each of {len(found.turns)} turns, their median: {found.share:.3f} (promised >= {BOUND}: {'yes' if found.share >= BOUND else 'no'})"
    )
    _write_json([{**asdict(found), "share": found.share}], output)


def _bench_arms(words: str, output: Path | None) -> None:
    from gated_srp_bench.arms import chosen, measure_arms, merged

    costs, machine = [], f"{_machine()}, {date.today():%Y-%m-%d}"
    say(
        "times NA's (lowest to highest of the turns) in processor time: a prediction, a training step; microseconds per patch"
    )
    for cost in measure_arms(chosen(words)):
        costs.append(cost)
        parts = [f"{middle:6.2f} ({low:.2f} to {high:.2f})" for low, middle, high in (cost.predict, cost.train)]
        say(
            f"{cost.arm:28} {parts[0]:24} {parts[1]:24} {cost.predict_us:8.1f} {cost.train_us:8.1f}   against {cost.against}"
        )
        _write_json(merged(costs, output, machine), output)


def _bench_models(full: bool, output: Path | None) -> "list[Figure]":
    from gated_srp_bench import figures as promised
    from gated_srp_bench import full as parts

    rows: list[Row] = []
    plan = parts.parts(full=full)
    start = time.monotonic()
    for number, part in enumerate(plan, 1):
        left = sum(one.minutes for one in plan[number - 1 :])
        say(f"{number} of {len(plan)}: {part.name} (about {part.minutes:.1f} min, {left:.0f} to go) ...")
        rows += part.measure()
        _save(rows, output)  # whatever ends it: what was measured stays
    figures = promised.figures(rows)
    _print_rows(rows)
    _print_figures(figures, promised.multiply_rate(rows))
    say(f"took {(time.monotonic() - start) / 60:.1f} min")
    return figures


def _save(rows: "list[Row]", output: Path | None) -> None:
    from dataclasses import asdict

    _write_json({"machine": _machine(), "rows": [asdict(row) for row in rows]}, output)


def _write_json(rows: list[dict[str, Any]] | dict[str, Any], output: Path | None) -> None:
    import json

    from gated_srp.files import write_whole

    if output is not None:
        write_whole(output, json.dumps(rows, indent=1) + "\n")


def _describe_machine() -> None:
    from gated_srp.machine import bf16_environment, has_bf16

    note = ", bf16 without AMX (this machine announces it and cannot run it)" if bf16_environment() else ""
    say(_machine() + (note if has_bf16() else ", no instructions for bf16: asked for bf16, it computes in float32"))


def _machine() -> str:
    import platform

    import torch

    from gated_srp.machine import has_bf16, processor

    kind = f"{torch.backends.cpu.get_cpu_capability()}, {'with' if has_bf16() else 'without'} bf16"
    versions = f"torch {torch.__version__}, Python {platform.python_version()}"
    return f"{processor()} ({kind}), {torch.get_num_threads()} threads, {versions}"


def _print_rows(rows: "list[Row]") -> None:
    from rich.table import Table

    table = Table("patches", "phase", "arm", "dtype", "seconds", "peak MB", title="measurements")
    for row in rows:
        seconds = "" if row.seconds is None else f"{row.seconds:.4f}"
        table.add_row(
            f"{row.tokens:,}",
            row.phase,
            row.arm,
            row.dtype,
            seconds,
            "" if row.peak_mb is None else f"{row.peak_mb:,.0f}" + (f" ({row.own_mb:,.0f} own)" if row.own_mb else ""),
        )
    with console() as page:
        page.print(table)


def _print_figures(figures: "list[Figure]", rate: float | None = None) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table(
        box=SIMPLE_HEAD,
        pad_edge=False,
        padding=(0, 1, 0, 0),
        title="ratios" + (f" (matrix multiply rate {rate / 1e9:.0f} Gflop/s)" if rate else ""),
    )
    for name in ("patches", "ratio", "median (95 %)", "aim"):
        table.add_column(name, no_wrap=True)
    for figure in figures:
        aim = f"{'>=' if figure.at_least else '<='} {figure.bound:g} {'yes' if figure.holds else 'no'}"
        table.add_row(f"{figure.tokens:,}", figure.name, figure.words, aim)
    with console() as page:
        page.print(table)
