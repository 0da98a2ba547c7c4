"""Attention that knows where neighbours lie: with a bias per place, and ConViT's gate between content and position.

Shapes: B batch, H heads, L rows (row 0 is CLS), D head width, R = B * L, K neighbours at most.
"""

from typing import ClassVar

import torch
from torch import Tensor, nn

from gated_srp.models.attention import LocalAttention, by_table, neighbour_table, place_table
from gated_srp.models.block import OwnStart
from gated_srp.models.nystrom import NystromAttention
from gated_srp.srp import PatchGraph


class NeighbourhoodAttention(LocalAttention):
    """`LocalAttention` with a bias per head and relative position: softmax_j(<q_i, k_j> / sqrt D + b_(p_j - p_i)) (Hassani et al. 2023).

    b starts at zero. It has the 49 places of a window of 7; a smaller window uses the middle ones.
    """

    checked: ClassVar[str] = (
        "A loop over the neighbours. Windows are centred and lack what the tissue lacks, where the publication "
        "shifts them at a border; the biases start at zero."
    )

    def __init__(self, dim: int, num_heads: int) -> None:
        super().__init__(dim, num_heads)
        self.relative = PlaceBias(num_heads)

    def place_bias(self) -> Tensor:
        return self.relative.table


class PlaceBias(OwnStart):
    """One number per head and place of a window of 7."""

    def __init__(self, num_heads: int) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.zeros(num_heads, 49))

    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        nn.init.zeros_(self.table)


class Focus(OwnStart):
    """Per head, where in the window it looks: u . (|d|^2, dx, dy) is the logit of step d, which starts as -|d - c|^2 (up to a constant)
    around a centre c, and g, how much of it the head takes: sigmoid(g), g = 1 at the start.

    Heads take the places of a 3 x 3 window as centres, in turn.
    """

    def __init__(self, num_heads: int) -> None:
        super().__init__()
        self.place, self.gate = nn.Parameter(torch.empty(num_heads, 3)), nn.Parameter(torch.empty(num_heads))
        self.reset_parameters()

    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        steps = torch.cartesian_prod(torch.arange(-1, 2), torch.arange(-1, 2)).float()  # (9, 2)
        with torch.no_grad():
            self.gate.fill_(1.0)
            for head, row in enumerate(self.place):
                row[0], row[1:] = -1, 2 * steps[head % len(steps)]

    def logits(self) -> Tensor:
        """Of the 49 places of a window of 7, (H, 49)."""
        steps = torch.cartesian_prod(torch.arange(-3, 4), torch.arange(-3, 4)).to(self.place)
        return self.place @ torch.cat([steps.square().sum(1, keepdim=True), steps], dim=1).t()


class PositionalNystrom(NystromAttention):
    """ConViT's gated positional attention (d'Ascoli et al. 2021): y_i = (1 - s) content_i + s sum_j softmax_j(u . r_ij) v_j, s = sigmoid(g).

    Content is Nystrom attention; j runs over i and its neighbours, r_ij = (|d|^2, dx, dy) of the step from i to j. Rows without
    neighbours (CLS, padding, a lone patch) have content alone.
    """

    checked: ClassVar[str] = (
        "A loop over the published formula and start values, with positions looked at within the window alone, "
        "centres of heads in turn over 3 x 3 places, and Nystrom attention for the content."
    )

    reads_graph: ClassVar[bool] = True

    def __init__(self, dim: int, num_heads: int, *, num_landmarks: int = 64) -> None:
        super().__init__(dim, num_heads, num_landmarks=num_landmarks)
        self.focus = Focus(num_heads)

    def in_chunks(self, x: Tensor, *, halves: bool = False) -> bool:
        return False  # a prediction in chunks would pass the positions by

    def forward(self, x: Tensor, graph: PatchGraph) -> tuple[Tensor, Tensor]:
        content, v = super().forward(x, graph)
        rows = v.transpose(1, 2).flatten(0, 1)  # (R, H, D)
        tables = [*neighbour_table(graph), place_table(graph)]
        near = by_table(_average_table, rows, (rows, self.focus.logits()), tables)  # (R, H, D)
        near = near.view(len(x), -1, *rows.shape[1:]).transpose(1, 2)  # (B, H, L, D)
        share = torch.sigmoid(self.focus.gate).to(content.dtype).view(-1, 1, 1)
        has = (graph.neighbour_count > 0).view(len(x), 1, -1, 1)
        return torch.where(has, (1 - share) * content + share * near.to(content.dtype), content), v


def _average_table(rows: Tensor, v: Tensor, logits: Tensor, table: Tensor, meant: Tensor, places: Tensor) -> Tensor:
    """Means of the rows of v (R, H, D) that the table (P, K + 1) means, weighted by their places."""
    chosen = logits[:, places].transpose(0, 1).masked_fill(~meant.unsqueeze(1), float("-inf"))  # (P, H, K + 1)
    return torch.einsum("phj,pjhd->phd", chosen.softmax(-1).to(v.dtype), v[table])
