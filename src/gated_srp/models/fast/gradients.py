"""Parts of a block with backwards of their own: fewer passes over memory than derived ones, and less kept for them.

Nystrom attention in row chunks: rows meet landmarks in logits alone, so that neither queries nor keys exist.
Shapes: B batch, H heads, L rows, D head width, C = H * D channels, M landmarks, S side of a square.
"""

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from gated_srp.models.fast import product_dtype
from gated_srp.srp.projection import add_product, chunks, linear_into

Marks = tuple[Tensor, Tensor]  # q~ and k~ of one bag, (H, M, D) each


def projections(x: Tensor, weight: Tensor, bias: Tensor, dim: int) -> tuple[Tensor, ...]:
    """linear(x, weight, bias) cut into tensors of ``dim`` channels: (B, L, C) -> as many (B, L, dim)."""
    dtype = product_dtype(x)
    parts: tuple[Tensor, ...] = _Projections.apply(x.to(dtype), weight.to(dtype), bias.to(dtype), dim)  # type: ignore[no-untyped-call]
    return parts


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


def feed_forward(x: Tensor, first: nn.Linear, second: nn.Linear) -> Tensor:
    """second(gelu(first(x))): (B, L, C) -> (B, L, C)."""
    if not torch.is_grad_enabled():
        out: Tensor = second(torch.ops.aten.gelu_(first(x)))
        return out
    dtype = product_dtype(x)
    weights = (p.to(dtype) for p in (first.weight, first.bias, second.weight, second.bias))
    out = _FeedForward.apply(x.to(dtype), *weights)  # type: ignore[no-untyped-call]
    return out


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


def depthwise(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """A convolution of every channel with its own odd kernel, x (B, C, S, S) -> the same shape."""
    out: Tensor = _Depthwise.apply(x, weight.to(x.dtype), bias.to(x.dtype))  # type: ignore[no-untyped-call]
    return out


class _Depthwise(torch.autograd.Function):
    """Both gradients as convolutions: of the output's gradient with the turned kernel, and of the input with the output's gradient.

    On a CPU the library's own weight gradient of a depthwise convolution takes four times as long.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return F.conv2d(x, weight, bias, padding=weight.shape[-1] // 2, groups=len(weight))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, ...]:
        x, weight = ctx.saved_tensors
        (dout,) = grads
        bags, channels = x.shape[:2]
        margin = weight.shape[-1] // 2
        dx = F.conv2d(dout, weight.flip(2, 3), padding=margin, groups=channels)
        rows = x.contiguous().view(1, bags * channels, *x.shape[2:])
        kernels = dout.contiguous().view(bags * channels, 1, *dout.shape[2:])
        dweight = F.conv2d(rows, kernels, padding=margin, groups=bags * channels)  # (1, B * C, 7, 7)
        return dx, dweight.view(bags, *weight.shape).sum(0), dout.sum((0, 2, 3))


def refined(a: Tensor, z: Tensor) -> Tensor:
    """Six times Z <- 0.25 Z (13 I - A Z (15 I - A Z (7 I - A Z))), each matrix of (X, M, M) by itself."""
    result: Tensor = _Refined.apply(a, z)  # type: ignore[no-untyped-call]
    return result


def _refinements(a: Tensor, z: Tensor) -> list[tuple[Tensor, Tensor, Tensor, Tensor]]:
    """Of each time: A Z, A Z (7 I - A Z), A Z (15 I - that) and the new Z; sums with multiples of I are the products' own."""
    steps = []
    for _ in range(6):
        az = torch.bmm(a, z)
        inner = torch.baddbmm(az, az, az, beta=7, alpha=-1)
        middle = torch.baddbmm(az, az, inner, beta=15, alpha=-1)
        z = torch.baddbmm(z, z, middle, beta=3.25, alpha=-0.25)
        steps.append((az, inner, middle, z))
    return steps


class _Refined(torch.autograd.Function):
    """Eight products per refinement backward and no sums beside them, where a derived backward scales and adds after each product."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, z: Tensor) -> Tensor:
        steps = _refinements(a, z)
        ctx.save_for_backward(a, z, *(part for step in steps for part in step))
        return steps[-1][-1]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, ...]:
        a, start, *parts = ctx.saved_tensors
        dz, da = grads[0], torch.zeros_like(a)
        with torch.autocast(a.device.type, enabled=False):  # whoever calls backward inside one
            for step in reversed(range(6)):
                az, inner, middle = parts[4 * step : 4 * step + 3]
                z = parts[4 * step - 1] if step else start
                t = az.transpose(1, 2)
                dmiddle = torch.bmm(z.transpose(1, 2), dz)  # times -0.25, put in below
                dz = torch.baddbmm(dz, dz, middle.transpose(1, 2), beta=3.25, alpha=-0.25)
                dinner = torch.bmm(t, dmiddle)  # times 0.25
                daz = torch.baddbmm(dmiddle, dmiddle, inner.transpose(1, 2), beta=-3.75, alpha=0.25)
                daz.baddbmm_(dinner, t, alpha=-0.25).baddbmm_(t, dinner, alpha=-0.25).add_(dinner, alpha=1.75)
                da.baddbmm_(daz, z.transpose(1, 2))
                dz.baddbmm_(a.transpose(1, 2), daz)
        return da, dz


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
