"""Several neighbourhoods of a token as one axis, mixed by what a gate learns of them: windows of several sizes.

Shapes: R rows of all bags, H heads, D head width, S neighbourhoods, E neighbour entries.
"""

from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gated_srp.errors import UserError
from gated_srp.models.block import OwnStart
from gated_srp.srp import Direction, PatchGraph, unit
from gated_srp.srp.projection import neighbour_sum, wide

WINDOWS = (3, 5, 7)


class Mixture(Direction, OwnStart):
    """r_i = sum_s a_is r_hat_is, r_is the mean of the detached values in neighbourhood s of i, a_i = softmax_s(w d_is + b_s) per head.

    d_is = [m_is / K_s, |sum_j v_j| / sum_j |v_j|]: how full neighbourhood s is, and how much its values agree (1: all point one way).
    w and b start at zero: all neighbourhoods count alike. One without values adds nothing; a row without any stays as it is.
    """

    learned = True  # through a; the means are measurements, as in `NeighbourMean`
    count: ClassVar[int]  # S

    def __init__(self, num_heads: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(num_heads, 2))
        self.bias = nn.Parameter(torch.zeros(num_heads, self.count))

    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        nn.init.zeros_(self.weight)
        nn.init.zeros_(self.bias)

    def sums(self, v: Tensor, graph: PatchGraph) -> list[tuple[Tensor, Tensor, Tensor]]:
        """Of each neighbourhood sum_j v_j (R, H * D), sum_j |v_j| (R, H) and m / K (R,) of detached values v (R, H, D)."""
        raise NotImplementedError

    def forward(self, v: Tensor, graph: PatchGraph) -> Tensor:
        axes, logits = [], []
        for (total, length, full), bias in zip(self.sums(v.detach(), graph), wide(self.bias).unbind(-1), strict=True):
            mean = total.view(v.shape)
            some = length > 0
            agree = torch.where(some, torch.linalg.vector_norm(mean, dim=-1) / torch.where(some, length, 1.0), 0.0)
            facts = torch.stack([full.to(agree.dtype).unsqueeze(-1).expand_as(agree), agree], -1)  # (R, H, 2)
            axes.append(unit(mean))
            logits.append((facts * wide(self.weight)).sum(-1) + bias)
        shares = torch.stack(logits, -1).softmax(-1)  # (R, H, S)
        mixed = (a.unsqueeze(-1) * axis for a, axis in zip(shares.unbind(-1), axes, strict=True))
        return sum(mixed, torch.zeros_like(axes[0]))


def listed_sums(v: Tensor, neighbours: Tensor, offsets: Tensor) -> tuple[Tensor, Tensor]:
    """sum_j v_j (R, H * D) and sum_j |v_j| (R, H) over the lists, of values v (R, H, D)."""
    sizes = torch.linalg.vector_norm(wide(v), dim=-1)
    return neighbour_sum(wide(v).flatten(1), neighbours, offsets), neighbour_sum(sizes, neighbours, offsets)


class MixedWindows(Mixture):
    """The `Mixture` of the neighbours in windows 3, 5 and 7."""

    count = len(WINDOWS)

    def sums(self, v: Tensor, graph: PatchGraph) -> list[tuple[Tensor, Tensor, Tensor]]:
        """Windows are nested: each adds a ring to the sums of the one before, so that every neighbour is read once."""
        lists = rings(graph)
        total, length = (found.unflatten(0, (-1, self.count)).cumsum(1) for found in listed_sums(v, *lists))
        counts = lists[1].diff().unflatten(0, (-1, self.count)).cumsum(1)  # (R, S)
        return [(total[:, s], length[:, s], counts[:, s] / (window**2 - 1)) for s, window in enumerate(WINDOWS)]


def rings(graph: PatchGraph) -> tuple[Tensor, Tensor]:
    """Neighbours and offsets of 3 R lists: of each row those that lie one, two and three steps away, along x or y, whichever is more.

    Entries change places; how many a ring has is no size of a tensor, which a compiler cannot know and a device would be waited for.
    """
    if graph.window != WINDOWS[-1] or graph.places is None:
        knows = f"window {graph.window}" if graph.places is not None else "no places of neighbours"
        what = f"a graph with {knows}, but this arm mixes the windows {', '.join(map(str, WINDOWS))}"
        cure = f"Build it with PatchGraph.from_coords(..., window={WINDOWS[-1]}); `gated-srp train` does so by itself."
        raise UserError(what, where="graph", cure=cure)
    rows, entries = torch.arange(graph.num_rows, device=graph.offsets.device), len(graph.neighbours)
    owners = rows.repeat_interleave(graph.neighbour_count, output_size=entries)  # (E,)
    steps = torch.stack([graph.places // graph.window, graph.places % graph.window]).int() - graph.window // 2
    ring = steps.abs().amax(0).long() - 1  # (E,)
    inside = F.one_hot(ring, len(WINDOWS)).cumsum(0)  # (E, S) so many of each ring up to here
    before = F.pad(inside, (0, 0, 1, 0))[graph.offsets]  # (R + 1, S)
    offsets = F.pad(before.diff(dim=0).flatten().cumsum(0), (1, 0))  # (3 R + 1,)
    place = (inside - before[owners]).gather(1, ring.unsqueeze(1)).squeeze(1) - 1  # among those of its row and ring
    order = offsets[len(WINDOWS) * owners + ring] + place
    return torch.empty_like(graph.neighbours).scatter_(0, order, graph.neighbours), offsets
