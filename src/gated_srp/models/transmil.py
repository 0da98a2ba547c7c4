"""TransMIL in its published form (after Shao et al. 2021).

Shapes: B bags, N patches, S side of the square, L = 1 + S * S rows (row 0 is CLS), P rows padded in front, H heads, D head width.
"""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gated_srp.models.attention import check_heads, merge_heads, split_heads
from gated_srp.models.nystrom import nystrom, nystrom_map, segment_means
from gated_srp.models.peers import Peer
from gated_srp.models.position import PPEG
from gated_srp.srp import GatedSRP, PatchGraph


class TransMILLayer(nn.Module):
    """x + W_o (F pinv(A) B v + conv(v)) with Nystrom attention of LN x.

    Rows are padded in front with zeros to a multiple of the landmarks, and the zeros take part in means and softmaxes; q, k, v
    have no bias; conv is one depthwise kernel of 33 rows a head over the values (the value residual).
    """

    def __init__(self, dim: int, num_heads: int, num_landmarks: int, *, kernel: int = 33) -> None:
        super().__init__()
        check_heads(dim, num_heads)
        self.num_heads, self.num_landmarks = num_heads, num_landmarks
        self.correction: GatedSRP | None = None  # for `trace`
        self.norm = nn.LayerNorm(dim)
        self.qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.residual = nn.Conv2d(
            num_heads, num_heads, (kernel, 1), padding=(kernel // 2, 0), groups=num_heads, bias=False
        )
        self.proj = nn.Linear(dim, dim)

    def forward(self, x: Tensor, graph: PatchGraph) -> Tensor:
        """The branch alone, (B, L, C), so that the model can drop parts of it."""
        q, k, v, q_marks, k_marks = self._heads(x)
        y = nystrom(q, k, v, q_marks, k_marks) + self.residual(v)
        branch: Tensor = self.proj(merge_heads(y)[:, -x.shape[1] :])
        return branch

    def cls_attention(self, x: Tensor, graph: PatchGraph) -> Tensor:
        """F[cls] pinv(A) B, patch columns: (H, N) for one bag."""
        q, k, _, q_marks, k_marks = self._heads(x)
        front = q.shape[2] - x.shape[1]
        return graph.patches(
            nystrom_map(q[:, :, front : front + 1], k.unbind(1), q_marks, k_marks).squeeze(2)[..., front:]
        )

    def _heads(self, x: Tensor) -> tuple[Tensor, ...]:
        """q, k, v (B, H, P + L, D) and the landmarks of q and k (B, H, M, D)."""
        rows = F.pad(self.norm(x), (0, 0, -x.shape[1] % self.num_landmarks, 0))  # (B, P + L, C)
        q, k, v = self.qkv(rows).chunk(3, dim=-1)
        marks = (segment_means(part, self.num_landmarks) for part in (q, k))
        return tuple(split_heads(part, self.num_heads) for part in (q, k, v, *marks))


class TransMIL(Peer):
    """Linear and ReLU to C channels, rows repeated from the first on to a square, CLS; layer, PPEG, layer; LayerNorm, CLS, linear."""

    def __init__(
        self,
        in_dim: int,
        num_outputs: int,
        *,
        dim: int = 512,
        num_heads: int = 8,
        num_landmarks: int = 256,
        dropout: float = 0.1,
    ) -> None:
        super().__init__(in_dim, dropout=dropout)
        self.in_proj = nn.Linear(in_dim, dim)
        self.cls_token = nn.Parameter(torch.zeros(1, 1, dim))
        self.layers = nn.ModuleList(TransMILLayer(dim, num_heads, num_landmarks) for _ in range(2))
        self.ppeg = PPEG(dim)
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, num_outputs)

    def forward(self, features: Tensor, graph: PatchGraph, keep: Tensor | None = None) -> Tensor:
        x = F.relu(self.in_proj(self.rows(features, graph)))  # (B, N, C)
        missing = math.ceil(math.sqrt(x.shape[1])) ** 2 - x.shape[1]
        x = torch.cat([self.cls_token.to(x.dtype).expand(len(x), -1, -1), x, x[:, :missing]], dim=1)  # (B, L, C)
        rows = graph.with_isolated(before=1, after=missing)
        first, second = self.layers
        x = self.ppeg(x + self.drop(first(x, rows), keep, 0))
        x = x + self.drop(second(x, rows), keep, 1)
        logits: Tensor = self.head(self.norm(x[:, 0]))
        return logits
