"""From models' logits to answers: calibrated probabilities, or risk and survival; of several runs the mean and its spread.

Shapes: M members, B slides, K outputs.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd
from torch import Tensor

from gated_srp.training.trained import Member


def combined(members: Sequence[Member], logits: Sequence[Tensor]) -> pd.DataFrame:
    """Calibrated answers of each member's (B, K) logits: of one member, or the mean of several with its spread."""
    task = members[0].task
    calibrated = [member.calibrated(one) for member, one in zip(members, logits, strict=True)]
    each = type(task).member_numbers([member.task for member in members], calibrated)
    values = {name: np.stack([one[name] for one in each]) for name in each[0]}  # (M, B)
    table = task.decided(pd.DataFrame({name: value.mean(0) for name, value in values.items()}))
    if len(members) > 1:
        table = table.assign(**{f"{name}_std": value.std(0, ddof=1) for name, value in values.items()})
    return table
