"""Studies: runs of several arms, paired by seed, compared, and put beside the published numbers.

`compare`, `tune`, `reproduce` and `stats` are functions of `gated_srp`, too. Names are resolved on first use (PEP 562).
"""

from typing import TYPE_CHECKING

from gated_srp import lazily

if TYPE_CHECKING:
    from gated_srp.study.cells import Cell, Row, plan
    from gated_srp.study.comparison import CompareResult, compare, stats
    from gated_srp.study.reproduction import ReproduceResult, reproduce
    from gated_srp.study.results import Comparison, Difference
    from gated_srp.study.running import Cost, Declined
    from gated_srp.study.tuning import TuneResult, tune

__all__ = [
    "Cell",
    "CompareResult",
    "Comparison",
    "Cost",
    "Declined",
    "Difference",
    "ReproduceResult",
    "Row",
    "TuneResult",
    "compare",
    "plan",
    "reproduce",
    "stats",
    "tune",
]
_MODULES = {
    "cells": ("Cell", "Row", "plan"),
    "comparison": ("CompareResult", "compare", "stats"),
    "reproduction": ("ReproduceResult", "reproduce"),
    "results": ("Comparison", "Difference"),
    "running": ("Cost", "Declined"),
    "tuning": ("TuneResult", "tune"),
}
__getattr__, __dir__ = lazily(__name__, {name: module for module, names in _MODULES.items() for name in names})
