"""The paper's slide models, built by name. What reads published checkpoints is loaded on first use (PEP 562)."""

from typing import TYPE_CHECKING, Any

from gated_srp.models.arms import ARMS, METHOD, TUNED, Sizes, arm_title, build_model, find_arm
from gated_srp.models.slide import SlideModel, SlideTransformer
from gated_srp.models.store import load_card, load_model, model_file, save_model

if TYPE_CHECKING:
    from gated_srp.models.published import convert, load_published

__all__ = [
    "ARMS",
    "METHOD",
    "TUNED",
    "Sizes",
    "SlideModel",
    "SlideTransformer",
    "arm_title",
    "build_model",
    "convert",
    "find_arm",
    "load_card",
    "load_model",
    "load_published",
    "model_file",
    "save_model",
]


def __getattr__(name: str) -> Any:
    if name not in ("convert", "load_published"):
        raise AttributeError(f"module 'gated_srp.models' has no attribute {name!r}")
    from gated_srp.models import published

    return getattr(published, name)
