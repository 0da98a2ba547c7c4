"""Choosing delta and hidden width on validation, within each seed, and what that choosing costs."""

from __future__ import annotations

from collections.abc import Sequence

from gated_srp.data.configschema import CohortConfig
from gated_srp.study.matrix import Row


def tuned_rows(config: CohortConfig, arms: Sequence[str]) -> list[Row]:
    """A row more for what `gated-srp tune` froze for this cohort, if it did."""
    return []
