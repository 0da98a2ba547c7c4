"""Nystrom attention, the base "NA": attention through a few landmark rows; and differential attention, dense and Nystrom.

Shapes: B batch, H heads (of differential attention half of the base's), L rows (row 0 is CLS), M landmarks, D head width, C channels.
"""

import math
from collections.abc import Iterable
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gated_srp.errors import UserError
from gated_srp.models.attention import Attention, FusedAttention, check_heads, key_mask, split_heads, weights
from gated_srp.models.fast import by_hand, in_row_chunks
from gated_srp.models.fast.gradients import attend, refined, row_layers
from gated_srp.srp import PatchGraph


class NystromAttention(FusedAttention):
    """y = softmax(q k~^T) pinv(softmax(q~ k~^T)) softmax(q~ k^T) v with the segment means q~, k~ as landmarks."""

    dense: ClassVar[bool] = False

    def __init__(self, dim: int, num_heads: int, *, num_landmarks: int = 64) -> None:
        super().__init__(dim, num_heads)
        self.num_landmarks = num_landmarks

    def in_chunks(self, x: Tensor, *, halves: bool = False) -> bool:
        """Whether rows meet landmarks in chunks, through weights folded with them; ``halves``: in a prediction, which takes halves too."""
        return in_row_chunks(x, halves=halves) and by_hand(self.qkv)

    def forward(self, x: Tensor, graph: PatchGraph) -> tuple[Tensor, Tensor]:
        check_one_length(graph)
        if self.in_chunks(x):
            return self._in_chunks(x, x.shape[1])
        q, k, v = self.heads(x)
        return nystrom(q, k, v, *self.landmarks(segment_means(x, self.num_landmarks))), v

    def first_row(self, x: Tensor, graph: PatchGraph) -> tuple[Tensor, Tensor]:
        check_one_length(graph)
        if self.in_chunks(x):
            y, v = self._in_chunks(x, 1)
        else:
            (q,) = self.heads(x[:, :1], 0, 1)
            k, v = self.heads(x, 1, 3)
            y = nystrom(q, k, v, *self.landmarks(segment_means(x, self.num_landmarks)))
        return y, v[:, :, :1]

    def _in_chunks(self, x: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """y of the first ``count`` rows and v of all."""
        q_marks, k_marks = self.landmarks(segment_means(x, self.num_landmarks))
        inverse = pinv(weights(q_marks, k_marks))[0]
        queries, (keys, _), values = row_layers(self.qkv, (q_marks[0], k_marks[0]))
        y, v = attend(x[0], inverse, keys, queries, values, count)
        return y.transpose(0, 1).unsqueeze(0), split_heads(v[None], self.num_heads)

    def cls_map(self, x: Tensor, graph: PatchGraph) -> Tensor:
        (q,) = self.heads(x[:, :1], 0, 1)
        dim, width = self.proj.in_features, self.proj.in_features // self.num_heads
        of_head = zip(*(p[dim : 2 * dim].split(width) for p in (self.qkv.weight, self.qkv.bias)), strict=True)
        keys = (F.linear(x.to(weight.dtype), weight, bias) for weight, bias in of_head)
        return nystrom_map(q, keys, *self.landmarks(segment_means(x, self.num_landmarks))).squeeze(2)

    def landmarks(self, means: Tensor) -> tuple[Tensor, Tensor]:
        """q~ and k~ of the segment means of x, (B, H, M, D) each."""
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

    ``keys`` (B, L, D) of each head in turn; B, M numbers per row and head, exists for one head at a time.
    """
    with torch.autocast(q.device.type, enabled=False):
        left = weights(q, k_marks) @ pinv(weights(q_marks, k_marks))  # (B, H, queries, M)
        heads = zip(left.unbind(1), q_marks.unbind(1), keys, strict=True)
        return torch.stack([part @ weights(marks, k) for part, marks, k in heads], dim=1)


def pinv(a: Tensor, largest: Tensor | None = None) -> Tensor:
    """Iterative Moore-Penrose inverse of A (B, H, M, M) in float32: six times Z <- 0.25 Z (13 I - A Z (15 I - A Z (7 I - A Z))), from
    A^T / (largest row sum * largest column sum), each over all heads of a bag; ``largest`` (B,): that product, where it is known."""
    a = a.float()
    if largest is None:
        largest = a.sum(-1).amax((1, 2)) * a.sum(-2).amax((1, 2))  # (B,)
    z = a.transpose(-2, -1) / largest.view(-1, 1, 1, 1)
    if by_hand():
        return refined(a.flatten(0, 1), z.flatten(0, 1)).view(a.shape)
    eye = torch.eye(a.shape[-1], device=a.device)
    for _ in range(6):
        az = a @ z
        z = 0.25 * z @ (13 * eye - az @ (15 * eye - az @ (7 * eye - az)))
    return z


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
    if torch.compiler.is_compiling():  # one form for every length: a branch on what is left would compile once more
        segments = -(-rows // size)
        filled = F.pad(x, (0, 0, 0, segments * size - rows)).unflatten(1, (segments, size))
        counts = (rows - size * torch.arange(segments, device=x.device)).clamp(max=size)
        averaged: Tensor = filled.sum(2) / counts.unsqueeze(-1).to(x.dtype)
        return averaged
    rest = rows % size
    body, tail = torch.split(x, [rows - rest, rest], dim=1)  # its backward is one cat; that of slices fills zeros
    means = body.unflatten(1, (-1, size)).mean(2)
    return torch.cat([means, tail.mean(1, keepdim=True)], dim=1) if rest else means


def check_one_length(graph: PatchGraph) -> None:
    if any(
        patches != graph.lengths[0] for patches in graph.lengths[1:]
    ):  # no set: a compiler would make constants of them
        what = f"Nystrom attention takes one bag per batch, or bags of one length; here the lengths are {graph.lengths}"
        cure = "Call the model bag by bag and accumulate gradients, or use an arm with dense attention (vit4)."
        raise UserError(what, cure=cure)


class TwoMaps(Attention):
    """Two attentions with queries and keys of their own over shared values (2 D wide), mixed and normalised:
    y = scale RMSNorm(mix(y1, y2)), a head of these for two of the base's."""

    signed: ClassVar[bool] = True

    def __init__(self, dim: int, num_heads: int, *, scale: float) -> None:
        super().__init__()
        check_heads(dim, num_heads)
        check_heads(num_heads, 2)
        self.num_heads = num_heads // 2
        self.scale = scale
        self.q_proj, self.k_proj, self.v_proj, self.proj = (nn.Linear(dim, dim, bias=False) for _ in range(4))
        self.subln = nn.RMSNorm(2 * dim // num_heads, eps=1e-5)

    def values(self, x: Tensor) -> Tensor:
        found: Tensor = self.v_proj(x)
        return found

    def mix(self, first: Tensor, second: Tensor, queries: Tensor) -> Tensor:
        """Of what both attentions give (B, H, L, ...) to the rows ``queries`` (B, L, C)."""
        raise NotImplementedError

    def forward(self, x: Tensor, graph: PatchGraph) -> tuple[Tensor, Tensor]:
        v = split_heads(self.v_proj(x), self.num_heads)  # (B, H, L, 2 D)
        return self._combine(x, x, v, graph), v

    def first_row(self, x: Tensor, graph: PatchGraph) -> tuple[Tensor, Tensor]:
        v = split_heads(self.v_proj(x), self.num_heads)
        return self._combine(x[:, :1], x, v, graph), v[:, :, :1]

    def cls_map(self, x: Tensor, graph: PatchGraph) -> Tensor:
        """The mixed map, signed."""
        first, second = (self._map(q, k, i, x, graph) for i, (q, k) in enumerate(self._branches(x[:, :1], x)))
        return self.mix(first, second, x[:, :1])[:, :, 0]

    def _combine(self, queries: Tensor, x: Tensor, v: Tensor, graph: PatchGraph) -> Tensor:
        first, second = (self._attend(q, k, v, i, x, graph) for i, (q, k) in enumerate(self._branches(queries, x)))
        with torch.autocast(x.device.type, enabled=False):
            mixed: Tensor = self.subln(self.mix(first, second, queries).to(self.subln.weight.dtype))
            return mixed.mul(self.scale).to(first.dtype)

    def _branches(self, queries: Tensor, x: Tensor) -> list[tuple[Tensor, Tensor]]:
        """(q, k) of each branch, (B, H, L, D): heads 2 h and 2 h + 1 of the base belong to head h."""
        q, k = (split_heads(part, 2 * self.num_heads) for part in (self.q_proj(queries), self.k_proj(x)))
        return [(q[:, i::2], k[:, i::2]) for i in (0, 1)]

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, branch: int, x: Tensor, graph: PatchGraph) -> Tensor:
        mask = key_mask(x, graph)
        # CPU attention has no fast path for values wider than keys: take the two halves one after the other.
        halves = [F.scaled_dot_product_attention(q, k, half, attn_mask=mask) for half in v.chunk(2, dim=-1)]
        return torch.cat(halves, dim=-1)

    def _map(self, q: Tensor, k: Tensor, branch: int, x: Tensor, graph: PatchGraph) -> Tensor:
        return weights(q, k, key_mask(x, graph))


class NystromMaps(TwoMaps):
    """Each of the two is Nystrom attention with its own landmarks and pinv scale."""

    dense: ClassVar[bool] = False
    num_landmarks: int

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, branch: int, x: Tensor, graph: PatchGraph) -> Tensor:
        check_one_length(graph)
        marks = self._landmarks(x, branch)
        return torch.cat([nystrom(q, k, half, *marks) for half in v.chunk(2, dim=-1)], dim=-1)

    def _map(self, q: Tensor, k: Tensor, branch: int, x: Tensor, graph: PatchGraph) -> Tensor:
        return nystrom_map(q, k.unbind(1), *self._landmarks(x, branch))

    def _landmarks(self, x: Tensor, branch: int) -> list[Tensor]:
        means = segment_means(x, self.num_landmarks)
        marks = (landmarks(means, layer.weight, None, self.num_landmarks) for layer in (self.q_proj, self.k_proj))
        return [split_heads(m, 2 * self.num_heads)[:, branch::2] for m in marks]


class DifferentialAttention(TwoMaps):
    """y = (1 - lambda_0) RMSNorm(y1 - lambda y2) with lambda = exp(lq1 . lk1) - exp(lq2 . lk2) + lambda_0.

    ``depth`` counts the blocks from 0: lambda_0 = 0.8 - 0.6 exp(-0.3 depth). Dense; `DifferentialNystrom` is the slide form.
    """

    lambda_q1: Tensor
    lambda_k1: Tensor
    lambda_q2: Tensor
    lambda_k2: Tensor

    def __init__(self, dim: int, num_heads: int, *, depth: int = 0) -> None:
        lambda_init = 0.8 - 0.6 * math.exp(-0.3 * depth)
        super().__init__(dim, num_heads, scale=1 - lambda_init)
        self.lambda_init = lambda_init
        for name in ("lambda_q1", "lambda_k1", "lambda_q2", "lambda_k2"):
            self.register_parameter(name, nn.Parameter(torch.randn(dim // num_heads) * 0.1))

    def mix(self, first: Tensor, second: Tensor, queries: Tensor) -> Tensor:
        return first - self._lambda().to(first.dtype) * second

    def _lambda(self) -> Tensor:
        with torch.autocast(self.lambda_q1.device.type, enabled=False):
            first = (self.lambda_q1.float() * self.lambda_k1.float()).sum().exp()
            second = (self.lambda_q2.float() * self.lambda_k2.float()).sum().exp()
            return first - second + self.lambda_init


class DifferentialNystrom(NystromMaps, DifferentialAttention):
    """`DifferentialAttention` through landmarks."""

    def __init__(self, dim: int, num_heads: int, *, depth: int = 0, num_landmarks: int = 64) -> None:
        DifferentialAttention.__init__(self, dim, num_heads, depth=depth)
        self.num_landmarks = num_landmarks
