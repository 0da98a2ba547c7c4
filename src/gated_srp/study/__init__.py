"""Studies: runs of several arms, paired by seed, compared, and put beside the published numbers.

`compare`, `crossval`, `tune`, `reproduce` and `stats` are functions of `gated_srp`, too. Names are resolved on first use (PEP 562).
"""

from gated_srp import lazily

_HOMES = {
    **dict.fromkeys(("Cell", "Row", "plan"), "cells"),
    **dict.fromkeys(("CompareResult", "compare", "stats"), "comparison"),
    **dict.fromkeys(("CrossvalResult", "crossval"), "cross_validation"),
    **dict.fromkeys(("Cost", "Declined"), "engine"),
    "PredictionComparison": "prediction_comparison",
    **dict.fromkeys(("ReproduceResult", "reproduce"), "reproduction"),
    **dict.fromkeys(("Comparison", "Difference"), "results"),
    **dict.fromkeys(("TargetsResult", "compare_targets"), "targets"),
    **dict.fromkeys(("TuneResult", "tune"), "tuning"),
}

__getattr__, __dir__ = lazily(__name__, _HOMES)
