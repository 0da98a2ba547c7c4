"""Very long slides in half precision: of all rows only x and the values exist, in memory that the blocks share.

Shapes: H heads, L rows (row 0 is CLS), M landmarks, D head width, C channels, S side of the square.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gated_srp.models.attention import split_heads, weights
from gated_srp.models.fast import product_dtype
from gated_srp.models.fast.gradients import Gathered
from gated_srp.models.nystrom import NystromAttention, means_of_segments, pinv, segment_size
from gated_srp.srp.projection import chunks

if TYPE_CHECKING:
    from gated_srp.models.fast.inference import Scratch, YAt

_LINES = 64  # of the square that are convolved at once


def nystrom_in_parts(attention: NystromAttention, x: Tensor, norm: nn.Module, scratch: Scratch) -> tuple[YAt, Tensor]:
    """attention(norm(x)) of one bag: y of any rows on demand and v of all, (1, H, L, D). Queries and keys exist for some rows at a time;
    logits of landmarks on keys, and what landmarks gather, are float32."""
    heads, dim, dtype = attention.num_heads, x.shape[2], product_dtype(x)
    size, values = segment_size(x.shape[1], attention.num_landmarks), scratch.values(x)
    segments = (slice(start, start + size) for start in range(0, x.shape[1], size))
    means = torch.cat([means_of_segments(norm(x[:, rows]), size) for rows in segments], dim=1)
    q_marks, k_marks = attention.landmarks(means)
    gathered = Gathered(q_marks.shape[1:], values.new_empty(0, dtype=torch.float32))
    weight, bias = (p.to(dtype) for p in (attention.qkv.weight, attention.qkv.bias))
    scaled = q_marks[0].float() * q_marks.shape[-1] ** -0.5  # (H, M, D)
    for rows in chunks(x[0]):
        k, v = F.linear(norm(x[0, rows]).to(dtype), weight[dim:], bias[dim:]).split(dim, dim=1)  # (chunk, C) each
        values[rows] = v
        with torch.autocast(x.device.type, enabled=False):
            logits = torch.einsum("rhd,hmd->rhm", k.float().unflatten(1, (heads, -1)), scaled)
            gathered.add(logits.flatten(1).contiguous(), v.float().contiguous())
    with torch.autocast(x.device.type, enabled=False):
        u = (pinv(weights(q_marks, k_marks)) @ gathered.means()).to(dtype)  # (1, H, M, D)

    def y_at(rows: slice) -> Tensor:
        q = F.linear(norm(x[:, rows]).to(dtype), weight[:dim], bias[:dim])  # (1, chunk, C)
        return F.scaled_dot_product_attention(split_heads(q, heads), k_marks.to(dtype), u)

    return y_at, split_heads(values[None], heads)


def convolve_in_place(square: Tensor, weight: Tensor, bias: Tensor) -> None:
    """A depthwise convolution of square (1, S, S, C) in its own memory, some lines at a time."""
    margin, side = weight.shape[-1] // 2, square.shape[1]
    above = square.new_zeros(1, margin, side, square.shape[3])  # lines before these, as they were
    for start in range(0, side, _LINES):
        lines = square[:, start : start + _LINES + margin]
        missing = max(0, start + _LINES + margin - side)
        known = torch.cat([above, lines, above.new_zeros(1, missing, *above.shape[2:])], dim=1)
        found = F.conv2d(known.movedim(-1, 1), weight, bias, padding=(0, margin), groups=len(weight)).movedim(1, -1)
        own = square[:, start : start + _LINES]
        above = known[:, _LINES : _LINES + margin].clone()
        own.copy_(found[:, : own.shape[1]])
