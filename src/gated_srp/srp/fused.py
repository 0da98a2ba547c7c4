# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, import-not-found, import-untyped, unused-ignore"
"""The correction as three Triton kernels, for GPUs: measure, gate, correct; forward and backward.

An axis is summed from its neighbours' values inside the kernel that needs it and never written. Chosen by `projection.by_kernels`;
`tests/srp/test_fused.py` holds it to `project` in Triton's interpreter. Needs triton, which comes with PyTorch for CUDA.

Shapes: R rows, H heads, D head width, E neighbour entries.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from gated_srp.srp.projection import Measured

Lists = tuple[Tensor, Tensor]  # neighbours (E,) and offsets (R + 1,)


@triton.jit
def _axis(v, neighbours, offsets, row, stride, place, there):
    """Sum over the row's neighbours of v, in float32."""
    total = tl.zeros(place.shape, tl.float32)
    for entry in range(tl.load(offsets + row), tl.load(offsets + row + 1)):
        total += tl.load(v + tl.load(neighbours + entry) * stride + place, mask=there, other=0.0).to(tl.float32)
    return total


@triton.jit
def _measure_kernel(
    y, v, neighbours, offsets, scale, component, norm, heads, width, rows: tl.constexpr, columns: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    head, column = tl.arange(0, rows), tl.arange(0, columns)
    there = (head[:, None] < heads) & (column[None, :] < width)
    place = head[:, None] * width + column[None, :]
    axis = _axis(v, neighbours, offsets, row, heads * width, place, there)
    own = tl.load(y + row * heads * width + place, mask=there, other=0.0).to(tl.float32)
    size = tl.sqrt(tl.sum(axis * axis, 1))
    inverse = tl.where(size > 0, 1 / tl.where(size > 0, size, 1.0), 0.0)
    out = row * heads + head
    tl.store(scale + out, inverse, mask=head < heads)
    tl.store(component + out, tl.sum(own * axis, 1) * inverse, mask=head < heads)
    tl.store(norm + out, tl.sqrt(tl.sum(own * own, 1)), mask=head < heads)


@triton.jit
def _correct_kernel(
    x, v, neighbours, offsets, beta, component, scale, result, dbeta, heads, width,
    rows: tl.constexpr, columns: tl.constexpr, backward: tl.constexpr,
):  # fmt: skip
    """Forward: x is y, the result z. Backward: x is dL/dz, the result dL/dy, and dL/dbeta is written too."""
    row = tl.program_id(0).to(tl.int64)
    head, column = tl.arange(0, rows), tl.arange(0, columns)
    there = (head[:, None] < heads) & (column[None, :] < width)
    place = head[:, None] * width + column[None, :]
    axis = _axis(v, neighbours, offsets, row, heads * width, place, there)
    own = tl.load(x + row * heads * width + place, mask=there, other=0.0).to(tl.float32)
    out = row * heads + head
    b = tl.load(beta + out, mask=head < heads, other=0.0)
    s = tl.load(scale + out, mask=head < heads, other=0.0)
    c = tl.load(component + out, mask=head < heads, other=0.0)
    if backward:
        slope = tl.sum(own * axis, 1) * s
        tl.store(dbeta + out, -c * slope, mask=head < heads)
        amount = b * s * slope
    else:
        amount = b * c * s
    tl.store(result + row * heads * width + place, own - amount[:, None] * axis, mask=there)


@triton.jit
def _gate_kernel(component, norm, token, weight, bias, beta, count, heads, delta, block: tl.constexpr):
    """beta = delta tanh(token + <w_h, d_head> + bias_h), Eq. 7, 8 and 10."""
    i = tl.program_id(0) * block + tl.arange(0, block)
    there = i < count
    head = i % heads
    n = tl.load(norm + i, mask=there, other=0.0)
    cosine = tl.where(n > 0, tl.load(component + i, mask=there, other=0.0) / tl.where(n > 0, n, 1.0), 0.0)
    logit = tl.load(token + i // heads, mask=there, other=0.0) + tl.load(bias + head, mask=there, other=0.0)
    logit += cosine * tl.load(weight + 3 * head, mask=there, other=0.0)
    logit += tl.abs(cosine) * tl.load(weight + 3 * head + 1, mask=there, other=0.0)
    logit += tl.log(1 + n) * tl.load(weight + 3 * head + 2, mask=there, other=0.0)
    tl.store(beta + i, delta * (2 * tl.sigmoid(2 * logit) - 1), mask=there)  # tanh, which has no name in every version


def _tile(y: Tensor) -> dict[str, int]:
    return {"rows": triton.next_power_of_2(y.shape[1]), "columns": triton.next_power_of_2(y.shape[2])}


def measure(y: Tensor, v: Tensor, lists: Lists) -> Measured:
    """`projection.measure` along the mean of the neighbours' v: y, v (R, H, D)."""
    y, v = y.detach().contiguous(), v.detach().contiguous()
    scale, component, norm = (torch.empty(y.shape[:2], device=y.device) for _ in range(3))
    _measure_kernel[(len(y),)](y, v, *lists, scale, component, norm, *y.shape[1:], **_tile(y))
    return Measured(scale, component, norm)


def corrected(y: Tensor, v: Tensor, beta: Tensor, measured: Measured, lists: Lists) -> Tensor:
    """project(y, unit(mean of the neighbours' v), beta), what `measure` found at hand: (R, H, D)."""
    result: Tensor = _Corrected.apply(y.contiguous(), v.detach().contiguous(), beta, measured, lists)
    return result


class _Corrected(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, v: Tensor, beta: Tensor, measured: Measured, lists: Lists) -> Tensor:
        ctx.save_for_backward(v, beta, measured.component, measured.scale, *lists)
        return _launch(y, v, beta, measured.component, measured.scale, lists, None)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        v, beta, component, scale, *lists = ctx.saved_tensors
        dbeta = torch.empty_like(beta)
        dy = _launch(grads[0].contiguous(), v, beta, component, scale, tuple(lists), dbeta)
        return dy, None, dbeta, None, None


def _launch(
    x: Tensor, v: Tensor, beta: Tensor, component: Tensor, scale: Tensor, lists: Any, dbeta: Tensor | None
) -> Tensor:
    result, backward = torch.empty_like(x), dbeta is not None
    other = beta if dbeta is None else dbeta  # a kernel wants something there
    _correct_kernel[(len(x),)](
        x, v, *lists, beta.contiguous(), component, scale, result, other, *x.shape[1:], **_tile(x), backward=backward
    )
    return result


def gate(component: Tensor, norm: Tensor, token: Tensor, weight: Tensor, bias: Tensor, delta: float) -> Tensor:
    """delta tanh(token + <w_h, d_head> + bias): component, norm (R, H), token (R, 1), weight (H, 3), bias (H,) -> (R, H)."""
    result: Tensor = _Gate.apply(component, norm, token.contiguous(), weight.contiguous(), bias.contiguous(), delta)
    return result


class _Gate(torch.autograd.Function):
    """The diagnostics get no gradient."""

    @staticmethod
    def forward(
        ctx: Any, component: Tensor, norm: Tensor, token: Tensor, weight: Tensor, bias: Tensor, delta: float
    ) -> Tensor:
        beta, block = torch.empty_like(norm), 1024
        count = beta.numel()
        _gate_kernel[(triton.cdiv(count, block),)](
            component, norm, token, weight, bias, beta, count, beta.shape[1], delta, block=block
        )
        ctx.save_for_backward(component, norm, beta)
        ctx.delta = delta
        return beta

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        component, norm, beta = ctx.saved_tensors
        slope = grads[0] * (ctx.delta - beta * beta / ctx.delta)  # (R, H)
        cosine = torch.where(norm > 0, component / torch.where(norm > 0, norm, 1.0), 0.0)
        inputs = torch.stack([cosine, cosine.abs(), norm.log1p()], -1)  # (R, H, 3)
        return None, None, slope.sum(1, keepdim=True), torch.einsum("rh,rhi->hi", slope, inputs), slope.sum(0), None
