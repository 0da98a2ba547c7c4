"""Training: runs that resume and explain themselves, and finished runs on other slides.

`train.train`, `predict.predict` and `evaluate.evaluate` are functions of `gated_srp`; nothing is imported before it is used.
"""

from gated_srp import lazily

_HOMES = {"RunFolder": "folder", "TrainedRun": "trained", "open_slide": "trained"}
__all__ = list(_HOMES)
__getattr__, __dir__ = lazily(__name__, _HOMES)
