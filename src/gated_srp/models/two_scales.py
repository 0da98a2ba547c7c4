"""Patches of two magnifications in one bag: their graph, the model that takes them, and an axis from neighbours and parent.

Shapes: N fine patches, M coarse patches, P fine patches that have a parent, L rows (CLS, N + M patches, what fills two squares), C channels.
"""

import math
from dataclasses import dataclass, fields, replace
from typing import ClassVar, Self

import torch
from torch import Tensor
from torch.nn import functional as F

from gated_srp.models.fast.inference import Scratch
from gated_srp.models.scales import Mixture, listed_sums
from gated_srp.models.slide import SlideTransformer
from gated_srp.srp import PatchGraph
from gated_srp.srp.graph import _lists


@dataclass(frozen=True, eq=False)
class TwoScaleGraph(PatchGraph):
    """Rows of a bag of N fine and, behind them, M coarse patches. Neighbours lie on the lattice of a row's own scale.

    ``lengths`` counts the fine patches alone: they are what maps and statistics show. The parent of row i is
    ``parents[parent_offsets[i]:parent_offsets[i + 1]]``, one row or none: of a fine patch the coarse one around it. Coarse patches have
    none, and no edge leads back to children.
    """

    scales = 2
    coarse: int = 0  # M
    parents: Tensor = None  # type: ignore[assignment]  # (P,) row numbers; fields of the base have defaults
    parent_offsets: Tensor = None  # type: ignore[assignment]  # (L + 1,)

    @classmethod
    def of(cls, fine: PatchGraph, coarse: PatchGraph, children: Tensor, parents: Tensor) -> Self:
        """From the graph of each scale, and (P,) rows of fine patches, rising, with the rows of their parents among the coarse ones.

        >>> fine, coarse = PatchGraph.from_grid(2, 2), PatchGraph.from_grid(1, 2)
        >>> both = TwoScaleGraph.of(fine, coarse, torch.tensor([0, 1, 3]), torch.tensor([0, 0, 1]))
        >>> both.parents.tolist(), both.parent_offsets.tolist(), both.neighbours[-2:].tolist()
        ([4, 4, 5], [0, 1, 2, 2, 3, 3, 3], [5, 4])
        """
        both = PatchGraph.side_by_side([fine, coarse])
        plain = {one.name: getattr(both, one.name) for one in fields(PatchGraph)} | {"lengths": fine.lengths}
        counts = torch.zeros_like(both.neighbour_count).index_fill_(0, children, 1)
        ends = F.pad(counts.cumsum(0), (1, 0))
        return cls(**plain, coarse=coarse.num_rows, parents=parents + fine.num_rows, parent_offsets=ends)

    def with_isolated(self, before: int = 0, after: int = 0) -> Self:
        ends = F.pad(F.pad(self.parent_offsets.diff(), (before, after)).cumsum(0), (1, 0))
        return replace(super().with_isolated(before, after), parents=self.parents + before, parent_offsets=ends)

    def part(self, rows: slice) -> Self:
        parents, ends = _lists(self.parents, self.parent_offsets, rows)
        return replace(super().part(rows), parents=parents, parent_offsets=ends)

    def first_rows(self) -> Self:
        lone = super().first_rows()
        return replace(lone, parents=self.parents[:0], parent_offsets=torch.zeros_like(lone.offsets))

    def to(self, device: torch.device | str) -> Self:
        moved = {name: getattr(self, name).to(device, non_blocking=True) for name in ("parents", "parent_offsets")}
        return replace(super().to(device), **moved)


class NeighboursAndParent(Mixture):
    """The `Mixture` of the neighbours in a token's own scale and of its parent, r_i2 = v_parent(i): so K_2 = 1, and one value agrees
    with itself. A patch without a parent, as every coarse one, has the neighbours' axis alone; one without either stays as it is."""

    count = 2

    def sums(self, v: Tensor, graph: PatchGraph) -> list[tuple[Tensor, Tensor, Tensor]]:
        assert isinstance(graph, TwoScaleGraph)
        lists = ((graph.neighbours, graph.offsets, graph.most_neighbours), (graph.parents, graph.parent_offsets, 1))
        return [(*listed_sums(v, near, ends), ends.diff() / most) for near, ends, most in lists]


class TwoScaleTransformer(SlideTransformer):
    """A slide model over the patches of two magnifications: one embedding, one attention over all of them, and PPEG on the square of
    each scale for itself, with the same kernels. Rows are CLS, N fine patches, M coarse ones, what fills the fine square, and the
    coarse one: without coarse patches it is the slide model.
    """

    scales: ClassVar[int] = 2
    no_pretraining: ClassVar[str] = "masks are drawn on the lattice of one magnification"
    checked: ClassVar[str] = (
        "Ours, of no publication: edges, parents, PPEG of each scale and the axis against loops over patches; "
        "without coarse patches its logits are those of `na`, bit for bit."
    )

    def tokens(self, features: Tensor, graph: PatchGraph, scratch: Scratch | None = None) -> tuple[Tensor, PatchGraph]:
        assert isinstance(graph, TwoScaleGraph)
        sizes = graph.lengths[0], graph.coarse
        lacking = [0 if self.ppeg is None else math.ceil(math.sqrt(n)) ** 2 - n for n in sizes]
        x = self.in_proj(features.to(self.in_proj.weight.dtype))  # (1, N + M, C)
        fill = [part[:, :more] for part, more in zip(x.split(sizes, dim=1), lacking, strict=True)]
        cls = self.cls_token.to(x.dtype).expand(len(x), -1, -1)
        return torch.cat([cls, x, *fill], dim=1), graph.with_isolated(before=1, after=sum(lacking))

    def positions(self, x: Tensor, rows: PatchGraph, *, overwrite: bool = False) -> Tensor:
        assert isinstance(rows, TwoScaleGraph) and self.ppeg is not None
        fine, coarse = rows.lengths[0], rows.coarse
        filled = math.ceil(math.sqrt(fine)) ** 2 - fine
        parts = torch.split(x, [1, fine, coarse, filled, x.shape[1] - 1 - fine - coarse - filled], dim=1)
        squares = [torch.cat([parts[place], parts[place + 2]], dim=1) for place in (1, 2)]
        (a, a_fill), (b, b_fill) = (
            torch.split(self.ppeg.square(one) if one.shape[1] else one, [n, one.shape[1] - n], dim=1)
            for one, n in zip(squares, (fine, coarse), strict=True)
        )
        return torch.cat([parts[0].to(a.dtype), a, b, a_fill, b_fill], dim=1)
