"""Several targets of one table: a comparison of arms for each, and one table over them all (`compare_targets`)."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd

from gated_srp.errors import UserError, counted
from gated_srp.files import write_whole
from gated_srp.progress import Event, Progress, silent
from gated_srp.records import csv_text
from gated_srp.study.comparison import CompareResult, compare
from gated_srp.study.results import LOWER_IS_BETTER, StudyResult, html
from gated_srp.study.statistics import holm

if TYPE_CHECKING:
    from gated_srp.config.cohort import CohortConfig

LEVEL = 0.05


@dataclass(frozen=True, eq=False)
class TargetsResult(StudyResult):
    """What `compare_targets` found and wrote, beside what a `StudyResult` has.

    Attributes:
        studies: the `CompareResult` of each target.
        table: one row per target and arm: target, task, slides, patients, metric, arm, mean, reference, difference, low, high, p, p_holm, verdict.
        rule: over what Holm's correction is, in words.
        folder: where summary.csv and README.md are.
    """

    studies: dict[str, CompareResult]
    table: pd.DataFrame
    rule: str
    folder: Path

    @property
    def scripts(self) -> tuple[Path, ...]:
        """Slurm's, one per target that has something to run."""
        return tuple(found.script for found in self.studies.values() if found.script)

    @property
    def verdict(self) -> str:
        """The table in words: the text of README.md."""
        if self.scripts:
            return f"nothing has run yet; submit {', '.join(map(str, self.scripts))}"
        return (self.folder / "README.md").read_text(encoding="utf-8")

    def _repr_html_(self) -> str:
        return f"{html(self.table)}<p>{self.rule}</p>"


def compare_targets(
    cohort: str | Path | CohortConfig,
    targets: Sequence[str],
    *,
    settings: Mapping[str, Any] | None = None,
    out: str | Path | None = None,
    tables: str | Path | None = None,
    progress: Progress = silent,
    **options: Any,
) -> TargetsResult:
    """`compare` for each of several columns of one table, and one summary with Holm's correction over all of them.

    Args:
        cohort: the cohort's YAML, or its settings; its own ``target`` plays no part.
        targets: columns to predict, one after the other; ``score:regression`` says which task a column is for, where it is not classes.
        settings: settings of the YAML to change for all of them.
        out: where runs are written, instead of the YAML's ``out``; those of a target are in OUT/NAME_TARGET.
        tables: folder of the summary; OUT/NAME_targets by default. Each study writes its own into OUT/NAME_TARGET/comparison.
        progress: as in `compare`.
        options: the other arguments of `compare`: arms, seeds, reference, quick, bootstrap, margin, jobs, ...

    Returns:
        The studies by target and the summary. Each target is a study of its own: slides without its label are left out of it, and splits
        are drawn on what is left.

    Example:
        >>> found = gated_srp.compare_targets("cohort.yaml", ["er", "her2", "score:regression"], seeds=[42, 43])  # doctest: +SKIP
        >>> found.table[["target", "arm", "difference", "p_holm"]]  # doctest: +SKIP
    """
    from gated_srp.config.load import with_changes

    configs = _configs(cohort, targets, settings, out)
    first = next(iter(configs.values()))
    studies: dict[str, CompareResult] = {}
    for number, (target, config) in enumerate(configs.items(), 1):
        progress(Event("study", text=f"target {target} ({number} of {len(configs)})"))
        studies[target] = compare(config, progress=progress, **options)
    name = with_changes(cohort, {**(settings or {}), "target": first.target, "task": first.task}, out).name
    folder = Path(tables) if tables else first.out / f"{name}_targets"
    scripts = [found.script for found in studies.values() if found.script]
    table, rule = _summary(configs, studies)
    files = [] if scripts else _written(folder, table, rule, studies)
    failed = {f"{target}, {name}": why for target, found in studies.items() for name, why in found.failed.items()}
    return TargetsResult(
        studies, table, rule, folder, files=tuple(files), failed=failed, script=scripts[0] if scripts else None
    )


def _configs(
    cohort: str | Path | CohortConfig,
    targets: Sequence[str],
    settings: Mapping[str, Any] | None,
    out: str | Path | None,
) -> dict[str, CohortConfig]:
    """The settings of each target, whose table is read: what is wrong with one is said before anything is trained."""
    from gated_srp.config.cohort import open_cohort
    from gated_srp.config.load import with_changes
    from gated_srp.tasks import task_names

    if not targets:
        raise UserError("none is named", where="targets", cure="Name columns of the table, e.g. --targets er,her2.")
    found: dict[str, CohortConfig] = {}
    for asked in targets:
        column, _, task = asked.rpartition(":")
        named = {"target": column, "task": task} if column and task in task_names() else {"target": asked}
        target = named["target"]
        if target in found:
            raise UserError(f"{target!r} is named twice", where="targets", cure="Name each once.")
        try:
            config = with_changes(cohort, {**(settings or {}), **named}, out)
            name = f"{config.name}_{re.sub(r'[^A-Za-z0-9_.+-]+', '_', target)}"
            config = config.model_copy(update={"name": name})
            open_cohort(config)
        except UserError as error:
            raise error.changed(
                where=f"target {target!r}: {error.where}" if error.where else f"target {target!r}"
            ) from None
        if name in {other.name for other in found.values()}:
            cure = "Rename one of the columns: their runs would lie in one folder."
            raise UserError(f"{target!r} and another target are both written as {name}", where="targets", cure=cure)
        found[target] = config
    return found


def _summary(configs: Mapping[str, CohortConfig], studies: Mapping[str, CompareResult]) -> tuple[pd.DataFrame, str]:
    """By the metric that selects, every arm against the reference; Holm's correction over all rows."""
    from gated_srp.config.cohort import open_cohort

    rows: list[dict[str, Any]] = []
    for target, config in configs.items():
        comparison = studies[target].comparison
        frame = open_cohort(config).slides(config.seeds[0])
        about = {"target": target, "task": config.task, "slides": len(frame), "patients": frame["case"].nunique()}
        for one in comparison.cohorts if comparison else ():
            if one.metric == config.metric:
                numbers = {"mean": one.means[0], "reference": one.means[1], "difference": one.test.mean}
                ends = {"low": one.test.low, "high": one.test.high, "p": one.test.p}
                rows.append(about | {"metric": one.metric, "arm": one.arm} | numbers | ends)
    table = pd.DataFrame(rows, columns=list(_COLUMNS))
    table["p_holm"] = holm(table["p"].astype(float)) if len(table) else []
    table["verdict"] = [_verdict(row) for row in table.to_dict("records")]
    family = int(table["p_holm"].notna().sum())
    of = f"{counted(len(configs), 'target')}, {counted(table['arm'].nunique(), 'arm')} against the reference"
    rule = (
        f"p_holm: Holm's correction over the {counted(family, 'difference')} of this table ({of}), by the metric that selects. "
        "The pages of the single targets correct within a target alone. Verdicts need an interval that excludes zero and p_holm below 0.05."
    )
    return table, rule


_COLUMNS = (
    *("target", "task", "slides", "patients", "metric", "arm", "mean", "reference"),
    *("difference", "low", "high", "p", "p_holm", "verdict"),
)


def _verdict(row: Mapping[Any, Any]) -> str:
    if not row["p_holm"] < LEVEL or row["low"] <= 0 <= row["high"]:
        return "not distinguishable"
    return "better" if (row["difference"] > 0) != (row["metric"] in LOWER_IS_BETTER) else "worse"


def _written(folder: Path, table: pd.DataFrame, rule: str, studies: Mapping[str, CompareResult]) -> list[Path]:
    shown = table.copy()
    for name in ("mean", "reference", "difference", "low", "high"):
        shown[name] = shown[name].map("{:.4f}".format)
    for name in ("p", "p_holm"):
        shown[name] = shown[name].map("{:.4g}".format)
    rows: list[list[Any]] = [list(shown.columns), ["---"] * shown.shape[1], *shown.values.tolist()]
    lines = [f"| {' | '.join(map(str, row))} |" for row in rows]
    links = [f"- {target}: {found.folder / 'README.md'}" for target, found in studies.items()]
    text = "\n".join(["# Targets", "", *lines, "", rule, "", "The study of each target:", "", *links, ""])
    write_whole(folder / "summary.csv", csv_text(table))
    write_whole(folder / "README.md", text)
    return [folder / "summary.csv", folder / "README.md"]
