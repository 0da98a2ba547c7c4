"""Attention as the blocks see it, and the dense form.

Shapes: B batch, H heads, L rows (row 0 is CLS), D head width, C = H * D channels.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from gated_srp.errors import UserError
from gated_srp.srp import PatchGraph


class Spare:
    """What a prediction lends its blocks, one after the other: memory for their input and for their values, made once."""

    def __init__(self) -> None:
        self._both: Tensor | None = None

    def rows(self, like: Tensor, shape: tuple[int, int, int], dtype: torch.dtype) -> Tensor:
        """Unset (B, L, C) for what enters the first block, and as much for values in one block with it.

        The C library keeps one block of up to 32 MB for the next slide, where it gives two of half that size back to the system.
        """
        self._both = like.new_empty(2, *shape, dtype=dtype)
        return self._both[0]

    def values(self, x: Tensor) -> Tensor:
        """Unset (L, C) for the rows of x (1, L, C), where those asked for before lay."""
        if self._both is None or self._both.shape[1:] != x.shape or self._both.dtype != x.dtype:
            return torch.empty_like(x[0])
        return self._both[1, 0]


class Attention(nn.Module):
    """Maps normalised rows (B, L, C) to head outputs y and values v, both (B, H, L, D); `out` merges the heads afterwards."""

    num_heads: int
    proj: nn.Linear

    def forward(self, x: Tensor, graph: PatchGraph) -> tuple[Tensor, Tensor]:
        raise NotImplementedError

    def by_rows(
        self, x: Tensor, norm: nn.Module, graph: PatchGraph, spare: Spare
    ) -> tuple[Callable[[slice], Tensor], Tensor]:
        """`forward` of norm(x) for one bag when no gradient is wanted: y of any rows on demand, (1, H, rows, D), and v of all."""
        y, v = self(norm(x), graph)
        return lambda rows: y[:, :, rows], v

    def first_row(self, x: Tensor, graph: PatchGraph) -> tuple[Tensor, Tensor]:
        """y and v of row 0 alone, (B, H, 1, D) each: what a head that reads CLS needs of the last block."""
        raise NotImplementedError

    def first_by_rows(self, x: Tensor, norm: nn.Module, graph: PatchGraph, spare: Spare) -> tuple[Tensor, Tensor]:
        """`first_row` of norm(x) for one bag when no gradient is wanted."""
        return self.first_row(norm(x), graph)

    def cls_map(self, x: Tensor, graph: PatchGraph) -> Tensor:
        """Weights with which row 0 reads the values of all rows, (B, H, L)."""
        raise NotImplementedError


class FusedAttention(Attention):
    """Queries, keys and values from one linear layer with bias."""

    def __init__(self, dim: int, num_heads: int) -> None:
        super().__init__()
        check_heads(dim, num_heads)
        self.num_heads = num_heads
        self.qkv = nn.Linear(dim, 3 * dim)
        self.proj = nn.Linear(dim, dim)

    def heads(self, x: Tensor, first: int = 0, last: int = 3) -> tuple[Tensor, ...]:
        """Projections number first to last - 1 of (q, k, v), each (B, H, L, D) in memory of its own."""
        dim = self.proj.in_features
        parts = projections(x, self.qkv.weight[first * dim : last * dim], self.qkv.bias[first * dim : last * dim], dim)
        return tuple(split_heads(part, self.num_heads) for part in parts)


def projections(x: Tensor, weight: Tensor, bias: Tensor, dim: int) -> tuple[Tensor, ...]:
    """linear(x, weight, bias) cut into tensors of ``dim`` channels: (B, L, C) -> as many (B, L, dim)."""
    if torch.compiler.is_compiling() or not torch.is_grad_enabled():
        return tuple(F.linear(x, w, b) for w, b in zip(weight.split(dim), bias.split(dim), strict=True))
    dtype = product_dtype(x)
    parts: tuple[Tensor, ...] = _Projections.apply(x.to(dtype), weight.to(dtype), bias.to(dtype), dim)  # type: ignore[no-untyped-call]
    return parts


def product_dtype(x: Tensor) -> torch.dtype:
    """What a linear layer computes in on rows like x: autocast's precision where it is on."""
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype


class _Projections(torch.autograd.Function):
    """The gradients of all parts are summed by the products themselves, where slices of one product would be joined first."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, dim: int) -> tuple[Tensor, ...]:
        ctx.save_for_backward(x, weight)
        return tuple(F.linear(x, w, b) for w, b in zip(weight.split(dim), bias.split(dim), strict=True))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        rows, parts = x.flatten(0, -2), [grad.flatten(0, -2) for grad in grads]
        dx, dweight = torch.empty_like(rows), torch.empty_like(weight)
        weights = weight.chunk(len(parts))
        for number, (grad, w, dw) in enumerate(zip(parts, weights, dweight.chunk(len(parts)), strict=True)):
            torch.addmm(dx, grad, w, beta=min(number, 1), out=dx)  # the first one overwrites
            torch.mm(grad.t(), rows, out=dw)
        return dx.view_as(x), dweight, torch.cat([grad.sum(0) for grad in parts]), None


class DenseAttention(FusedAttention):
    """Softmax attention over all rows (Eq. 1); rows that pad a shorter bag are never attended to."""

    def forward(self, x: Tensor, graph: PatchGraph) -> tuple[Tensor, Tensor]:
        q, k, v = self.heads(x)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=key_mask(x, graph)), v

    def first_row(self, x: Tensor, graph: PatchGraph) -> tuple[Tensor, Tensor]:
        (q,) = self.heads(x[:, :1], 0, 1)
        k, v = self.heads(x, 1, 3)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=key_mask(x, graph)), v[:, :, :1]

    def cls_map(self, x: Tensor, graph: PatchGraph) -> Tensor:
        (q,) = self.heads(x[:, :1], 0, 1)
        (k,) = self.heads(x, 1, 2)
        return weights(q, k, key_mask(x, graph)).squeeze(2)


def weights(q: Tensor, k: Tensor, mask: Tensor | None = None) -> Tensor:
    """softmax(q k^T / sqrt D) in float32 (Eq. 1), for the places that need the weights themselves."""
    with torch.autocast(q.device.type, enabled=False):
        logits: Tensor = q.float() @ k.float().transpose(-2, -1) * q.shape[-1] ** -0.5
        if mask is not None:
            logits = logits.masked_fill(~mask, float("-inf"))
        return logits.softmax(-1)


def key_mask(x: Tensor, graph: PatchGraph) -> Tensor | None:
    """(B, 1, 1, L), false at rows that pad a shorter bag; None when there are none."""
    if len(set(graph.lengths)) == 1:
        return None
    mask = torch.ones(x.shape[:2], dtype=torch.bool, device=x.device)
    for bag, patches in enumerate(graph.lengths):
        mask[bag, graph.before + patches :] = False
    return mask[:, None, None]


def split_heads(x: Tensor, num_heads: int) -> Tensor:
    """(B, L, H * D) -> (B, H, L, D), a view."""
    return x.view(*x.shape[:-1], num_heads, -1).transpose(1, 2)


def merge_heads(heads: Tensor) -> Tensor:
    """(B, H, L, D) -> (B, L, H * D)."""
    return heads.transpose(1, 2).flatten(2)


def check_heads(dim: int, num_heads: int) -> None:
    if num_heads < 1 or dim % num_heads:
        raise UserError(f"dim {dim} is not a multiple of num_heads {num_heads}: every head needs the same width.")
