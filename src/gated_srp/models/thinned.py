"""A prediction from a share of a slide's patches, in which the neighbour means of those that stay are of all their neighbours.

Shapes: N patches, k of them kept, T left out next to one that is kept, L rows (CLS, kept patches, square), E neighbour entries, C channels.
"""

import math
from dataclasses import dataclass, fields, replace
from typing import Self

import torch
from torch import Tensor
from torch.nn import functional as F

from gated_srp.errors import UserError
from gated_srp.models.block import Adapter, Block, refuse_wrapped
from gated_srp.models.fast import one_pass
from gated_srp.models.fast.inference import Scratch
from gated_srp.models.slide import SlideModel, SlideTransformer
from gated_srp.srp import GatedSRP, PatchGraph
from gated_srp.srp.graph import _lists
from gated_srp.srp.projection import neighbour_mean, neighbour_sum


def kept_patches(graph: PatchGraph, share: float) -> Tensor:
    """Which ceil(share N) patches of one bag stay, (k,) in their order; more where leaving out others would empty a piece of tissue.

    Of the twice as many most homogeneous patches as have to go (of all, if that is more than there are) some go in passes: the most
    homogeneous first, of equal ones the first, none next to one that went in the same pass, and none without a neighbour that is left.

    >>> kept_patches(PatchGraph.from_grid(1, 5), 0.6).tolist()
    [1, 3, 4]
    """
    check_share(share)
    count = graph.num_rows
    left = count - math.ceil(share * count - 1e-9)
    order: list[int] = graph.homogeneity.argsort(descending=True, stable=True).tolist()
    neighbours, offsets = graph.neighbours.tolist(), graph.offsets.tolist()
    kept, pool = [True] * count, order[: 2 * left]
    while left:
        before, beside = left, [False] * count
        for row in pool:
            near = neighbours[offsets[row] : offsets[row + 1]]
            if kept[row] and not beside[row] and any(kept[j] for j in near):
                kept[row] = False
                left -= 1
                for j in near:
                    beside[j] = True
            if not left:
                break
        if left == before:  # nobody of the pool can go
            if len(pool) == count:
                break
            pool = order
    return torch.tensor(kept, device=graph.offsets.device).nonzero().flatten()


def check_share(share: float) -> None:
    if not 0 < share <= 1:
        cure = "Expected a share of the patches above 0 and up to 1, such as 0.5."
        raise UserError(f"is {share}", where="budget", cure=cure)


@dataclass(frozen=True, eq=False)
class ThinnedGraph(PatchGraph):
    """Lists of kept rows: neighbours that are kept, and ``beyond``, those left out, numbered among themselves.

    ``counts`` (L,): how many both are, so that m and every mean are those of the whole slide. ``outside`` (T, C): values of those left out.
    """

    plain_lists = False
    counts: Tensor = None  # type: ignore[assignment]  # fields of the base have defaults
    beyond: Tensor = None  # type: ignore[assignment]
    beyond_offsets: Tensor = None  # type: ignore[assignment]
    outside: Tensor = None  # type: ignore[assignment]

    @property
    def neighbour_count(self) -> Tensor:
        return self.counts

    def mean(self, rows: Tensor) -> Tensor:
        total = self.sum(rows, slice(0, self.num_rows))
        return total / self.counts.clamp(min=1).unsqueeze(-1)

    def sum(self, rows: Tensor, part: slice) -> Tensor:
        far = neighbour_sum(self.outside, *_lists(self.beyond, self.beyond_offsets, part))
        return super().sum(rows, part) + far

    def part(self, rows: slice) -> Self:
        beyond, offsets = _lists(self.beyond, self.beyond_offsets, rows)
        return replace(super().part(rows), counts=self.counts[rows], beyond=beyond, beyond_offsets=offsets)

    def first_rows(self) -> PatchGraph:  # type: ignore[override]
        return PatchGraph(**{one.name: getattr(self, one.name) for one in fields(PatchGraph)}).first_rows()


@dataclass(frozen=True, eq=False)
class Thinning:
    """What a share of one bag's patches leaves: the rows ``kept`` (k,), their lists, and the patches ``outside`` (T,) that these name."""

    kept: Tensor
    graph: PatchGraph  # of the kept patches alone, with h_local of the whole slide
    counts: Tensor  # (k,) m of the whole slide
    outside: Tensor
    beyond: Tensor
    beyond_offsets: Tensor
    around: tuple[Tensor, Tensor]  # for each patch outside, its neighbours among the kept: lists and offsets

    @classmethod
    def of(cls, graph: PatchGraph, kept: Tensor) -> Self:
        count, device = graph.num_rows, kept.device
        stays = torch.zeros(count, dtype=torch.bool, device=device).index_fill_(0, kept, True)
        owners = torch.arange(count, device=device).repeat_interleave(graph.neighbour_count)  # (E,)
        mine, near = stays[owners], stays[graph.neighbours]
        outside = torch.unique(graph.neighbours[mine & ~near])

        def lists(chosen: Tensor, rows: Tensor, names: Tensor) -> tuple[Tensor, Tensor]:
            """The chosen entries of these rows, with neighbours numbered among ``names``."""
            number = torch.full((count,), -1, device=device).index_copy_(
                0, names, torch.arange(len(names), device=device)
            )
            counts = torch.bincount(owners[chosen], minlength=count)[rows]
            return number[graph.neighbours[chosen]], F.pad(counts.cumsum(0), (1, 0))

        neighbours, offsets = lists(mine & near, kept, kept)
        places = None if graph.places is None else graph.places[mine & near]
        inner = replace(graph, neighbours=neighbours, offsets=offsets, places=places)
        inner = replace(inner, homogeneity=graph.homogeneity[kept], lengths=(len(kept),))
        named = torch.zeros_like(stays).index_fill_(0, outside, True)
        far, around = lists(mine & ~near, kept, outside), lists(named[owners] & near, outside, kept)
        return cls(kept, inner, graph.neighbour_count[kept], outside, *far, around)

    def rows(self, graph: PatchGraph) -> ThinnedGraph:
        """The lists for a model's rows, whose plain ``graph`` has rows without neighbours around the patches."""
        sides = graph.before, graph.num_rows - graph.before - len(self.kept)
        counts = F.pad(self.counts, sides)
        ends = F.pad(F.pad(self.beyond_offsets.diff(), sides).cumsum(0), (1, 0))
        plain = {one.name: getattr(graph, one.name) for one in fields(PatchGraph)}
        return ThinnedGraph(**plain, counts=counts, beyond=self.beyond, beyond_offsets=ends)


@torch.no_grad()
def thinned_logits(model: SlideModel, features: Tensor, graph: PatchGraph, kept: Tensor) -> Tensor:
    """Logits (1, K) of one bag, features (1, N, in_dim), from the patches ``kept`` as `kept_patches` chose them; all of them: the model's own.

    Only kept patches pass through the blocks. A patch that is left out still has a value for its neighbours' means: its token is its
    own embedding plus the mean of what the blocks so far have added to its kept neighbours, its value that token's, by the block's own weights.
    """
    refuse_budget(model)
    assert isinstance(model, SlideTransformer)
    if len(kept) == graph.num_rows:
        logits: Tensor = model(features, graph)
        return logits
    refuse_wrapped(model.blocks, model.ppeg)
    thinning = Thinning.of(graph, kept)
    scratch = Scratch() if one_pass(model.ppeg, *model.blocks) else None
    x, rows = model.tokens(features[:, kept], thinning.graph, scratch)
    thinned, start = thinning.rows(rows), x.clone()
    own = model.in_proj(features[0, thinning.outside].to(model.in_proj.weight.dtype))  # (T, C)
    for number, block in enumerate(model.blocks):
        assert isinstance(block, Block)
        if block.patches and isinstance(block.correction, GatedSRP):
            added = (x - start)[0, 1 : 1 + len(kept)]  # (k, C)
            tokens = own + neighbour_mean(added, *thinning.around).to(own.dtype)
            thinned = replace(thinned, outside=block.attn.values(block.norm1(tokens[None]))[0])  # (T, C)
        x = block(x, thinned, None, scratch=scratch)
        if number == 0 and model.ppeg is not None and x.shape[1] > 1:
            x = model.ppeg(x, overwrite=scratch is not None)
    return model.logits(model.norm(x[:, 0]), graph)


def refuse_budget(model: SlideModel) -> None:
    """Models whose attention or axis needs the patches that would be left out take no budget."""
    what = ""
    if type(model) is not SlideTransformer:
        what = f"a {type(model).__name__} needs all patches"
    else:
        for block in model.blocks:
            assert isinstance(block, Block)
            if block.attn.reads_graph:
                what = f"{type(block.attn).__name__} attends along the neighbour lists"
            elif isinstance(block.correction, GatedSRP) and not block.correction.direction.thins:
                what = f"the axis {type(block.correction.direction).__name__} needs all patches"
            elif not isinstance(block.correction, GatedSRP | Adapter | None):
                what = f"the correction {type(block.correction).__name__} needs all patches"
    if what:
        arm = model.settings["arm"]
        raise UserError(
            f"arm {arm!r} takes no budget: {what}", where="budget", cure="Leave it out, or use na or gated_srp."
        )
