"""Comparing arms: `compare` trains them and `stats` takes results from anywhere; what finished runs add to a comparison.

`compare` and the other flows write what they find with `reports`, so this module, `tuning` and `reproduction` are a layer above it.
Runs are imported where they are needed: `stats` on a table does without torch.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd

from gated_srp.data.columns import plain
from gated_srp.data.spreadsheet import read_frame
from gated_srp.errors import UserError
from gated_srp.progress import Progress, silent
from gated_srp.study.results import (
    COLUMNS,
    LOWER_IS_BETTER,
    Comparison,
    StudyResult,
    check_margin,
    compare_results,
    html,
    read_results,
)
from gated_srp.study.statistics import MARGIN, RATIO, paired_bootstrap

if TYPE_CHECKING:
    from gated_srp.config.cohort import CohortConfig
    from gated_srp.study.cells import Cell
    from gated_srp.study.engine import Cost, EngineName
    from gated_srp.study.prediction_comparison import PredictionComparison


# The flows -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class CompareResult(StudyResult):
    """What `compare` found and wrote, beside what a `StudyResult` has; in a notebook it shows its table.

    Attributes:
        results: test metrics of all finished runs: cohort, arm, seed, metric, value.
        comparison: the paired differences; None if only a Slurm script was written.
        folder: where tables, figures and README.md are, all listed in ``files``.
        note: how a quick version was cut; empty for a full one.
    """

    results: pd.DataFrame
    comparison: Comparison | None
    folder: Path
    note: str = ""

    @property
    def table(self) -> pd.DataFrame:
        """Every arm against the reference: means, difference, 95 % interval, verdict."""
        return pd.DataFrame() if self.comparison is None else self.comparison.table

    @property
    def verdict(self) -> str:
        """What the comparison shows, in words: the text of README.md."""
        if self.comparison is None:
            return f"nothing has run yet; submit {self.script}"
        return (self.folder / "README.md").read_text(encoding="utf-8")

    def _repr_html_(self) -> str:
        return f"<p>{self.note}</p>" * bool(self.note) + html(self.table)


def compare(
    cohort: str | Path | CohortConfig,
    *,
    arms: Sequence[str] | None = None,
    seeds: Sequence[int] | None = None,
    reference: str | None = None,
    quick: bool = False,
    settings: Mapping[str, Any] | None = None,
    out: str | Path | None = None,
    tables: str | Path | None = None,
    bootstrap: int = 200,
    margin: float = MARGIN,
    jobs: int | None = None,
    engine: EngineName = "local",
    address: str | None = None,
    confirm: Callable[[Cost], bool] = lambda cost: True,
    progress: Progress = silent,
) -> CompareResult:
    """Train arms x seeds on identical splits and say what the paired differences show. Called again, it goes on where it was.

    Args:
        cohort: the cohort's YAML, or its settings.
        arms, seeds: those of the YAML unless named; ``["all"]``: every arm that fits the cohort and its task.
        reference: the arm that others are compared with; ``na`` if it is among them, otherwise the first.
        quick: fewer epochs and seeds for all arms alike, to try it out.
        settings: settings of the YAML to change for all arms alike, e.g. ``{"train.epochs": 5}``.
        out: where runs are written, instead of the YAML's ``out``.
        tables: folder for tables and figures; OUT/COHORT/comparison by default.
        bootstrap: how often patients are resampled; 0: not at all.
        margin: by how much worse than the reference an arm may not be shown to be, for "no worse".
        jobs: cells that run at a time; by default as many as cores, memory and devices allow.
        engine: ``local``, ``ray`` (with ``address``), or ``slurm``, which only writes a script.
        confirm: asked before anything is trained, with the estimated `Cost`.
        progress: called with an `Event` when something has changed.

    Returns:
        Results, differences with intervals and verdicts, and the files written.

    Raises:
        Declined: ``confirm`` said no.
        Interrupted: stopped with Ctrl-C; running cells have saved their states.

    Example:
        >>> found = gated_srp.compare("cohort.yaml", arms=["na", "gated_srp"], seeds=[42, 43, 44])  # doctest: +SKIP
        >>> print(found.verdict)  # doctest: +SKIP
    """
    from gated_srp.config.cohort import open_cohort
    from gated_srp.config.load import with_changes
    from gated_srp.models import fitting_arms
    from gated_srp.reports.tables import write_comparison
    from gated_srp.study.cells import Row, moved_gates, plan, quick_version, run_notes, short_gates
    from gated_srp.study.engine import Running, run_cells
    from gated_srp.study.tuning import tuned_rows

    check_margin(margin)  # not after all cells have trained
    running = Running(jobs, engine, address, confirm, progress)
    config = with_changes(cohort, settings, out)
    arms, seeds, note = tuple(arms or config.arms), tuple(seeds or config.seeds), ""
    if quick:
        config, seeds, note = quick_version(config, seeds)
        running.say(note)
    if arms == ("all",):
        having = {"images": config.images is not None, "covariates": config.covariates is not None}
        arms = fitting_arms(open_cohort(config).table.task, **having, scales=2 if config.features_low else 1)
    reference = reference or ("na" if "na" in arms else arms[0])
    if reference not in arms:
        what = f"{reference!r} is not among the arms: {', '.join(arms)}"
        raise UserError(what, where="reference", cure="Name one of them.")
    more, notes = tuned_rows(config, arms, seeds)
    cells = plan(config, [*(Row.of(arm) for arm in arms), *more], seeds)
    folder = Path(tables) if tables else config.out / config.name / "comparison"
    data = open_cohort(config)
    warnings = short_gates(cells, data)
    for one in warnings if not all(cell.run.finished for cell in cells) else ():
        running.say(one.line)
    ran = run_cells(cells, {config.name: data}, running)
    if ran.script:
        return CompareResult(pd.DataFrame(columns=list(COLUMNS)), None, folder, note, script=ran.script)
    results = collect(cells)
    said = (*([note] if note else []), *notes, *ran.notes, *run_notes(cells), *map(str, warnings), *moved_gates(cells))
    comparison = compare_cells(cells, results, reference, repeats=bootstrap, notes=said, margin=margin)
    title = f"{config.name}{' (quick)' if note else ''}"
    files = write_comparison(folder, cells, results, comparison, title=title, mark=note)
    return CompareResult(results, comparison, folder, note, files=tuple(files), failed=ran.failed)


def stats(
    results: str | Path | pd.DataFrame | Sequence[str | Path] | Mapping[str, pd.DataFrame],
    *,
    reference: str = "na",
    ratio: float | None = None,
    lower_is_better: Collection[str] = (),
    runs: str | Path | None = None,
    repeats: int = 1000,
    margin: float = MARGIN,
) -> Comparison | PredictionComparison:
    """Say what paired results from anywhere show, and no more: intervals, tests, power, verdicts in words.

    Args:
        results: a table (or its file) with the columns cohort, arm, seed, metric, value; or files of predictions of any tool on the
            same patients (or tables by name), one per model: ours, STAMP's and CLAM's as they are.
        reference: the arm that others are compared with; of predictions the first, where none is called so.
        ratio: size of the test set over that of the training set, for the corrected test; from ``runs``, else 0.2 / 0.7.
        lower_is_better: metrics of which less is better, beside the usual ones (loss, Brier score, ...).
        runs: run folders COHORT/ARM/seed42 whose patients are resampled ``repeats`` times.
        margin: by how much worse than the reference an arm may not be shown to be, for "no worse".

    Returns:
        All differences; ``print`` shows the verdicts, ``.table`` is a data frame. Of predictions: metrics with intervals over resampled
        patients, paired differences, and DeLong's test for AUC with the slides of a patient clustered.

    Example:
        >>> rows = [("A", arm, seed, "auc", value + seed / 100) for arm, value in (("na", 0.7), ("srp", 0.8)) for seed in (1, 2)]
        >>> found = stats(pd.DataFrame(rows, columns=["cohort", "arm", "seed", "metric", "value"]))
        >>> found.table["verdict"][0]
        'the same difference, +0.1000, in both seeds: no spread, hence no interval and no claim'
    """
    if isinstance(results, str | Path):
        results = results if _of_metrics(Path(results)) else [results]
    if not isinstance(results, str | Path | pd.DataFrame):
        from gated_srp.study.prediction_comparison import compare_predictions

        given = {
            "ratio": ratio is not None,
            "lower": lower_is_better,
            "runs": runs is not None,
            "margin": margin != MARGIN,
        }
        if ignored := [name for name, asked in given.items() if asked]:
            what = f"{', '.join(ignored)}: for a table of metrics by seed, not for predictions"
            raise UserError(what, where="stats", cure="Leave it out.")
        return compare_predictions(results, reference=reference, repeats=repeats)
    frame, notes = read_results(results)
    lower = LOWER_IS_BETTER | set(lower_is_better)
    if ratio is None and runs is not None:
        from gated_srp.training.folder import RunFolder

        ratio = _mean_ratio(RunFolder(run).split for run in sorted(Path(runs).glob("*/*/seed*")))
    ratio = RATIO if ratio is None else ratio
    found = compare_results(frame, reference, ratio=ratio, lower_is_better=lower, notes=notes, margin=margin)
    if runs is None:
        return found
    root = Path(runs)
    return _with_bootstrap(found, lambda cohort, arm: _pairs(root / cohort, arm, found.reference), repeats)


def _of_metrics(path: Path) -> bool:
    """Whether a file has rows of metrics rather than of predictions; one that has neither is for the former to refuse."""
    if path.is_dir():
        return False
    columns = {plain(str(name)) for name in read_frame(path)[0]}
    return bool({"metric", "seed"} & columns) or not any(
        name.startswith(("prob", "p_", "pred", "risk", "y_")) for name in columns
    )


# From finished cells to a comparison ---------------------------------------------------------------------------------


def collect(cells: Sequence[Cell]) -> pd.DataFrame:
    """Test metrics of the finished cells, at the level that scores: cohort, arm, seed, metric, value (missing: undefined)."""
    from gated_srp.study.cells import refuse_unpaired

    refuse_unpaired(cells)
    rows = [
        (cell.cohort, cell.row, cell.unit, metric, value)
        for cell in cells
        if cell.run.finished
        for metric, value in cell.metrics().items()
    ]
    return pd.DataFrame(rows, columns=list(COLUMNS))


def shown_metrics(cell: Cell) -> tuple[str, ...]:
    """Those that the paper shows for this task; the one that selects comes first if it is none of them (PANDA's kappa)."""
    from gated_srp.tasks import find_task

    usual = find_task(cell.config.task).shown
    return usual if cell.config.metric in usual else (cell.config.metric, *usual)


def compare_cells(
    cells: Sequence[Cell],
    results: pd.DataFrame,
    reference: str,
    *,
    repeats: int = 1000,
    notes: tuple[str, ...] = (),
    margin: float = MARGIN,
) -> Comparison:
    """Every row against the reference by the metrics that the paper shows. ``repeats`` 0: patients are not resampled."""
    shown = {(cell.cohort, metric) for cell in cells for metric in shown_metrics(cell)}
    known = pd.Series(list(zip(results["cohort"], results["metric"], strict=True)), dtype=object).isin(list(shown))
    keep = known.to_numpy() & results["value"].notna().to_numpy()
    if not keep.any():
        raise UserError("no cell is finished, so there is nothing to compare", cure="Mend what failed and start again.")
    unit = "fold" if all(cell.config.folds for cell in cells) else "seed"
    kept = results[keep].reset_index(drop=True)
    found = compare_results(kept, reference, ratio=split_ratio(cells), notes=notes, unit=unit, margin=margin)
    if not repeats:
        return found
    tables = {(cell.cohort, cell.row, cell.unit): cell.predictions() for cell in cells if cell.run.finished}

    def pairs(cohort: str, arm: str) -> list[Pair]:
        units = [unit for *where, unit in tables if where == [cohort, arm]]
        both = [(tables[cohort, arm, unit], tables.get((cohort, found.reference, unit))) for unit in units]
        return [(first, second) for first, second in both if second is not None and len(first)]

    return _with_bootstrap(found, pairs, repeats)


def split_ratio(cells: Sequence[Cell]) -> float:
    """Test over train in the cells' splits; the paper's if there is none."""
    there: dict[tuple[str, str], pd.DataFrame] = {}
    for cell in cells:
        at = (cell.cohort, cell.unit)
        if at not in there and (split := cell.run.split) is not None:
            there[at] = split
    return _mean_ratio(there.values())


def _mean_ratio(splits: Iterable[pd.DataFrame | None]) -> float:
    counts = [split["split"].value_counts() for split in splits if split is not None]
    ratios = [parts.get("test", 0) / parts["train"] for parts in counts if parts.get("train", 0)]
    return float(sum(ratios) / len(ratios)) if ratios else RATIO


# Patients ------------------------------------------------------------------------------------------------------------

Pair = tuple[pd.DataFrame, pd.DataFrame]  # predictions of an arm and of the reference, for one seed's test set


def _with_bootstrap(comparison: Comparison, pairs: Callable[[str, str], list[Pair]], repeats: int) -> Comparison:
    """Each difference of a cohort with its interval over resampled patients; ``pairs`` by cohort and arm."""
    keys = dict.fromkeys((str(one.cohort), one.arm) for one in comparison.cohorts)
    drawn = {key: paired_bootstrap(pairs(*key), metrics_of, repeats=repeats) for key in keys}
    found = (replace(one, bootstrap=drawn[str(one.cohort), one.arm].get(one.metric)) for one in comparison.cohorts)
    return replace(comparison, cohorts=tuple(found))


def metrics_of(predictions: pd.DataFrame) -> Mapping[str, float]:
    """The metrics that a labelled table of predictions gives by itself; its columns tell the task."""
    from gated_srp.tasks import every_task

    for kind in every_task():
        if (found := kind.metrics_of(predictions)) is not None:
            return found
    raise UserError(f"predictions with the columns {', '.join(map(str, predictions))} are of no known task.")


def _pairs(cohort: Path, arm: str, reference: str) -> list[Pair]:
    """Of run folders ARM/seed42 below ``cohort``."""
    from gated_srp.training.folder import RunFolder, read_predictions

    pairs = []
    for folder in sorted((cohort / arm).glob("seed*")):
        other, score = cohort / reference / folder.name, RunFolder(folder).results.get("score")
        # Where the run does not say: survival is scored per case, the rest per slide. Patients are resampled in both.
        for level in (score,) if score else ("slide", "case"):
            paths = [place / f"predictions_test_{level}.csv" for place in (folder, other)]
            if all(path.is_file() for path in paths):
                first, second = map(read_predictions, paths)
                if not score and level == "slide" and "risk" in first:
                    continue
                pairs.append((first, second))
                break
    return pairs
