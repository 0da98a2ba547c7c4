"""Gated SRP = direction + coefficient + project.

Shapes: B batch, H heads, L rows, D head width, R = B * L.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from gated_srp.errors import UserError
from gated_srp.srp import projection
from gated_srp.srp.coefficient import Coefficient, SignedGate
from gated_srp.srp.direction import Direction, NeighbourMean
from gated_srp.srp.graph import PatchGraph
from gated_srp.srp.projection import (
    along,
    composed,
    corrected,
    corrected_linear,
    length,
    measure,
    project,
    remove,
    unit,
)


class GatedSRP(nn.Module):
    """Corrects each patch token after attention: z = y - beta <y, r_hat> r_hat (Eq. 5).

    Call it between attention and output projection with y (the attention's output) and v (its values), both (B, H, L, D),
    and the graph of their rows. Rows without neighbours come back bit-unchanged, and so does everything until it is trained.

    >>> y, v = torch.randn(1, 6, 10, 64), torch.randn(1, 6, 10, 64)      # CLS + 9 patches
    >>> graph = PatchGraph.from_grid(3, 3).with_isolated(before=1)
    >>> torch.equal(GatedSRP(6)(y, v, graph), y)
    True
    """

    def __init__(
        self,
        num_heads: int,
        *,
        delta: float = 1.0,
        hidden_dim: int = 64,
        direction: Direction | None = None,
        coefficient: Coefficient | None = None,
    ) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.direction = NeighbourMean() if direction is None else direction
        self.coefficient = (
            SignedGate(num_heads, delta=delta, hidden_dim=hidden_dim) if coefficient is None else coefficient
        )

    def forward(self, y: Tensor, v: Tensor, graph: PatchGraph) -> Tensor:
        """The corrected heads, in the shape and dtype of y."""
        self._check(y, v, graph)
        y_rows, v_rows = _rows(y), _rows(v)  # (R, H, D)
        if self._fused(y, graph):
            z = self._by_kernels(y_rows, v_rows, graph)
            return z.view(len(y), -1, *z.shape[1:]).transpose(1, 2)  # (B, H, L, D)
        axis = self.direction(v_rows, graph)
        if self._composed():
            axis = unit(axis)
            with torch.set_grad_enabled(torch.is_grad_enabled() and self.coefficient.live):
                component, norm = along(y_rows, axis), length(y_rows)  # (R, H)
            z = project(y_rows, axis, self.coefficient(component, norm, graph))
        else:
            measured = measure(y_rows, lambda rows: axis[rows])
            beta = self.coefficient(measured.component, measured.norm, graph)
            z = corrected(y_rows, axis, beta, measured)
        return z.view(len(y), -1, *z.shape[1:]).transpose(1, 2)  # (B, H, L, D)

    def linear(self, y: Tensor, v: Tensor, graph: PatchGraph, layer: nn.Linear) -> Tensor:
        """layer(merge_heads(self(y, v, graph))), with the corrected heads recomputed in backward instead of kept: (B, L, O)."""
        if self._composed() or self._fused(y, graph):
            z = self(y, v, graph)
            merged: Tensor = layer(z.transpose(1, 2).flatten(2))
            return merged
        self._check(y, v, graph)
        kind = y.device.type
        dtype = (
            torch.get_autocast_dtype(kind)
            if torch.is_autocast_enabled(kind)
            else torch.promote_types(y.dtype, layer.weight.dtype)
        )
        y_rows, v_rows = _rows(y), _rows(v.detach())
        measured = measure(y_rows, self.direction.axis_at(v_rows, graph))
        beta = self.coefficient(measured.component, measured.norm, graph)
        weights = (layer.weight.to(dtype), None if layer.bias is None else layer.bias.to(dtype))
        rows = corrected_linear(
            y_rows.to(dtype), v_rows, beta, weights, measured, lambda values: self.direction.axis_at(values, graph)
        )
        return rows.view(len(y), -1, rows.shape[-1])

    def by_rows(self, v: Tensor, graph: PatchGraph) -> Callable[[Tensor, slice], Tensor]:
        """`forward` of one bag when no gradient is wanted, some rows at a time: y of these rows (1, H, R, D) -> z (R, H, D).

        A row's axis, diagnostics, beta and correction depend on other rows through v alone, so one pass does it all.
        """
        if self._fused(v, graph):  # all rows at once
            return lambda y, rows: self._by_kernels(_rows(y), _rows(v), graph)
        axis_at = self.direction.axis_at(_rows(v), graph)

        def correct(y: Tensor, rows: slice) -> Tensor:
            y_rows, axis = _rows(y), axis_at(rows)
            measured = measure(y_rows, lambda part: axis[part])
            beta = self.coefficient(measured.component, measured.norm, graph.part(rows))
            return remove(y_rows, axis, measured.amount(beta))

        return correct

    def _composed(self) -> bool:
        """Whether the equations are left to autograd or a compiler, one by one, instead of passing over row chunks."""
        return self.direction.learned or self.coefficient.live or composed()

    def _fused(self, y: Tensor, graph: PatchGraph) -> bool:
        listed = type(self.direction) is NeighbourMean and graph.plain_lists
        return listed and not self._composed() and projection.by_kernels(y)

    def _by_kernels(self, y: Tensor, v: Tensor, graph: PatchGraph) -> Tensor:
        from gated_srp.srp import fused  # needs triton

        lists = (graph.neighbours, graph.offsets)
        measured = fused.measure(y, v, lists)
        return fused.corrected(y, v, self.coefficient(measured.component, measured.norm, graph), measured, lists)

    def _check(self, y: Tensor, v: Tensor, graph: PatchGraph) -> None:
        if y.ndim != 4 or y.shape != v.shape or y.shape[1] != self.num_heads:
            raise UserError(
                f"GatedSRP: y {tuple(y.shape)} and v {tuple(v.shape)}, expected both (B, {self.num_heads}, L, D): "
                "the attention's output and its values, split into heads, before the output projection."
            )
        if graph.num_rows != y.shape[0] * y.shape[2]:
            raise UserError(
                f"GatedSRP: the graph has {graph.num_rows} rows, y has {y.shape[0]} x {y.shape[2]}. Add rows without neighbours for CLS and "
                "padding with graph.with_isolated(before=1, after=...), and PatchGraph.batch for several bags."
            )


def _rows(heads: Tensor) -> Tensor:
    """(B, H, L, D) -> (B * L, H, D); a view where the heads were split from rows."""
    return heads.transpose(1, 2).flatten(0, 1)
