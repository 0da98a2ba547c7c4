"""One temperature for all logits, fitted on validation (Guo et al., 2017)."""

import math

import numpy as np
import torch
from scipy.optimize import minimize_scalar
from torch import Tensor

from gated_srp.tasks.task import Task

# Beyond these a "temperature" says that the validation set is too small or too easy to fit one.
COLDEST, HOTTEST = 0.05, 20.0


def fit_temperature(task: Task, logits: Tensor, target: Tensor) -> float:
    """The T that minimises the task's loss of (B, K) logits / T; 1.0 where the data cannot tell.

    They cannot when the task has no probabilities to calibrate, when there are fewer than two bags or only one kind
    of target, or when the loss has no minimum inside the bounds (all slides right: it only falls as T goes to 0).
    """
    logits = logits.detach().cpu().double()
    target = target.detach().cpu()
    kinds = np.unique(target.numpy(), axis=0)
    if not task.calibrates or len(logits) < 2 or len(kinds) < 2 or not torch.isfinite(logits).all():
        return 1.0

    def loss(log_temperature: float) -> float:
        return float(task.loss(logits / math.exp(log_temperature), target))

    low, high = math.log(COLDEST), math.log(HOTTEST)
    found = minimize_scalar(loss, bounds=(low, high), method="bounded", options={"xatol": 1e-6})
    inside = min(found.x - low, high - found.x) > 1e-3
    return math.exp(found.x) if inside and found.fun < loss(0.0) else 1.0
