"""Nystrom attention, the base "NA": attention through a few landmark rows.

Shapes: B batch, H heads, L rows (row 0 is CLS), M landmarks, D head width, C channels.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from gated_srp.errors import UserError
from gated_srp.models.attention import FusedAttention, Spare, product_dtype, split_heads, weights
from gated_srp.models.fast.landmarks import Gathered, attend, landmark_logits, spread
from gated_srp.srp import PatchGraph
from gated_srp.srp.projection import chunks, linear_into


class NystromAttention(FusedAttention):
    """y = softmax(q k~^T) pinv(softmax(q~ k~^T)) softmax(q~ k^T) v with the segment means q~, k~ as landmarks."""

    def __init__(self, dim: int, num_heads: int, *, num_landmarks: int = 64) -> None:
        super().__init__(dim, num_heads)
        self.num_landmarks = num_landmarks

    def forward(self, x: Tensor, graph: PatchGraph) -> tuple[Tensor, Tensor]:
        check_one_length(graph)
        if self._in_chunks(x):
            return self._attend(x, x.shape[1])
        q, k, v = self.heads(x)
        return nystrom(q, k, v, *self._landmarks(segment_means(x, self.num_landmarks))), v

    def first_row(self, x: Tensor, graph: PatchGraph) -> tuple[Tensor, Tensor]:
        check_one_length(graph)
        if self._in_chunks(x):
            y, v = self._attend(x, 1)
            return y, v[:, :, :1]
        (q,) = self.heads(x[:, :1], 0, 1)
        k, v = self.heads(x, 1, 3)
        return nystrom(q, k, v, *self._landmarks(segment_means(x, self.num_landmarks))), v[:, :, :1]

    def _in_chunks(self, x: Tensor) -> bool:
        """Whether one bag passes in row chunks, that fit a processor's cache, instead of through two attention calls.

        In half precision never: logits that a product rounds to it are too coarse for a softmax.
        """
        exact = product_dtype(x).itemsize >= 4
        return exact and len(x) == 1 and x.device.type == "cpu" and not torch.compiler.is_compiling()

    def _attend(self, x: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """y of the first ``count`` rows and v of all, (1, H, rows, D)."""
        q_marks, k_marks = self._landmarks(segment_means(x, self.num_landmarks))
        to_keys, (wk, _), linear_v = self._logits(q_marks, k_marks)
        y, values = attend(x[0], pinv(weights(q_marks, k_marks))[0], wk, to_keys, linear_v, count)
        return y.transpose(0, 1).unsqueeze(0), split_heads(values[None], self.num_heads)

    def _logits(self, q_marks: Tensor, k_marks: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Layers of rows: to the logits of their queries on k~, to those of q~ on their keys, to their values."""
        dim = self.proj.in_features
        layers = zip(self.qkv.weight.split(dim), self.qkv.bias.split(dim), strict=True)
        queries, keys, values = layers
        return [landmark_logits(k_marks[0], *queries), landmark_logits(q_marks[0], *keys), values]

    def by_rows(
        self, x: Tensor, norm: nn.Module, graph: PatchGraph, spare: Spare
    ) -> tuple[Callable[[slice], Tensor], Tensor]:
        """Of all rows only the values exist; normalised rows and logits exist for a chunk at a time."""
        if product_dtype(x).itemsize < 4:
            return super().by_rows(x, norm, graph, spare)
        q_marks, k_marks = self._landmarks(self._means(x, norm))
        to_keys, (wk, _), linear_v = self._logits(q_marks, k_marks)
        values = spare.values(x)
        gathered = Gathered(q_marks.shape[1:], values)
        for rows in chunks(x[0]):
            part = norm(x[0, rows])
            linear_into(values[rows], part, *linear_v)
            gathered.add(F.linear(part, wk), values[rows])
        u = (pinv(weights(q_marks, k_marks))[0] @ gathered.means().float()).to(values.dtype)  # (H, M, D)

        def y_at(rows: slice) -> Tensor:
            return spread(F.linear(norm(x[0, rows]), *to_keys), u).transpose(0, 1).unsqueeze(0)

        return y_at, split_heads(values[None], self.num_heads)

    def first_by_rows(self, x: Tensor, norm: nn.Module, graph: PatchGraph, spare: Spare) -> tuple[Tensor, Tensor]:
        y_at, v = self.by_rows(x, norm, graph, spare)
        return y_at(slice(0, 1)), v[:, :, :1]

    def _means(self, x: Tensor, norm: nn.Module) -> Tensor:
        """Segment means of norm(x), a few whole segments of rows at a time."""
        size = segment_size(x.shape[1], self.num_landmarks)
        parts = chunks(x[0], max(1, 1024 // size) * size)
        return torch.cat([means_of_segments(norm(x[:, rows]), size) for rows in parts], dim=1)

    def cls_map(self, x: Tensor, graph: PatchGraph) -> Tensor:
        (q,) = self.heads(x[:, :1], 0, 1)
        dim, width = self.proj.in_features, self.proj.in_features // self.num_heads
        of_head = zip(*(p[dim : 2 * dim].split(width) for p in (self.qkv.weight, self.qkv.bias)), strict=True)
        keys = (F.linear(x.to(weight.dtype), weight, bias) for weight, bias in of_head)
        return nystrom_map(q, keys, *self._landmarks(segment_means(x, self.num_landmarks))).squeeze(2)

    def _landmarks(self, means: Tensor) -> tuple[Tensor, Tensor]:
        dim = self.proj.in_features
        rows = landmarks(means, self.qkv.weight[: 2 * dim], self.qkv.bias[: 2 * dim], self.num_landmarks)
        q, k = rows.chunk(2, dim=-1)
        return split_heads(q, self.num_heads), split_heads(k, self.num_heads)


def nystrom(q: Tensor, k: Tensor, v: Tensor, q_marks: Tensor, k_marks: Tensor) -> Tensor:
    """F pinv(A) B v with F = softmax(q k~^T), A = softmax(q~ k~^T), B = softmax(q~ k^T): (B, H, L, D).

    B v is attention of M queries over L keys, F u of L queries over M keys, so neither (L x M) matrix exists.
    """
    return F.scaled_dot_product_attention(q, k_marks, landmark_values(q_marks, k_marks, k, v))


def landmark_values(q_marks: Tensor, k_marks: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """pinv(A) B v: what each landmark hands to the rows that look at it, (B, H, M, D)."""
    u = F.scaled_dot_product_attention(q_marks, k, v)
    with torch.autocast(k.device.type, enabled=False):
        u = pinv(weights(q_marks, k_marks)) @ u.float()
    return u.to(k.dtype)


def nystrom_map(q: Tensor, keys: Iterable[Tensor], q_marks: Tensor, k_marks: Tensor) -> Tensor:
    """The weights F pinv(A) B themselves for a few queries: (B, H, queries, L), signed, rows need not sum to one.

    ``keys`` (B, L, D) of each head in turn; B, M numbers a row and head, exists for one head at a time.
    """
    with torch.autocast(q.device.type, enabled=False):
        left = weights(q, k_marks) @ pinv(weights(q_marks, k_marks))  # (B, H, queries, M)
        heads = zip(left.unbind(1), q_marks.unbind(1), keys, strict=True)
        return torch.stack([part @ weights(marks, k) for part, marks, k in heads], dim=1)


def pinv(a: Tensor) -> Tensor:
    """Iterative Moore-Penrose inverse of (B, H, M, M) in float32, `refined` from A^T / (largest row sum * largest column sum), each
    over all heads of a bag."""
    a = a.float()
    largest = a.sum(-1).amax((1, 2)) * a.sum(-2).amax((1, 2))  # (B,)
    start = a.transpose(-2, -1) / largest.view(-1, 1, 1, 1)
    return refined(a.flatten(0, 1), start.flatten(0, 1)).view(a.shape)


def refined(a: Tensor, z: Tensor) -> Tensor:
    """Six times Z <- 0.25 Z (13 I - A Z (15 I - A Z (7 I - A Z))), each matrix of (X, M, M) by itself."""
    if torch.compiler.is_compiling():
        return _refine(a, z)[-1][-1]
    result: Tensor = _Refined.apply(a, z)  # type: ignore[no-untyped-call]
    return result


def _refine(a: Tensor, z: Tensor) -> list[tuple[Tensor, Tensor, Tensor, Tensor]]:
    """Of each time: A Z, A Z (7 I - A Z), A Z (15 I - that) and the new Z; sums with multiples of I are the products' own."""
    steps = []
    for _ in range(6):
        az = torch.bmm(a, z)
        inner = torch.baddbmm(az, az, az, beta=7, alpha=-1)
        middle = torch.baddbmm(az, az, inner, beta=15, alpha=-1)
        z = torch.baddbmm(z, z, middle, beta=3.25, alpha=-0.25)
        steps.append((az, inner, middle, z))
    return steps


class _Refined(torch.autograd.Function):
    """Eight products a time backward and no sums beside them, where a derived backward scales and adds after each product."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, z: Tensor) -> Tensor:
        steps = _refine(a, z)
        ctx.save_for_backward(a, z, *(part for step in steps for part in step))
        return steps[-1][-1]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, ...]:
        a, start, *parts = ctx.saved_tensors
        dz, da = grads[0], torch.zeros_like(a)
        with torch.autocast(a.device.type, enabled=False):  # whoever calls backward inside one
            for step in reversed(range(6)):
                az, inner, middle = parts[4 * step : 4 * step + 3]
                z = parts[4 * step - 1] if step else start
                t = az.transpose(1, 2)
                dmiddle = torch.bmm(z.transpose(1, 2), dz)  # times -0.25, put in below
                dz = torch.baddbmm(dz, dz, middle.transpose(1, 2), beta=3.25, alpha=-0.25)
                dinner = torch.bmm(t, dmiddle)  # times 0.25
                daz = torch.baddbmm(dmiddle, dmiddle, inner.transpose(1, 2), beta=-3.75, alpha=0.25)
                daz.baddbmm_(dinner, t, alpha=-0.25).baddbmm_(t, dinner, alpha=-0.25).add_(dinner, alpha=1.75)
                da.baddbmm_(daz, z.transpose(1, 2))
                dz.baddbmm_(a.transpose(1, 2), daz)
        return da, dz


def landmarks(means: Tensor, weight: Tensor, bias: Tensor | None, count: int) -> Tensor:
    """Segment means of linear(x), taken as linear(segment means of x): (B, <= count, C) -> (B, count, O).

    A landmark without rows is zero, not the bias, and takes part in every softmax.
    """
    marks = F.linear(means, weight, bias)
    return F.pad(marks, (0, 0, 0, count - marks.shape[1]))


def segment_means(x: Tensor, count: int) -> Tensor:
    """Means of successive segments of ceil(L / count) rows, the last one of what is left: (B, L, C) -> (B, <= count, C)."""
    return means_of_segments(x, segment_size(x.shape[1], count))


def segment_size(rows: int, count: int) -> int:
    return -(-rows // count)


def means_of_segments(x: Tensor, size: int) -> Tensor:
    rows = x.shape[1]
    rest = rows % size
    body, tail = torch.split(x, [rows - rest, rest], dim=1)  # its backward is one cat; that of slices fills zeros
    means = body.unflatten(1, (-1, size)).mean(2)
    return torch.cat([means, tail.mean(1, keepdim=True)], dim=1) if rest else means


def check_one_length(graph: PatchGraph) -> None:
    if len(set(graph.lengths)) > 1:
        raise UserError(
            f"Nystrom attention takes one bag a batch, or bags of one length; here the lengths are {graph.lengths}. "
            "Call the model bag by bag and accumulate gradients, or use an arm with dense attention (vit4)."
        )
