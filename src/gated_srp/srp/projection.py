"""The paper's geometry: neighbour mean, unit axis, projection. The only place that writes these equations.

Shapes: L rows, E neighbour entries, C channels, D head width; ``...`` any leading axes.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F


def wide(x: Tensor) -> Tensor:
    """Geometry is computed in float32 (float64 stays): halves are widened, everything else is returned as it is."""
    return x if x.dtype in (torch.float32, torch.float64) else x.float()


def neighbour_mean(rows: Tensor, neighbours: Tensor, offsets: Tensor) -> Tensor:
    """Eq. 6: r_i = (1 / m_i) sum over j in N(i) of rows_j; zero where a row has no neighbours.

    ``rows`` (L, C), ``neighbours`` (E,), ``offsets`` (L' + 1,) -> (L', C). One embedding bag: nothing of size
    rows x neighbours x channels exists. Not differentiated: the axis is a measurement, not an escape route through W_v.

    >>> neighbour_mean(torch.tensor([[1.0], [3.0], [8.0]]), torch.tensor([1, 2]), torch.tensor([0, 2, 2, 2]))
    tensor([[5.5000], [0.0000], [0.0000]])
    """
    with torch.no_grad():
        return F.embedding_bag(neighbours, wide(rows), offsets, mode="mean", include_last_offset=True)


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
    return (wide(y) - amount.unsqueeze(-1) * axis).to(y.dtype)


class _Project(torch.autograd.Function):
    """Keeps the axis, beta and one number a row; y itself only where the axis is learned (XSA)."""

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
        slope = along(dz, axis)  # dL/dz along the axis
        dy = remove(dz, axis, beta * slope) if ctx.needs_input_grad[0] else None  # the map is symmetric in y
        daxis = None
        if y is not None:
            daxis = -(beta * slope).unsqueeze(-1) * wide(y) - (beta * component).unsqueeze(-1) * wide(dz)
        dbeta = -component * slope if ctx.needs_input_grad[2] else None
        return dy, daxis, dbeta


def project(y: Tensor, axis: Tensor, beta: Tensor) -> Tensor:
    """Eq. 4-5: z = y - beta <y, axis> axis for unit (or zero) axes.

    ``y``, ``axis`` (..., D), ``beta`` (...) -> (..., D) in the dtype of y. beta 0 is the identity, 1 removes the
    component, 2 flips it, a negative one amplifies it; a zero axis returns y exactly.

    >>> y, axis = torch.tensor([3.0, 4.0]), torch.tensor([1.0, 0.0])
    >>> [project(y, axis, torch.tensor(b)).tolist() for b in (0.0, 1.0, 2.0, -1.0)]
    [[3.0, 4.0], [0.0, 4.0], [-3.0, 4.0], [6.0, 4.0]]
    """
    result: Tensor = _Project.apply(y, axis, beta.to(axis.dtype))  # type: ignore[no-untyped-call]
    return result
