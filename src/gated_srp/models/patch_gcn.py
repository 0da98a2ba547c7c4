"""Patch-GCN: graph convolutions over the patches, then attention pooling.

Shapes: B bags of one length, N patches, R = B * N rows, E neighbour entries, C channels.
"""

from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gated_srp.models.block import OwnStart
from gated_srp.models.peers import GatedPool, Peer, pooled
from gated_srp.srp import PatchGraph


class Temperature(OwnStart):
    """One number, 1 at the start."""

    def __init__(self) -> None:
        super().__init__()
        self.value = nn.Parameter(torch.ones(()))

    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        nn.init.ones_(self.value)


class SoftmaxConvolution(nn.Module):
    """GENConv (Li et al. 2020): x_i <- MLP(x_i + sum_j softmax_j(t m_j) m_j), m_j = ReLU(x_j) + 1e-7, over the neighbours j, channel by channel.

    MLP: linear to 2 C, LayerNorm, ReLU, linear. Without neighbours the sum is zero. t starts at 1.
    """

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.temperature = Temperature()
        self.first, self.norm, self.second = nn.Linear(dim, 2 * dim), nn.LayerNorm(2 * dim), nn.Linear(2 * dim, dim)

    def forward(self, x: Tensor, graph: PatchGraph) -> Tensor:
        """(R, C) -> (R, C)"""
        rows, entries = torch.arange(len(x), device=x.device), len(graph.neighbours)
        owner = rows.repeat_interleave(
            graph.neighbour_count, output_size=entries
        )  # (E,); the size given: no wait for it
        messages = (F.relu(x) + 1e-7)[graph.neighbours]  # (E, C)
        logits = messages * self.temperature.value
        index = owner.unsqueeze(-1).expand_as(logits)
        highest = torch.full_like(x, -torch.inf, dtype=logits.dtype).scatter_reduce(0, index, logits.detach(), "amax")
        share = (logits - highest[owner]).exp()
        weight = torch.zeros_like(x, dtype=share.dtype).index_add(0, owner, share)
        total = torch.zeros_like(weight).index_add(0, owner, share * messages)
        mixed = x + torch.where(weight > 0, total / weight.clamp(min=1e-30), 0.0).to(x.dtype)
        out: Tensor = self.second(F.relu(self.norm(self.first(mixed))))
        return out


class PatchGCN(Peer):
    """Patch-GCN (Chen et al. 2021): h_0 = ReLU(W x + b), h_1 = conv(h_0), h_l = h_(l-1) + ReLU(LN(conv(h_(l-1)))), l = 2, 3;
    p_i = ReLU(V [h_0 ... h_3]_i + c), z = sum_i a_i p_i with `GatedPool`, logits = head(ReLU(U z + d))."""

    checked: ClassVar[str] = (
        "A loop over messages, and the sizes of its authors' code. Neighbours are those of the lattice, where it "
        "takes the eight nearest; dropout follows the first, the joint and the last layer alone."
    )

    def __init__(self, in_dim: int, num_outputs: int, *, dim: int = 128) -> None:
        super().__init__(in_dim, dropout=0.25)
        self.in_proj = nn.Linear(in_dim, dim)
        self.layers = nn.ModuleList(SoftmaxConvolution(dim) for _ in range(3))
        self.norms = nn.ModuleList(nn.LayerNorm(dim) for _ in range(2))
        self.joint, self.last = nn.Linear(4 * dim, 4 * dim), nn.Linear(4 * dim, 4 * dim)
        self.pool = GatedPool(4 * dim, 4 * dim)
        self.head = nn.Linear(4 * dim, num_outputs)

    def forward(self, features: Tensor, graph: PatchGraph, keep: Tensor | None = None) -> Tensor:
        hidden, scores = self.attend(features, graph, keep)
        return self.logits(self.drop(F.relu(self.last(pooled(scores, hidden))), keep, 2), graph)

    def attend(self, features: Tensor, graph: PatchGraph, keep: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """p (B, N, 4 C) and the attention's logits (B, N)."""
        h = self.drop(F.relu(self.in_proj(self.rows(features, graph))), keep, 0)
        bags, rows = len(h), h.flatten(0, 1)
        found = [rows, self.layers[0](rows, graph)]
        for layer, norm in zip(list(self.layers)[1:], self.norms, strict=True):
            found.append(found[-1] + F.relu(norm(layer(found[-1], graph))))
        joint = self.drop(F.relu(self.joint(torch.cat(found, dim=-1).unflatten(0, (bags, -1)))), keep, 1)
        return joint, self.pool(joint)

    def cls_attention(self, features: Tensor, graph: PatchGraph, keep: Tensor | None = None) -> Tensor:
        """a_i as one head, (1, N) for one bag."""
        return graph.patches(self.attend(features, graph)[1].softmax(-1)[:, None])
