"""Gated Spatial Redundancy Projection for whole-slide pathology transformers.

Names are resolved on first use (PEP 562), so that the command line's ``--help`` does not import torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.2.0"  # the one place: pyproject.toml reads it
__all__ = [
    "GatedSRP",
    "PatchGraph",
    "UserError",
    "__version__",
    "attach",
    "check",
    "compare",
    "evaluate",
    "explain",
    "extract",
    "heatmap",
    "init",
    "load_model",
    "predict",
    "report",
    "reproduce",
    "stats",
    "trace",
    "train",
    "tune",
]

if TYPE_CHECKING:
    from gated_srp.checks.check import check
    from gated_srp.cohort_draft import init
    from gated_srp.errors import UserError
    from gated_srp.foreign import attach
    from gated_srp.models import load_model
    from gated_srp.reports.explain import explain
    from gated_srp.reports.heatmap import heatmap
    from gated_srp.reports.page import report
    from gated_srp.slides.extract import extract
    from gated_srp.srp import GatedSRP, PatchGraph
    from gated_srp.srp.trace import trace
    from gated_srp.study import compare, reproduce, stats, tune
    from gated_srp.training.evaluate import evaluate
    from gated_srp.training.predict import predict
    from gated_srp.training.train import train

_HOMES = {
    "GatedSRP": "gated_srp.srp.module",
    "PatchGraph": "gated_srp.srp.graph",
    "UserError": "gated_srp.errors",
    "attach": "gated_srp.foreign.handle",
    "compare": "gated_srp.study.comparison",
    "load_model": "gated_srp.models.store",
    "check": "gated_srp.checks.check",
    "evaluate": "gated_srp.training.evaluate",
    "explain": "gated_srp.reports.explain",
    "extract": "gated_srp.slides.extract",
    "heatmap": "gated_srp.reports.heatmap",
    "init": "gated_srp.cohort_draft",
    "predict": "gated_srp.training.predict",
    "report": "gated_srp.reports.page",
    "reproduce": "gated_srp.study.reproduction",
    "stats": "gated_srp.study.comparison",
    "trace": "gated_srp.srp.trace",
    "train": "gated_srp.training.train",
    "tune": "gated_srp.study.tuning",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'gated_srp' has no attribute {name!r}")
    value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value  # a submodule of the same name must not shadow the function
    return value
