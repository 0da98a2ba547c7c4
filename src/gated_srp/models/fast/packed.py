"""Several bags through a slide model together: their rows pass norms, linear layers and feed-forward at once.

Attention and PPEG take bags of one number of rows together (with a square layout bags of 65 to 81 patches are alike), the correction takes
the rows of all bags as one graph. Equal to one bag after the other but for rounding (tests/models/fast/test_packed.py).

Shapes: B bags, R rows of all bags, L rows of a bag (its first is CLS), H heads, D head width, C channels, M landmarks.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, groupby
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from gated_srp.models.attention import split_heads
from gated_srp.models.block import Block, refuse_wrapped
from gated_srp.models.fast import by_hand
from gated_srp.models.fast.gradients import projections
from gated_srp.models.masked import MaskedGraph, MaskedTransformer
from gated_srp.models.nystrom import NystromAttention, nystrom, pinv, segment_means
from gated_srp.models.slide import CorrectedFeatures, SlideModel, SlideTransformer, check_bags
from gated_srp.srp import PatchGraph


@dataclass(frozen=True, eq=False)
class PackedGraph(PatchGraph):
    """The graph of bags laid end to end, each with the rows it has: nothing is filled up to the longest."""

    rows: tuple[int, ...] = ()  # of each bag

    @property
    def spans(self) -> list[slice]:
        starts = [end - rows + self.before for end, rows in zip(accumulate(self.rows), self.rows, strict=True)]
        return [slice(start, start + patches) for start, patches in zip(starts, self.lengths, strict=True)]


@dataclass(frozen=True, eq=False)
class Pack:
    """How rows of several bags lie, bags of equal rows next to each other."""

    order: tuple[int, ...]  # bags by their number of rows
    graph: PackedGraph  # of all rows, in that order
    groups: tuple[
        PatchGraph, ...
    ]  # of bags with equal rows; to attention all of a bag's rows but CLS are patches, as they are to one bag's
    source: Tensor  # (R,) which of CLS and the patches of all bags each row is

    @classmethod
    def of(cls, graphs: Sequence[PatchGraph], *, square: bool) -> "Pack":
        """``square``: each bag's first patches come again, until they fill a square."""
        sizes = [graph.num_rows for graph in graphs]
        missing = [math.ceil(math.sqrt(n)) ** 2 - n if square else 0 for n in sizes]
        rows = [1 + n + more for n, more in zip(sizes, missing, strict=True)]
        order = sorted(range(len(graphs)), key=rows.__getitem__)
        first = [1 + start for start in accumulate(sizes, initial=0)]  # after CLS
        source = []
        for bag in order:
            patches = torch.arange(first[bag], first[bag] + sizes[bag])
            source += [torch.zeros(1, dtype=torch.long), patches, patches[: missing[bag]]]
        whole = [graphs[bag].with_isolated(before=1, after=missing[bag]) for bag in order]
        groups = []
        for _, some in groupby(zip(order, whole, strict=True), key=lambda one: rows[one[0]]):
            alike = [graph for _, graph in some]
            groups.append(_line(alike, [graph.num_rows - 1 for graph in alike]))
        flat = _line(groups, [sizes[bag] for bag in order])
        graph = PackedGraph(**_facts(flat), rows=tuple(rows[bag] for bag in order))
        return cls(tuple(order), graph, tuple(groups), torch.cat(source).to(graph.offsets.device))

    def split(self, x: Tensor) -> list[Tensor]:
        """(R, C) -> (B, L, C) of each group."""
        parts = torch.split(x, [group.num_rows for group in self.groups])  # its backward is one cat
        return [part.unflatten(0, (group.num_bags, -1)) for part, group in zip(parts, self.groups, strict=True)]

    @cached_property
    def rows(self) -> Tensor:
        """Of each bag, (B,); once for all blocks, since it is copied to the device."""
        return torch.tensor(self.graph.rows, device=self.source.device)

    @cached_property
    def cls_rows(self) -> Tensor:
        """(B,)"""
        starts = [end - rows for end, rows in zip(accumulate(self.graph.rows), self.graph.rows, strict=True)]
        return torch.tensor(starts, device=self.source.device)


def _line(graphs: Sequence[PatchGraph], lengths: Sequence[int]) -> PatchGraph:
    """Graphs with their CLS laid end to end."""
    return replace(PatchGraph._in_line(graphs, tuple(lengths)), before=1)


def _facts(graph: PatchGraph) -> dict[str, Any]:
    return {name: getattr(graph, name) for name in PatchGraph.__dataclass_fields__}


def _packed(graphs: Sequence[PatchGraph]) -> PackedGraph:
    """Graphs of patches alone laid end to end."""
    rows = tuple(graph.num_rows for graph in graphs)
    return PackedGraph(**_facts(PatchGraph._in_line(graphs, rows)), rows=rows)


def packed_logits(model: SlideModel, bags: Sequence[tuple[Tensor, PatchGraph]], keep: Tensor | None = None) -> Tensor:
    """model(features[None], graph, keep of the bag) of each bag, all at once: features (N, in_dim) and graphs, keep (depth, 2, B) -> (B, outputs)."""
    assert isinstance(model, SlideTransformer) and model.packs
    for features, graph in bags:
        check_bags(features[None], graph, model.in_proj.in_features)
    refuse_wrapped(model.blocks, model.ppeg)
    pack = Pack.of([graph for _, graph in bags], square=model.ppeg is not None)
    dtype = model.in_proj.weight.dtype
    x = torch.cat([features for features, _ in bags])
    if isinstance(model, CorrectedFeatures):  # in one call, so that what its gate does is counted for all bags
        x = model.entering(x[None], _packed([graph for _, graph in bags]))[0]
    x = model.in_proj(x.to(dtype))
    x = torch.cat([model.cls_token[0].to(x.dtype), x]).index_select(0, pack.source)  # (R, C)
    if isinstance(model, MaskedTransformer):
        hidden = [graph.hidden for _, graph in bags if isinstance(graph, MaskedGraph)]
        x = model.hide(x, F.pad(torch.cat(hidden), (1, 0)).index_select(0, pack.source))
    if keep is not None:
        keep = keep[..., list(pack.order)]
    for number, block in enumerate(cast(Sequence[Block], model.blocks)):
        factor = None if keep is None else keep[number]
        if model.checkpointing and torch.is_grad_enabled():
            x = checkpoint(_block, block, x, pack, factor, use_reentrant=False, preserve_rng_state=False)
        else:
            x = _block(block, x, pack, factor)
        if number == 0 and model.ppeg is not None and len(x) > len(bags):  # after a last block CLS is alone
            x = _joined([model.ppeg(part).flatten(0, 1) for part in pack.split(x)])
    if isinstance(model, MaskedTransformer):
        spans = dict(zip(pack.order, pack.graph.spans, strict=True))
        return torch.stack([model.errors(x[spans[number]], *bag) for number, bag in enumerate(bags)])
    given = [bags[bag][1].covariates for bag in pack.order]
    known = [one for one in given if one is not None]
    graph = pack.graph.with_covariates(torch.cat(known)) if known else pack.graph
    logits = model.logits(model.norm(x), graph)
    return logits[torch.tensor(pack.order, device=x.device).argsort()]


def _block(block: Block, x: Tensor, pack: Pack, keep: Tensor | None) -> Tensor:
    """The block on all rows (R, C), or for a last block on each bag's CLS, (B, C); ``keep`` (2, B)."""
    y, v = _attention(block, block.norm1(x), pack)  # (1, H, R, D)
    graph: PatchGraph = pack.graph
    if block.patches:
        keep = None if keep is None else keep.repeat_interleave(pack.rows, 1, output_size=len(x))
    else:
        graph, x = graph.first_rows(), x.index_select(0, pack.cls_rows)
    x = _add(x, block._merge(y, v, graph)[0], keep, 0)
    return _add(x, block.mlp(block.norm2(x)), keep, 1)


def _add(x: Tensor, branch: Tensor, keep: Tensor | None, which: int) -> Tensor:
    return x + branch if keep is None else torch.addcmul(x, branch, keep[which].unsqueeze(-1).to(branch.dtype))


def _attention(block: Block, x: Tensor, pack: Pack) -> tuple[Tensor, Tensor]:
    """y and v of all rows, or of the CLS rows for a last block, as of one bag: (1, H, rows, D)."""
    if type(block.attn) is NystromAttention and by_hand(block.attn, block.attn.qkv):
        return _nystrom(block.attn, x, pack, all_rows=block.patches)
    attend = block.attn if block.patches else block.attn.first_row
    parts = [attend(part, group) for part, group in zip(pack.split(x), pack.groups, strict=True)]
    y, v = (_joined([_rows(heads) for heads in some]) for some in zip(*parts, strict=True))
    return y.transpose(0, 1)[None], v.transpose(0, 1)[None]


def _nystrom(attention: NystromAttention, x: Tensor, pack: Pack, *, all_rows: bool) -> tuple[Tensor, Tensor]:
    """Queries, keys and values of all rows from one product, the pseudo-inverses of all bags together."""
    dim, heads, count = attention.proj.in_features, attention.num_heads, attention.num_landmarks
    weight, bias = attention.qkv.weight, attention.qkv.bias
    if all_rows:
        q, k, v = projections(x, weight, bias, dim)
        queries = pack.split(q)
        q_means = [segment_means(part, count) for part in queries]  # those of linear(x), as linear is
    else:
        k, v = projections(x, weight[dim:], bias[dim:], dim)
        (q,) = projections(x.index_select(0, pack.cls_rows), weight[:dim], bias[:dim], dim)
        queries = [part.unsqueeze(1) for part in q.split([group.num_bags for group in pack.groups])]
        q_means = [F.linear(segment_means(part, count), weight[:dim], bias[:dim]) for part in pack.split(x)]
    outputs = []
    for query, mean, key, value in zip(queries, q_means, pack.split(k), pack.split(v), strict=True):
        of_heads = [split_heads(part, heads) for part in (query, key, value, mean, segment_means(key, count))]
        outputs.append(_rows(_few_landmarks(count, *of_heads)))
    v = v if all_rows else v.index_select(0, pack.cls_rows)
    return _joined(outputs).transpose(0, 1)[None], split_heads(v[None], heads)


def _few_landmarks(count: int, q: Tensor, k: Tensor, v: Tensor, q_marks: Tensor, k_marks: Tensor) -> Tensor:
    """`nystrom` with the zero landmarks of a short bag as one: (B, H, L, D); ``q_marks``, ``k_marks`` (B, H, m, D) are those with rows.

    The e = count - m others are alike: equal rows and equal columns of A. With E, whose columns are the m unit vectors and the
    mean direction of those e, A = E A' E^T, and the iteration for its inverse never leaves that form: it needs m + 1 rows, not count.
    """
    empty = count - q_marks.shape[2]
    if not empty:
        return nystrom(q, k, v, q_marks, k_marks)
    root, dtype = math.sqrt(empty), v.dtype
    q_marks, k_marks = (F.pad(marks, (0, 0, 0, 1)) for marks in (q_marks, k_marks))  # (B, H, m + 1, D)
    last = q_marks.new_zeros(q_marks.shape[2])
    last[-1] = math.log(empty)  # a softmax sees the zero landmark e times
    u = F.scaled_dot_product_attention(q_marks, k, v)
    with torch.autocast(v.device.type, enabled=False):
        length = torch.ones_like(last, dtype=torch.float32)
        length[-1] = root
        logits = q_marks.float() @ k_marks.float().transpose(-2, -1) * q.shape[-1] ** -0.5
        whole = (logits + last.float()).softmax(-1)  # its last column is the sum of e
        a = whole * length.unsqueeze(-1) / length  # A' = E^T A E
        highest = (whole * (length**2).unsqueeze(-1)).sum(-2) / length**2  # sums of the columns of A
        inverse = pinv(a, whole.sum(-1).amax((1, 2)) * highest.amax((1, 2)))
        u = ((inverse @ (u.float() * length.unsqueeze(-1))) / length.unsqueeze(-1)).to(dtype)
    return F.scaled_dot_product_attention(q, k_marks, u, attn_mask=last.expand(q.shape[2], -1))


def _joined(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _rows(heads: Tensor) -> Tensor:
    """(B, H, L, D) -> (B * L, H, D)."""
    return heads.transpose(1, 2).flatten(0, 1)
