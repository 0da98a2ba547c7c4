"""Survival metrics of cases: concordance (Harrell, Uno), time-dependent AUC, integrated Brier score, Kaplan-Meier.

Undefined is not a number, never a warning. Shapes: N cases, T times.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    import pandas as pd
    from torch import Tensor

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]
_ROWS = 1024  # pairs are counted in blocks of rows: memory stays small for any number of cases


@cache
def _torchsurv() -> Any:
    """Its area under the curve, Brier score and weights of censoring; imported on first use, since that takes a second."""
    from types import SimpleNamespace

    with warnings.catch_warnings():
        # On import torchsurv compiles a helper that we do not use, in a way that newer torch calls deprecated.
        warnings.simplefilter("ignore", DeprecationWarning)
        from torchsurv.metrics.auc import Auc
        from torchsurv.metrics.brier_score import BrierScore
        from torchsurv.stats.ipcw import get_ipcw
    return SimpleNamespace(Auc=Auc, BrierScore=BrierScore, get_ipcw=get_ipcw)


@dataclass(frozen=True, eq=False)
class FollowUp:
    """Observed times of cases and whether each ended with the event."""

    time: Floats
    event: Bools

    @classmethod
    def of(cls, time: object, event: object) -> FollowUp:
        """From anything that numpy reads."""
        return cls(np.asarray(time, dtype=np.float64), np.asarray(event).astype(bool))


def concordance_index(risk: Floats, cases: FollowUp, weight: Floats | None = None) -> float:
    """Share of pairs in which the case whose event came strictly first has the higher risk; a tied risk counts half.

    A pair is comparable when case i had the event and t_i < t_j. With the squared inverse probability of censoring as
    the weight of i, this is Uno's C. Not a number without a comparable pair.

    >>> cases = FollowUp.of([1, 2, 3], [1, 0, 1])
    >>> concordance_index(np.array([0.5, 0.5, 0.1]), cases)
    0.75
    """
    weight = np.ones(len(risk)) if weight is None else weight
    agreed = total = 0.0
    first = np.flatnonzero(cases.event)
    for start in range(0, len(first), _ROWS):
        i = first[start : start + _ROWS]
        later = cases.time[i, None] < cases.time
        twice = 2 * np.sum(later & (risk[i, None] > risk), 1) + np.sum(later & (risk[i, None] == risk), 1)
        agreed += float(weight[i] @ twice) / 2
        total += float(weight[i] @ later.sum(1))
    return agreed / total if total > 0 else float("nan")


def uno_concordance(risk: Floats, cases: FollowUp, training: FollowUp) -> float:
    """Uno's C: censoring estimated on the training cases; events that its follow-up does not reach weigh nothing."""
    weight = censoring_weight(cases.time, training)
    return float("nan") if weight is None else concordance_index(risk, cases, weight**2)


def censoring_weight(time: Floats, training: FollowUp) -> Floats | None:
    """1 / P(not censored by t), by Kaplan-Meier on the training cases; 0 where that is 0; None without any event."""
    if not training.event.any():
        return None
    import torch

    weight = _torchsurv().get_ipcw(torch.from_numpy(training.event), _single(training.time), _single(time))
    return np.asarray(weight.double())


def survival_at_times(survival: Floats, times: Floats, cases: FollowUp, training: FollowUp) -> dict[str, float]:
    """Integrated Brier score and mean cumulative/dynamic AUC of (N, T) predicted survival, corrected for censoring.

    Only times that have both an event up to them and a case after them count. The Brier score is integrated over these
    by trapezoids and divided by their span; the AUC, with 1 - survival as the marker, is their plain mean.
    """
    undefined = {"integrated_brier": float("nan"), "time_auc": float("nan")}
    weight = censoring_weight(cases.time, training)
    at_times = censoring_weight(times, training)
    if weight is None or at_times is None:
        return undefined
    before = (cases.event & (weight > 0))[:, None] & (cases.time[:, None] <= times)  # (N, T)
    known = before.any(0) & (cases.time[:, None] > times).any(0) & (at_times > 0)
    if not known.any():
        return undefined
    import torch

    estimate = torch.from_numpy(survival[:, known])
    given = (
        torch.from_numpy(cases.event),
        _single(cases.time),
        _single(times[known]),
        torch.from_numpy(weight),
        torch.from_numpy(at_times[known]),
    )
    event, time, new_time, weights, new_weights = given
    brier = _torchsurv().BrierScore()
    brier(estimate, event, time, new_time=new_time, weight=weights, weight_new_time=new_weights)
    auc = _torchsurv().Auc()(1 - estimate, event, time, new_time=new_time, weight=weights, weight_new_time=new_weights)
    return {"integrated_brier": float(brier.integral()), "time_auc": float(auc.mean())}


@dataclass(frozen=True, eq=False)
class RiskGroups:
    """Kaplan-Meier curves of the cases above and not above a risk, and the log-rank test between them."""

    curves: pd.DataFrame  # group (low | high), time, at_risk, events, survival, lower, upper
    statistic: float
    p_value: float


def risk_groups(risk: Floats, cases: FollowUp, threshold: float) -> RiskGroups:
    """Split at a threshold: the median risk of the TRAINING cases.

    The test is undefined when a group is empty or nobody had an event.
    """
    import pandas as pd
    from lifelines import KaplanMeierFitter
    from lifelines.statistics import logrank_test

    high = risk > threshold
    curves = []
    for name, chosen in (("low", ~high), ("high", high)):
        if not chosen.any():
            continue
        fitted = KaplanMeierFitter().fit(cases.time[chosen], cases.event[chosen])
        table = fitted.event_table[["at_risk", "observed"]].rename(columns={"observed": "events"})
        table.insert(0, "group", name)
        table["survival"] = fitted.survival_function_.iloc[:, 0]
        table[["lower", "upper"]] = fitted.confidence_interval_.to_numpy()
        curves.append(table.rename_axis("time").reset_index())
    statistic = p_value = float("nan")
    if high.any() and not high.all() and cases.event.any():
        test = logrank_test(cases.time[high], cases.time[~high], cases.event[high], cases.event[~high])
        statistic, p_value = float(test.test_statistic), float(test.p_value)
    return RiskGroups(pd.concat(curves, ignore_index=True) if curves else pd.DataFrame(), statistic, p_value)


def curve_at(times: np.ndarray, edges: np.ndarray, curve: np.ndarray) -> np.ndarray:
    """Survival (B, times) from survival at a model's own edges (B, edges): the hazard is constant from edge to edge, and goes on.

    >>> curve_at(np.array([1.0, 4.0]), np.array([2.0]), np.array([[0.25]])).tolist()
    [[0.5, 0.0625]]
    """
    place = np.concatenate([[0.0], edges])
    log = np.log(np.concatenate([np.ones((len(curve), 1)), curve], 1))  # (B, 1 + edges)
    right = np.clip(np.searchsorted(place, times), 1, len(edges))
    share = (times - place[right - 1]) / (place[right] - place[right - 1])
    return np.asarray(np.exp(log[:, right - 1] + share * (log[:, right] - log[:, right - 1])))


def _single(values: Floats) -> Tensor:
    import torch

    # torchsurv compares times in single precision; rounding every time alike keeps equal times equal.
    return torch.from_numpy(values.astype(np.float32))
