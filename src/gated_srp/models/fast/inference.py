"""A prediction of one bag in one pass over its rows: of all rows only x and the values exist, in memory that the blocks share.

Shapes: H heads, L rows (row 0 is CLS), M landmarks, D head width, C channels.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gated_srp.models.attention import Attention, merge_heads, split_heads, weights
from gated_srp.models.fast import product_dtype
from gated_srp.models.fast.gradients import Gathered, row_layers, spread
from gated_srp.models.nystrom import NystromAttention, means_of_segments, pinv, segment_size
from gated_srp.srp import PatchGraph
from gated_srp.srp.projection import chunks, linear_into

if TYPE_CHECKING:
    from gated_srp.models.block import Block, FeedForward

_ROWS = 1024  # that pass through a block at once
YAt = Callable[[slice], Tensor]  # rows -> their y, (1, H, rows, D)


class Scratch:
    """Memory that the blocks of a prediction share, one after the other: for their input and for their values, made once."""

    def __init__(self) -> None:
        self._both: Tensor | None = None

    def rows(self, like: Tensor, shape: tuple[int, int, int], dtype: torch.dtype) -> Tensor:
        """Unset (B, L, C) for what enters the first block, and as much for values in one block with it.

        The C library keeps one block of up to 32 MB for the next slide, where it gives two of half that size back to the system.
        """
        self._both = like.new_empty(2, *shape, dtype=dtype)
        return self._both[0]

    def values(self, x: Tensor) -> Tensor:
        """Unset (L, C) for the rows of x (1, L, C), where those asked for before lay."""
        if self._both is None or self._both.shape[1:] != x.shape or self._both.dtype != x.dtype:
            return torch.empty_like(x[0])
        return self._both[1, 0]


def embedded(features: Tensor, layer: nn.Linear, cls: Tensor, missing: int, scratch: Scratch | None) -> Tensor:
    """CLS, layer(features) and its first ``missing`` rows again, (B, L, C): every row is computed where it belongs.

    Half-precision features are widened a few rows at a time.
    """
    patches, dtype = features.shape[1], product_dtype(layer.weight)
    weight, bias = layer.weight.to(dtype), layer.bias.to(dtype)
    shape = len(features), 1 + patches + missing, len(bias)
    x = features.new_empty(shape, dtype=dtype) if scratch is None else scratch.rows(features, shape, dtype)
    x[:, :1] = cls
    for bag, rows in zip(features, x[:, 1:], strict=True):
        for part, out in zip(bag.split(8192), rows[:patches].split(8192), strict=True):
            linear_into(out, part.to(dtype), weight, bias)
    x[:, 1 + patches :] = x[:, 1 : 1 + missing]
    return x


def block_by_rows(block: Block, x: Tensor, graph: PatchGraph, scratch: Scratch | None) -> Tensor:
    """The block's forward of one bag x (1, L, C). With ``scratch`` x may be overwritten, and takes the result.

    Once the values and the landmarks are known, a row needs no other row of x.
    """
    out = torch.empty_like(x) if scratch is None else x
    y_at, v = attention_by_rows(block.attn, x, block.norm1, graph, scratch)
    correct = None if block.correction is None else block.correction.by_rows(v, graph)
    feed_forward = _feed_forward(block.mlp, x)
    for rows in chunks(x[0], _ROWS):
        y = y_at(rows)  # (1, H, chunk, D)
        z = merge_heads(y)[0] if correct is None else correct(y, rows).flatten(1)  # (chunk, C)
        branch = block.attn.proj(z)
        part = branch.add_(x[0, rows]) if branch.dtype == x.dtype else x[0, rows] + branch
        torch.add(part, feed_forward(block.norm2(part)), out=out[0, rows])
    return out


def attention_by_rows(
    attention: Attention, x: Tensor, norm: nn.Module, graph: PatchGraph, scratch: Scratch | None
) -> tuple[YAt, Tensor]:
    """attention(norm(x)) of one bag: y of any rows on demand, and v of all, (1, H, L, D)."""
    if isinstance(attention, NystromAttention) and attention.in_chunks(x):
        return _nystrom(attention, x, norm, scratch or Scratch())
    y, v = attention(norm(x), graph)
    return lambda rows: y[:, :, rows], v


def first_row(
    attention: Attention, x: Tensor, norm: nn.Module, graph: PatchGraph, scratch: Scratch | None
) -> tuple[Tensor, Tensor]:
    """attention.first_row(norm(x)) of one bag."""
    if isinstance(attention, NystromAttention) and attention.in_chunks(x):
        y_at, v = _nystrom(attention, x, norm, scratch or Scratch())
        return y_at(slice(0, 1)), v[:, :, :1]
    return attention.first_row(norm(x), graph)


def _nystrom(attention: NystromAttention, x: Tensor, norm: nn.Module, scratch: Scratch) -> tuple[YAt, Tensor]:
    """Normalised rows and logits exist for a chunk at a time."""
    size = segment_size(x.shape[1], attention.num_landmarks)
    segments = chunks(x[0], max(1, _ROWS // size) * size)  # a few whole ones at a time
    means = torch.cat([means_of_segments(norm(x[:, rows]), size) for rows in segments], dim=1)
    q_marks, k_marks = attention.landmarks(means)
    to_keys, (wk, _), to_values = row_layers(attention.qkv, (q_marks[0], k_marks[0]))
    values = scratch.values(x)
    gathered = Gathered(q_marks.shape[1:], values)
    for rows in chunks(x[0]):
        part = norm(x[0, rows])
        linear_into(values[rows], part, *to_values)
        gathered.add(F.linear(part, wk), values[rows])
    u = (pinv(weights(q_marks, k_marks))[0] @ gathered.means().float()).to(values.dtype)  # (H, M, D)

    def y_at(rows: slice) -> Tensor:
        return spread(F.linear(norm(x[0, rows]), *to_keys), u).transpose(0, 1).unsqueeze(0)

    return y_at, split_heads(values[None], attention.num_heads)


def _feed_forward(layer: FeedForward, x: Tensor) -> Callable[[Tensor], Tensor]:
    """The layer for a chunk of rows of x at a time, whose hidden rows share one memory."""
    dtype = product_dtype(x)
    w1, b1, w2, b2 = (p.to(dtype) for p in (layer.fc1.weight, layer.fc1.bias, layer.fc2.weight, layer.fc2.bias))
    most = _ROWS if x.device.type == "cpu" else x.shape[1]
    memory = x.new_empty(min(most, x.shape[1]), len(w1), dtype=dtype)

    def run(rows: Tensor) -> Tensor:
        hidden = memory[: len(rows)]
        linear_into(hidden, rows.to(dtype), w1, b1)
        return F.linear(torch.ops.aten.gelu_(hidden), w2, b2)

    return run
