"""The paper's models as a plain implementer writes them from the pseudocode: the oracle of the tests and the peer of the benchmark.

Neighbours in a padded table with a mask, gathered and averaged; both Nystrom factors as matrices; every block on every row;
homogeneity by gathering neighbours; the graph through a dictionary. The numbers follow the paper's equations.
Parameter names equal those of `gated_srp.models`, so a state dict of one loads into the other.
"""

import math

import torch
from torch import Tensor, nn


def neighbour_table(coords: Tensor, stride: float, window: int = 3) -> tuple[Tensor, Tensor]:
    """Neighbour numbers (N, K) and a mask (N, K) of the real ones; a cell belongs to its first patch."""
    cells = [(int(x // stride), int(y // stride)) for x, y in coords.tolist()]
    owner: dict[tuple[int, int], int] = {}
    for number, cell in enumerate(cells):
        owner.setdefault(cell, number)
    radius = window // 2
    steps = [(dx, dy) for dx in range(-radius, radius + 1) for dy in range(-radius, radius + 1) if (dx, dy) != (0, 0)]
    index, mask = [], []
    for x, y in cells:
        found = [owner.get((x + dx, y + dy), -1) for dx, dy in steps]
        index.append([max(j, 0) for j in found])
        mask.append([j >= 0 for j in found])
    return torch.tensor(index), torch.tensor(mask)


def homogeneity(features: Tensor, index: Tensor, mask: Tensor) -> Tensor:
    """Mean cosine of each patch's features to its neighbours'."""
    unit = torch.nn.functional.normalize(features, dim=-1)
    cosine = (unit[:, None] * unit[index]).sum(-1)  # (N, K)
    return (cosine * mask).sum(1) / mask.sum(1).clamp_min(1)


class Gate(nn.Module):
    def __init__(self, num_heads: int, delta: float, hidden_dim: int) -> None:
        super().__init__()
        self.delta = delta
        self.token_hidden = nn.Linear(3, hidden_dim)
        self.token_out = nn.Linear(hidden_dim, 1)
        self.head_weight = nn.Parameter(torch.zeros(num_heads, 3))
        self.head_bias = nn.Parameter(torch.zeros(num_heads))
        self.layer_head_bias = nn.Parameter(torch.zeros(num_heads))

    def forward(self, d_tok: Tensor, d_head: Tensor) -> Tensor:
        token = self.token_out(nn.functional.gelu(self.token_hidden(d_tok)))[..., 0]  # (N,)
        head = torch.einsum("hnt,ht->hn", d_head, self.head_weight)
        logit = token + head + self.head_bias[:, None] + self.layer_head_bias[:, None]
        return self.delta * torch.tanh(logit)  # (H, N)


class Correction(nn.Module):
    """The pseudocode's middle part, on the patch rows of one bag."""

    def __init__(self, num_heads: int, delta: float, hidden_dim: int) -> None:
        super().__init__()
        self.coefficient = Gate(num_heads, delta, hidden_dim)

    def forward(self, y: Tensor, v: Tensor, index: Tensor, mask: Tensor, h_local: Tensor) -> Tensor:
        around = v.detach()[:, index]  # (H, N, K, D)
        real = mask[None, :, :, None].to(v.dtype)
        r = (around * real).sum(2) / real.sum(2).clamp_min(1)
        norm = r.norm(dim=-1, keepdim=True)
        r_hat = torch.where(norm > 0, r / norm.clamp_min(1e-30), 0.0)
        along = (y * r_hat).sum(-1, keepdim=True)
        common = along * r_hat
        m = mask.sum(-1).to(v.dtype)
        d_tok = torch.stack([h_local, m / mask.shape[1], torch.log1p(m)], -1).detach()
        size = y.norm(dim=-1)
        cosine = torch.where(size > 0, along[..., 0] / size.clamp_min(1e-30), 0.0)
        d_head = torch.stack([cosine, cosine.abs(), torch.log1p(size)], -1).detach()
        beta = self.coefficient(d_tok, d_head)
        return y - beta[..., None] * common


class Nystrom(nn.Module):
    def __init__(self, dim: int, num_heads: int, num_landmarks: int) -> None:
        super().__init__()
        self.num_heads, self.num_landmarks = num_heads, num_landmarks
        self.qkv = nn.Linear(dim, 3 * dim)
        self.proj = nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        rows, dim = x.shape
        q, k, v = self.qkv(x).view(rows, 3, self.num_heads, dim // self.num_heads).permute(1, 2, 0, 3)  # (H, L, D)
        q = q * (dim // self.num_heads) ** -0.5
        q_marks, k_marks = self._marks(q), self._marks(k)
        f = torch.softmax(q @ k_marks.transpose(-2, -1), -1)
        a = torch.softmax(q_marks @ k_marks.transpose(-2, -1), -1)
        b = torch.softmax(q_marks @ k.transpose(-2, -1), -1)
        return f @ (self._pinv(a).to(v.dtype) @ (b @ v)), v

    def _marks(self, x: Tensor) -> Tensor:
        size = math.ceil(x.shape[1] / self.num_landmarks)
        marks = [part.mean(1) for part in x.split(size, dim=1)]
        marks += [torch.zeros_like(marks[0])] * (self.num_landmarks - len(marks))
        return torch.stack(marks, 1)

    def _pinv(self, a: Tensor) -> Tensor:
        a = a.float()
        z = a.transpose(-2, -1) / (a.sum(-1).max() * a.sum(-2).max())
        eye = torch.eye(a.shape[-1])
        for _ in range(6):
            z = 0.25 * z @ (13 * eye - a @ z @ (15 * eye - a @ z @ (7 * eye - a @ z)))
        return z


class Mlp(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(dim, 4 * dim)
        self.fc2 = nn.Linear(4 * dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(nn.functional.gelu(self.fc1(x)))


class Block(nn.Module):
    def __init__(self, dim: int, attention: nn.Module, correction: nn.Module | None) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.attn, self.mlp, self.correction = attention, Mlp(dim), correction

    def forward(self, x: Tensor, graph: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        y, v = self.attn(self.norm1(x))
        if self.correction is not None:
            patches = slice(1, 1 + len(graph[0]))
            z = self.correction(y[:, patches], v[:, patches], *graph)
            y = torch.cat([y[:, :1], z, y[:, patches.stop :]], dim=1)
        x = x + self.attn.proj(y.transpose(0, 1).flatten(1))
        return x + self.mlp(self.norm2(x))


class PPEG(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.conv7, self.conv5, self.conv3 = (nn.Conv2d(dim, dim, k, padding=k // 2, groups=dim) for k in (7, 5, 3))

    def forward(self, x: Tensor) -> Tensor:
        side = math.isqrt(len(x) - 1)
        square = x[1:].t().reshape(1, -1, side, side)
        square = square + self.conv7(square) + self.conv5(square) + self.conv3(square)
        return torch.cat([x[:1], square.flatten(2)[0].t()])


class SlideModel(nn.Module):
    """One bag: features (N, in_dim) and (index, mask, h_local) -> logits (outputs,). No drop path."""

    def __init__(
        self,
        in_dim: int,
        num_outputs: int,
        *,
        gated: bool = True,
        dim: int = 384,
        depth: int = 4,
        num_heads: int = 6,
        num_landmarks: int = 64,
        delta: float = 1.0,
        hidden_dim: int = 64,
    ) -> None:
        super().__init__()
        self.in_proj = nn.Linear(in_dim, dim)
        self.cls_token = nn.Parameter(torch.zeros(1, 1, dim))
        gates = [Correction(num_heads, delta, hidden_dim) if gated and i < depth - 1 else None for i in range(depth)]
        self.blocks = nn.ModuleList(Block(dim, Nystrom(dim, num_heads, num_landmarks), gate) for gate in gates)
        self.ppeg = PPEG(dim)
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, num_outputs)

    def forward(self, features: Tensor, graph: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        x = self.in_proj(features)
        side = math.ceil(math.sqrt(len(x)))
        x = torch.cat([self.cls_token[0], x, x[: side * side - len(x)]])
        for number, block in enumerate(self.blocks):
            x = block(x, graph)
            if number == 0:
                x = self.ppeg(x)
        return self.head(self.norm(x)[0])
