"""A pre-norm transformer block with room for a correction between attention and output projection.

Shapes: B batch, H heads, L rows (row 0 is CLS), D head width, C channels, R rows of all bags.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from gated_srp.models.adapter import Adapter
from gated_srp.models.attention import Attention, Spare, merge_heads, product_dtype
from gated_srp.srp import GatedSRP, PatchGraph
from gated_srp.srp.projection import add_product, chunks, linear_into


class Block(nn.Module):
    """x + keep * attention(LN x), then x + keep * mlp(LN x); ``keep`` (2, B) are drop-path factors, None keeps everything.

    ``spare``: nobody needs x afterwards, so its memory may take the result when no gradient is wanted, and that of the values
    serves the next block.
    """

    def __init__(
        self, dim: int, attention: Attention, *, correction: GatedSRP | Adapter | None = None, mlp_ratio: int = 4
    ) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(dim)
        self.attn = attention
        self.correction = correction
        self.norm2 = nn.LayerNorm(dim)
        self.mlp = FeedForward(dim, mlp_ratio * dim)

    def forward(
        self, x: Tensor, graph: PatchGraph, keep: Tensor | None = None, *, spare: Spare | None = None
    ) -> Tensor:
        if self._plainly(x, keep):
            y, v = self.attn(self.norm1(x), graph)
            x = _add(x, self._merge(y, v, graph), keep, 0)
            return _add(x, self.mlp(self.norm2(x)), keep, 1)
        return self._by_rows(x, graph, torch.empty_like(x) if spare is None else x, spare or Spare())

    def _plainly(self, x: Tensor, keep: Tensor | None) -> bool:
        """Whether the parts are called as they are written: for gradients, compilers, batches, drop path and whoever watches them."""
        looked_at = watched(*self.attn.modules(), *self.mlp.modules(), self.correction)
        return torch.is_grad_enabled() or torch.compiler.is_compiling() or len(x) > 1 or keep is not None or looked_at

    def _by_rows(self, x: Tensor, graph: PatchGraph, out: Tensor, spare: Spare) -> Tensor:
        """`forward` of one bag when no gradient is wanted: of its rows only x, v and the result exist as a whole.

        ``out`` takes the result and may be x: once v and the landmarks are known, a row needs no other row of x.
        """
        y_at, v = self.attn.by_rows(x, self.norm1, graph, spare)
        correct = None if self.correction is None else self.correction.by_rows(v, graph)
        feed_forward = self.mlp.by_rows(x, 1024)
        for rows in chunks(x[0], 1024):
            y = y_at(rows)  # (1, H, chunk, D)
            z = merge_heads(y)[0] if correct is None else correct(y, rows).flatten(1)  # (chunk, C)
            part = _add(x[0, rows], self.attn.proj(z), None, 0)
            torch.add(part, feed_forward(self.norm2(part)), out=out[0, rows])
        return out

    def cls_attention(
        self, x: Tensor, graph: PatchGraph, keep: Tensor | None = None, *, spare: Spare | None = None
    ) -> Tensor:
        """Attention of CLS to the patches, (H, N) for one bag."""
        return graph.patches(self.attn.cls_map(self.norm1(x), graph))

    def _merge(self, y: Tensor, v: Tensor, graph: PatchGraph) -> Tensor:
        if self.correction is not None:
            return self.correction.linear(y, v, graph, self.attn.proj)
        merged: Tensor = self.attn.proj(merge_heads(y))
        return merged


class LastBlock(Block):
    """The last block of a model whose head reads CLS alone: keys and values of all rows, everything else for one. (B, 1, C)."""

    def forward(
        self, x: Tensor, graph: PatchGraph, keep: Tensor | None = None, *, spare: Spare | None = None
    ) -> Tensor:
        if self._plainly(x, keep):
            y, v = self.attn.first_row(self.norm1(x), graph)
        else:
            y, v = self.attn.first_by_rows(x, self.norm1, graph, spare or Spare())
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
            return self.fc2(F.gelu(self.fc1(x)))  # type: ignore[no-any-return]
        if not torch.is_grad_enabled():
            return self.fc2(torch.ops.aten.gelu_(self.fc1(x)))  # type: ignore[no-any-return]
        dtype = product_dtype(x)
        weights = (p.to(dtype) for p in (self.fc1.weight, self.fc1.bias, self.fc2.weight, self.fc2.bias))
        out: Tensor = _FeedForward.apply(x.to(dtype), *weights)  # type: ignore[no-untyped-call]
        return out

    def by_rows(self, x: Tensor, most: int) -> Callable[[Tensor], Tensor]:
        """`forward` of at most so many rows like those of x at a time when no gradient is wanted; their hidden rows share one memory."""
        dtype = product_dtype(x)
        w1, b1, w2, b2 = (p.to(dtype) for p in (self.fc1.weight, self.fc1.bias, self.fc2.weight, self.fc2.bias))
        most = most if x.device.type == "cpu" else x.shape[1]
        memory = x.new_empty(min(most, x.shape[1]), len(w1), dtype=dtype)

        def run(rows: Tensor) -> Tensor:
            hidden = memory[: len(rows)]
            linear_into(hidden, rows.to(dtype), w1, b1)
            return F.linear(torch.ops.aten.gelu_(hidden), w2, b2)

        return run


class _FeedForward(torch.autograd.Function):
    """linear(gelu(linear(x))) in row chunks: keeps the hidden rows, recomputes their activation in backward, and never holds
    the gradient of all hidden rows at once."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w1: Tensor, b1: Tensor, w2: Tensor, b2: Tensor) -> Tensor:
        out = x.new_empty(*x.shape[:-1], len(w2))
        rows, flat = x.flatten(0, -2), out.flatten(0, -2)
        hidden = rows.new_empty(len(rows), len(w1))
        for part in chunks(rows):
            linear_into(hidden[part], rows[part], w1, b1)
            linear_into(flat[part], F.gelu(hidden[part]), w2, b2)
        ctx.save_for_backward(x, hidden, w1, w2)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, ...]:
        x, hidden, w1, w2 = ctx.saved_tensors
        dout, rows = grads[0].flatten(0, -2), x.flatten(0, -2)
        exact = torch.promote_types(w1.dtype, torch.float32)  # sums over chunks
        dx = torch.empty_like(rows)
        dw1, dw2 = torch.zeros_like(w1, dtype=exact), torch.zeros_like(w2, dtype=exact)
        db1 = torch.zeros(len(w1), dtype=exact, device=x.device)
        for part in chunks(rows):
            add_product(dw2, dout[part].t(), F.gelu(hidden[part]))
            dhidden = torch.ops.aten.gelu_backward(dout[part] @ w2, hidden[part])  # (chunk, hidden)
            add_product(dw1, dhidden.t(), rows[part])
            db1 += dhidden.sum(0)
            torch.mm(dhidden, w1, out=dx[part])
        return dx.view_as(x), dw1.to(w1.dtype), db1.to(w1.dtype), dw2.to(w2.dtype), dout.sum(0)


def watched(*modules: nn.Module | None) -> bool:
    """Whether somebody has hooks on any of these modules."""
    return any(m._forward_hooks or m._forward_pre_hooks for m in modules if m is not None)


def _add(x: Tensor, branch: Tensor, keep: Tensor | None, which: int) -> Tensor:
    """x + keep * branch. The branch is a fresh output that nobody else reads: where dtypes agree its memory takes the sum."""
    if keep is not None:
        branch = branch * keep[which].view(-1, 1, 1).to(branch.dtype)
    return branch.add_(x) if branch.dtype == x.dtype else x + branch
