"""Gated Spatial Redundancy Projection for whole-slide pathology transformers.

Names are resolved on first use (PEP 562), so that the command line's ``--help`` does not import torch.
"""

import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.2.0"  # the one place: pyproject.toml reads it
__all__ = [
    "GatedSRP",
    "PatchGraph",
    "UserError",
    "__version__",
    "attach",
    "budget_curve",
    "check",
    "compare",
    "compare_targets",
    "crossval",
    "embed",
    "evaluate",
    "explain",
    "extract",
    "heatmap",
    "init",
    "load_model",
    "localize",
    "predict",
    "pretrain",
    "readers",
    "report",
    "reproduce",
    "score_readers",
    "simulate",
    "stats",
    "trace",
    "train",
    "tune",
    "view",
]

if TYPE_CHECKING:
    from gated_srp.checks.check import check
    from gated_srp.cohort_draft import init
    from gated_srp.errors import UserError
    from gated_srp.foreign import attach
    from gated_srp.models import load_model
    from gated_srp.reports.budget import budget_curve
    from gated_srp.reports.explain import explain
    from gated_srp.reports.heatmap import heatmap
    from gated_srp.reports.localize import localize
    from gated_srp.reports.page import report
    from gated_srp.reports.readers import readers, score_readers
    from gated_srp.reports.viewer import view
    from gated_srp.simulation import simulate
    from gated_srp.slides.extract import extract
    from gated_srp.srp import GatedSRP, PatchGraph
    from gated_srp.srp.trace import trace
    from gated_srp.study.comparison import compare, stats
    from gated_srp.study.cross_validation import crossval
    from gated_srp.study.reproduction import reproduce
    from gated_srp.study.targets import compare_targets
    from gated_srp.study.tuning import tune
    from gated_srp.training.embed import embed
    from gated_srp.training.evaluate import evaluate
    from gated_srp.training.predict import predict
    from gated_srp.training.pretrain import pretrain
    from gated_srp.training.train import train

_HOMES = {
    "GatedSRP": "srp.module",
    "PatchGraph": "srp.graph",
    "UserError": "errors",
    "attach": "foreign.handle",
    "budget_curve": "reports.budget",
    "compare": "study.comparison",
    "compare_targets": "study.targets",
    "crossval": "study.cross_validation",
    "load_model": "models.store",
    "check": "checks.check",
    "embed": "training.embed",
    "evaluate": "training.evaluate",
    "explain": "reports.explain",
    "extract": "slides.extract",
    "heatmap": "reports.heatmap",
    "localize": "reports.localize",
    "init": "cohort_draft",
    "predict": "training.predict",
    "pretrain": "training.pretrain",
    "readers": "reports.readers",
    "report": "reports.page",
    "reproduce": "study.reproduction",
    "simulate": "simulation",
    "score_readers": "reports.readers",
    "stats": "study.comparison",
    "trace": "srp.trace",
    "train": "training.train",
    "tune": "study.tuning",
    "view": "reports.viewer",
}


def lazily(package: str, homes: Mapping[str, str]) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """A package's ``__getattr__`` and ``__dir__``; ``homes``: the module, below the package, of each public name."""

    def resolve(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(import_module(f"{package}.{homes[name]}"), name)
        setattr(sys.modules[package], name, value)  # a submodule of the same name must not shadow it
        return value

    return resolve, lambda: sorted(homes)


__getattr__, __dir__ = lazily(__name__, _HOMES)
