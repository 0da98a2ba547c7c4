"""The control without a direction: as many weights as a gate, in the same place, that know nothing of neighbours.

Shapes: B batch, H heads, L rows, D head width.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gated_srp.models.attention import merge_heads
from gated_srp.srp import PatchGraph


class Adapter(nn.Module):
    """z = y + U gelu(W y) on the rows that a gate would correct, one bottleneck for all heads (Houlsby et al., 2019).

    It is the narrowest one with at least ``budget`` weights: should it do worse than a gate of that many, it is not for
    lack of weights. U starts at zero, so an untrained adapter is the identity. Called like `GatedSRP`; v is not looked at.

    >>> sum(p.numel() for p in Adapter(64, budget=351).parameters())
    384
    """

    coefficient = None  # where a `GatedSRP` keeps its beta

    def __init__(self, head_dim: int, *, budget: int) -> None:
        super().__init__()
        rank = math.ceil(budget / (2 * head_dim))
        self.down = nn.Linear(head_dim, rank, bias=False)
        self.up = nn.Linear(rank, head_dim, bias=False)
        self.reset_parameters()

    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """W as PyTorch's Linear, U zero."""
        nn.init.kaiming_uniform_(self.down.weight, a=math.sqrt(5), generator=generator)
        nn.init.zeros_(self.up.weight)

    def forward(self, y: Tensor, v: Tensor, graph: PatchGraph) -> Tensor:
        """The changed heads, in the shape (B, H, L, D) and dtype of y."""
        change = self.up(F.gelu(self.down(y))).to(y.dtype)
        rows = (graph.neighbour_count > 0).view(len(y), 1, -1, 1)  # never CLS, never padding: the gate's rows
        return torch.where(rows, y + change, y)

    def by_rows(self, v: Tensor, graph: PatchGraph) -> Callable[[Tensor, slice], Tensor]:
        """`forward` of one bag, some rows at a time: y of these rows (1, H, R, D) -> (R, H, D)."""
        return lambda y, rows: self(y, v, graph.part(rows))[0].transpose(0, 1)

    def linear(self, y: Tensor, v: Tensor, graph: PatchGraph, layer: nn.Linear) -> Tensor:
        """layer(merge_heads(self(y, v, graph))): (B, L, O)."""
        merged: Tensor = layer(merge_heads(self(y, v, graph)))
        return merged
