"""Attentions of other publications that correct the weights themselves: Cog, Integral, Differential Gated.

Each is dense; those that have a form through landmarks have it beside them. Shapes: B batch, H heads, L rows (row 0 is CLS), D head
width, C channels.
"""

from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from gated_srp.models.attention import DenseAttention, FusedAttention, key_mask
from gated_srp.models.nystrom import NystromAttention, NystromMaps, TwoMaps
from gated_srp.srp import PatchGraph

_ROWS = 128  # queries whose weights on all keys exist at once


class CogAttention(DenseAttention):
    """Weights that may be negative: y_i = sum_j sign(p_ij) softmax_j(|p_ij|) v_j, p_ij = <q_i, k_j> / sqrt D (Lv et al. 2024).

    Dense alone: an iteration for the pseudo-inverse of signed landmark weights does not converge in general.
    """

    signed: ClassVar[bool] = True
    checked: ClassVar[str] = (
        "A loop over sign(p) softmax(|p|), the form of its authors' code, which keeps the softmax in the first and "
        "the last block, as here. Dense alone: signed landmark weights have no convergent pseudo-inverse "
        "iteration."
    )

    def forward(self, x: Tensor, graph: PatchGraph) -> tuple[Tensor, Tensor]:
        q, k, v = self.heads(x)
        return self._attend(q, k, v, key_mask(x, graph)), v

    def first_row(self, x: Tensor, graph: PatchGraph) -> tuple[Tensor, Tensor]:
        (q,) = self.heads(x[:, :1], 0, 1)
        k, v = self.heads(x, 1, 3)
        return self._attend(q, k, v, key_mask(x, graph)), v[:, :, :1]

    def cls_map(self, x: Tensor, graph: PatchGraph) -> Tensor:
        (q,) = self.heads(x[:, :1], 0, 1)
        (k,) = self.heads(x, 1, 2)
        return signed_weights(q, k, key_mask(x, graph)).squeeze(2)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        parts = []
        for part in q.split(_ROWS, dim=2):
            # L weights per row and head: cheaper to compute twice than to keep.
            again = torch.is_grad_enabled() and part.requires_grad
            parts.append(
                checkpoint(_attend_signed, part, k, v, mask, use_reentrant=False, preserve_rng_state=False)
                if again
                else _attend_signed(part, k, v, mask)
            )
        return torch.cat(parts, dim=2)


def _attend_signed(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    with torch.autocast(q.device.type, enabled=False):
        y = signed_weights(q, k, mask) @ v.to(torch.promote_types(v.dtype, torch.float32))
        return y.to(v.dtype)


def signed_weights(q: Tensor, k: Tensor, mask: Tensor | None = None) -> Tensor:
    """sign(p) softmax(|p|) with p = q k^T / sqrt D, in float32 at least; a masked key has weight 0.

    >>> signed_weights(torch.ones(1, 1), torch.tensor([[3.0], [-3.0], [0.0]]))
    tensor([[ 0.4879, -0.4879,  0.0000]])
    """
    with torch.autocast(q.device.type, enabled=False):
        exact = torch.promote_types(q.dtype, torch.float32)
        p: Tensor = q.to(exact) @ k.to(exact).transpose(-2, -1) * q.shape[-1] ** -0.5
        size = p.abs() if mask is None else p.abs().masked_fill(~mask, float("-inf"))
        return p.sign() * size.softmax(-1)


class Integral(FusedAttention):
    """The Integral Transformer averages S signals before the softmax: softmax_j(1 / S sum_s <q_is, k_js> / sqrt(D / S)) (Kobyzev et al. 2025).

    q and k are cut into S signals of width D / S. Their products sum up to <q_i, k_j>, so that this is softmax attention with logits
    divided by sqrt S, which is how it is computed; the published S is 8.
    """

    checked: ClassVar[str] = (
        "A loop over eight signals, each scaled by its own width, averaged before the softmax. The formula is from "
        "two texts on the paper, not from its own pages. Signals that meet in one sum are one product: this is "
        "softmax attention with logits divided by sqrt 8."
    )

    signals = 8

    def heads(self, x: Tensor, first: int = 0, last: int = 3) -> tuple[Tensor, ...]:
        parts = super().heads(x, first, last)
        return parts if first else (parts[0] * self.signals**-0.5, *parts[1:])


class IntegralAttention(Integral, DenseAttention):
    """`Integral` over all rows."""


class IntegralNystrom(Integral, NystromAttention):
    """`Integral` through landmarks: all three softmaxes have the averaged logits."""

    def in_chunks(self, x: Tensor, *, halves: bool = False) -> bool:
        return False  # folded weights do not know of the signals

    def landmarks(self, means: Tensor) -> tuple[Tensor, Tensor]:
        q, k = super().landmarks(means)
        return q * self.signals**-0.5, k


class GatedDifferentialAttention(TwoMaps):
    """Differential Gated Self-Attention: y_i = (1 - lambda_0) RMSNorm(g_i y1_i - (1 - g_i) y2_i), g_i = sigmoid(W x_i + b) per head
    (Lygizou, Farsang, Grosu 2025).

    The first attention excites, the second inhibits; x_i is the row that enters the attention, lambda_0 = 0.8 in all blocks.
    """

    checked: ClassVar[str] = (
        "A loop over g A1 - (1 - g) A2, g = sigmoid(W x + b) per token and head, RMSNorm, times 0.2. Of the paper "
        "its abstract and its reviews could be read: two maps, a sigmoid gate of the token per head, lambda_0 = "
        "0.8. That the second map is weighed by 1 - g is our reading of 'fused'; its authors' code was not public."
    )

    def __init__(self, dim: int, num_heads: int) -> None:
        super().__init__(dim, num_heads, scale=1 - 0.8)
        self.gate = nn.Linear(dim, self.num_heads)

    def mix(self, first: Tensor, second: Tensor, queries: Tensor) -> Tensor:
        g = torch.sigmoid(self.gate(queries.to(self.gate.weight.dtype))).transpose(1, 2).unsqueeze(-1)  # (B, H, L, 1)
        return g * first - (1 - g) * second


class GatedDifferentialNystrom(NystromMaps, GatedDifferentialAttention):
    """`GatedDifferentialAttention` through landmarks."""

    def __init__(self, dim: int, num_heads: int, *, num_landmarks: int = 64) -> None:
        GatedDifferentialAttention.__init__(self, dim, num_heads)
        self.num_landmarks = num_landmarks
