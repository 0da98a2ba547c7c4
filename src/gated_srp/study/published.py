"""The paper's printed numbers, as data to compare with."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pandas as pd
import yaml

from gated_srp.errors import UserError


@dataclass(frozen=True)
class PublishedTable:
    """One table; ``frame`` has a row a number: name (as printed), arm, cohort, metric, value, what sets rows apart."""

    name: str
    source: str
    statistic: Literal["mean", "std"]
    frame: pd.DataFrame

    def as_results(self) -> pd.DataFrame:
        """In the form of results: each printed number is one "seed"."""
        return self.frame.assign(seed=self.statistic)[["cohort", "arm", "seed", "metric", "value"]]


def read_published(path: str | Path) -> dict[str, PublishedTable]:
    """All tables of a file in the form of ``studies/published.yaml``."""
    try:
        content = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
        return {name: _table(name, table) for name, table in content["tables"].items()}
    except (OSError, yaml.YAMLError, KeyError, TypeError, ValueError) as error:
        raise UserError(f"{path}: not a file of published tables ({error}). Restore studies/published.yaml.") from None


def _table(name: str, table: dict[str, Any]) -> PublishedTable:
    columns = [(cohort, metric) for cohort, metrics in table["columns"].items() for metric in metrics]
    rows = []
    for row in table["rows"]:
        about = {key: value for key, value in row.items() if key != "values"}
        for (cohort, metric), value in zip(columns, row["values"], strict=True):
            rows.append({**about, "cohort": cohort, "metric": metric, "value": value})
    return PublishedTable(name, table["source"], table["statistic"], pd.DataFrame(rows))
