"""Fewer rows from block to block: merging what is similar (ToMe), and pruning what CLS does not look at (EViT).

Shapes: H heads, L rows (row 0 is CLS), N patches of the slide, D head width, C channels. One bag at a time.
"""

import math
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from gated_srp.errors import UserError
from gated_srp.models.attention import DenseAttention
from gated_srp.models.block import Block
from gated_srp.models.slide import SlideTransformer
from gated_srp.srp import PatchGraph
from gated_srp.srp.projection import chunks

MERGED, KEPT = 0.25, 0.7  # shares of the patches that leave and that stay before a block


@dataclass(frozen=True, eq=False)
class ReducedGraph(PatchGraph):
    """The graph of rows that stand for several patches: ``owner`` (N,) the row of each patch, ``size`` (L,) how many a row stands for."""

    owner: Tensor = None  # type: ignore[assignment]  # fields of the base have defaults
    size: Tensor = None  # type: ignore[assignment]

    def patches(self, values: Tensor) -> Tensor:
        """Each patch has the value of its row: (1, H, L) -> (H, N)."""
        return values[0, :, self.owner]

    def rows_of(self, patches: Tensor) -> Tensor:
        """A row counts if one of its patches does."""
        return torch.zeros_like(self.size).index_add_(0, self.owner, patches.to(self.size.dtype)) > 0


class SharedMap(DenseAttention):
    """Dense attention whose map gives each patch its share of what its row gets."""

    def cls_map(self, x: Tensor, graph: PatchGraph) -> Tensor:
        weights = super().cls_map(x, graph)
        return weights / graph.size if isinstance(graph, ReducedGraph) else weights


class SizedAttention(SharedMap):
    """Proportional attention: softmax_j(<q_i, k_j> / sqrt D + log s_j), as if a row of s_j patches were there as often (Bolya et al. 2023)."""

    def forward(self, x: Tensor, graph: PatchGraph) -> tuple[Tensor, Tensor]:
        if not isinstance(graph, ReducedGraph):
            return super().forward(x, graph)
        q, k, v = self.heads(x)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=graph.size.log().to(q.dtype).view(1, 1, 1, -1)), v

    def first_row(self, x: Tensor, graph: PatchGraph) -> tuple[Tensor, Tensor]:
        if not isinstance(graph, ReducedGraph):
            return super().first_row(x, graph)
        (q,) = self.heads(x[:, :1], 0, 1)
        k, v = self.heads(x, 1, 3)
        mask = graph.size.log().to(q.dtype).view(1, 1, 1, -1)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask), v[:, :, :1]

    def cls_map(self, x: Tensor, graph: PatchGraph) -> Tensor:
        """softmax(p + log s) / s: weights exp(p) alone, normalised by all patches."""
        if not isinstance(graph, ReducedGraph):
            return super().cls_map(x, graph)
        plain = DenseAttention.cls_map(self, x, graph)  # exp(p) / sum exp(p)
        return plain / (plain * graph.size).sum(-1, keepdim=True)


class ReducedTransformer(SlideTransformer):
    """A slide model that hands fewer rows to each block but the first."""

    no_pretraining: ClassVar[str] = (
        "it merges or drops patches on the way, so that not every masked one has a token at the end"
    )

    def before_block(self, number: int, x: Tensor, rows: PatchGraph) -> tuple[Tensor, PatchGraph]:
        if number == 0 or x.shape[1] < 4:  # CLS and two patches: nothing to choose from
            return x, rows
        if len(x) > 1:
            what = f"{len(x)} bags at once: rows are merged or dropped slide by slide"
            raise UserError(what, cure="Call the model bag by bag and accumulate gradients.")
        if not isinstance(rows, ReducedGraph):
            owner = torch.arange(rows.before, x.shape[1], device=x.device)
            size = torch.ones(x.shape[1], device=x.device)
            rows = ReducedGraph(**vars(rows) | {"places": None}, owner=owner, size=size)
        block = self.blocks[number]
        assert isinstance(block, Block)
        return self.reduce(block, x, rows)

    def reduce(self, block: Block, x: Tensor, rows: ReducedGraph) -> tuple[Tensor, ReducedGraph]:
        raise NotImplementedError


class MergingTransformer(ReducedTransformer):
    """Token merging (Bolya et al. 2023): patches are dealt in turn into A and B, each of A finds the one of B with the highest cosine of
    keys (means over heads); of these pairs the most similar ones merge into means weighted by sizes, and their neighbour lists too."""

    checked: ClassVar[str] = (
        "Loops over bipartite matching, weighted means, contracted lists and attention with log sizes. Merging "
        "happens before a block, by that block's keys, not between its attention and its MLP; that neighbour lists "
        "are contracted is ours."
    )

    def reduce(self, block: Block, x: Tensor, rows: ReducedGraph) -> tuple[Tensor, ReducedGraph]:
        with torch.no_grad():
            assert isinstance(block.attn, DenseAttention)
            (keys,) = block.attn.heads(block.norm1(x), 1, 2)
            target = match_rows(keys[0].float().mean(0), int(MERGED * (x.shape[1] - 1)))
        return merge_rows(x, rows, target)


def match_rows(keys: Tensor, count: int) -> Tensor:
    """The row that each row joins, (L,), itself for those that stay: ``count`` rows 1, 3, 5, ... join rows 2, 4, 6, ...; keys (L, D)."""
    unit = F.normalize(keys, dim=-1)
    ours, theirs = unit[1::2], unit[2::2]
    best = [(ours[part] @ theirs.t()).max(-1) for part in chunks(ours, 4096)]
    near, found = (torch.cat([getattr(one, name) for one in best]) for name in ("values", "indices"))
    chosen = near.argsort(descending=True, stable=True)[:count]
    target = torch.arange(len(keys), device=keys.device)
    target[1 + 2 * chosen] = 2 + 2 * found[chosen]
    return target


def merge_rows(x: Tensor, rows: ReducedGraph, target: Tensor) -> tuple[Tensor, ReducedGraph]:
    """Rows with one target become their mean, weighted by sizes: x (1, L, C), target (L,)."""
    stays = target == torch.arange(len(target), device=x.device)
    to = (stays.cumsum(0) - 1)[target]  # (L,) numbers among the rows that stay
    size = torch.zeros_like(rows.size[stays]).index_add(0, to, rows.size)
    share = rows.size / size[to]
    merged = x.new_zeros(len(size), x.shape[-1]).index_add(0, to, (x[0] * share.unsqueeze(-1)).to(x.dtype))
    homogeneity = torch.zeros_like(size).index_add(0, to, rows.homogeneity * share)
    neighbours, offsets = contracted(rows, to, len(size))
    reduced = replace(rows, neighbours=neighbours, offsets=offsets, homogeneity=homogeneity, size=size)
    return merged[None], replace(reduced, owner=to[rows.owner])


def contracted(rows: PatchGraph, to: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Neighbour lists and offsets after row i became row to[i] of ``count`` (-1: dropped): each neighbour once, nobody its own."""
    one, other = to.repeat_interleave(rows.neighbour_count), to[rows.neighbours]  # (E,) each
    apart = (one != other) & (one >= 0) & (other >= 0)
    pairs = torch.unique(one[apart] * count + other[apart])  # sorted: row by row
    counts = torch.bincount(pairs // count, minlength=count)
    return pairs % count, F.pad(counts.cumsum(0), (1, 0))


class PruningTransformer(ReducedTransformer):
    """EViT (Liang et al. 2022): the patches with the highest CLS attention a_i (mean over heads) stay, the others become one row, sum a_i x_i.

    That row has no neighbours; those that stay are neighbours as before.
    """

    checked: ClassVar[str] = (
        "A loop over the choice by CLS attention and the sum of what is left, weighted by that attention. It "
        "happens before a block, by that block's attention, not between its attention and its MLP."
    )

    def reduce(self, block: Block, x: Tensor, rows: ReducedGraph) -> tuple[Tensor, ReducedGraph]:
        kept = math.ceil(KEPT * (x.shape[1] - 1))
        assert isinstance(block.attn, DenseAttention)
        attention = DenseAttention.cls_map(block.attn, block.norm1(x), rows)[0].mean(0)[1:]  # (L - 1,)
        stays = torch.ones(x.shape[1], dtype=torch.bool, device=x.device)
        stays[1 + attention.argsort(descending=True, stable=True)[kept:]] = False
        left = ~stays
        fused = (attention[left[1:]].to(x.dtype).unsqueeze(-1) * x[0, left]).sum(0)  # (C,)
        to = torch.where(stays, stays.cumsum(0) - 1, -1)  # (L,)
        neighbours, offsets = contracted(rows, to, kept + 2)
        reduced = replace(
            rows,
            neighbours=neighbours,
            offsets=offsets,
            homogeneity=F.pad(rows.homogeneity[stays], (0, 1)),
            size=torch.cat([rows.size[stays], rows.size[left].sum()[None]]),
            owner=torch.where(to < 0, kept + 1, to)[rows.owner],
        )
        return torch.cat([x[0, stays], fused[None]])[None], reduced
