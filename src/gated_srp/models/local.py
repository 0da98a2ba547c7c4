"""Attention that is local: every patch over itself and its neighbours in the graph. What the paper argues against and never tests.

Shapes: B batch, H heads, L rows (row 0 is CLS), R = B * L, K neighbours at most, D head width.
"""

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from gated_srp.models.attention import DenseAttention, key_mask
from gated_srp.srp import PatchGraph

_CHUNK = 1024  # rows whose keys and values are gathered at once


class LocalAttention(DenseAttention):
    """y_i = sum over j in N(i) and i itself of softmax_j(<q_i, k_j> / sqrt D) v_j; CLS alone reads all rows."""

    def forward(self, x: Tensor, graph: PatchGraph) -> tuple[Tensor, Tensor]:
        q, k, v = self.heads(x, 0, 3)
        rows = [part.transpose(1, 2).flatten(0, 1) for part in (q, k, v)]  # (R, H, D)
        table, meant = neighbour_table(graph)
        parts = []
        for q_part, *listed in zip(rows[0].split(_CHUNK), table.split(_CHUNK), meant.split(_CHUNK), strict=True):
            arguments = (q_part, *rows[1:], *listed)
            # K + 1 keys and values a row: cheaper to gather twice than to keep.
            parts.append(
                checkpoint(attend, *arguments, use_reentrant=False, preserve_rng_state=False)
                if torch.is_grad_enabled()
                else attend(*arguments)
            )
        y = torch.cat(parts).view(len(x), -1, *rows[0].shape[1:]).transpose(1, 2)  # (B, H, L, D)
        cls = F.scaled_dot_product_attention(q[:, :, :1], k, v, attn_mask=key_mask(x, graph))
        return torch.cat([cls.to(y.dtype), y[:, :, 1:]], dim=2), v


def neighbour_table(graph: PatchGraph) -> tuple[Tensor, Tensor]:
    """Each row's own number, then its neighbours', (R, K + 1), and which entries are meant."""
    counts = graph.neighbour_count
    own = torch.arange(len(counts), device=counts.device).unsqueeze(1)  # (R, 1)
    meant = torch.arange(graph.most_neighbours + 1, device=counts.device) <= counts.unsqueeze(1)  # (R, K + 1)
    table = own.repeat(1, meant.shape[1])
    table[:, 1:][meant[:, 1:]] = graph.neighbours
    return table, meant


def attend(q: Tensor, k: Tensor, v: Tensor, table: Tensor, meant: Tensor) -> Tensor:
    """Attention of rows q (P, H, D) over the rows of k, v (R, H, D) that the table (P, K + 1) means."""
    logits = torch.einsum("phd,pjhd->phj", q, k[table]) * q.shape[-1] ** -0.5
    logits = logits.masked_fill(~meant.unsqueeze(1), float("-inf"))
    return torch.einsum("phj,pjhd->phd", logits.softmax(-1).to(v.dtype), v[table])
