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
from gated_srp.srp.projection import chunks


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
        return _add(x, self.mlp(self.norm2(x)), keep, 1)

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
        if torch.compiler.is_compiling():
            return self._plain(x)
        if not torch.is_grad_enabled():
            # Nobody needs the hidden rows again: they exist for one chunk at a time.
            return torch.cat([self._plain(part) for part in x.flatten(0, -2).split(2048)]).view_as(x)
        hidden = self.fc1(x)
        weight, bias = self.fc2.weight.to(hidden.dtype), self.fc2.bias.to(hidden.dtype)
        out: Tensor = _GeluLinear.apply(hidden, weight, bias)  # type: ignore[no-untyped-call]
        return out

    def _plain(self, x: Tensor) -> Tensor:
        out: Tensor = self.fc2(F.gelu(self.fc1(x)))
        return out


class _GeluLinear(torch.autograd.Function):
    """linear(gelu(hidden)) in row chunks; the activation is recomputed in backward instead of kept."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        ctx.save_for_backward(hidden, weight)
        rows = hidden.flatten(0, -2)
        out = rows.new_empty(len(rows), len(weight))
        for part in chunks(len(rows)):
            torch.addmm(bias, F.gelu(rows[part]), weight.t(), out=out[part])
        return out.view(*hidden.shape[:-1], -1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, ...]:
        hidden, weight = ctx.saved_tensors
        dout = grads[0].flatten(0, -2)
        rows = hidden.flatten(0, -2)
        dhidden = torch.empty_like(rows)
        dweight = torch.zeros_like(weight, dtype=torch.promote_types(weight.dtype, torch.float32))
        for part in chunks(len(rows)):
            dweight += dout[part].t() @ F.gelu(rows[part])
            dhidden[part] = torch.ops.aten.gelu_backward(dout[part] @ weight, rows[part])
        return dhidden.view_as(hidden), dweight.to(weight.dtype), dout.sum(0)


def _add(x: Tensor, branch: Tensor, keep: Tensor | None, which: int) -> Tensor:
    return x + branch if keep is None else x + keep[which].view(-1, 1, 1).to(branch.dtype) * branch
