"""The models that others compare with, after their publications: pooling, attention pooling, DSMIL, CLAM, a linear probe.

All take (features, graph) like `SlideTransformer`. Shapes: B bags of one length, N patches, C channels, K outputs.
"""

import math
from collections.abc import Mapping
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gated_srp.models.attention import check_heads, merge_heads, split_heads
from gated_srp.models.block import PPEG
from gated_srp.models.nystrom import check_one_length, nystrom, nystrom_map, segment_means
from gated_srp.models.slide import Device, Loss, SlideModel, check_bags
from gated_srp.srp import FixedCoefficient, GatedSRP, PatchGraph, SignedGate, from_removal, signed
from gated_srp.srp.coefficient import Bound
from gated_srp.srp.projection import chunks


class Peer(SlideModel):
    """A model of another publication. ``drop_path`` is the rate of its dropout, whose random numbers are made on
    the device from the seed in ``keep``; models with a loss on patches add it in `training_loss`.
    """

    def __init__(self, in_dim: int, *, dropout: float = 0.0) -> None:
        super().__init__()
        self.in_dim = in_dim
        self.drop_path = dropout
        self.checkpointing = False  # nothing here is deep enough to be recomputed
        self.correction: GatedSRP | None = None  # `trace` shows the attention of models that also have `cls_attention`

    def draw_keep(self, batch: int, *, device: Device = "cpu", generator: torch.Generator | None = None) -> Tensor:
        """The seed of a forward's dropout, (1,)."""
        return torch.randint(2**62, (1,), device=device, generator=generator)

    def drop(self, x: Tensor, keep: Tensor | None, place: int = 0) -> Tensor:
        """Dropout in training; ``place`` tells the dropouts of one forward apart."""
        if not self.training or self.drop_path == 0:
            return x
        if keep is None:
            return F.dropout(x, self.drop_path)
        draws = counter_draws(x.numel(), keep, place).view(x.shape)
        return x * (draws >= int(self.drop_path * 2**31)) / (1 - self.drop_path)

    def rows(self, features: Tensor, graph: PatchGraph) -> Tensor:
        """The features in the dtype of the weights, after a look at their shape."""
        check_bags(features, graph, self.in_dim)
        check_one_length(graph)
        return features.to(next(self.parameters()).dtype)


class LinearProbe(Peer):
    """logits = W mean_i x_i + b: for slide embeddings, which are bags of one row (1, 1, C), and as the floor of all pooling."""

    def __init__(self, in_dim: int, num_outputs: int) -> None:
        super().__init__(in_dim)
        self.head = nn.Linear(in_dim, num_outputs)

    def forward(self, features: Tensor, graph: PatchGraph, keep: Tensor | None = None) -> Tensor:
        return self.logits(self.rows(features, graph).mean(1), graph)


class Constant(nn.Module):
    """A head that has nothing to look at: b for every bag."""

    def __init__(self, num_outputs: int) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(num_outputs))

    def forward(self, x: Tensor) -> Tensor:
        return self.bias.expand(len(x), -1)


class Clinical(Peer):
    """logits = V c + b of the covariates c alone: what the table says without the slide, whose patches are not looked at."""

    def __init__(self, in_dim: int, num_outputs: int) -> None:
        super().__init__(in_dim)
        self.head = Constant(num_outputs)

    def forward(self, features: Tensor, graph: PatchGraph, keep: Tensor | None = None) -> Tensor:
        check_bags(features, graph, self.in_dim)
        return self.logits(features.new_zeros(len(features), 0), graph)


class MeanPool(Peer):
    """h_i = ReLU(W x_i + b); logits = V mean_i h_i + c."""

    def __init__(self, in_dim: int, num_outputs: int, *, dim: int = 384) -> None:
        super().__init__(in_dim)
        self.in_proj = nn.Linear(in_dim, dim)
        self.head = nn.Linear(dim, num_outputs)

    def forward(self, features: Tensor, graph: PatchGraph, keep: Tensor | None = None) -> Tensor:
        return self.logits(F.relu(self.in_proj(self.rows(features, graph))).mean(1), graph)


class GatedPool(nn.Module):
    """a_i = softmax_i(w^T (tanh(V h_i) * sigmoid(U h_i))), Ilse et al. 2018, Eq. 9: (B, N, C) -> logits of a (B, N)."""

    def __init__(self, dim: int, hidden_dim: int) -> None:
        super().__init__()
        self.content, self.gate = nn.Linear(dim, hidden_dim), nn.Linear(dim, hidden_dim)
        self.score = nn.Linear(hidden_dim, 1)

    def forward(self, h: Tensor) -> Tensor:
        scores: Tensor = self.score(torch.tanh(self.content(h)) * torch.sigmoid(self.gate(h)))
        return scores.squeeze(-1)


class ABMIL(Peer):
    """h_i = ReLU(W x_i + b); z = sum_i a_i h_i with `GatedPool`; logits = V z + c (Ilse et al. 2018, gated form).

    With a ``correction`` the features pass through Gated SRP first, as one head that is its own value:
    x_i <- x_i - beta_i <x_i, r_i> r_i, r_i the unit mean of the neighbours' features. For those who have no transformer.
    """

    def __init__(
        self,
        in_dim: int,
        num_outputs: int,
        *,
        dim: int = 384,
        pool_dim: int | None = None,
        correction: GatedSRP | None = None,
        dropout: float = 0.0,
    ) -> None:
        super().__init__(in_dim, dropout=dropout)
        self.correction = correction
        self.in_proj = nn.Linear(in_dim, dim)
        self.pool = GatedPool(dim, max(1, dim // 2) if pool_dim is None else pool_dim)
        self.head = nn.Linear(dim, num_outputs)

    def forward(self, features: Tensor, graph: PatchGraph, keep: Tensor | None = None) -> Tensor:
        h, scores = self.attend(features, graph, keep)
        return self.logits(pooled(scores, h), graph)

    def attend(self, features: Tensor, graph: PatchGraph, keep: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """h (B, N, C) and the attention's logits (B, N)."""
        x = self.rows(features, graph)
        if self.correction is not None:
            x = self.correction(x[:, None], x[:, None], graph)[:, 0]
        h = self.drop(F.relu(self.in_proj(x)), keep)
        return h, self.pool(h)

    def cls_attention(self, features: Tensor, graph: PatchGraph, keep: Tensor | None = None) -> Tensor:
        """a_i as one head, (1, N) for one bag."""
        return graph.patches(self.attend(features, graph)[1].softmax(-1)[:, None])


def srp_abmil(in_dim: int, num_outputs: int, *, dim: int, bound: Bound = signed, **gate: Any) -> ABMIL:
    """`ABMIL` behind Gated SRP on the features; ``gate``: delta and hidden_dim."""
    return ABMIL(in_dim, num_outputs, dim=dim, correction=GatedSRP(1, coefficient=SignedGate(1, bound=bound, **gate)))


srp_abmil_from_1 = partial(srp_abmil, bound=from_removal)


def abmil_beta_1(in_dim: int, num_outputs: int, *, dim: int) -> ABMIL:
    """`ABMIL` behind removal by force."""
    return ABMIL(in_dim, num_outputs, dim=dim, correction=GatedSRP(1, coefficient=FixedCoefficient(1.0)))


def published_abmil(in_dim: int, num_outputs: int) -> ABMIL:
    """`ABMIL` at the sizes of the paper's table of MIL models: 512 channels, attention of width 128."""
    return ABMIL(in_dim, num_outputs, dim=512, pool_dim=128)


class DSMIL(Peer):
    """Two streams over the same patches (Li, Li, Eliceiri 2021).

    Instances: c_i = W_0 x_i + b_0, the critical one of each class m_k = argmax_i c_ik. Bag: q_i = W_q x_i, v_i = W_v x_i,
    U_ik = softmax_i(<q_i, q_m_k> / sqrt D), B_k = sum_i U_ik v_i, c_B = W_b [B_1 ... B_K] + b_b.
    logits = (max_i c_i + c_B) / 2; training minimises the mean of both streams' losses. For survival the hazards of the time
    intervals stand in place of the classes, in both streams.
    """

    refuses: ClassVar[Mapping[str, str]] = {
        "cox": "it trains two answers, and a partial likelihood of a window is of one. Take abmil, or `task: survival`."
    }

    def __init__(self, in_dim: int, num_outputs: int, *, dim: int = 384, query_dim: int = 128) -> None:
        super().__init__(in_dim)
        self.instance_head = nn.Linear(in_dim, num_outputs)
        self.query: nn.Module = nn.Linear(in_dim, query_dim)
        self.value: nn.Module = nn.Linear(in_dim, dim)
        self.head = nn.Linear(num_outputs * dim, num_outputs)

    def forward(self, features: Tensor, graph: PatchGraph, keep: Tensor | None = None) -> Tensor:
        instance, bag = self.streams(features, graph)
        return (instance + bag) / 2

    def streams(self, features: Tensor, graph: PatchGraph) -> tuple[Tensor, Tensor]:
        """Logits of the critical instances and of the bag, (B, K) each."""
        x = self.rows(features, graph)
        scores = self.instance_head(x)  # (B, N, K)
        bags = self._attention(x, scores) @ self.value(x)  # (B, K, C)
        return scores.amax(1), self.logits(bags.flatten(1), graph)

    def training_loss(
        self, features: Tensor, graph: PatchGraph, target: Tensor, *, loss: Loss, keep: Tensor | None = None
    ) -> Tensor:
        instance, bag = self.streams(features, graph)
        return (loss(instance, target) + loss(bag, target)) / 2

    def cls_attention(self, features: Tensor, graph: PatchGraph, keep: Tensor | None = None) -> Tensor:
        """U, one row a class: (K, N) for one bag."""
        x = self.rows(features, graph)
        return graph.patches(self._attention(x, self.instance_head(x)))

    def _attention(self, x: Tensor, scores: Tensor) -> Tensor:
        q = self.query(x)  # (B, N, Q)
        critical = scores.argmax(1)  # (B, K)
        q_critical = q.gather(1, critical.unsqueeze(-1).expand(-1, -1, q.shape[-1]))  # (B, K, Q)
        weights: Tensor = (q_critical @ q.transpose(1, 2) * q.shape[-1] ** -0.5).softmax(-1)  # (B, K, N)
        return weights


class PublishedDSMIL(DSMIL):
    """`DSMIL` at the sizes of the paper's table of MIL models, on h_i = ReLU(W x_i + b) of 512 channels in place of x_i.

    q_i = tanh(W_2 ReLU(W_1 h_i)) of width 128, v_i = h_i. Its convolution over (B_1 ... B_K), as wide as h, is the linear layer W_b:
    it has one place to be. ReLU after the first layer and v_i = h_i are Li et al.'s; the table's source names neither.
    """

    def __init__(self, in_dim: int, num_outputs: int, *, dim: int = 512, query_dim: int = 128) -> None:
        super().__init__(dim, num_outputs, dim=dim, query_dim=query_dim)
        self.in_dim = in_dim
        self.in_proj = nn.Linear(in_dim, dim)
        layers = nn.Linear(dim, query_dim), nn.ReLU(), nn.Linear(query_dim, query_dim), nn.Tanh()
        self.query, self.value = nn.Sequential(*layers), nn.Identity()

    def rows(self, features: Tensor, graph: PatchGraph) -> Tensor:
        return F.relu(self.in_proj(super().rows(features, graph)))


class CLAM(ABMIL):
    """CLAM-SB (Lu et al. 2021): `ABMIL` whose attention also sorts patches into evidence for and against a slide's class.

    Of the slide's class y, the M patches with the highest attention should look positive to the instance classifier
    s_i = W_y h_i + b_y (two scores), the M lowest negative; of every other class the M highest negative. Each is judged by the
    smooth SVM loss log sum_j exp(1[j != t] + s_j - s_t). Training minimises 0.7 slide loss + 0.3 mean instance loss.
    """

    _CLASSES = "CLAM's instance clustering needs the one class of a slide; "
    refuses: ClassVar[Mapping[str, str]] = {
        "survival": _CLASSES + "a survival time is none. Take abmil.",
        "multilabel": _CLASSES + "several labels are none. Take abmil.",
        "cox": _CLASSES + "a survival time is none. Take abmil.",
        "regression": _CLASSES + "a number is none. Take abmil.",
    }

    def __init__(self, in_dim: int, num_outputs: int, *, dim: int = 512, sampled: int = 8, share: float = 0.3) -> None:
        super().__init__(in_dim, num_outputs, dim=dim, dropout=0.25)
        self.sampled, self.share = sampled, share
        self.instance_heads = nn.ModuleList(nn.Linear(dim, 2) for _ in range(num_outputs))

    def training_loss(
        self, features: Tensor, graph: PatchGraph, target: Tensor, *, loss: Loss, keep: Tensor | None = None
    ) -> Tensor:
        h, scores = self.attend(features, graph, keep)
        slide = loss(self.logits(pooled(scores, h), graph), target)
        bags = zip(h, scores, target.view(-1), strict=True)
        instance = torch.stack([self.instance_loss(*bag) for bag in bags]).mean()
        return (1 - self.share) * slide + self.share * instance

    def instance_loss(self, h: Tensor, scores: Tensor, label: Tensor) -> Tensor:
        """The clustering loss of one bag: h (N, C), attention logits (N,), its class. Zero for a single patch."""
        count = min(self.sampled, len(h) // 2)
        if count == 0:
            return h.sum() * 0
        order = scores.detach().argsort(descending=True, stable=True)
        top, low = h[order[:count]], h[order[-count:]]
        losses = []
        for number, head in enumerate(self.instance_heads):
            inside = (label == number).long()  # 1 for the slide's class
            high = smooth_svm(head(top), inside.expand(count))
            below = smooth_svm(head(low), torch.zeros_like(order[:count]))
            losses.append(torch.where(inside.bool(), (high + below) / 2, high))
        return torch.stack(losses).mean()


class TransMILLayer(nn.Module):
    """x + W_o (F pinv(A) B v + conv(v)) with Nystrom attention of LN x.

    Rows are padded in front with zeros to a multiple of the landmarks, and the zeros take part in means and softmaxes; q, k, v
    have no bias; conv is one depthwise kernel of 33 rows per head over the values (the value residual).
    """

    def __init__(self, dim: int, num_heads: int, num_landmarks: int, *, kernel: int = 33) -> None:
        super().__init__()
        check_heads(dim, num_heads)
        self.num_heads, self.num_landmarks = num_heads, num_landmarks
        self.correction: GatedSRP | None = None  # for `trace`
        self.norm = nn.LayerNorm(dim)
        self.qkv = nn.Linear(dim, 3 * dim, bias=False)
        around = (kernel // 2, 0)
        self.residual = nn.Conv2d(num_heads, num_heads, (kernel, 1), padding=around, groups=num_heads, bias=False)
        self.proj = nn.Linear(dim, dim)

    def forward(self, x: Tensor, graph: PatchGraph) -> Tensor:
        """The branch alone, (B, L, C), so that the model can drop parts of it."""
        q, k, v, q_marks, k_marks = self._heads(x)
        y = nystrom(q, k, v, q_marks, k_marks) + self.residual(v)
        branch: Tensor = self.proj(merge_heads(y)[:, -x.shape[1] :])
        return branch

    def cls_attention(self, x: Tensor, graph: PatchGraph) -> Tensor:
        """F[cls] pinv(A) B, patch columns: (H, N) for one bag."""
        q, k, _, q_marks, k_marks = self._heads(x)
        front = q.shape[2] - x.shape[1]
        weights = nystrom_map(q[:, :, front : front + 1], k.unbind(1), q_marks, k_marks)
        return graph.patches(weights.squeeze(2)[..., front:])

    def _heads(self, x: Tensor) -> tuple[Tensor, ...]:
        """q, k, v (B, H, P + L, D) and the landmarks of q and k (B, H, M, D)."""
        rows = F.pad(self.norm(x), (0, 0, -x.shape[1] % self.num_landmarks, 0))  # (B, P + L, C)
        q, k, v = self.qkv(rows).chunk(3, dim=-1)
        marks = (segment_means(part, self.num_landmarks) for part in (q, k))
        return tuple(split_heads(part, self.num_heads) for part in (q, k, v, *marks))


class TransMIL(Peer):
    """Linear and ReLU to C channels, rows repeated from the first on to a square, CLS; layer, PPEG, layer; LayerNorm, CLS, linear."""

    def __init__(
        self, in_dim: int, num_outputs: int, *, dim: int = 512, num_heads: int = 8, num_landmarks: int = 256
    ) -> None:
        super().__init__(in_dim, dropout=0.1)
        self.in_proj = nn.Linear(in_dim, dim)
        self.cls_token = nn.Parameter(torch.zeros(1, 1, dim))
        self.layers = nn.ModuleList(TransMILLayer(dim, num_heads, num_landmarks) for _ in range(2))
        self.ppeg = PPEG(dim)
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, num_outputs)

    def forward(self, features: Tensor, graph: PatchGraph, keep: Tensor | None = None) -> Tensor:
        x = F.relu(self.in_proj(self.rows(features, graph)))  # (B, N, C)
        missing = math.ceil(math.sqrt(x.shape[1])) ** 2 - x.shape[1]
        x = torch.cat([self.cls_token.to(x.dtype).expand(len(x), -1, -1), x, x[:, :missing]], dim=1)  # (B, L, C)
        rows = graph.with_isolated(before=1, after=missing)
        first, second = self.layers
        x = self.ppeg(x + self.drop(first(x, rows), keep, 0))
        x = x + self.drop(second(x, rows), keep, 1)
        return self.logits(self.norm(x[:, 0]), graph)


def counter_draws(count: int, seed: Tensor, place: int = 0) -> Tensor:
    """``count`` random integers in [0, 2^31), int32, of a seed (1,) and a place, on the seed's device.

    Counters are mixed (the finaliser of MurmurHash3, keyed), since a generator would have to be seeded with a number out of
    the device's memory, for which the host had to wait. Every device draws the same.
    """
    # Products wrap around, which spreads seeds and places that lie close to each other.
    key = (seed * 0x9E3779B97F4A7C1 + place) * 0x2545F4914F6CDD1D
    key = (key ^ (key >> 29)) * 0xBF58476D1CE4E5B
    first, second = (key & 0x7FFFFFFF).int(), ((key >> 32) & 0x7FFFFFFF).int()
    draws = torch.arange(count, dtype=torch.int32, device=seed.device)
    for part in chunks(draws, 2**16):
        x = draws[part]
        x ^= first
        for shift, factor, add in ((16, 0x85EBCA6B - 2**32, second), (13, 0xC2B2AE35 - 2**32, first)):
            x ^= (x >> shift).bitwise_and_(2 ** (32 - shift) - 1)
            x *= factor
            x += add
        x ^= (x >> 16).bitwise_and_(0xFFFF)
        x &= 0x7FFFFFFF
    return draws


def smooth_svm(scores: Tensor, target: Tensor) -> Tensor:
    """mean of log sum_j exp(1[j != t] + s_j - s_t): the smooth top-1 SVM loss with margin and temperature 1.

    >>> smooth_svm(torch.tensor([[0.0, 0.0]]), torch.tensor([0]))
    tensor(1.3133)
    """
    margin = 1 - F.one_hot(target, scores.shape[-1]).to(scores.dtype)
    return ((margin + scores).logsumexp(-1) - scores.gather(-1, target.unsqueeze(-1)).squeeze(-1)).mean()


def pooled(scores: Tensor, h: Tensor) -> Tensor:
    """sum_i softmax(scores)_i h_i: (B, N), (B, N, C) -> (B, C)."""
    return (scores.softmax(-1).unsqueeze(1) @ h).squeeze(1)
