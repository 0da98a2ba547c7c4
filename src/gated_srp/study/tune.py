"""Choosing the gate's range and width on validation, within each seed, and what that choosing is worth.

The base gets no search, so a tuned row never stands alone: `compare` shows it beside the untuned one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
import yaml

from gated_srp.config.schema import CohortConfig
from gated_srp.errors import UserError
from gated_srp.files import write_whole
from gated_srp.models import TUNED, Sizes
from gated_srp.study.cells import Cell, Row, plan, unit_name
from gated_srp.study.statistics import TTest, t_test

DELTAS = (0.5, 1.0, 1.5, 2.0)
WIDTHS = (16, 32, 64, 128)
START = (Sizes.delta, Sizes.hidden_dim)  # an untuned user's


def tuning_cells(config: CohortConfig, arm: str, seeds: Sequence[int]) -> tuple[Cell, ...]:
    """The grid for every seed (and fold). A chosen cell is the very run that `compare` then shows."""
    rows = [
        Row(f"{arm} delta {delta:g} h {width}", arm, {"model.delta": delta, "model.hidden_dim": width})
        for width in WIDTHS
        for delta in DELTAS
    ]
    return plan(config, rows, seeds)


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


def tuning_table(cells: Sequence[Cell]) -> pd.DataFrame:
    """unit, delta, hidden_dim, score (what selects), validation and test (the metric itself), of finished cells."""
    rows = []
    for cell in cells:
        if not cell.run.finished:
            continue
        found, gate = cell.run.read_json("metrics.json"), cell.config.gate(cell.arm)
        val, test = (_metric(found, part, cell) for part in ("val", "test"))
        rows.append((cell.unit, gate.delta, gate.hidden_dim, found.get("best_score"), val, test))
    return pd.DataFrame(rows, columns=["unit", "delta", "hidden_dim", "score", "validation", "test"])


def _metric(found: Mapping[str, Any], part: str, cell: Cell) -> float:
    value = ((found.get(part) or {}).get(cell.config.score) or {}).get(cell.config.metric)
    return math.nan if value is None else float(value)


def choose(table: pd.DataFrame) -> tuple[Choice, ...]:
    """Per seed the best validation score; ties go to the smaller gate, then to the smaller range. The test is not looked at."""
    chosen = []
    for unit, part in table.groupby("unit", sort=False):
        if len(part) < len(DELTAS) * len(WIDTHS):
            raise UserError(
                f"seed {unit}: only {len(part)} of {len(DELTAS) * len(WIDTHS)} settings are finished, so none is chosen. "
                "Mend what failed and start the same command again."
            )
        best = part.sort_values(["score", "hidden_dim", "delta"], ascending=[False, True, True]).iloc[0]
        start = part[(part["delta"] == START[0]) & (part["hidden_dim"] == START[1])].iloc[0]
        chosen.append(
            Choice(
                unit=str(unit),
                delta=float(best["delta"]),
                hidden_dim=int(best["hidden_dim"]),
                validation=float(best["validation"]),
                test=float(best["test"]),
                start_validation=float(start["validation"]),
                start_test=float(start["test"]),
                best_test=float(part["test"].max()),
            )
        )
    return tuple(chosen)


@dataclass(frozen=True)
class Optimism:
    """Means over seeds. ``chosen``: validation minus test of the chosen settings; ``start``: the same of the untuned one."""

    chosen: float
    start: float
    gain: TTest  # on the test set, chosen minus untuned, paired by seed
    peeking: (
        float  # what choosing on the test set would have added: the best test score of the grid minus the chosen one's
    )

    @property
    def by_choosing(self) -> float:
        """The part of the gap that comes from having chosen the best of sixteen."""
        return self.chosen - self.start


def optimism(choices: Sequence[Choice], ratio: float) -> Optimism:
    """What the chosen settings promised on validation and did not keep; ``ratio`` of test to training, for the interval."""
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
    chosen = {choice.unit: {"delta": choice.delta, "hidden_dim": choice.hidden_dim} for choice in choices}
    before = read_frozen(config)
    kept = before["chosen"] if before and before["arm"] == arm else {}
    content = {"arm": arm, "chosen_on": f"validation {config.metric}, within each seed", "chosen": kept | chosen}
    path = frozen_path(config)
    write_whole(path, yaml.safe_dump(content, sort_keys=False))
    return path


def read_frozen(config: CohortConfig) -> dict[str, Any] | None:
    """What `freeze` wrote; None if nothing was."""
    path = frozen_path(config)
    if not path.is_file():
        return None
    try:
        content: dict[str, Any] = yaml.safe_load(path.read_text(encoding="utf-8"))
        chosen = {
            str(u): {"delta": float(g["delta"]), "hidden_dim": int(g["hidden_dim"])}
            for u, g in content["chosen"].items()
        }
        return {"arm": str(content["arm"]), "chosen": chosen}
    except (OSError, yaml.YAMLError, KeyError, TypeError, ValueError, AttributeError) as error:
        raise UserError(f"{path}: cannot be read ({error!r}). Remove it, or run `gated-srp tune` again.") from None


def tuned_rows(config: CohortConfig, arms: Sequence[str], seeds: Sequence[int]) -> tuple[list[Row], list[str]]:
    """A row more for what `gated-srp tune` froze for this cohort, if it did so for all these seeds; and notes."""
    frozen = read_frozen(config)
    if frozen is None or frozen["arm"] not in arms:
        return [], []
    units = [
        unit_name(config, seed, fold) for seed in seeds for fold in range(config.folds.number if config.folds else 1)
    ]
    if missing := [unit for unit in units if unit not in frozen["chosen"]]:
        return [], [
            f"{frozen_path(config)}: has no setting for seed {', '.join(missing)}, so the tuned row is left out"
        ]
    changes = {
        unit: {"model.delta": gate["delta"], "model.hidden_dim": gate["hidden_dim"]}
        for unit, gate in frozen["chosen"].items()
    }
    return [Row(frozen["arm"] + TUNED, frozen["arm"], by_unit=changes)], []
