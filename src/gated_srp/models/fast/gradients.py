"""Parts of a block with backwards of their own: fewer passes over memory than derived ones, and less kept for them.

Shapes: B batch, L rows, C channels, M landmarks, S side of a square.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from gated_srp.models.fast import product_dtype
from gated_srp.srp.projection import add_product, chunks, linear_into


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
