"""The neighbour means of several windows as one axis, mixed by what a gate learns of them.

Shapes: R rows of all bags, H heads, D head width, S windows, E neighbour entries.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gated_srp.errors import UserError
from gated_srp.models.block import OwnStart
from gated_srp.srp import Direction, PatchGraph, unit
from gated_srp.srp.projection import neighbour_sum, wide

WINDOWS = (3, 5, 7)


class MixedWindows(Direction, OwnStart):
    """r_i = sum_s a_is r_hat_is, r_is the mean of the neighbours' detached values in window s, a_i = softmax_s(w d_is + b_s) per head.

    d_is = [m_is / K_s, |sum_j v_j| / sum_j |v_j|]: how full the window is, and how much its values agree (1: all point one way).
    w and b start at zero: all windows count alike. A window without neighbours adds nothing; a row without any stays as it is.
    """

    learned = True  # through a; the means are measurements, as in `NeighbourMean`

    def __init__(self, num_heads: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(num_heads, 2))
        self.bias = nn.Parameter(torch.zeros(num_heads, len(WINDOWS)))

    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        nn.init.zeros_(self.weight)
        nn.init.zeros_(self.bias)

    def forward(self, v: Tensor, graph: PatchGraph) -> Tensor:
        axes, facts = window_means(v, graph)  # (R, H, D), (R, H, 2) of each window
        logits = [
            (one * wide(self.weight)).sum(-1) + b for one, b in zip(facts, wide(self.bias).unbind(-1), strict=True)
        ]
        shares = torch.stack(logits, -1).softmax(-1)  # (R, H, S)
        return sum(
            (a.unsqueeze(-1) * axis for a, axis in zip(shares.unbind(-1), axes, strict=True)), torch.zeros_like(axes[0])
        )


@torch.no_grad()
def window_means(v: Tensor, graph: PatchGraph) -> tuple[list[Tensor], list[Tensor]]:
    """Of each window the unit mean of the values v (R, H, D) in it, and what `MixedWindows` calls d, (R, H, 2).

    Windows are nested: each adds a ring to the sums of the one before, so that every neighbour is read once.
    """
    if graph.window != WINDOWS[-1] or graph.places is None:
        knows = f"window {graph.window}" if graph.places is not None else "no places of neighbours"
        what = f"a graph with {knows}, but this arm mixes the windows {', '.join(map(str, WINDOWS))}"
        cure = f"Build it with PatchGraph.from_coords(..., window={WINDOWS[-1]}); `gated-srp train` does so by itself."
        raise UserError(what, where="graph", cure=cure)
    values, sizes = wide(v).flatten(1), torch.linalg.vector_norm(wide(v), dim=-1)  # (R, H * D), (R, H)
    total, length = torch.zeros_like(values), torch.zeros_like(sizes)
    count = torch.zeros_like(graph.neighbour_count)
    axes, facts = [], []
    for window in WINDOWS:
        neighbours, offsets = _ring(graph, window // 2)
        total, length = (
            total + neighbour_sum(values, neighbours, offsets),
            length + neighbour_sum(sizes, neighbours, offsets),
        )
        count = count + offsets.diff()
        mean = total.view(v.shape)
        agreement = torch.where(
            length > 0, torch.linalg.vector_norm(mean, dim=-1) / torch.where(length > 0, length, 1.0), 0.0
        )
        full = (count / (window**2 - 1)).to(agreement.dtype).unsqueeze(-1).expand_as(agreement)
        axes.append(unit(mean))
        facts.append(torch.stack([full, agreement], -1))
    return axes, facts


def _ring(graph: PatchGraph, distance: int) -> tuple[Tensor, Tensor]:
    """The neighbours that lie so many steps away, along x or y, whichever is more: lists and offsets."""
    assert graph.places is not None
    steps = torch.stack([graph.places // graph.window, graph.places % graph.window]).int() - graph.window // 2
    inside = steps.abs().amax(0) == distance  # (E,)
    return graph.neighbours[inside], F.pad(inside.cumsum(0), (1, 0))[graph.offsets]
