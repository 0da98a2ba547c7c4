"""What `gated-srp pretrain` minimises: the error of features predicted for masked patches. No cohort has this task: it needs no labels.

Shapes: B bags, C channels of the features. What other tasks call logits are squared errors here, (B, C).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self

from gated_srp.errors import Note, UserError
from gated_srp.tasks import PRETRAINING
from gated_srp.tasks import task as base
from gated_srp.tasks.metrics import as_numpy, full_precision
from gated_srp.tasks.task import Columns, Labels, Metrics, Task

if TYPE_CHECKING:
    import pandas as pd
    from torch import Tensor


@dataclass(frozen=True)
class MaskedFeatures(Task):
    """Squared error of masked patches' features as a share of their variance (`models.masked`); the share explained selects.

    ``width``: channels of the features; ``share`` and ``block``: how patches are masked.
    """

    width: int = 0
    share: float = 0.5
    block: int = 3

    name: ClassVar[str] = PRETRAINING
    subject: ClassVar[str] = "features of masked patches"
    selects: ClassVar[tuple[str, ...]] = ("r2",)
    shown: ClassVar[tuple[str, ...]] = ("r2",)
    usual: ClassVar[Mapping[str, tuple[str, ...]]] = {}
    truth: ClassVar[tuple[str, ...]] = ()
    masked: ClassVar[bool] = True
    scored: ClassVar[tuple[str, ...]] = ("val",)

    @classmethod
    def read(cls, frame: pd.DataFrame, columns: Any, *, classes: Sequence[str] | None, where: Path) -> Labels:
        raise UserError("pretraining reads no labels", where=where, cure="Use `gated-srp pretrain`.")

    @classmethod
    def describe(cls, frame: pd.DataFrame, classes: tuple[str, ...], columns: Any) -> list[Note]:
        return []

    @classmethod
    def strata(cls, frame: pd.DataFrame, classes: tuple[str, ...]) -> dict[str, str]:
        """All alike; `pretrain` takes the split of the cohort's own task."""
        return dict.fromkeys(map(str, frame["case"]), "")

    @classmethod
    def fit(cls, training: pd.DataFrame, classes: tuple[str, ...] = (), metric: str | None = None) -> Self:
        """There is nothing to fit: features are standardised by their own slide."""
        return cls()

    def card(self) -> dict[str, Any]:
        return {"masking": {"share": self.share, "block": self.block}}

    @classmethod
    def from_card(cls, card: Mapping[str, Any]) -> Self:
        return cls(card["settings"]["in_dim"], **card["masking"])

    @property
    def num_outputs(self) -> int:
        return self.width

    def encode(self, table: pd.DataFrame) -> Tensor:
        """A bag is its own target."""
        import torch

        return torch.zeros(len(table))

    def answers(self, table: pd.DataFrame) -> Columns:
        return {}

    def loss(self, logits: Tensor, target: Tensor) -> Tensor:
        """Mean over slides of the squared error of masked patches as a share of their variance."""
        return full_precision(logits).mean()

    def predict(self, logits: Tensor) -> Columns:
        """``error``: of each slide; 1 is that of the slide's mean."""
        return {"error": as_numpy(logits).mean(-1)}

    def by_case(self, slides: pd.DataFrame) -> pd.DataFrame:
        return base.mean_by_case(slides, (), ["error"])

    def metrics(self, predictions: pd.DataFrame) -> Metrics:
        """R2 = 1 - mean error: of the variance of masked patches around their slide's mean, the share explained."""
        return {"r2": 1 - float(predictions["error"].mean()) if len(predictions) else math.nan}
