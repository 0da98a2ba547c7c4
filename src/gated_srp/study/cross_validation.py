"""Cross-validation: `crossval` trains every fold, pools what each model says of the patients it has not seen, and says how sure that is."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from gated_srp.errors import UserError, counted
from gated_srp.files import write_whole
from gated_srp.progress import Progress, silent
from gated_srp.study.comparison import collect, metrics_of, shown_metrics, split_ratio
from gated_srp.study.results import Comparison, StudyResult, compare_results, html

if TYPE_CHECKING:
    from gated_srp.config.cohort import CohortConfig, CohortData
    from gated_srp.study.cells import Cell
    from gated_srp.study.engine import Cost, EngineName

USUAL_FOLDS = 5
POOLED_AND_MEAN = (
    "Pooled: all out-of-fold predictions are one table. A metric that ranks (AUC, C-index, mAP) then also compares patients of different folds, "
    "whose scores come from different models with offsets of their own. Mean: every fold is ranked within itself and the folds are averaged. "
    "They differ where the models' scores are not on one scale; pooled is then usually the lower one, and a single threshold for all "
    "models is worth the pooled one. Small folds make the mean noisy, and a fold without a class has no AUC and is left out of the mean."
)
INTERVALS = (
    "Intervals are percentiles over resampled patients with the trained models as they are: they say how sure the numbers are for these models, "
    "not how much they would change with other training sets; the spread over folds hints at that."
)


@dataclass(frozen=True, eq=False)
class CrossvalResult(StudyResult):
    """What `crossval` found and wrote, beside what a `StudyResult` has; in a notebook it shows its metrics.

    Attributes:
        predictions: the pooled out-of-fold table at the level that scores: arm, fold, slide or case, truth, predictions.
        metrics: arm, metric, pooled with its interval (low, high), mean over folds with its own, std over folds, folds that define it.
        folds: test metrics of every fold: arm, fold, metric, value.
        differences: arm against the reference: metric, pooled and mean difference with intervals over patients; empty with one arm.
        comparison: the same paired by fold (corrected t-test); None with one arm.
        notes: what to know beside the numbers.
        folder: where tables and README.md are.
    """

    predictions: pd.DataFrame
    metrics: pd.DataFrame
    folds: pd.DataFrame
    differences: pd.DataFrame
    comparison: Comparison | None
    notes: tuple[str, ...]
    folder: Path
    text: str = ""

    @property
    def verdict(self) -> str:
        """What it shows, in words: the text of README.md."""
        return self.text if self.script is None else f"nothing has run yet; submit {self.script}"

    def _repr_html_(self) -> str:
        return html(self.metrics)


def crossval(
    cohort: str | Path | CohortConfig,
    *,
    folds: int | None = None,
    arms: Sequence[str] | None = None,
    seed: int | None = None,
    reference: str | None = None,
    settings: Mapping[str, Any] | None = None,
    out: str | Path | None = None,
    tables: str | Path | None = None,
    bootstrap: int = 1000,
    jobs: int | None = None,
    engine: EngineName = "local",
    address: str | None = None,
    confirm: Callable[[Cost], bool] = lambda cost: True,
    progress: Progress = silent,
) -> CrossvalResult:
    """Train all folds and pool their out-of-fold predictions. Called again, it goes on where it was.

    Args:
        cohort: the cohort's YAML, or its settings.
        folds: how many; those of the YAML, else all that its ``split`` has, else 5.
        arms: the cohort's main arm unless named; several share every fold and are compared.
        seed: of the folds, the start weights and the order of slides; the cohort's first.
        reference: the arm that others are compared with; ``na`` if it is among them, otherwise the first.
        settings: settings of the YAML to change, e.g. ``{"train.patience": 5, "folds.by": "site"}``.
        out: where runs are written, instead of the YAML's ``out``.
        tables: folder for the tables; OUT/COHORT/crossval by default.
        bootstrap: how often patients are resampled.
        jobs, engine, address, confirm, progress: as for `compare`.

    Returns:
        Pooled predictions, metrics with intervals, per fold too, paired differences between arms, and the files written.

    Example:
        >>> found = gated_srp.crossval("cohort.yaml", folds=5, arms=["na", "gated_srp"])  # doctest: +SKIP
        >>> found.metrics, found.predictions  # doctest: +SKIP
    """
    from gated_srp.config.cohort import open_cohort
    from gated_srp.config.load import with_changes
    from gated_srp.study.cells import Row, plan, run_notes
    from gated_srp.study.engine import Running, run_cells

    running = Running(jobs, engine, address, confirm, progress)
    config = with_changes(cohort, settings, out)
    seed = config.seeds[0] if seed is None else seed
    if folds is not None or config.folds is None:
        config = with_changes(config, {"folds.number": folds or _folds_of(config, seed)})
    arms = tuple(arms or [config.main_arm])
    reference = reference or ("na" if "na" in arms else arms[0])
    if reference not in arms:
        what = f"{reference!r} is not among the arms: {', '.join(arms)}"
        raise UserError(what, where="reference", cure="Name one of them.")
    cells = plan(config, [Row.of(arm) for arm in arms], [seed])
    folder = Path(tables) if tables else config.out / config.name / "crossval"
    data = open_cohort(config)
    ran = run_cells(cells, {config.name: data}, running)
    if ran.script:
        nothing = pd.DataFrame()
        return CrossvalResult(nothing, nothing, nothing, nothing, None, (), folder, script=ran.script)
    whole, gaps = _complete(cells)
    results = collect(whole)
    pooled = {arm: _pooled(whole, arm, config.score) for arm in arms}
    table = pd.concat([one.assign(arm=arm) for arm, one in pooled.items()], ignore_index=True)
    table = table[["arm", *(name for name in table if name != "arm")]]
    metrics, differences = _scores(pooled, reference, repeats=bootstrap)
    notes = (*gaps, *ran.notes, *_coverage(data, pooled[reference], config.score), *run_notes(whole))
    comparison = None
    if len(arms) > 1:
        shown = results[results["metric"].isin(shown_metrics(cells[0])) & results["value"].notna()]
        shown = shown.reset_index(drop=True)
        comparison = compare_results(shown, reference, ratio=split_ratio(whole), unit="fold")
    of_folds = results.rename(columns={"seed": "fold"}).drop(columns="cohort")
    of_folds["fold"] = of_folds["fold"].str.rpartition("fold")[2].astype(int)
    patients = table["case"].nunique()
    text = _text(cells[0], len(arms), metrics, differences, comparison, notes, bootstrap, patients)
    found = CrossvalResult(table, metrics, of_folds, differences, comparison, notes, folder, text, failed=ran.failed)
    facts = {
        "cohort": config.name,
        "folds": len(pooled[reference]["fold"].unique()),
        "seed": seed,
        "score": config.score,
    }
    return _written(found, whole, arms, facts | {"bootstrap": bootstrap, "patients": patients, "reference": reference})


def _folds_of(config: CohortConfig, seed: int) -> int:
    """Where nobody said how many: all that a split file has."""
    if config.split is None:
        return USUAL_FOLDS
    from gated_srp.data.imported_splits import available_folds

    return available_folds(config.split, seed)


def _complete(cells: Sequence[Cell]) -> tuple[list[Cell], tuple[str, ...]]:
    """The cells of folds that all arms have finished, and what is missing."""
    missing = sorted({cell.fold for cell in cells if not cell.run.finished})
    whole = [cell for cell in cells if cell.fold not in missing]
    if not whole:
        raise UserError("no fold is finished", where="crossval", cure="Mend what failed and start again.")
    folds = {cell.fold for cell in cells}
    which = f"fold{'s' * (len(missing) > 1)} {', '.join(map(str, missing))} of {len(folds)}"
    said = f"INCOMPLETE: {which} not finished and left out, so this is no whole cross-validation; start the same command again"
    return whole, (said,) if missing else ()


def _pooled(cells: Sequence[Cell], arm: str, level: str) -> pd.DataFrame:
    """Test predictions of an arm's folds below each other, columns that all of them have, with the column ``fold`` in front."""
    own = [cell for cell in cells if cell.row == arm]
    tables = [cell.run.predictions("test", level) for cell in own]
    shared = [
        name for name in tables[0] if all(name in table for table in tables)
    ]  # bins of survival, temperatures differ
    table = pd.concat([one[shared].assign(fold=cell.fold) for one, cell in zip(tables, own, strict=True)])
    units = [name for name in ("fold", "case", "slide") if name in table]
    return table.sort_values(units, kind="stable", ignore_index=True)[["fold", *shared]]


def _scores(pooled: Mapping[str, pd.DataFrame], reference: str, *, repeats: int) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Metrics and differences of all arms from the same draws of patients."""
    from gated_srp.training.evaluate import bootstrap

    first = pooled[reference]
    for table in pooled.values():
        if not first[["fold", "case"]].equals(table[["fold", "case"]]):
            raise UserError("the arms' folds hold different patients", where="crossval", cure="Remove the older runs.")

    def scores(chosen: pd.DataFrame) -> Mapping[Any, float]:
        found: dict[tuple[str, str, str], float] = {}
        rows = chosen["row"].to_numpy()
        for arm, table in pooled.items():
            drawn = table.iloc[rows]
            for name, value in metrics_of(drawn).items():
                found[arm, name, "pooled"] = value
            parts = [metrics_of(part) for _, part in drawn.groupby("fold")]
            for name in parts[0]:
                found[arm, name, "mean"] = _mean([part[name] for part in parts])
        theirs = {key[1:]: value for key, value in found.items() if key[0] == reference}
        apart = {(arm, name, f"{how} apart"): value - theirs[name, how] for (arm, name, how), value in found.items()}
        return found | {key: value for key, value in apart.items() if key[0] != reference}

    drawn = bootstrap(pd.DataFrame({"case": first["case"], "row": range(len(first))}), scores, repeats=repeats)
    by_key: dict[Any, tuple[float, float, float]] = {
        row["metric"]: (row["value"], row["low"], row["high"]) for row in drawn.to_dict("records")
    }
    metrics, differences = [], []
    for arm, name, how in by_key:
        if how == "pooled":
            each = [metrics_of(part)[name] for _, part in pooled[arm].groupby("fold")]
            known = [value for value in each if not math.isnan(value)]
            spread = float(np.std(known, ddof=1)) if len(known) > 1 else math.nan
            metrics.append((arm, name, *by_key[arm, name, how], *by_key[arm, name, "mean"], spread, len(known)))
        elif how == "pooled apart":
            differences.append((arm, reference, name, *by_key[arm, name, how], *by_key[arm, name, "mean apart"]))
    ends = ["low", "high"]
    columns = ["pooled", *ends, "mean", *(f"mean_{end}" for end in ends)]
    return (
        pd.DataFrame(metrics, columns=["arm", "metric", *columns, "std", "folds"]),
        pd.DataFrame(differences, columns=["arm", "reference", "metric", *columns]),
    )


def _mean(values: Sequence[float]) -> float:
    known = [value for value in values if not math.isnan(value)]
    return float(np.mean(known)) if known else math.nan


def _coverage(data: CohortData, pooled: pd.DataFrame, level: str) -> Iterator[str]:
    """Whom the folds test never, or more than once (CLAM's do not divide a cohort, they draw from it)."""
    times = pooled[level].value_counts()
    whole = data.table.frame[data.table.frame["slide"].isin(data.matches.found)][level].nunique()
    unit = {"slide": "slide", "case": "patient"}[level]
    if len(times) < whole:
        yield f"{whole - len(times)} of {counted(whole, unit)} are in the test part of no fold and therefore not scored"
    if (several := int((times > 1).sum())) > 0:
        yield f"{several} of {counted(whole, unit)} are tested in several folds: all their predictions count, and they are resampled together"


# What is said and written --------------------------------------------------------------------------------------------


def _text(
    cell: Cell,
    arms: int,
    metrics: pd.DataFrame,
    differences: pd.DataFrame,
    comparison: Comparison | None,
    notes: Sequence[str],
    repeats: int,
    patients: int,
) -> str:
    from gated_srp.study.cells import folds

    config, shown = cell.config, shown_metrics(cell)
    by = config.folds.by if config.folds else "patient"
    source = f"of {config.split.name}" if config.split else f"by {by}"
    lines = [f"# Cross-validation of {config.name}", ""]
    lines += [
        f"{counted(len(folds(config)), 'fold')} {source}, seed {cell.seed}, scored by {config.score}; 95 % intervals over {repeats:,} "
        f"draws of {counted(patients, 'patient')}.",
        "",
    ]
    lines += [f"Note: {note}." for note in notes] + [""] * bool(notes)
    lines += ["| arm | metric | pooled | mean of folds | std of folds |", "|---|---|---|---|---|"]
    for row in metrics[metrics["metric"].isin(shown)].to_dict("records"):
        fewer = "" if row["folds"] == len(folds(config)) else f" (n={row['folds']})"
        pooled = _interval(row["pooled"], row["low"], row["high"])
        mean = _interval(row["mean"], row["mean_low"], row["mean_high"])
        lines.append(f"| {row['arm']} | {row['metric']} | {pooled} | {mean}{fewer} | {row['std']:.4f} |")
    if arms > 1:
        lines += ["", "## Differences, paired", ""]
    for row in differences[differences["metric"].isin(shown)].to_dict("records"):
        who = f"{row['arm']} against {row['reference']}, {row['metric']}"
        pooled = _interval(row["pooled"], row["low"], row["high"], sign="+")
        mean = _interval(row["mean"], row["mean_low"], row["mean_high"], sign="+")
        lines.append(f"- {who}: pooled {pooled}, mean of folds {mean}, over patients.")
        pairs = comparison.cohorts if comparison else ()
        lines += [f"  Over folds: {d.verdict}." for d in pairs if (d.arm, d.metric) == (row["arm"], row["metric"])]
    return "\n".join([*lines, "", "## How to read it", "", POOLED_AND_MEAN, "", INTERVALS, ""])


def _interval(value: float, low: float, high: float, sign: str = "") -> str:
    return "not defined" if math.isnan(value) else f"{value:{sign}.4f} ({low:{sign}.4f} to {high:{sign}.4f})"


def _written(
    found: CrossvalResult, cells: Sequence[Cell], arms: Sequence[str], facts: Mapping[str, Any]
) -> CrossvalResult:
    """README.md, tables as CSV, everything as crossval.json; predictions also at the level that does not score, and in STAMP's form."""
    from dataclasses import replace

    from gated_srp.data.prediction_tables import stamp_table
    from gated_srp.records import csv_text
    from gated_srp.training.folder import defined

    other = "case" if facts["score"] == "slide" else "slide"
    tables = {"metrics": found.metrics, "folds": found.folds, f"predictions_{facts['score']}": found.predictions}
    tables |= {"differences": found.differences} if len(arms) > 1 else {}
    if all((cell.run.path / f"predictions_test_{other}.csv").is_file() for cell in cells):
        both = [_pooled(cells, arm, other).assign(arm=arm) for arm in arms]
        tables[f"predictions_{other}"] = pd.concat(both, ignore_index=True)
    content = dict(facts) | {
        "notes": list(found.notes),
        "failed": {name: str(why) for name, why in found.failed.items()},
    }
    content |= {"metrics": found.metrics.to_dict("records"), "by_fold": found.folds.to_dict("records")}
    content |= {"differences": found.differences.to_dict("records")}
    content |= {"over_folds": found.comparison.as_json()} if found.comparison else {}
    files = [
        found.folder / "README.md",
        *(found.folder / f"{name}.csv" for name in tables),
        found.folder / "crossval.json",
    ]
    texts = [
        found.text,
        *map(csv_text, tables.values()),
        json.dumps(defined(content), indent=2, allow_nan=False) + "\n",
    ]
    if "predictions_case" in tables:  # as STAMP's crossval leaves them
        target = cells[0].config.target
        for (arm, fold), part in tables["predictions_case"].groupby(["arm", "fold"]):
            files.append(found.folder / "stamp" / str(arm) / f"split-{fold}" / "patient-preds.csv")
            texts.append(csv_text(stamp_table(part, target if isinstance(target, str) else "label")))
    for path, text in zip(files, texts, strict=True):
        write_whole(path, text)
    return replace(found, files=tuple(files))
