"""Commands on results of many runs."""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from gated_srp.study.results import Comparison


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
        typer.echo(line)


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
