"""What the parts of the page of evidence share: a plan's finished runs, and answers in a few words."""

from collections.abc import Iterable
from pathlib import Path

import pandas as pd

from gated_srp.study.statistics import TTest


def finished(plan: dict, stage: dict, results: pd.DataFrame) -> tuple[pd.DataFrame, int]:
    """The primary metric of a stage's finished runs, and how many are planned."""
    cohort = plan["cohorts"][stage["cohort"]]
    units = [
        f"{seed}_fold{fold}" if "folds" in cohort["settings"] else str(seed)
        for seed in stage["seeds"]
        for fold in range(cohort["settings"].get("folds", 1))
    ]
    here = results[(results["cohort"] == stage["cohort"]) & (results["metric"] == cohort["primary"])]
    done = here[here["arm"].isin(stage["arms"]) & here["seed"].isin(units)]
    return done.assign(value=pd.to_numeric(done["value"])), len(stage["arms"]) * len(units)


def rows_of(path: Path) -> pd.DataFrame:
    """A table of results; none where no run is finished."""
    columns = ["cohort", "arm", "seed", "metric", "value"]
    return pd.read_csv(path, dtype={"seed": str}) if path.is_file() else pd.DataFrame(columns=columns)


def lead(claimed: Iterable[float]) -> str:
    """An answer in three words. ``claimed``: differences, 0 where one is not shown."""
    signs = {int(one > 0) - int(one < 0) for one in claimed} - {0}
    return {(): "no difference seen", (1,): "a gain", (-1,): "a loss"}.get(tuple(signs), "gains and losses")


def verdict(test: TTest, p: float) -> str:
    """Of a contrast. ``p``: after its plan's correction; 0 for a hint, which its interval alone decides."""
    if p >= 0.05 or not test.excludes_zero:
        return "not distinguishable"
    return "better" if test.mean > 0 else "worse"
