"""Along which axis a token is corrected: the paper's neighbour mean, XSA's own value, and controls.

A direction maps values (R, H, D), R = B * L rows, to an axis (R, H, D) that is not yet normalised; a zero axis means
"leave this row alone". ``learned`` says whether the axis gets a gradient.
"""

import torch
from torch import Tensor, nn

from gated_srp.srp.graph import LONG, PatchGraph
from gated_srp.srp.projection import AxisAt, wide


class Direction(nn.Module):
    """Base of all directions."""

    learned = False
    thins = (
        False  # whether it is still what it was where patches are left out whose values the graph has: `models.thinned`
    )

    def forward(self, v: Tensor, graph: PatchGraph) -> Tensor:
        raise NotImplementedError

    def axis_at(self, v: Tensor, graph: PatchGraph) -> AxisAt:
        """The axis of any slice of rows, for passes over row chunks."""
        axis = self(v, graph)
        return lambda rows: axis[rows]


class NeighbourMean(Direction):
    """r_i, the mean of the neighbours' detached values (Eq. 6)."""

    thins = True

    def forward(self, v: Tensor, graph: PatchGraph) -> Tensor:
        return graph.mean(v.detach().flatten(1)).view(v.shape)  # (R, H, D)

    def axis_at(self, v: Tensor, graph: PatchGraph) -> AxisAt:
        flat = v.detach().flatten(1)
        if len(flat) <= LONG or flat.device.type != "cpu":
            flat = wide(flat)  # of a very long slide in halves it would be as large as all other tensors together
        return lambda rows: graph.sum(flat, rows).view(-1, *v.shape[1:])  # the axis never exists as a whole


class OwnValue(Direction):
    """v_i itself, as in Exclusive Self-Attention (Eq. 2-3): every row, CLS and padding too; the gradient flows through it."""

    learned = True
    thins = True

    def forward(self, v: Tensor, graph: PatchGraph) -> Tensor:
        return wide(v)


class SlideMean(Direction):
    """Control: one axis for the slide, the mean value of all its patches, on the rows that have neighbours."""

    def forward(self, v: Tensor, graph: PatchGraph) -> Tensor:
        with torch.no_grad():
            axis = torch.zeros_like(wide(v))
            for span in graph.spans:
                axis[span] = wide(v[span]).mean(0)
            return axis * (graph.neighbour_count > 0).view(-1, 1, 1)


class RandomDirection(Direction):
    """Control: a fixed random axis per head, the same for every patch that has neighbours."""

    thins = True
    axis: Tensor

    def __init__(self, num_heads: int, head_dim: int, *, seed: int = 0) -> None:
        super().__init__()
        draw = torch.randn(num_heads, head_dim, generator=torch.Generator().manual_seed(seed))
        self.register_buffer("axis", draw)

    def forward(self, v: Tensor, graph: PatchGraph) -> Tensor:
        return wide(self.axis).expand(v.shape) * (graph.neighbour_count > 0).view(-1, 1, 1)


class ShuffledNeighbours(Direction):
    """Control: as many neighbours as there are, but of a fixed reordering of the slide's patches.

    The order is one of even steps through the rows, not a random one: on lattices of hundreds of patches those that take the place of a
    patch's neighbours may lie near each other. It stays as it is, since models that were trained with it depend on it.
    """

    def forward(self, v: Tensor, graph: PatchGraph) -> Tensor:
        order = torch.arange(len(v), device=v.device)
        for span in graph.spans:
            order[span] = span.start + _scrambled(span.stop - span.start, v.device)
        return graph.mean(v.detach()[order].flatten(1)).view(v.shape)


def _scrambled(count: int, device: torch.device) -> Tensor:
    """A fixed permutation made on the device (multiplicative hashing), so that no generator state takes part."""
    numbers = torch.arange(1, count + 1, device=device)
    return ((numbers * 2654435761) % 4294967291).mul(40503).remainder(2147483647).argsort(stable=True)
