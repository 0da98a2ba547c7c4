"""Differential attention: two attentions share their values, the second is subtracted.

Shapes: B batch, H heads (half of the base's), L rows (row 0 is CLS), M landmarks, D branch width, 2 D value width.
"""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gated_srp.models.attention import Attention, check_heads, key_mask, split_heads, weights
from gated_srp.models.nystrom import check_one_length, landmarks, nystrom, nystrom_map, segment_means
from gated_srp.srp import PatchGraph


class DifferentialAttention(Attention):
    """y = (1 - lambda_0) RMSNorm(y1 - lambda y2) with lambda = exp(lq1 . lk1) - exp(lq2 . lk2) + lambda_0.

    ``depth`` counts the blocks from 0: lambda_0 = 0.8 - 0.6 exp(-0.3 depth). Dense; `DifferentialNystrom` is the slide form.
    """

    lambda_q1: Tensor
    lambda_k1: Tensor
    lambda_q2: Tensor
    lambda_k2: Tensor

    def __init__(self, dim: int, num_heads: int, *, depth: int = 0) -> None:
        super().__init__()
        check_heads(dim, num_heads)
        check_heads(num_heads, 2)
        self.num_heads = num_heads // 2
        width = dim // num_heads
        self.lambda_init = 0.8 - 0.6 * math.exp(-0.3 * depth)
        self.q_proj, self.k_proj, self.v_proj, self.proj = (nn.Linear(dim, dim, bias=False) for _ in range(4))
        for name in ("lambda_q1", "lambda_k1", "lambda_q2", "lambda_k2"):
            self.register_parameter(name, nn.Parameter(torch.randn(width) * 0.1))
        self.subln = nn.RMSNorm(2 * width, eps=1e-5)

    def forward(self, x: Tensor, graph: PatchGraph) -> tuple[Tensor, Tensor]:
        v = split_heads(self.v_proj(x), self.num_heads)  # (B, H, L, 2 D)
        return self._combine(x, x, v, graph), v

    def first_row(self, x: Tensor, graph: PatchGraph) -> tuple[Tensor, Tensor]:
        v = split_heads(self.v_proj(x), self.num_heads)
        return self._combine(x[:, :1], x, v, graph), v[:, :, :1]

    def cls_map(self, x: Tensor, graph: PatchGraph) -> Tensor:
        """A1 - lambda A2, signed."""
        first, second = (self._map(q, k, i, x, graph) for i, (q, k) in enumerate(self._branches(x[:, :1], x)))
        signed: Tensor = first - self._lambda() * second
        return signed[:, :, 0]

    def _combine(self, queries: Tensor, x: Tensor, v: Tensor, graph: PatchGraph) -> Tensor:
        first, second = (self._attend(q, k, v, i, x, graph) for i, (q, k) in enumerate(self._branches(queries, x)))
        with torch.autocast(x.device.type, enabled=False):
            mixed: Tensor = self.subln((first - self._lambda().to(first.dtype) * second).to(self.subln.weight.dtype))
            return mixed.mul(1 - self.lambda_init).to(first.dtype)

    def _branches(self, queries: Tensor, x: Tensor) -> list[tuple[Tensor, Tensor]]:
        """(q, k) of each branch, (B, H, L, D): heads 2 h and 2 h + 1 of the base belong to head h."""
        q, k = (split_heads(part, 2 * self.num_heads) for part in (self.q_proj(queries), self.k_proj(x)))
        return [(q[:, i::2], k[:, i::2]) for i in (0, 1)]

    def _lambda(self) -> Tensor:
        with torch.autocast(self.lambda_q1.device.type, enabled=False):
            first = (self.lambda_q1.float() * self.lambda_k1.float()).sum().exp()
            second = (self.lambda_q2.float() * self.lambda_k2.float()).sum().exp()
            return first - second + self.lambda_init

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, branch: int, x: Tensor, graph: PatchGraph) -> Tensor:
        mask = key_mask(x, graph)
        # CPU attention has no fast path for values wider than keys: take the two halves one after the other.
        return torch.cat(
            [F.scaled_dot_product_attention(q, k, half, attn_mask=mask) for half in v.chunk(2, dim=-1)], dim=-1
        )

    def _map(self, q: Tensor, k: Tensor, branch: int, x: Tensor, graph: PatchGraph) -> Tensor:
        return weights(q, k, key_mask(x, graph))


class DifferentialNystrom(DifferentialAttention):
    """Each branch is Nystrom attention with its own landmarks and pinv scale."""

    def __init__(self, dim: int, num_heads: int, *, depth: int = 0, num_landmarks: int = 64) -> None:
        super().__init__(dim, num_heads, depth=depth)
        self.num_landmarks = num_landmarks

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, branch: int, x: Tensor, graph: PatchGraph) -> Tensor:
        check_one_length(graph)
        marks = self._landmarks(x, branch)
        return torch.cat([nystrom(q, k, half, *marks) for half in v.chunk(2, dim=-1)], dim=-1)

    def _map(self, q: Tensor, k: Tensor, branch: int, x: Tensor, graph: PatchGraph) -> Tensor:
        return nystrom_map(q, k.unbind(1), *self._landmarks(x, branch))

    def _landmarks(self, x: Tensor, branch: int) -> list[Tensor]:
        means = segment_means(x, self.num_landmarks)
        marks = (landmarks(means, layer.weight, None, self.num_landmarks) for layer in (self.q_proj, self.k_proj))
        return [split_heads(m, 2 * self.num_heads)[:, branch::2] for m in marks]
