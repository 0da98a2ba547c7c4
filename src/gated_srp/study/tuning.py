"""Tuning the gate's range and width (and its learning rate) on validation, within each seed, and what the choice is worth on the test set.

The base arm is not tuned, so a tuned row never stands alone: `compare` shows it beside the untuned one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd
import yaml

from gated_srp.config.cohort import CohortConfig
from gated_srp.config.load import with_changes
from gated_srp.errors import UserError
from gated_srp.files import write_whole
from gated_srp.models import TUNED, Sizes, find_arm
from gated_srp.progress import Progress, silent
from gated_srp.study.cells import Cell, Row, folds, plan, quick_version, refuse_unpaired, unit_name
from gated_srp.study.results import StudyResult, html
from gated_srp.study.statistics import TTest, t_test

if TYPE_CHECKING:
    from gated_srp.study.engine import Cost, EngineName

DELTAS = (0.5, 1.0, 1.5, 2.0)
WIDTHS = (16, 32, 64, 128)
_SETTING = {"delta": "model.delta", "hidden_dim": "model.hidden_dim", "gate_lr": "train.gate_lr"}
START = (Sizes.delta, Sizes.hidden_dim)  # the defaults, which an untuned user has


@dataclass(frozen=True, eq=False)
class TuneResult(StudyResult):
    """What `tune` chose, beside what a `StudyResult` has; in a notebook it shows the choices.

    Attributes:
        grid: one row per seed and setting: unit, delta, hidden_dim, gate_lr, score, validation, test.
        choices: the setting chosen for each seed.
        optimism: how much of the validation score was luck; None if only a Slurm script was written.
        files: ``tuned.yaml``, which `compare` reads, and ``tuning.csv``.
    """

    arm: str
    metric: str
    grid: pd.DataFrame
    choices: tuple[Choice, ...] = ()
    optimism: Optimism | None = None

    @property
    def table(self) -> pd.DataFrame:
        """One row per seed: the chosen setting and its scores."""
        return pd.DataFrame([vars(choice) for choice in self.choices])

    @property
    def verdict(self) -> str:
        """What was chosen, and what it is worth."""
        if self.optimism is None:
            return f"nothing has run yet; submit {self.script}"
        lines = [
            f"seed {one.unit}: {one.words}; {self.metric} {one.validation:.4f} on validation, "
            f"{one.test:.4f} on test (untuned {one.start_validation:.4f}, {one.start_test:.4f})"
            for one in self.choices
        ]
        return "\n".join([*lines, str(self.optimism)])

    def _repr_html_(self) -> str:
        return html(self.table)


def tune(
    cohort: str | Path | CohortConfig,
    *,
    arm: str = "gated_srp",
    seeds: Sequence[int] | None = None,
    gate_lr: Sequence[float] = (),
    quick: bool = False,
    settings: Mapping[str, Any] | None = None,
    out: str | Path | None = None,
    jobs: int | None = None,
    engine: EngineName = "local",
    address: str | None = None,
    confirm: Callable[[Cost], bool] = lambda cost: True,
    progress: Progress = silent,
) -> TuneResult:
    """Choose delta and the gate's hidden width on validation, within each seed, and freeze them for `compare`.

    Args:
        cohort: the cohort's YAML, or its settings.
        arm: whose gate is tuned.
        gate_lr: factors on the gates' learning rate to try as well, e.g. (1, 10): so many times as many runs.
        quick: fewer epochs and seeds; `compare` with ``quick`` then shows what was chosen.
        seeds, settings, out, jobs, engine, address, confirm, progress: as for `compare`.

    Returns:
        The choices, how optimistic validation was, and the files written.

    Example:
        >>> print(gated_srp.tune("cohort.yaml").verdict)  # doctest: +SKIP
    """
    from gated_srp.config.cohort import open_cohort
    from gated_srp.study.comparison import split_ratio
    from gated_srp.study.engine import Running, run_cells

    running = Running(jobs, engine, address, confirm, progress, part="val")  # no test score before the choice
    config = with_changes(cohort, settings, out)
    seeds = tuple(seeds or config.seeds)
    if quick:
        config, seeds, note = quick_version(config, seeds)
        running.say(note)
    cells = tuning_cells(config, arm, seeds, gate_lr=gate_lr)
    ran = run_cells(cells, {config.name: open_cohort(config)}, running)
    if ran.script:
        return TuneResult(arm, config.metric, tuning_table(()), script=ran.script)
    refuse_unpaired(cells)
    grid = tuning_table(cells)
    if absent := list(dict.fromkeys(cell.unit for cell in cells if cell.unit not in set(grid["unit"]))):
        what = f"no setting is finished, so none is chosen for any seed; the first failed with: {next(iter(ran.failed.values()), 'no reason')}"
        cure = "Mend what failed and start the same command again."
        raise UserError(what, where=f"seed {', '.join(absent)}", cure=cure)
    choices = choose(grid, rates=len(gate_lr) or 1)
    path = freeze(config, arm, choices)
    beside = path.with_name("tuning.csv")
    write_whole(beside, grid.to_csv(index=False, lineterminator="\n"))
    found = optimism(choices, split_ratio(cells))
    return TuneResult(arm, config.metric, grid, choices, found, files=(path, beside), failed=ran.failed)


# Choosing ------------------------------------------------------------------------------------------------------------


def tuning_cells(
    config: CohortConfig, arm: str, seeds: Sequence[int], *, gate_lr: Sequence[float] = ()
) -> tuple[Cell, ...]:
    """The grid for every seed (and fold). `compare` then shows the run of the chosen cell itself."""
    if not find_arm(arm).gated:
        cure = "Name one that has: gated_srp, say. `gated-srp arms` lists them."
        raise UserError(f"{arm} has no gate, so all settings would be one model", where="arm", cure=cure)
    rates = gate_lr or (config.train.gate_lr,)
    grid = [
        dict(zip(_SETTING.values(), (delta, width, float(rate)), strict=True))
        for rate in rates
        for width in WIDTHS
        for delta in DELTAS
    ]
    return plan(config, [Row(f"{arm} {one}", arm, one) for one in grid], seeds)


@dataclass(frozen=True)
class Choice:
    """Of one seed (or fold): the chosen setting and its scores, those of `START`, and the best test score of the grid."""

    unit: str
    delta: float
    hidden_dim: int
    validation: float
    test: float
    start_validation: float
    start_test: float
    best_test: float
    gate_lr: float = 1.0

    @property
    def words(self) -> str:
        return f"delta {self.delta:g}, h {self.hidden_dim}" + f", gate_lr {self.gate_lr:g}" * (self.gate_lr != 1)


def tuning_table(cells: Sequence[Cell]) -> pd.DataFrame:
    """unit, delta, hidden_dim, gate_lr, score (what selects), validation and test (the metric itself), of finished cells."""
    rows = []
    for cell in (cell for cell in cells if cell.run.finished):
        gate, best = cell.config.gate(cell.arm), cell.run.results.get("best_score")
        val, test = (cell.metrics(part).get(cell.config.metric, math.nan) for part in ("val", "test"))
        rows.append((cell.unit, gate.delta, gate.hidden_dim, cell.config.train.gate_lr, best, val, test))
    return pd.DataFrame(rows, columns=["unit", *_SETTING, "score", "validation", "test"])


def choose(table: pd.DataFrame, *, rates: int = 1) -> tuple[Choice, ...]:
    """Per seed the best validation score; ties go to the slower gate, the smaller one, the smaller range. Test scores play no part.

    ``rates``: how many learning rates of the gates were tried.
    """
    chosen, settings = [], len(DELTAS) * len(WIDTHS) * rates
    for unit, part in table.groupby("unit", sort=False):
        if len(part) < settings:
            what = f"only {len(part)} of {settings} settings are finished, so none is chosen"
            raise UserError(what, where=f"seed {unit}", cure="Mend what failed and start the same command again.")
        part = part.sort_values(["score", "gate_lr", "hidden_dim", "delta"], ascending=[False, True, True, True])
        best, slow = part.iloc[0], part["gate_lr"] == part["gate_lr"].min()
        start = part[slow & (part["delta"] == START[0]) & (part["hidden_dim"] == START[1])].iloc[0]
        scores = [*best[["validation", "test"]], *start[["validation", "test"]], part["test"].max(), best["gate_lr"]]
        chosen.append(Choice(str(unit), float(best["delta"]), int(best["hidden_dim"]), *map(float, scores)))
    return tuple(chosen)


@dataclass(frozen=True)
class Optimism:
    """Means over seeds. ``chosen``: validation minus test of the chosen settings; ``start``: the same of the untuned one."""

    chosen: float
    start: float
    gain: TTest  # on the test set, chosen minus untuned, paired by seed
    peeking: float  # the best test score of the grid minus the chosen setting's: what choosing on the test set would have added

    @property
    def by_choosing(self) -> float:
        """The part of the gap that comes from having chosen the best of sixteen."""
        return self.chosen - self.start

    def __str__(self) -> str:
        gain = self.gain
        interval = "" if math.isnan(gain.low) else f" (95 % interval {gain.low:+.4f} to {gain.high:+.4f})"
        added = f"{self.by_choosing:+.4f} is the optimism of choosing"
        by_choosing = added if self.by_choosing > 0 else "choosing added no optimism"
        said = f"validation minus test is {self.chosen:+.4f} for the chosen settings, {self.start:+.4f} untuned; {by_choosing}"
        if math.isnan(self.by_choosing):
            said = "not defined, as the metric is not on validation"
        return (
            f"optimism: {said}.\ngain of tuning on test: {gain.mean:+.4f}{interval}. Choosing on the test set would "
            f"have shown {self.peeking:+.4f} more, none of it real."
        )


def optimism(choices: Sequence[Choice], ratio: float) -> Optimism:
    """What the chosen settings promised on validation and did not keep; ``ratio``: test over training set, for the interval."""
    frame = pd.DataFrame([vars(choice) for choice in choices])
    return Optimism(
        chosen=float((frame["validation"] - frame["test"]).mean()),
        start=float((frame["start_validation"] - frame["start_test"]).mean()),
        gain=t_test((frame["test"] - frame["start_test"]).to_numpy(), ratio),
        peeking=float((frame["best_test"] - frame["test"]).mean()),
    )


# What was frozen -----------------------------------------------------------------------------------------------------


def frozen_path(config: CohortConfig) -> Path:
    """Beside the cohort's runs, where `compare` looks."""
    return config.out / config.name / "tuned.yaml"


def freeze(config: CohortConfig, arm: str, choices: Sequence[Choice]) -> Path:
    """Write the chosen settings; those of seeds tuned before stay."""
    own = config.train.gate_lr
    chosen = {
        one.unit: {"delta": one.delta, "hidden_dim": one.hidden_dim}
        | ({"gate_lr": one.gate_lr} if one.gate_lr != own else {})
        for one in choices
    }
    before = read_frozen(config)
    kept = before["chosen"] if before and before["arm"] == arm else {}
    content = {"arm": arm, "chosen_on": f"validation {config.metric}, within each seed", "chosen": kept | chosen}
    write_whole(path := frozen_path(config), yaml.safe_dump(content, sort_keys=False))
    return path


def read_frozen(config: CohortConfig) -> dict[str, Any] | None:
    """What `freeze` wrote; None if nothing was."""
    path = frozen_path(config)
    if not path.is_file():
        return None
    try:
        content: dict[str, Any] = yaml.safe_load(path.read_text(encoding="utf-8"))
        kinds = {"delta": float, "hidden_dim": int, "gate_lr": float}
        chosen = {
            str(u): {"delta": g["delta"], "hidden_dim": g["hidden_dim"]} | g for u, g in content["chosen"].items()
        }
        chosen = {u: {name: kinds[name](value) for name, value in g.items()} for u, g in chosen.items()}
        return {"arm": str(content["arm"]), "chosen": chosen}
    except (
        OSError,
        yaml.YAMLError,
        LookupError,
        TypeError,
        ValueError,
        AttributeError,
        ArithmeticError,
        RecursionError,
    ) as error:
        cure = "Remove it, or run `gated-srp tune` again."
        raise UserError(f"cannot be read ({error!r})", where=path, cure=cure) from None


def tuned_rows(config: CohortConfig, arms: Sequence[str], seeds: Sequence[int]) -> tuple[list[Row], list[str]]:
    """One more row for the settings that `tune` froze for this cohort, if it did so for all these seeds; and notes."""
    frozen = read_frozen(config)
    if frozen is None or frozen["arm"] not in arms:
        return [], []
    units = [unit_name(config, seed, fold) for seed in seeds for fold in folds(config)]
    if missing := [unit for unit in units if unit not in frozen["chosen"]]:
        note = f"has no setting for seed {', '.join(missing)}, so the tuned row is left out"
        return [], [f"{frozen_path(config)}: {note}"]
    chosen = frozen["chosen"].items()
    changes = {unit: {_SETTING[name]: value for name, value in gate.items()} for unit, gate in chosen}
    return [Row(frozen["arm"] + TUNED, frozen["arm"], by_unit=changes)], []
