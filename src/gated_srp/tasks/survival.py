"""Survival in discrete time (paper, appendix "Training objectives"): one hazard a time bin.

Shapes: B bags, K = 4 time bins.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np
import torch
from scipy.special import expit
from torch import Tensor
from torch.nn import functional as F

from gated_srp.errors import UserError
from gated_srp.tasks.survival_metrics import (
    FollowUp,
    concordance_index,
    survival_at_times,
    uno_concordance,
)
from gated_srp.tasks.task import Columns, Metrics, as_numpy, full_precision, mean_by_case

if TYPE_CHECKING:
    import pandas as pd

BINS = 4
SMALLEST = 1e-7  # hazards are clamped to [SMALLEST, 1 - SMALLEST]


@dataclass(frozen=True)
class Survival:
    """Negative log likelihood of hazards in four bins; the case C-index selects.

    ``edges`` come from the training cases (`Survival.fit`); so does ``training``, by which the other metrics correct
    for censoring (without it, the evaluated cases themselves serve). Fewer than three edges (tied times) leave the last
    outputs without a bin; nothing trains them and no prediction uses them.
    Columns: ``time``, ``event`` (truth), ``risk``, ``survival_1`` ... the probability to live through bin 1, 2, ...
    """

    edges: tuple[float, ...]
    training: FollowUp | None = None

    num_outputs: ClassVar[int] = BINS
    truth: ClassVar[tuple[str, ...]] = ("time", "event")
    select: ClassVar[str] = "c_index"
    # A temperature would reorder risks: they are sums over bins.
    calibrates: ClassVar[bool] = False

    @classmethod
    def fit(cls, training: pd.DataFrame) -> Survival:
        """Edges from a table of TRAINING rows (slides or cases): each case counts once.

        They are the distinct quartiles of event times, or of all times with fewer than four events.
        """
        cases = training.drop_duplicates("case") if "case" in training else training
        follow_up = _read(cases)
        if not len(follow_up.time):
            raise UserError("survival: the training split has no case. Check the split and the table's time column.")
        events = follow_up.time[follow_up.event]
        edges = np.unique(np.quantile(events if len(events) >= BINS else follow_up.time, (0.25, 0.5, 0.75)))
        return cls(tuple(edges.tolist()), follow_up)

    def bins(self, time: np.ndarray) -> np.ndarray:
        """Number of edges <= t.

        >>> Survival((1.0, 2.0, 3.0)).bins(np.array([0.5, 1.0, 9.0])).tolist()
        [0, 1, 3]
        """
        return np.searchsorted(np.asarray(self.edges), time, side="right")

    def encode(self, table: pd.DataFrame) -> Tensor:
        """(B, 2) whole numbers: the bin of ``time`` (found here, in the edges' double precision) and ``event``."""
        follow_up = _read(table)
        return torch.from_numpy(np.stack([self.bins(follow_up.time), follow_up.event], 1).astype(np.int64))

    def answers(self, table: pd.DataFrame) -> Columns:
        """``time``, and ``event`` as 0 or 1."""
        follow_up = _read(table)
        return {"time": follow_up.time, "event": follow_up.event.astype(np.int64)}

    def loss(self, logits: Tensor, target: Tensor) -> Tensor:
        """Mean negative log likelihood of (B, K) logits and (B, 2) targets.

        An event in bin y: survival of the bins before y and the hazard of y. Censored in bin y: survival through y.
        """
        logits = full_precision(logits).reshape(-1, BINS)
        place, event = target.reshape(-1, 2).to(logits.device).unbind(1)
        log_hazard, log_survival = _log_hazard(logits), _log_hazard(-logits)  # 1 - sigmoid(x) = sigmoid(-x)
        before = torch.arange(BINS, device=logits.device) < place[:, None]  # (B, K)
        lived = torch.where(before, log_survival, 0.0).sum(1)  # (B,)
        last = torch.where(event.bool()[:, None], log_hazard, log_survival).gather(1, place[:, None])[:, 0]
        return -(lived + last).mean()

    def predict(self, logits: Tensor) -> Columns:
        """Survival curve, and risk = minus its sum (larger: earlier event)."""
        hazard = np.clip(expit(as_numpy(logits)), SMALLEST, 1 - SMALLEST)
        curve = np.cumprod(1 - hazard, axis=1)[:, : len(self.edges) + 1]  # (B, bins)
        return {"risk": -curve.sum(1), **dict(zip(self._curve, curve.T, strict=True))}

    def by_case(self, slides: pd.DataFrame) -> pd.DataFrame:
        """Mean risk, and mean survival curve, of the slides."""
        return mean_by_case(slides, self.truth, ["risk", *self._curve])

    def metrics(self, predictions: pd.DataFrame) -> Metrics:
        """C-index and Uno's C of the risk; Brier score and AUC at the bin edges.

        These are the only times of which the model speaks: to live through bin k is to outlive edge k, so
        ``survival_k`` is the prediction for that time, without interpolation.
        """
        cases = _read(predictions)
        training = self.training or cases
        risk = predictions["risk"].to_numpy(np.float64)
        survival = predictions[self._curve[:-1]].to_numpy(np.float64)  # (B, edges)
        return {
            "c_index": concordance_index(risk, cases),
            "uno_c": uno_concordance(risk, cases, training),
            **survival_at_times(survival, np.asarray(self.edges), cases, training),
        }

    @property
    def _curve(self) -> list[str]:
        return [f"survival_{k + 1}" for k in range(len(self.edges) + 1)]


def _log_hazard(logits: Tensor) -> Tensor:
    """log of the clamped sigmoid, without forming the sigmoid: in single precision that is exactly 1 from 17 on."""
    return F.logsigmoid(logits).clamp(math.log(SMALLEST), math.log1p(-SMALLEST))


def _read(table: pd.DataFrame) -> FollowUp:
    time, event = (table[name].to_numpy(np.float64) for name in ("time", "event"))
    bad = ~np.isfinite(time) | (time < 0) | ~np.isin(event, (0, 1))
    if bad.any():
        row = int(np.argmax(bad))
        raise UserError(
            f"survival, row {row + 1}: time {time[row]}, event {event[row]}; expected a time of at least 0, "
            "and event 0 (censored) or 1. Correct or drop the row."
        )
    return FollowUp(time, event.astype(bool))
