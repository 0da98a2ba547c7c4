"""From models' logits to answers: calibrated probabilities, or risk and survival; of several runs the mean and its spread.

Shapes: M members, B slides, K outputs.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from torch import Tensor

from gated_srp.tasks import Classification, Survival
from gated_srp.training.trained import Member


def combined(members: Sequence[Member], logits: Sequence[Tensor]) -> pd.DataFrame:
    """Calibrated answers of (B, K) logits a member: of one member, or the mean of several with its spread."""
    times = curve_times(members) if isinstance(members[0].task, Survival) else ()
    each = [_numbers(member, one, times) for member, one in zip(members, logits, strict=True)]
    values = {name: np.stack([one[name] for one in each]) for name in each[0]}  # (M, B)
    table = pd.DataFrame({name: value.mean(0) for name, value in values.items()})
    task = members[0].task
    if isinstance(task, Classification):
        table.insert(0, "predicted", [task.classes[i] for i in table.to_numpy().argmax(1)])
    if len(members) > 1:
        table = table.assign(**{f"{name}_std": value.std(0, ddof=1) for name, value in values.items()})
    return table


def curve_times(members: Sequence[Member]) -> tuple[float, ...]:
    """The times of which an ensemble speaks: the edges of the first run, or of the first with more of them."""
    return max((member.task.edges for member in members if isinstance(member.task, Survival)), key=len)


def _numbers(member: Member, logits: Tensor, times: Sequence[float]) -> dict[str, NDArray[np.float64]]:
    """One member's numbers, (B,) each."""
    columns = member.task.predict(member.calibrated(logits))
    if not isinstance(member.task, Survival):
        return {name: np.asarray(value, float) for name, value in columns.items() if name.startswith("prob_")}
    edges = member.task.edges
    curve = np.stack([np.asarray(columns[f"survival_{k + 1}"], float) for k in range(len(edges))], 1)  # (B, edges)
    if tuple(times) != edges:
        curve = curve_at(np.asarray(times), np.asarray(edges), curve)
    named = {f"survival_at_{time:.10g}": value for time, value in zip(times, curve.T, strict=True)}
    return {"risk": np.asarray(columns["risk"], float), **named}


def curve_at(times: NDArray[np.float64], edges: NDArray[np.float64], curve: NDArray[np.float64]) -> NDArray[np.float64]:
    """Survival (B, times) from survival at a member's own edges (B, edges): the hazard is constant from edge to edge, and goes on.

    >>> curve_at(np.array([1.0, 4.0]), np.array([2.0]), np.array([[0.25]])).tolist()
    [[0.5, 0.0625]]
    """
    place = np.concatenate([[0.0], edges])
    log = np.log(np.concatenate([np.ones((len(curve), 1)), curve], 1))  # (B, 1 + edges)
    right = np.clip(np.searchsorted(place, times), 1, len(edges))
    share = (times - place[right - 1]) / (place[right] - place[right - 1])
    found: NDArray[np.float64] = np.exp(log[:, right - 1] + share * (log[:, right] - log[:, right - 1]))
    return found
