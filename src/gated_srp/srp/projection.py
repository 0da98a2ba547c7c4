"""The paper's geometry: neighbour mean, unit axis, projection. The only place that writes these equations.

Shapes: L rows, E neighbour entries, C channels, D head width; ``...`` any leading axes.
"""

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F


def wide(x: Tensor) -> Tensor:
    """Geometry is computed in float32 (float64 stays): halves are widened, everything else is returned as it is."""
    return x if x.dtype in (torch.float32, torch.float64) else x.float()


def composed() -> bool:
    """Whether a compiler or a function transform (torch.func) is at work: then equations are left to it one by one."""
    return torch.compiler.is_compiling() or torch._C._functorch.peek_interpreter_stack() is not None


def by_kernels(y: Tensor) -> bool:
    """Whether fused kernels (`srp.fused`) take over: on a GPU with Triton, for numbers that they have; a compiler fuses by itself.

    Only where GATED_SRP_FUSED=1 asks for them: they were proved in Triton's interpreter, and never ran on a GPU.
    """
    asked = y.is_cuda and os.environ.get("GATED_SRP_FUSED") == "1"
    return asked and y.dtype != torch.float64 and not composed() and find_spec("triton") is not None


def neighbour_mean(rows: Tensor, neighbours: Tensor, offsets: Tensor) -> Tensor:
    """Eq. 6: r_i = (1 / m_i) sum over j in N(i) of rows_j; zero where a row has no neighbours.

    ``rows`` (L, C), ``neighbours`` (E,), ``offsets`` (L' + 1,) -> (L', C). One embedding bag: nothing of size
    rows x neighbours x channels exists. Not differentiated: the axis is a measurement, not an escape route through W_v.

    >>> neighbour_mean(torch.tensor([[1.0], [3.0], [8.0]]), torch.tensor([1, 2]), torch.tensor([0, 2, 2, 2]))
    tensor([[5.5000], [0.0000], [0.0000]])
    """
    # embedding_bag's own mode="mean" takes three times as long
    return neighbour_sum(rows, neighbours, offsets).div_(offsets.diff().clamp(min=1).unsqueeze(-1))


def neighbour_sum(rows: Tensor, neighbours: Tensor, offsets: Tensor) -> Tensor:
    """m_i r_i: it points where the mean does, which is all that a unit axis keeps of it."""
    with torch.no_grad():
        if not torch.compiler.is_compiling() and composed():  # vmap would loop over embedding bags
            owners = torch.arange(offsets.shape[0] - 1, device=rows.device)
            owners = owners.repeat_interleave(offsets.diff(), output_size=neighbours.shape[0])  # (E,)
            gathered = wide(rows)[neighbours]  # (E, C)
            return gathered.new_zeros(offsets.shape[0] - 1, rows.shape[-1]).index_add(0, owners, gathered)
        return F.embedding_bag(neighbours, wide(rows), offsets, mode="sum", include_last_offset=True)


def unit(x: Tensor) -> Tensor:
    """x / |x| over the last axis, in float32; a zero vector stays zero, in its value and in its gradient."""
    x = wide(x)
    square = (x * x).sum(-1, keepdim=True)
    alive = square > 0
    # The inner `where` keeps the square root away from zero: its infinite slope would survive the outer one as NaN.
    return torch.where(alive, x * torch.where(alive, square, 1.0).rsqrt(), 0.0)


def length(y: Tensor) -> Tensor:
    """|y| over the last axis, in float32, with gradient zero (not NaN) at the zero vector."""
    y = wide(y)
    square = (y * y).sum(-1)
    alive = square > 0
    return torch.where(alive, torch.where(alive, square, 1.0).sqrt(), 0.0)


def along(y: Tensor, axis: Tensor) -> Tensor:
    """Eq. 4 without its direction: <y, axis>, the signed size of the common component c = <y, axis> axis."""
    return (wide(y) * axis).sum(-1)


def remove(y: Tensor, axis: Tensor, amount: Tensor) -> Tensor:
    """Eq. 5: z = y - amount axis with amount = beta <y, axis>, computed wide and returned in the dtype of y."""
    return torch.addcmul(wide(y), amount.unsqueeze(-1), axis, value=-1).to(y.dtype)


def _gradients(
    dz: Tensor, axis: Tensor, beta: Tensor, component: Tensor, scale: Tensor | float = 1.0
) -> tuple[Tensor, Tensor, Tensor]:
    """Of z = y - beta <y, a> a with a = scale axis: dL/dy (the map is symmetric in y), dL/dbeta and dL/dz along a."""
    slope = along(dz, axis) * scale
    return remove(dz, axis, beta * scale * slope), -component * slope, slope


class _Project(torch.autograd.Function):
    """Keeps the axis, beta and one number per row; y itself only where the axis is learned (XSA)."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, axis: Tensor, beta: Tensor) -> Tensor:
        component = along(y, axis)
        ctx.save_for_backward(axis, beta, component, y if ctx.needs_input_grad[1] else None)
        return remove(y, axis, beta * component)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        axis, beta, component, y = ctx.saved_tensors
        (dz,) = grads
        dy, dbeta, slope = _gradients(dz, axis, beta, component)
        daxis = None
        if y is not None:
            daxis = -(beta * slope).unsqueeze(-1) * wide(y) - (beta * component).unsqueeze(-1) * wide(dz)
        return dy, daxis, dbeta


def project(y: Tensor, axis: Tensor, beta: Tensor) -> Tensor:
    """Eq. 4-5: z = y - beta <y, axis> axis for unit (or zero) axes.

    ``y``, ``axis`` (..., D), ``beta`` (...) -> (..., D) in the dtype of y. beta 0 is the identity, 1 removes the
    component, 2 flips it, a negative one amplifies it; a zero axis returns y exactly.

    >>> y, axis = torch.tensor([3.0, 4.0]), torch.tensor([1.0, 0.0])
    >>> [project(y, axis, torch.tensor(b)).tolist() for b in (0.0, 1.0, 2.0, -1.0)]
    [[3.0, 4.0], [0.0, 4.0], [-3.0, 4.0], [6.0, 4.0]]
    """
    if composed():  # a compiler derives and fuses the backward itself
        return remove(y, axis, beta * along(y, axis))
    result: Tensor = _Project.apply(y, axis, beta.to(axis.dtype))  # type: ignore[no-untyped-call]
    return result


AxisAt = Callable[[slice], Tensor]  # rows -> their axis (rows, H, D), not normalised


@dataclass(frozen=True)
class Measured:
    """What a correction measures before it decides, each (R, H): scale = 1 / |axis| (0 for a zero axis),
    component = <y, axis / |axis|> and norm = |y|."""

    scale: Tensor
    component: Tensor
    norm: Tensor

    def amount(self, beta: Tensor) -> Tensor:
        """beta <y, axis / |axis|> / |axis|: how much of the axis, as it is before it is normalised, is removed."""
        return beta * self.component * self.scale


def measure(y: Tensor, axis_at: AxisAt) -> Measured:
    """Eq. 4's component and the lengths behind Eq. 10 in one pass over row chunks, not differentiated."""
    with torch.no_grad():
        dtype = torch.promote_types(y.dtype, torch.float32)
        size, component, norm = (torch.empty(y.shape[:-1], dtype=dtype, device=y.device) for _ in range(3))
        for rows in chunks(y):
            part, axis = wide(y[rows]), axis_at(rows)
            torch.linalg.vector_norm(axis, dim=-1, out=size[rows])
            component[rows] = along(part, axis)
            torch.linalg.vector_norm(part, dim=-1, out=norm[rows])
        scale = torch.where(size > 0, 1 / size, 0.0)
        component *= scale
        return Measured(scale, component, norm)


class _Correct(torch.autograd.Function):
    """`project` along an axis that gets no gradient, in row chunks; it keeps the axis and three numbers per row and head."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, axis: Tensor, beta: Tensor, measured: Measured) -> Tensor:
        ctx.save_for_backward(axis, beta, measured.component, measured.scale)
        amount = measured.amount(beta)  # (R, H)
        z = y.new_empty(y.shape)
        for rows in chunks(y):
            z[rows] = remove(y[rows], axis[rows], amount[rows])
        return z

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        axis, beta, component, scale = ctx.saved_tensors
        (dz,) = grads
        dy, dbeta = dz.new_empty(dz.shape), torch.empty_like(beta)
        for rows in chunks(dz):
            dy[rows], dbeta[rows], _ = _gradients(dz[rows], axis[rows], beta[rows], component[rows], scale[rows])
        return dy, None, dbeta, None


def corrected(y: Tensor, axis: Tensor, beta: Tensor, measured: Measured) -> Tensor:
    """project(y, unit(axis), beta) for an axis that gets no gradient and was measured: (R, H, D)."""
    result: Tensor = _Correct.apply(y, axis, beta, measured)  # type: ignore[no-untyped-call]
    return result


class _CorrectedLinear(torch.autograd.Function):
    """project + linear in row chunks; axis and corrected rows are recomputed in backward instead of kept.

    Of what the attention does not hold anyway (y, v, the weight) it keeps three numbers per row and head.
    """

    @staticmethod
    def forward(
        ctx: Any,
        y: Tensor,
        v: Tensor,
        beta: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        measured: Measured,
        axis_of: Callable[[Tensor], AxisAt],
    ) -> Tensor:
        ctx.save_for_backward(y, v, beta, weight, measured.component, measured.scale)
        ctx.axis_of, ctx.biased = axis_of, bias is not None
        amount = measured.amount(beta)  # (R, H)
        axis_at = axis_of(v)
        out = y.new_empty(len(y), len(weight))
        for rows in chunks(y):
            z = remove(y[rows], axis_at(rows), amount[rows])  # (chunk, H, D)
            linear_into(out[rows], z.flatten(1), weight, bias)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        y, v, beta, weight, component, scale = ctx.saved_tensors
        (dout,) = grads
        amount = beta * component * scale
        axis_at = ctx.axis_of(v)
        dy, dbeta = torch.empty_like(y), torch.empty_like(beta)
        dweight = torch.zeros_like(weight, dtype=torch.promote_types(weight.dtype, torch.float32))
        for rows in chunks(y):
            axis = axis_at(rows)
            z = remove(y[rows], axis, amount[rows]).flatten(1)  # (chunk, C)
            add_product(dweight, dout[rows].t(), z)
            dz = (dout[rows] @ weight).view_as(y[rows])
            dy[rows], dbeta[rows], _ = _gradients(dz, axis, beta[rows], component[rows], scale[rows])
        dbias = dout.sum(0) if ctx.biased else None
        return dy, None, dbeta, dweight.to(weight.dtype), dbias, None, None


def corrected_linear(
    y: Tensor,
    v: Tensor,
    beta: Tensor,
    linear: tuple[Tensor, Tensor | None],
    measured: Measured,
    axis_of: Callable[[Tensor], AxisAt],
) -> Tensor:
    """linear(project(y, unit(axis), beta)) for an axis that gets no gradient: (R, H, D) -> (R, O).

    ``axis_of(v)`` gives the axis of any rows, here and again in backward.
    """
    weight, bias = linear
    result: Tensor = _CorrectedLinear.apply(y, v, beta, weight, bias, measured, axis_of)  # type: ignore[no-untyped-call]
    return result


def chunks(rows: Tensor, size: int = 1024) -> Iterator[slice]:
    """Slices over the rows: on a CPU small enough that a pass over them stays in the cache, elsewhere or compiled all at once."""
    size = size if rows.device.type == "cpu" and not torch.compiler.is_compiling() else max(1, len(rows))
    return (slice(start, min(start + size, len(rows))) for start in range(0, len(rows), size))


def linear_into(out: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    """out <- x weight^T + bias, into memory that is there already."""
    if bias is None:
        torch.mm(x, weight.t(), out=out)
    else:
        torch.addmm(bias, x, weight.t(), out=out)


def add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """total <- total + a b; the sum over chunks stays float32 when the factors are halves."""
    if total.dtype == a.dtype == b.dtype:
        total.addmm_(a, b)
    else:
        total += a @ b
