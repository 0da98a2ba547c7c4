"""Nystrom attention in row chunks: rows meet landmarks in logits alone, so that neither queries nor keys exist.

Shapes: H heads, L rows of one bag, M landmarks, D head width, C = H * D channels.
"""

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from gated_srp.srp.projection import chunks, linear_into

Marks = tuple[Tensor, Tensor]  # q~ and k~ of one bag, (H, M, D) each


def nystrom_in_chunks(x: Tensor, qkv: nn.Linear, marks: Marks, inverse: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """y of the first ``count`` rows of x (L, C), (count, H, D), and v of all, (L, C); ``inverse`` of softmax(q~ k~^T), (H, M, M)."""
    to_keys, (wk, _), values = row_layers(qkv, marks)
    return attend(x, inverse, wk, to_keys, values, count)


def row_layers(qkv: nn.Linear, marks: Marks) -> list[tuple[Tensor, Tensor]]:
    """Layers of rows: to the logits of their queries on k~, to those of q~ on their keys, to their values."""
    queries, keys, values = zip(*(p.chunk(3) for p in (qkv.weight, qkv.bias)), strict=True)
    q_marks, k_marks = marks
    return [landmark_logits(k_marks, *queries), landmark_logits(q_marks, *keys), values]


def landmark_logits(marks: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """The layer that maps rows to <marks, linear(rows)> / sqrt D, head by head: (H, M, D) -> weight (H M, C), bias (H M,).

    A product with it takes the place of two: rows to queries (or keys), and those to logits. Where the softmax is over the rows
    the bias falls out of it.
    """
    heads, _, width = marks.shape
    scaled = marks * width**-0.5
    folded = scaled @ weight.view(heads, width, -1)  # (H, M, C)
    return folded.flatten(0, 1), (scaled @ bias.view(heads, width, 1)).flatten()


class Gathered:
    """softmax(logits^T) values over rows that come in chunks: sums of exp(logit - highest so far), rescaled when that rises."""

    def __init__(self, shape: torch.Size, like: Tensor) -> None:
        """``shape``: heads, landmarks, width of a head."""
        self.highest = like.new_full(shape[:2], -math.inf)  # (H, M)
        self.weight = like.new_zeros(shape[:2])
        self.value = like.new_zeros(shape)  # (H, M, D)

    def add(self, logits: Tensor, values: Tensor) -> None:
        """``logits`` (rows, H M), which is overwritten, and ``values`` (rows, H D)."""
        logits, values = (by_head(rows, len(self.value)) for rows in (logits, values))
        highest = torch.maximum(self.highest, logits.amax(1))
        shrink = torch.exp(self.highest - highest)
        share = logits.sub_(highest.unsqueeze(1)).exp_()
        self.highest = highest
        self.weight = self.weight * shrink + share.sum(1)
        self.value = self.value * shrink.unsqueeze(-1) + share.transpose(1, 2) @ values

    def means(self) -> Tensor:
        """(H, M, D)"""
        return self.value / self.weight.unsqueeze(-1)


def spread(logits: Tensor, u: Tensor, near: Tensor | None = None) -> Tensor:
    """softmax(logits) u, head by head: (rows, H M) and (H, M, D) -> (rows, H, D); ``near`` keeps the softmax, (rows, H M)."""
    heads, _, width = u.shape
    share = torch.softmax(logits.unflatten(1, (heads, -1)), -1)  # (rows, H, M)
    if near is not None:
        near.copy_(share.flatten(1))
    y = logits.new_empty(len(logits), heads, width)
    torch.bmm(share.transpose(0, 1), u, out=y.transpose(0, 1))
    return y


def by_head(rows: Tensor, heads: int) -> Tensor:
    """(rows, H X) -> (H, rows, X), a view."""
    return rows.view(len(rows), heads, -1).transpose(0, 1)


class _Attend(torch.autograd.Function):
    """Both attentions of Nystrom and the values in one pass over row chunks, forward and backward.

    Of a row it keeps its input, its value and its two softmaxes, as many numbers as query and key would be. No gradient of
    queries, keys or logits ever exists as a whole.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, inverse: Tensor, wk: Tensor, wq: Tensor, bq: Tensor, wv: Tensor, bv: Tensor, count: int
    ) -> tuple[Tensor, Tensor]:
        heads, marks, _ = inverse.shape
        far, near = x.new_empty(len(x), len(wk)), x.new_empty(count, len(wq))  # softmax over rows, over landmarks
        values, y = x.new_empty(len(x), len(wv)), x.new_empty(count, heads, len(wv) // heads)
        highest = x.new_full((len(wk),), -math.inf)
        for rows in chunks(x):
            linear_into(values[rows], x[rows], wv, bv)
            linear_into(far[rows], x[rows], wk, None)
            highest = torch.maximum(highest, far[rows].amax(0))
        weight, gathered = x.new_zeros(len(wk)), x.new_zeros(heads, marks, y.shape[-1])
        for rows in chunks(x):
            weight += far[rows].sub_(highest).exp_().sum(0)
            gathered += by_head(far[rows], heads).transpose(1, 2) @ by_head(values[rows], heads)
        weight = weight.view(heads, marks, 1)
        gathered /= weight  # (H, M, D)
        u = (inverse @ gathered.to(inverse.dtype)).to(x.dtype)
        for rows in chunks(y):
            y[rows] = spread(torch.addmm(bq, x[rows], wq.t()), u, near[rows])
        ctx.set_materialize_grads(False)  # the values' gradient: only where a correction learns through them (XSA)
        ctx.save_for_backward(x, inverse, wk, wq, wv, far, near, values, gathered, u, weight)
        return y, values

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        x, inverse, wk, wq, wv, far, near, values, gathered, u, weight = ctx.saved_tensors
        dy, dvalues = grads  # (count, H, D) and (L, C)
        heads, count = len(u), len(near)
        dy = near.new_zeros(count, heads, u.shape[-1]) if dy is None else dy
        du = torch.zeros_like(u)
        for rows in chunks(near):
            du += by_head(near[rows], heads).transpose(1, 2) @ dy[rows].transpose(0, 1)
        du = du.to(inverse.dtype)
        dinverse = du @ gathered.to(inverse.dtype).transpose(1, 2)
        dgathered = (inverse.transpose(1, 2) @ du).to(x.dtype)
        level = (dgathered * gathered).sum(-1, keepdim=True) / weight  # (H, M, 1)
        dgathered = dgathered / weight
        dx, dwk, dwq, dwv = (torch.empty_like(x), *(torch.zeros_like(w) for w in (wk, wq, wv)))
        dbq, dbv = x.new_zeros(len(wq)), x.new_zeros(len(wv))
        for rows in chunks(x):
            share, value = by_head(far[rows], heads), by_head(values[rows], heads)
            dfar = _merged(share * (value @ dgathered.transpose(1, 2) - level.transpose(1, 2)))
            dvalue = _merged(share @ dgathered)
            if dvalues is not None:
                dvalue.add_(dvalues[rows])
            for grad, w, dw, beta in ((dfar, wk, dwk, 0), (dvalue, wv, dwv, 1)):
                torch.addmm(dx[rows], grad, w, beta=beta, out=dx[rows])
                dw.addmm_(grad.t(), x[rows])
            dbv += dvalue.sum(0)
            if rows.start < count:
                some = slice(rows.start, min(rows.stop, count))
                share = by_head(near[some], heads)
                dshare = dy[some].transpose(0, 1) @ u.transpose(1, 2)
                dnear = _merged(share * (dshare - (share * dshare).sum(-1, keepdim=True)))
                dx[some].addmm_(dnear, wq)
                dwq.addmm_(dnear.t(), x[some])
                dbq += dnear.sum(0)
        return dx, dinverse, dwk, dwq, dbq, dwv, dbv, None


def _merged(heads: Tensor) -> Tensor:
    """(H, rows, X) -> (rows, H X)."""
    return heads.transpose(0, 1).flatten(1)


def attend(
    x: Tensor, inverse: Tensor, keys: Tensor, queries: tuple[Tensor, Tensor], values: tuple[Tensor, Tensor], count: int
) -> tuple[Tensor, Tensor]:
    """y = softmax(x queries) inverse softmax(x keys)^T v of the first ``count`` rows, (count, H, D), and v = linear(x), (L, C).

    ``keys`` and ``queries`` are `landmark_logits` of q~ with the layer of the keys and of k~ with that of the queries.
    """
    result: tuple[Tensor, Tensor] = _Attend.apply(x, inverse, keys, *queries, *values, count)  # type: ignore[no-untyped-call]
    return result
