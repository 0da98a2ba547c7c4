"""The paper's slide models, built by name, and their files."""

from typing import TYPE_CHECKING

from gated_srp import lazily
from gated_srp.models.arms import (
    ARMS,
    METHOD,
    TUNED,
    arm_settings,
    arm_title,
    build_model,
    find_arm,
    fitting_arms,
    is_gated,
)
from gated_srp.models.parts import Sizes
from gated_srp.models.slide import SlideModel, SlideTransformer
from gated_srp.models.store import load_card, load_model, model_file, save_model

if TYPE_CHECKING:
    from gated_srp.models.published import convert, load_published

__getattr__, _ = lazily(__name__, {"convert": "published", "load_published": "published"})  # runs do not need them
__all__ = [
    "ARMS",
    "METHOD",
    "TUNED",
    "Sizes",
    "SlideModel",
    "SlideTransformer",
    "arm_settings",
    "arm_title",
    "build_model",
    "convert",
    "find_arm",
    "fitting_arms",
    "is_gated",
    "load_card",
    "load_model",
    "load_published",
    "model_file",
    "save_model",
]
