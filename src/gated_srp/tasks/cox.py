"""Survival by Cox's partial likelihood: one log risk per slide, compared with those of everyone still at risk.

Shapes: B bags, G distinct times.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from gated_srp.errors import UserError
from gated_srp.tasks import metrics as scores
from gated_srp.tasks import task as base
from gated_srp.tasks.metrics import FollowUp
from gated_srp.tasks.survival import Survival, read_follow_up
from gated_srp.tasks.task import Columns, Header, Metrics, Recipe, Task

if TYPE_CHECKING:
    import pandas as pd
    from torch import Tensor


@dataclass(frozen=True)
class Cox(Survival):
    """Negative log partial likelihood, ties by Efron; the case C-index selects.

    A kind of its own rather than a loss of `Survival`: it has one output instead of time bins, another card and other columns, and a
    loss that is of the slides of a window together (``joint``).
    Columns: ``time``, ``event`` (truth), ``risk``: the log of the hazard, relative to that of others (larger: earlier event).
    """

    edges: tuple[float, ...] = ()  # it has no time bins

    name: ClassVar[str] = "cox"
    subject: ClassVar[str] = "survival by Cox's partial likelihood"
    recipe: ClassVar[Recipe] = Recipe(epochs=20, lr=1e-4, weight_decay=1e-5, accumulation=32)
    joint: ClassVar[bool] = True
    num_outputs: ClassVar[int] = 1

    @classmethod
    def named_by(cls, settings: Mapping[str, Any]) -> bool:
        """Never: columns of a time and an event mean `Survival`."""
        return False

    @classmethod
    def seen_in(cls, header: Header) -> bool:
        return False

    @classmethod
    def window_problem(cls, bags: int) -> UserError | None:
        what = "1 slide per update, of which the partial likelihood is always 1: nothing would be learnt"
        cure = "Set it to 16 or more: an event is compared with the other slides of its window alone."
        return UserError(what, where="train.accumulation", cure=cure) if bags < 2 else None

    @classmethod
    def fit(cls, training: pd.DataFrame, classes: tuple[str, ...] = (), metric: str | None = None) -> Cox:
        """Keeps the follow-up of the TRAINING cases, by which Uno's C corrects for censoring."""
        cls.checked_metric(metric)
        cases = training.drop_duplicates("case") if "case" in training else training
        return cls((), read_follow_up(cases))

    def card(self) -> dict[str, Any]:
        return {"follow_up": super().card()["follow_up"]}

    @classmethod
    def from_card(cls, card: Mapping[str, Any]) -> Cox:
        seen = card.get("follow_up")
        return cls((), None if seen is None else FollowUp.of(seen["time"], seen["event"]))

    @property
    def outputs(self) -> tuple[str, ...]:
        return ("log risk",)

    def encode(self, table: pd.DataFrame) -> Tensor:
        """(B, 2) whole numbers: the bits of ``time``, which order times of at least 0 exactly on every device, and ``event``."""
        import torch

        follow_up = read_follow_up(table)
        time = (follow_up.time + 0.0).view(np.int64)  # of -0.0 too
        return torch.from_numpy(np.stack([time, follow_up.event.astype(np.int64)], 1))

    def loss(self, logits: Tensor, target: Tensor) -> Tensor:
        """Mean over the events of minus the log partial likelihood of (B, 1) log risks; 0 where no event was seen."""
        risk, target = logits.double().reshape(-1), target.reshape(-1, 2).to(logits.device)
        order = target[:, 0].argsort(stable=True)
        return efron(risk[order], target[order, 0], target[order, 1].bool()).to(scores.full_precision(logits).dtype)

    def predict(self, logits: Tensor) -> Columns:
        return {"risk": scores.as_numpy(logits).reshape(-1)}

    def by_case(self, slides: pd.DataFrame) -> pd.DataFrame:
        """Mean risk of the slides."""
        return base.mean_by_case(slides, self.truth, ["risk"])

    def metrics(self, predictions: pd.DataFrame) -> Metrics:
        """C-index and Uno's C of the risk."""
        cases, risk = read_follow_up(predictions), predictions["risk"].to_numpy(np.float64)
        uno = scores.uno_concordance(risk, cases, self.training or cases)
        return {"c_index": scores.concordance_index(risk, cases), "uno_c": uno}

    @classmethod
    def member_numbers(cls, tasks: Sequence[Task], logits: Sequence[Tensor]) -> list[Columns]:
        return [task.predict(one) for task, one in zip(tasks, logits, strict=True)]

    def summary(self, predictions: pd.DataFrame) -> list[str]:
        return super().summary(predictions)[:1]


def efron(risk: Tensor, time: Tensor, event: Tensor) -> Tensor:
    """Minus the log partial likelihood per event, of log risks (B,) sorted by ``time``; tied events by Efron's approximation.

    Of d events at one time, D their summed risks and R those of everyone at risk, the l-th of them (l = 0 ... d - 1) has
    log(R - l / d D) - risk; here as log R + log(1 - l / d D / R), which never overflows.
    """
    import torch

    events = event.sum()
    if not events:
        return risk.sum() * 0
    first = torch.searchsorted(time.contiguous(), time.contiguous())  # (B,) where each one's time begins
    at_risk = risk.flip(0).logcumsumexp(0).flip(0)[first]  # (B,) log R
    seen = event.to(risk)
    share = torch.zeros_like(risk).index_add(0, first, (risk - at_risk).exp() * seen)[first]  # (B,) D / R
    count = torch.zeros_like(risk).index_add(0, first, seen)[first]  # (B,) d
    before = seen.cumsum(0) - seen  # events ahead of each row
    place = before - before[first]  # (B,) l
    terms = at_risk + torch.log1p(-place / count.clamp(min=1) * share) - risk
    return torch.where(event, terms, 0.0).sum() / events
