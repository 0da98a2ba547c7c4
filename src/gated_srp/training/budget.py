"""Predictions with a redundancy budget: a share of each slide's patches, the most homogeneous thinned out (`models.thinned`).

Shapes: N patches, K outputs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from gated_srp.models.thinned import check_share, kept_patches, refuse_budget, thinned_logits
from gated_srp.training.loop import error_context
from gated_srp.training.predict import RunModel

if TYPE_CHECKING:
    from torch import Tensor

    from gated_srp.data.loader import SlideBag
    from gated_srp.training.trained import TrainedRun


class ThinnedModel(RunModel):
    """A run's model on a share of the patches; ``kept`` counts, by bag, how many it saw."""

    def __init__(self, run: TrainedRun, *, share: float, kept: dict[str, int]) -> None:
        super().__init__(run)
        self.share, self.kept = share, kept
        check_share(share)
        refuse_budget(self.model)

    @torch.no_grad()
    def __call__(self, bag: SlideBag) -> Tensor:
        rows = kept_patches(bag.graph, self.share)
        self.kept[bag.slide] = len(rows)
        if len(rows) == len(bag.features):
            return super().__call__(bag)
        device = self.ranks.device
        with error_context([bag]), self.ranks.autocast():
            logits = thinned_logits(self.model, bag.features.to(device)[None], bag.graph.to(device), rows.to(device))
        return logits[0].float().cpu()
