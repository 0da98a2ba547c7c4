"""A prediction of one bag in one pass over its rows: of all rows only x and the values exist, in memory that the blocks share.

Shapes: H heads, L rows (row 0 is CLS), M landmarks, D head width, C channels.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gated_srp.machine import has_bf16
from gated_srp.models.attention import Attention, merge_heads, split_heads, weights
from gated_srp.models.fast import in_parts, product_dtype
from gated_srp.models.fast.gradients import Gathered, row_layers, spread
from gated_srp.models.nystrom import NystromAttention, landmark_values, means_of_segments, pinv, segment_size
from gated_srp.srp import PatchGraph
from gated_srp.srp.projection import chunks

if TYPE_CHECKING:
    from gated_srp.models.block import Block

_ROWS = 1024  # that pass through a block at once
YAt = Callable[[slice], Tensor]  # rows -> their y, (1, H, rows, D)


class RowLayer:
    """linear(rows), then ``gelu``, for ``count`` rows that come in chunks: weights are laid out for the product once, before the first.

    oneDNN adds the bias and applies the activation while it writes the product. Where it cannot, or for few rows, PyTorch's own calls.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None, like: Tensor, count: int, *, gelu: bool = False) -> None:
        dtype = product_dtype(like)
        self.weight, self.bias = weight.to(dtype), None if bias is None else bias.to(dtype)
        self.gelu, self.packed = gelu, count >= _ROWS and _packs(self.weight)
        if self.packed:
            self.weight = torch.ops.mkldnn._reorder_linear_weight(self.weight.contiguous(), _ROWS)

    def __call__(self, rows: Tensor) -> Tensor:
        rows = rows.to(self.weight.dtype)
        if self.packed:
            activation = "gelu" if self.gelu else "none"
            out: Tensor = torch.ops.mkldnn._linear_pointwise(rows, self.weight, self.bias, activation, [], "none")
            return out
        out = F.linear(rows, self.weight, self.bias)
        return torch.ops.aten.gelu_(out) if self.gelu else out


def _packs(weight: Tensor) -> bool:
    """Whether oneDNN takes such weights: it is not in every build of PyTorch, and emulates bf16 where the processor has none."""
    there = weight.device.type == "cpu" and torch.backends.mkldnn.is_available()
    return there and (weight.dtype == torch.float32 or (weight.dtype == torch.bfloat16 and has_bf16()))


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
    embed = RowLayer(layer.weight, layer.bias, layer.weight, patches)
    shape = len(features), 1 + patches + missing, layer.out_features
    x = features.new_empty(shape, dtype=dtype) if scratch is None else scratch.rows(features, shape, dtype)
    x[:, :1] = cls
    for bag, rows in zip(features, x[:, 1:], strict=True):
        step = _ROWS if x.device.type == "cpu" else 8192  # a GPU takes fewer, larger calls
        for part, out in zip(bag.split(step), rows[:patches].split(step), strict=True):
            out.copy_(embed(part))
    x[:, 1 + patches :] = x[:, 1 : 1 + missing]
    return x


def block_by_rows(block: Block, x: Tensor, graph: PatchGraph, scratch: Scratch | None) -> Tensor:
    """The block's forward of one bag x (1, L, C). With ``scratch`` x may be overwritten, and takes the result.

    Once the values and the landmarks are known, a row needs no other row of x.
    """
    out = torch.empty_like(x) if scratch is None else x
    y_at, v = attention_by_rows(block.attn, x, block.norm1, graph, scratch)
    correct = None if block.correction is None else block.correction.by_rows(v, graph)
    project, first, second = (
        RowLayer(layer.weight, layer.bias, x, x.shape[1], gelu=layer is block.mlp.fc1)
        for layer in (block.attn.proj, block.mlp.fc1, block.mlp.fc2)
    )
    for rows in chunks(x[0], _ROWS):
        y = y_at(rows)  # (1, H, chunk, D)
        z = merge_heads(y)[0] if correct is None else correct(y, rows).flatten(1)  # (chunk, C)
        part = x[0, rows] + project(z)
        torch.add(part, second(first(block.norm2(part))), out=out[0, rows])
    return out


def attention_by_rows(
    attention: Attention, x: Tensor, norm: nn.Module, graph: PatchGraph, scratch: Scratch | None
) -> tuple[YAt, Tensor]:
    """attention(norm(x)) of one bag: y of any rows on demand, and v of all, (1, H, L, D)."""
    if isinstance(attention, NystromAttention) and attention.in_chunks(x, halves=True):
        if in_parts(x):
            from gated_srp.models.fast.long import nystrom_in_parts  # not above: few slides need it

            return nystrom_in_parts(attention, x, norm, scratch or Scratch())
        by_rows = _nystrom if product_dtype(x).itemsize >= 4 else _nystrom_in_halves
        return by_rows(attention, x, norm, scratch or Scratch())
    y, v = attention(norm(x), graph)
    return lambda rows: y[:, :, rows], v


def first_row(
    attention: Attention, x: Tensor, norm: nn.Module, graph: PatchGraph, scratch: Scratch | None
) -> tuple[Tensor, Tensor]:
    """attention.first_row(norm(x)) of one bag."""
    if isinstance(attention, NystromAttention) and attention.in_chunks(x, halves=True):
        y_at, v = attention_by_rows(attention, x, norm, graph, scratch)
        return y_at(slice(0, 1)), v[:, :, :1]
    return attention.first_row(norm(x), graph)


def _nystrom(attention: NystromAttention, x: Tensor, norm: nn.Module, scratch: Scratch) -> tuple[YAt, Tensor]:
    """Normalised rows and logits exist for a chunk at a time."""
    size = segment_size(x.shape[1], attention.num_landmarks)
    segments = chunks(x[0], max(1, _ROWS // size) * size)  # a few whole ones at a time
    means = torch.cat([means_of_segments(norm(x[:, rows]), size) for rows in segments], dim=1)
    q_marks, k_marks = attention.landmarks(means)
    layers = row_layers(attention.qkv, (q_marks[0], k_marks[0]))
    to_queries, to_keys, to_values = (RowLayer(*layer, x, x.shape[1]) for layer in layers)
    values = scratch.values(x)
    gathered = Gathered(q_marks.shape[1:], values)
    for rows in chunks(x[0], _ROWS):
        part = norm(x[0, rows])
        values[rows] = to_values(part)
        gathered.add(to_keys(part), values[rows])
    u = (pinv(weights(q_marks, k_marks))[0] @ gathered.means().float()).to(values.dtype)  # (H, M, D)

    def y_at(rows: slice) -> Tensor:
        return spread(to_queries(norm(x[0, rows])), u).transpose(0, 1).unsqueeze(0)

    return y_at, split_heads(values[None], attention.num_heads)


def _nystrom_in_halves(attention: NystromAttention, x: Tensor, norm: nn.Module, scratch: Scratch) -> tuple[YAt, Tensor]:
    """`_nystrom` through the library's attention, whose logits are float32 inside."""
    size, heads, values = segment_size(x.shape[1], attention.num_landmarks), attention.num_heads, scratch.values(x)
    project = RowLayer(attention.qkv.weight, attention.qkv.bias, x, x.shape[1])
    # Heads apart, each in one piece: over rows of all heads the library's attention takes up to half as long again.
    apart = x.new_empty(3, heads, x.shape[1], x.shape[2] // heads, dtype=product_dtype(x))
    means = []
    for rows in chunks(x[0], max(1, _ROWS // size) * size):  # a few whole segments at a time
        part = norm(x[:, rows])
        means.append(means_of_segments(part, size))
        qkv = project(part[0])
        apart[:, :, rows] = qkv.unflatten(1, (3, heads, -1)).movedim(0, 2)
        values[rows] = qkv[:, -x.shape[2] :]
    q, k, v = apart.unsqueeze(1)  # (1, H, L, D) each
    q_marks, k_marks = attention.landmarks(torch.cat(means, dim=1))
    u = landmark_values(q_marks, k_marks, k, v)

    def y_at(rows: slice) -> Tensor:
        return F.scaled_dot_product_attention(q[:, :, rows], k_marks, u)

    return y_at, split_heads(values[None], heads)
