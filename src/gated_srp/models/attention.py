"""Attention as the blocks see it: the dense form and the local one.

Shapes: B batch, H heads, L rows (row 0 is CLS), D head width, C = H * D channels, R = B * L,
K neighbours at most (`PatchGraph.most_listed`).
"""

from collections.abc import Callable
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from gated_srp.errors import UserError
from gated_srp.models.fast import by_hand, halves_on_processor, watched
from gated_srp.models.fast.gradients import projections
from gated_srp.srp import PatchGraph

_GATHERED = 1024  # rows whose neighbours' keys and values are gathered at once


class Attention(nn.Module):
    """Maps normalised rows (B, L, C) to head outputs y and values v, both (B, H, L, D); `out` merges the heads afterwards."""

    dense: ClassVar[bool] = True  # over all pairs of rows
    signed: ClassVar[bool] = False  # weights below zero mean something: maps show them
    reads_graph: ClassVar[bool] = False  # it attends along neighbour lists
    num_heads: int
    proj: nn.Linear

    def forward(self, x: Tensor, graph: PatchGraph) -> tuple[Tensor, Tensor]:
        raise NotImplementedError

    def first_row(self, x: Tensor, graph: PatchGraph) -> tuple[Tensor, Tensor]:
        """y and v of row 0 alone, (B, H, 1, D) each: what a head that reads CLS needs of the last block."""
        raise NotImplementedError

    def cls_map(self, x: Tensor, graph: PatchGraph) -> Tensor:
        """Weights with which row 0 reads the values of all rows, (B, H, L)."""
        raise NotImplementedError

    def values(self, x: Tensor) -> Tensor:
        """v alone, heads side by side: (B, L, C)."""
        raise NotImplementedError


class FusedAttention(Attention):
    """Queries, keys and values from one linear layer with bias."""

    def __init__(self, dim: int, num_heads: int) -> None:
        super().__init__()
        check_heads(dim, num_heads)
        self.num_heads = num_heads
        self.qkv = nn.Linear(dim, 3 * dim)
        self.proj = nn.Linear(dim, dim)

    def heads(self, x: Tensor, first: int = 0, last: int = 3) -> tuple[Tensor, ...]:
        """Projections number first to last - 1 of (q, k, v), each (B, H, L, D) in memory of its own."""
        dim = self.proj.in_features
        weight, bias = (p[first * dim : last * dim] for p in (self.qkv.weight, self.qkv.bias))
        if watched(self.qkv):  # all of it, as whoever looks on expects
            parts = self.qkv(x).split(dim, dim=-1)[first:last]
        elif by_hand():
            parts = projections(x, weight, bias, dim)
        else:
            parts = tuple(F.linear(x, w, b) for w, b in zip(weight.split(dim), bias.split(dim), strict=True))
        apart = (split_heads(part, self.num_heads) for part in parts)
        return tuple(one.contiguous() if by_hand() and halves_on_processor(one) else one for one in apart)

    def values(self, x: Tensor) -> Tensor:
        return merge_heads(self.heads(x, 2, 3)[0])


class DenseAttention(FusedAttention):
    """Softmax attention over all rows (Eq. 1); rows that pad a shorter bag are never attended to."""

    def forward(self, x: Tensor, graph: PatchGraph) -> tuple[Tensor, Tensor]:
        q, k, v = self.heads(x)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=key_mask(x, graph)), v

    def first_row(self, x: Tensor, graph: PatchGraph) -> tuple[Tensor, Tensor]:
        (q,) = self.heads(x[:, :1], 0, 1)
        k, v = self.heads(x, 1, 3)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=key_mask(x, graph)), v[:, :, :1]

    def cls_map(self, x: Tensor, graph: PatchGraph) -> Tensor:
        (q,) = self.heads(x[:, :1], 0, 1)
        (k,) = self.heads(x, 1, 2)
        return weights(q, k, key_mask(x, graph)).squeeze(2)


class LocalAttention(DenseAttention):
    """What the paper argues against and never tests: every patch over itself and its neighbours in the graph.

    y_i = sum over j in N(i) and i itself of softmax_j(<q_i, k_j> / sqrt D) v_j; CLS alone reads all rows."""

    dense: ClassVar[bool] = False
    reads_graph: ClassVar[bool] = True

    def forward(self, x: Tensor, graph: PatchGraph) -> tuple[Tensor, Tensor]:
        q, k, v = self.heads(x, 0, 3)
        rows = [part.transpose(1, 2).flatten(0, 1) for part in (q, k, v)]  # (R, H, D)
        bias = self.place_bias()
        tables = [*neighbour_table(graph), *([] if bias is None else [place_table(graph)])]
        y = by_table(_attend_table, rows[0], (*rows[1:], bias), tables).view(len(x), -1, *rows[0].shape[1:])
        cls = F.scaled_dot_product_attention(q[:, :, :1], k, v, attn_mask=key_mask(x, graph))
        return torch.cat([cls.to(y.dtype), y.transpose(1, 2)[:, :, 1:]], dim=2), v

    def place_bias(self) -> Tensor | None:
        """What is added to the logit of a neighbour by its place (H, 49); None: nothing."""
        return None


def by_table(
    attend: Callable[..., Tensor], q: Tensor, whole: tuple[Tensor | None, ...], tables: list[Tensor]
) -> Tensor:
    """attend(rows of q, *whole, *rows of the tables), some rows at a time: (R, H, D).

    K + 1 keys and values per row: cheaper to gather twice than to keep.
    """
    parts = []
    for part, *listed in zip(*(one.split(_GATHERED) for one in (q, *tables)), strict=True):
        if torch.is_grad_enabled():
            parts.append(checkpoint(attend, part, *whole, *listed, use_reentrant=False, preserve_rng_state=False))
        else:
            parts.append(attend(part, *whole, *listed))
    return torch.cat(parts)


def neighbour_table(graph: PatchGraph) -> tuple[Tensor, Tensor]:
    """Each row's own number, then its neighbours', (R, K + 1), and which entries are meant."""
    counts = graph.neighbour_count
    own = torch.arange(len(counts), device=counts.device).unsqueeze(1)  # (R, 1)
    meant = torch.arange(graph.most_listed + 1, device=counts.device) <= counts.unsqueeze(1)  # (R, K + 1)
    return _filled(own.repeat(1, meant.shape[1]), graph, graph.neighbours), meant


def _filled(table: Tensor, graph: PatchGraph, entries: Tensor) -> Tensor:
    """``table`` (R, K + 1) with what is known of each neighbour, (E,), behind its row's own column; a mask would wait for the device."""
    owners = torch.arange(len(table), device=table.device)
    owners = owners.repeat_interleave(graph.neighbour_count, output_size=len(entries))  # (E,)
    places = table.shape[1] * owners + 1 + torch.arange(len(entries), device=table.device) - graph.offsets[owners]
    return table.view(-1).scatter_(0, places, entries).view_as(table)


def place_table(graph: PatchGraph) -> Tensor:
    """Where each entry of `neighbour_table` lies in a window of 7 x 7 around its row, numbered as `PatchGraph.places`: (R, K + 1)."""
    if graph.places is None or graph.window > 7:
        what = "the graph does not know where neighbours lie" if graph.places is None else f"window {graph.window}"
        cure = "Relative positions need PatchGraph.from_coords (or from_grid) and a window of 3, 5 or 7."
        raise UserError(what, where="graph", cure=cure)
    around = 3 - graph.window // 2
    x, y = graph.places.long() // graph.window, graph.places.long() % graph.window
    table = torch.full((graph.num_rows, graph.most_listed + 1), 24, device=x.device)  # the row itself
    return _filled(table, graph, (x + around) * 7 + y + around)


def _attend_table(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, table: Tensor, meant: Tensor, places: Tensor | None = None
) -> Tensor:
    """Attention of rows q (P, H, D) over the rows of k, v (R, H, D) that the table (P, K + 1) means."""
    logits = torch.einsum("phd,pjhd->phj", q, k[table]) * q.shape[-1] ** -0.5
    if bias is not None and places is not None:
        logits = logits + bias[:, places].transpose(0, 1)  # (P, H, K + 1)
    logits = logits.masked_fill(~meant.unsqueeze(1), float("-inf"))
    return torch.einsum("phj,pjhd->phd", logits.softmax(-1).to(v.dtype), v[table])


def weights(q: Tensor, k: Tensor, mask: Tensor | None = None) -> Tensor:
    """softmax(q k^T / sqrt D) in float32 (Eq. 1), for the places that need the weights themselves."""
    with torch.autocast(q.device.type, enabled=False):
        logits: Tensor = q.float() @ k.float().transpose(-2, -1) * q.shape[-1] ** -0.5
        if mask is not None:
            logits = logits.masked_fill(~mask, float("-inf"))
        return logits.softmax(-1)


def key_mask(x: Tensor, graph: PatchGraph) -> Tensor | None:
    """(B, 1, 1, L), false at rows that pad a shorter bag; None when there are none."""
    if all(n == graph.lengths[0] for n in graph.lengths[1:]):
        return None
    mask = torch.ones(x.shape[:2], dtype=torch.bool, device=x.device)
    for bag, patches in enumerate(graph.lengths):
        mask[bag, graph.before + patches :] = False
    return mask[:, None, None]


def split_heads(x: Tensor, num_heads: int) -> Tensor:
    """(B, L, H * D) -> (B, H, L, D), a view."""
    return x.view(*x.shape[:-1], num_heads, -1).transpose(1, 2)


def merge_heads(heads: Tensor) -> Tensor:
    """(B, H, L, D) -> (B, L, H * D)."""
    return heads.transpose(1, 2).flatten(2)


def check_heads(dim: int, num_heads: int) -> None:
    if num_heads < 1 or dim % num_heads:
        raise UserError(f"dim {dim} is not a multiple of num_heads {num_heads}: every head needs the same width.")
