"""`gated-srp bench`: ours against the textbook on one generated slide, in one process run, alternating, best of several.

Each memory figure comes from a fresh subprocess: peak resident size above the input and the model. Seconds are this machine's;
what counts are the ratios of one run.
"""

from gated_srp_bench.figures import Figure, figures, full_figures, multiply_rate
from gated_srp_bench.measure import Row, best_seconds, growth, memory_arms, peak, time_arms
from gated_srp_bench.subjects import (
    MULTIPLY_OPERATIONS,
    Ours,
    Textbook,
    make,
    make_slide,
    predict_operations,
    run_phase,
)

__all__ = [
    "MULTIPLY_OPERATIONS",
    "Figure",
    "Ours",
    "Row",
    "Textbook",
    "best_seconds",
    "figures",
    "full_figures",
    "growth",
    "make",
    "make_slide",
    "memory_arms",
    "multiply_rate",
    "peak",
    "predict_operations",
    "run_phase",
    "time_arms",
]
