"""Speed and memory on this machine."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from gated_srp.bench import Figure, Row


def bench(
    full: Annotated[
        bool, typer.Option("--full", help="2,048 to 160,000 patches and one slide of 1,000,000 (half an hour).")
    ] = False,
    data: Annotated[bool, typer.Option("--data", help="How fast bags load instead.")] = False,
    training: Annotated[
        bool, typer.Option("--training", help="An epoch of 64 bags from disk instead (20 minutes).")
    ] = False,
    output: Annotated[Path | None, typer.Option("--json", help="Write the measurements here.")] = None,
) -> None:
    """Ours against the textbook implementation: time and memory of prepare, predict and train, as ratios of one run."""
    import os

    from gated_srp.machine import bf16_environment

    os.environ.update(bf16_environment())
    _describe_machine()
    if data:
        _bench_data(output)
    if training:
        _bench_training(output)
    if not data and not training:
        _bench_models(full, output)


def _bench_data(output: Path | None) -> None:
    from gated_srp.data.loading_bench import measure_loading

    rows = measure_loading()
    for row in rows:
        typer.echo(f"{row['what']:32} {row['seconds']:8.3f} s   {row['ratio']:6.2f} x the cache's second epoch")
    _write_json(rows, output)


def _bench_training(output: Path | None) -> None:
    from dataclasses import asdict

    from gated_srp.bench.training import measure_training

    epochs = measure_training(dtypes=("float32", "bfloat16"))
    for epoch in epochs:
        typer.echo(
            f"{epoch.dtype}: epoch {epoch.loop:.1f} s, bare steps {epoch.bare:.1f} s, textbook float32 {epoch.textbook:.1f} s; "
            f"textbook / ours {epoch.textbook / epoch.loop:.2f}, loop over bare steps {epoch.loop / epoch.bare:.3f}"
        )
    _write_json([asdict(epoch) for epoch in epochs], output)


def _bench_models(full: bool, output: Path | None) -> None:
    from gated_srp import bench as measure

    rows: list[Row] = []
    for tokens in (512, 2_048, 10_000, 49_152) if full else (10_000,):
        typer.echo(f"timing {tokens:,} patches ...")
        rows += measure.time_arms(tokens, repeats=3 if tokens > 20_000 else 5)
        if tokens >= 10_000:
            typer.echo(f"memory of {tokens:,} patches, each figure in a process of its own ...")
            rows += measure.memory_arms(tokens)
        _save(rows, output)
    figures = measure.figures(rows)
    if full:
        rows += measure.growth((10_000, 160_000))
        typer.echo("one slide of 1,000,000 patches, half precision, memory-mapped ...")
        rows.append(measure.peak(1_000_000, "stream", "gated_srp", "float16"))
        figures += measure.full_figures(rows)
        _save(rows, output)
    _print_rows(rows)
    _print_figures(figures, measure.multiply_rate(rows))


def _save(rows: "list[Row]", output: Path | None) -> None:
    from dataclasses import asdict

    _write_json([asdict(row) for row in rows], output)


def _write_json(rows: list[dict[str, Any]], output: Path | None) -> None:
    import json

    from gated_srp.files import write_whole

    if output is not None:
        write_whole(output, json.dumps(rows, indent=1) + "\n")


def _describe_machine() -> None:
    import platform

    import torch

    from gated_srp.machine import bf16_environment, processor

    note = ", bf16 without AMX (this machine announces it and cannot run it)" if bf16_environment() else ""
    typer.echo(
        f"{processor()}, {torch.get_num_threads()} threads, torch {torch.__version__}, Python {platform.python_version()}{note}"
    )


def _print_rows(rows: "list[Row]") -> None:
    from rich.console import Console
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
            "" if row.peak_mb is None else f"{row.peak_mb:,.0f}",
        )
    Console().print(table)


def _print_figures(figures: "list[Figure]", rate: float) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(
        "patches", "ratio", "here", "promised", "", title=f"ratios (matrix multiply rate {rate / 1e9:.0f} Gflop/s)"
    )
    for figure in figures:
        sign = ">=" if figure.at_least else "<="
        table.add_row(
            f"{figure.tokens:,}",
            figure.name,
            f"{figure.value:.2f}",
            f"{sign} {figure.bound:g}",
            "yes" if figure.holds else "no",
        )
    Console().print(table)
