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
    "explain",
    "extract",
    "heatmap",
    "load_model",
    "report",
    "trace",
]

if TYPE_CHECKING:
    from gated_srp.errors import UserError
    from gated_srp.foreign import attach
    from gated_srp.models import load_model
    from gated_srp.reports.explain import explain
    from gated_srp.reports.heatmap import heatmap
    from gated_srp.reports.page import report
    from gated_srp.slides.extract import extract
    from gated_srp.srp import GatedSRP, PatchGraph, trace

_HOMES = {
    "GatedSRP": "gated_srp.srp.module",
    "PatchGraph": "gated_srp.srp.graph",
    "UserError": "gated_srp.errors",
    "attach": "gated_srp.foreign.handle",
    "load_model": "gated_srp.models.store",
    "explain": "gated_srp.reports.explain",
    "extract": "gated_srp.slides.extract",
    "heatmap": "gated_srp.reports.heatmap",
    "report": "gated_srp.reports.page",
    "trace": "gated_srp.srp.trace",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'gated_srp' has no attribute {name!r}")
    value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value  # a submodule of the same name must not shadow the function
    return value
