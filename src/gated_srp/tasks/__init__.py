"""Tasks: what a model's logits mean."""

from gated_srp.tasks.calibration import fit_temperature
from gated_srp.tasks.classification import Classification
from gated_srp.tasks.multilabel import Multilabel
from gated_srp.tasks.survival import Survival
from gated_srp.tasks.task import Task, selection_score

__all__ = ["Classification", "Multilabel", "Survival", "Task", "fit_temperature", "selection_score"]
