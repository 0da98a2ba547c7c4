"""The paper's slide models, built by name."""

from gated_srp.models.arms import ARMS, Sizes, build_model
from gated_srp.models.published import load_published
from gated_srp.models.slide import SlideModel, SlideTransformer
from gated_srp.models.store import load_card, load_model, model_file, save_model

__all__ = [
    "ARMS",
    "Sizes",
    "SlideModel",
    "SlideTransformer",
    "build_model",
    "load_card",
    "load_model",
    "load_published",
    "model_file",
    "save_model",
]
