"""Whole models in plain code, written from the protocol: a state dict in the release's names and features in, logits out.

Nothing of `gated_srp` is used here. One slide or image at a time, every row of every block, dense matrices throughout.
Shapes: H heads, L rows (row 0 is CLS), N patches, D head width, M landmarks, C channels.
"""

import math
from dataclasses import dataclass, field

import numpy as np
import torch
from reference import coefficients, homogeneity, neighbour_axes, projected
from torch import Tensor
from torch.nn import functional as F

Weights = dict[str, Tensor]


@dataclass
class Plain:
    """What a state dict does not say of its model. ``landmarks=None``: dense attention; ``beta``: a fixed coefficient."""

    heads: int
    landmarks: int | None = None
    xsa: bool = False
    beta: float | None = None
    delta: float = 1.0
    most: int = 8
    betas: dict[int, Tensor] = field(default_factory=dict)  # filled by a run: block -> (H, N)

    def slide(self, weights: Weights, features: Tensor, lists: list[list[int]]) -> Tensor:
        """Logits (K,) of one slide, features (N, in)."""
        x = F.linear(features, weights["in_proj.weight"], weights["in_proj.bias"])
        return self._run(weights, x, lists, homogeneity(features.detach(), lists))

    def image(self, weights: Weights, image: Tensor, lists: list[list[int]]) -> Tensor:
        """Logits (K,) of one image (3, S, S); h_local is that of the tokens with their positions."""
        kernel = weights["patch_embed.proj.weight"]
        x = F.conv2d(image[None], kernel, weights["patch_embed.proj.bias"], stride=kernel.shape[-1])[0].flatten(1).T
        placed = x + weights["pos_embed"][0, 1:]
        return self._run(weights, x, lists, homogeneity(placed.detach(), lists))

    def _run(self, weights: Weights, x: Tensor, lists: list[list[int]], h_local: Tensor) -> Tensor:
        side = math.ceil(math.sqrt(len(x)))
        square = "ppeg.conv7.weight" in weights
        x = torch.cat([weights["cls_token"][0], x, x[: side * side - len(x)] if square else x[:0]])  # (L, C)
        if "pos_embed" in weights:
            x = x + weights["pos_embed"][0]
        for i in range(1 + max(int(name.split(".")[1]) for name in weights if name.startswith("blocks."))):
            w = {name.removeprefix(f"blocks.{i}."): p for name, p in weights.items() if name.startswith(f"blocks.{i}.")}
            x = x + self._attention(w, _norm(w, "norm1", x), lists, h_local, i)
            hidden = F.gelu(F.linear(_norm(w, "norm2", x), w["mlp.fc1.weight"], w["mlp.fc1.bias"]))
            x = x + F.linear(hidden, w["mlp.fc2.weight"], w["mlp.fc2.bias"])
            if i == 0 and square:
                x = torch.cat([x[:1], _ppeg(weights, x[1:], side)])
        return F.linear(_norm(weights, "norm", x)[0], weights["head.weight"], weights["head.bias"])

    def _attention(self, w: Weights, x: Tensor, lists: list[list[int]], h_local: Tensor, i: int) -> Tensor:
        if "attn.q_proj.weight" in w:
            return self._differential(w, x, i)
        q, k, v = F.linear(x, w["attn.qkv.weight"], w["attn.qkv.bias"]).chunk(3, dim=-1)
        # An empty segment has a zero landmark, not the bias: means are taken after the projection, over real rows.
        y, v = self._mix(q, k, v, self.heads), _heads(v, self.heads)
        if self.xsa:
            y = projected(y, v / v.norm(dim=-1, keepdim=True), torch.ones(y.shape[:2], dtype=y.dtype))
        n = len(lists)
        last = "attn.gate.head_weight" not in w
        if not last or self.beta is not None:
            axes = neighbour_axes(v[:, 1 : 1 + n], lists)
            patches = y[:, 1 : 1 + n]
            if self.beta is not None:
                beta = torch.full(patches.shape[:2], self.beta, dtype=y.dtype)
            else:
                gate = {
                    name.removeprefix("attn.gate.").replace("mlp_", ""): p for name, p in w.items() if "gate" in name
                }
                beta = coefficients(patches, axes, lists, h_local, gate, self.delta, self.most)
                self.betas[i] = beta.detach()
            y = torch.cat([y[:, :1], projected(patches, axes, beta), y[:, 1 + n :]], dim=1)
        return F.linear(_merged(y), w["attn.proj.weight"], w["attn.proj.bias"])

    def _differential(self, w: Weights, x: Tensor, i: int) -> Tensor:
        q, k, v = (F.linear(x, w[f"attn.{name}_proj.weight"]) for name in "qkv")
        start = 0.8 - 0.6 * math.exp(-0.3 * i)
        first, second = ((w[f"attn.lambda_q{b}"] * w[f"attn.lambda_k{b}"]).sum().exp() for b in (1, 2))
        width = q.shape[-1] // self.heads
        # each head has two branches of width D beside each other, and a value of width 2 D
        branch = [torch.cat([part[:, (2 * h + b) * width :][:, :width] for h in range(self.heads // 2)], 1)
                  for b in (0, 1) for part in (q, k)]  # fmt: skip
        y1, y2 = (self._mix(*branch[2 * b : 2 * b + 2], v, self.heads // 2) for b in (0, 1))
        y = y1 - (first - second + start) * y2
        y = y / (y.square().mean(-1, keepdim=True) + 1e-5).sqrt() * w["attn.subln.weight"] * (1 - start)
        return F.linear(_merged(y), w["attn.out_proj.weight"])

    def _mix(self, q: Tensor, k: Tensor, v: Tensor, heads: int) -> Tensor:
        """(L, C) each -> y (H, L, D)."""
        marks = None if self.landmarks is None else [_segments(part, self.landmarks) for part in (q, k)]
        q, k, v = (_heads(part, heads) for part in (q, k, v))
        scale = q.shape[-1] ** -0.5
        if marks is None:
            return (scale * q @ k.mT).softmax(-1) @ v
        q_marks, k_marks = (_heads(part, heads) for part in marks)
        outer, inner, over = (
            (scale * a @ b.mT).softmax(-1) for a, b in ((q, k_marks), (q_marks, k_marks), (q_marks, k))
        )
        return outer @ _pinv(inner) @ over @ v


def _pinv(a: Tensor) -> Tensor:
    eye = torch.eye(a.shape[-1], dtype=a.dtype)
    z = a.mT / (a.abs().sum(-1).max() * a.abs().sum(-2).max())
    for _ in range(6):
        az = a @ z
        z = 0.25 * z @ (13 * eye - az @ (15 * eye - az @ (7 * eye - az)))
    return z


def _segments(rows: Tensor, landmarks: int) -> Tensor:
    size = math.ceil(len(rows) / landmarks)
    parts = [rows[start * size : (start + 1) * size] for start in range(landmarks)]
    return torch.stack([part.mean(0) if len(part) else torch.zeros_like(rows[0]) for part in parts])


def _ppeg(weights: Weights, rows: Tensor, side: int) -> Tensor:
    grid = rows.T.reshape(1, -1, side, side)
    total = grid
    for size in (7, 5, 3):
        kernel, bias = weights[f"ppeg.conv{size}.weight"], weights[f"ppeg.conv{size}.bias"]
        total = total + F.conv2d(grid, kernel, bias, padding=size // 2, groups=grid.shape[1])
    return total[0].flatten(1).T


def _norm(weights: Weights, name: str, x: Tensor) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], weights[f"{name}.weight"], weights[f"{name}.bias"], 1e-5)


def _heads(x: Tensor, heads: int) -> Tensor:
    return x.unflatten(-1, (heads, -1)).transpose(0, 1)


def _merged(heads: Tensor) -> Tensor:
    return heads.transpose(0, 1).flatten(1)


# Layouts -------------------------------------------------------------------------------------------------------------


def layout(
    *, width: int, heads: int, outputs: int, depth: int, in_dim: int = 0, ppeg: bool = False, patches: int = 0,
    patch: int = 0, diff: bool = False, gate_inputs: int = 0, hidden: int = 0, leftovers: tuple[str, ...] = (),
) -> dict[str, tuple[int, ...]]:  # fmt: skip
    """Names and shapes of a checkpoint's state dict. ``gate_inputs``: of the token part, 0 for no gates; none in the last block."""
    c, found = width, {"cls_token": (1, 1, width)}
    found |= {"in_proj.weight": (c, in_dim), "in_proj.bias": (c,)} if in_dim else {}
    if patches:
        found |= {"pos_embed": (1, 1 + patches, c)}
        found |= {"patch_embed.proj.weight": (c, 3, patch, patch), "patch_embed.proj.bias": (c,)}
    for i in range(depth):
        block: dict[str, tuple[int, ...]] = {f"attn.{name}": (() if name == "beta" else (heads,)) for name in leftovers}
        for norm in ("norm1", "norm2"):
            block |= {f"{norm}.weight": (c,), f"{norm}.bias": (c,)}
        if diff:
            block |= {f"attn.{name}_proj.weight": (c, c) for name in ("q", "k", "v", "out")}
            block |= {f"attn.lambda_{name}": (c // heads,) for name in ("q1", "k1", "q2", "k2")}
            block |= {"attn.subln.weight": (2 * c // heads,)}
        else:
            block |= {"attn.qkv.weight": (3 * c, c), "attn.qkv.bias": (3 * c,)}
            block |= {"attn.proj.weight": (c, c), "attn.proj.bias": (c,)}
        if gate_inputs and i < depth - 1:
            gate = {"head_weight": (heads, 3), "head_bias": (heads,), "layer_head_bias": (heads,)}
            gate |= {"token_mlp_hidden.weight": (hidden, gate_inputs), "token_mlp_hidden.bias": (hidden,)}
            gate |= {"token_mlp_out.weight": (1, hidden), "token_mlp_out.bias": (1,)}
            block |= {f"attn.gate.{name}": shape for name, shape in gate.items()}
        block |= {"mlp.fc1.weight": (4 * c, c), "mlp.fc1.bias": (4 * c,)}
        block |= {"mlp.fc2.weight": (c, 4 * c), "mlp.fc2.bias": (c,)}
        found |= {f"blocks.{i}.{name}": shape for name, shape in block.items()}
    if ppeg:
        for size in (7, 5, 3):
            found |= {f"ppeg.conv{size}.weight": (c, 1, size, size), f"ppeg.conv{size}.bias": (c,)}
    return found | {"norm.weight": (c,), "norm.bias": (c,), "head.weight": (outputs, c), "head.bias": (outputs,)}


def drawn(shapes: dict[str, tuple[int, ...]], seed: int, *, scale: float = 0.25) -> Weights:
    """Random weights in float64 of these names and shapes; norms around 1. RandomState's numbers are frozen for ever."""
    draws = np.random.RandomState(seed)
    found = {name: torch.from_numpy(np.asarray(scale * draws.standard_normal(shape))) for name, shape in shapes.items()}
    for name in found:
        if ("norm" in name and name.endswith("weight")) or name.endswith("subln.weight"):
            found[name] = found[name] + 1
    return found
