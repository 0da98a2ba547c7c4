"""A pre-norm transformer block with room for a correction between attention and output projection.

Shapes: B batch, H heads, L rows (row 0 is CLS), D head width, C channels, R rows of all bags.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from gated_srp.models.attention import Attention, merge_heads
from gated_srp.srp import GatedSRP, PatchGraph
from gated_srp.srp.projection import add_product, chunks, linear_into


class Block(nn.Module):
    """x + keep * attention(LN x), then x + keep * mlp(LN x); ``keep`` (2, B) are drop-path factors, None keeps everything."""

    def __init__(
        self, dim: int, attention: Attention, *, correction: GatedSRP | None = None, mlp_ratio: int = 4
    ) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(dim)
        self.attn = attention
        self.correction = correction
        self.norm2 = nn.LayerNorm(dim)
        self.mlp = FeedForward(dim, mlp_ratio * dim)

    def forward(self, x: Tensor, graph: PatchGraph, keep: Tensor | None = None) -> Tensor:
        y, v = self.attn(self.norm1(x), graph)
        x = _add(x, self._merge(y, v, graph), keep, 0)
        if keep is None and not torch.is_grad_enabled() and not torch.compiler.is_compiling():
            return self._feed_forward_in_place(x)
        return _add(x, self.mlp(self.norm2(x)), keep, 1)

    def _feed_forward_in_place(self, x: Tensor) -> Tensor:
        """x + mlp(LN x) when no gradient is wanted: the hidden rows exist for one chunk at a time, the sum replaces x."""
        for bag in x:
            for rows in chunks(len(bag), 2048):
                bag[rows] += self.mlp(self.norm2(bag[rows]))
        return x

    def cls_attention(self, x: Tensor, graph: PatchGraph, keep: Tensor | None = None) -> Tensor:
        """Attention of CLS to the patches, (H, N) for one bag."""
        return graph.patches(self.attn.cls_map(self.norm1(x), graph))

    def _merge(self, y: Tensor, v: Tensor, graph: PatchGraph) -> Tensor:
        if self.correction is not None:
            return self.correction.linear(y, v, graph, self.attn.proj)
        merged: Tensor = self.attn.proj(merge_heads(y))
        return merged


class LastBlock(Block):
    """The last block of a model whose head reads CLS alone: keys and values of all rows, everything else for one. (B, 1, C)."""

    def forward(self, x: Tensor, graph: PatchGraph, keep: Tensor | None = None) -> Tensor:
        y, v = self.attn.first_row(self.norm1(x), graph)
        x = _add(x[:, :1], self._merge(y, v, graph.first_rows()), keep, 0)
        return _add(x, self.mlp(self.norm2(x)), keep, 1)


class FeedForward(nn.Module):
    """Linear, exact GELU, linear."""

    def __init__(self, dim: int, hidden_dim: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(dim, hidden_dim)
        self.fc2 = nn.Linear(hidden_dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.fc1(x)
        if torch.compiler.is_compiling() or not torch.is_grad_enabled():
            plain: Tensor = self.fc2(F.gelu(hidden))
            return plain
        weight, bias = self.fc2.weight.to(hidden.dtype), self.fc2.bias.to(hidden.dtype)
        out: Tensor = _GeluLinear.apply(hidden, weight, bias)  # type: ignore[no-untyped-call]
        return out


class _GeluLinear(torch.autograd.Function):
    """linear(gelu(hidden)) in row chunks; the activation is recomputed in backward instead of kept."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        ctx.save_for_backward(hidden, weight)
        out = hidden.new_empty(*hidden.shape[:-1], len(weight))
        rows, flat = hidden.flatten(0, -2), out.flatten(0, -2)
        for part in chunks(len(rows)):
            linear_into(flat[part], F.gelu(rows[part]), weight, bias)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, ...]:
        hidden, weight = ctx.saved_tensors
        dout, rows = grads[0].flatten(0, -2), hidden.flatten(0, -2)
        dhidden = torch.empty_like(rows)
        dweight = torch.zeros_like(weight, dtype=torch.promote_types(weight.dtype, torch.float32))
        for part in chunks(len(rows)):
            add_product(dweight, dout[part].t(), F.gelu(rows[part]))
            torch.ops.aten.gelu_backward.grad_input(dout[part] @ weight, rows[part], grad_input=dhidden[part])
        return dhidden.view_as(hidden), dweight.to(weight.dtype), dout.sum(0)


def _add(x: Tensor, branch: Tensor, keep: Tensor | None, which: int) -> Tensor:
    """x + keep * branch. The branch is a fresh output that nobody else reads: where dtypes agree its memory takes the sum."""
    if keep is not None:
        branch = branch * keep[which].view(-1, 1, 1).to(branch.dtype)
    return branch.add_(x) if branch.dtype == x.dtype else x + branch
