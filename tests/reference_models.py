"""Whole models of the published layout in plain code and double precision: tensors by name in, logits and coefficients out.

Written from the paper's equations, the project's protocol and the names and shapes of the checkpoints that came with it; nothing of `gated_srp` is used.
Shapes: N patches, L rows (CLS first), H heads, D head width, C channels, S side of the square of rows.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch
from reference import coefficients, homogeneity, neighbour_axes, projected
from torch import Tensor
from torch.nn import functional as F

Weights = dict[str, Tensor]
Shapes = dict[str, tuple[int, ...]]
Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


def layout(
    *, width: int, heads: int, outputs: int, depth: int, leftovers: tuple[str, ...] = (), **parts: int | bool
) -> Shapes:
    """The names of a checkpoint's tensors and their shapes.

    Parts: `in_dim` of a slide model or `patches` and `patch` of an image model; `ppeg`; `diff` for differential attention;
    `gate_inputs` and `hidden` for gates (in every block but the last). `leftovers`: unused tensors of each attention.
    """
    shapes: Shapes = {"cls_token": (1, 1, width)}
    if "patches" in parts:
        shapes["pos_embed"] = (1, 1 + parts["patches"], width)
        shapes |= {"patch_embed.proj.weight": (width, 3, parts["patch"], parts["patch"]), "patch_embed.proj.bias": (width,)}  # fmt: skip
    else:
        shapes |= _affine("in_proj", parts["in_dim"], width)
    for number in range(depth):
        block, attn = f"blocks.{number}", f"blocks.{number}.attn"
        shapes |= _norm(f"{block}.norm1", width) | _norm(f"{block}.norm2", width)
        shapes |= _affine(f"{block}.mlp.fc1", width, 4 * width) | _affine(f"{block}.mlp.fc2", 4 * width, width)
        shapes |= {f"{attn}.{name}": () if name == "beta" else (heads,) for name in leftovers}
        if parts.get("diff"):
            branch = width // heads
            shapes |= {f"{attn}.{name}_proj.weight": (width, width) for name in ("q", "k", "v", "out")}
            shapes |= {f"{attn}.lambda_{name}": (branch,) for name in ("q1", "k1", "q2", "k2")}
            shapes[f"{attn}.subln.weight"] = (2 * branch,)
            continue
        shapes |= _affine(f"{attn}.qkv", width, 3 * width) | _affine(f"{attn}.proj", width, width)
        if "gate_inputs" in parts and number < depth - 1:
            shapes |= _affine(f"{attn}.gate.token_mlp_hidden", parts["gate_inputs"], parts["hidden"])
            shapes |= _affine(f"{attn}.gate.token_mlp_out", parts["hidden"], 1)
            shapes |= {f"{attn}.gate.head_weight": (heads, 3), f"{attn}.gate.head_bias": (heads,)}
            shapes[f"{attn}.gate.layer_head_bias"] = (heads,)
    if parts.get("ppeg"):
        for size in (7, 5, 3):
            shapes |= {f"ppeg.conv{size}.weight": (width, 1, size, size), f"ppeg.conv{size}.bias": (width,)}
    return shapes | _norm("norm", width) | _affine("head", width, outputs)


def _affine(name: str, inputs: int, outputs: int) -> Shapes:
    return {f"{name}.weight": (outputs, inputs), f"{name}.bias": (outputs,)}


def _norm(name: str, width: int) -> Shapes:
    return {f"{name}.weight": (width,), f"{name}.bias": (width,)}


def drawn(shapes: Shapes, seed: int, scale: float) -> Weights:
    """Normal draws of this standard deviation, around one for the weights of norms; the order of the names does not matter."""
    draws, weights = np.random.RandomState(seed), {}
    for name in sorted(shapes):
        around = 1.0 if name.endswith((".subln.weight", "norm.weight", "norm1.weight", "norm2.weight")) else 0.0
        weights[name] = torch.from_numpy(np.asarray(around + scale * draws.standard_normal(shapes[name])))
    return weights


def dense(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """softmax(q k^T / sqrt D) v for (H, L, D)."""
    return torch.softmax(q @ k.mT / math.sqrt(q.shape[-1]), dim=-1) @ v


def nystrom(q: Tensor, k: Tensor, v: Tensor, landmarks: int) -> Tensor:
    """F pinv(A) B v for (H, L, D); landmarks are means of segments of ceil(L / m) rows, zero where no row is left."""
    q = q / math.sqrt(q.shape[-1])
    length = math.ceil(q.shape[1] / landmarks)

    def means(rows: Tensor) -> Tensor:  # (H, L, D) -> (H, m, D)
        segments = [rows[:, start : start + length] for start in range(0, landmarks * length, length)]
        return torch.stack([part.mean(1) if part.shape[1] else torch.zeros_like(rows[:, 0]) for part in segments], dim=1)  # fmt: skip

    short_q, short_k = means(q), means(k)
    first = torch.softmax(q @ short_k.mT, dim=-1)  # F (H, L, m)
    middle = torch.softmax(short_q @ short_k.mT, dim=-1)  # A (H, m, m)
    last = torch.softmax(short_q @ k.mT, dim=-1)  # B (H, m, L)
    one = torch.eye(landmarks, dtype=q.dtype)
    inverse = middle.mT / (middle.sum(-1).max() * middle.sum(-2).max())
    for _ in range(6):
        product = middle @ inverse
        inverse = 0.25 * inverse @ (13 * one - product @ (15 * one - product @ (7 * one - product)))
    return first @ (inverse @ (last @ v))


@dataclass
class Plain:
    """What the layout's weights do not say by themselves. `betas` collects the gates' coefficients (H, N) by block.

    Args:
        heads: of the attention; differential attention has half as many.
        landmarks: of Nystrom attention; none: dense attention.
        xsa: the part along each row's own value is removed.
        beta: fixed coefficient along the neighbours' direction.
        delta: range of the gates.
        most: largest number of neighbours (K).
    """

    heads: int
    landmarks: int | None = None
    xsa: bool = False
    beta: float | None = None
    delta: float | None = None
    most: int = 8
    betas: dict[int, Tensor] = field(default_factory=dict)

    def slide(self, weights: Weights, features: Tensor, lists: list[list[int]]) -> Tensor:
        """Logits for features (N, in)."""
        rows = _linear(weights, "in_proj", features)
        if "ppeg.conv7.weight" in weights:
            side = math.ceil(math.sqrt(len(rows)))
            rows = torch.cat([rows, rows[: side**2 - len(rows)]])
        rows = torch.cat([weights["cls_token"][0], rows])  # (L, C)
        return self._logits(weights, rows, lists, homogeneity(features.detach(), lists).double())

    def image(self, weights: Weights, image: Tensor, lists: list[list[int]]) -> Tensor:
        """Logits for an image (3, height, width); `lists` are the neighbours on the grid of its patches, row by row."""
        kernel = weights["patch_embed.proj.weight"]
        grid = F.conv2d(image[None], kernel, weights["patch_embed.proj.bias"], stride=kernel.shape[-1])
        rows = torch.cat([weights["cls_token"][0], grid[0].flatten(1).T]) + weights["pos_embed"][0]  # (L, C)
        return self._logits(weights, rows, lists, homogeneity(rows[1:].detach(), lists).double())

    def _logits(self, weights: Weights, x: Tensor, lists: list[list[int]], alike: Tensor) -> Tensor:
        self.betas.clear()
        number = 0
        while f"blocks.{number}.norm1.weight" in weights:
            block = _below(weights, f"blocks.{number}")
            mixed = _layer_norm(block, "norm1", x)
            x = x + self._attention(_below(block, "attn"), mixed, lists, alike, number)
            x = x + _linear(block, "mlp.fc2", F.gelu(_linear(block, "mlp.fc1", _layer_norm(block, "norm2", x))))
            if number == 0 and "ppeg.conv7.weight" in weights:
                x = torch.cat([x[:1], _positions(weights, x[1:])])
            number += 1
        return _linear(weights, "head", _layer_norm(weights, "norm", x)[0])

    def _attention(self, attn: Weights, x: Tensor, lists: list[list[int]], alike: Tensor, number: int) -> Tensor:
        def mix(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return dense(q, k, v) if self.landmarks is None else nystrom(q, k, v, self.landmarks)

        if "subln.weight" in attn:
            return _differential(attn, x, self.heads // 2, number, mix)
        q, k, v = (_split(part, self.heads) for part in _linear(attn, "qkv", x).chunk(3, dim=-1))  # (H, L, D)
        y = mix(q, k, v)
        if self.xsa:
            own = v / v.norm(dim=-1, keepdim=True)
            y = projected(y, own, torch.ones_like(y[..., 0]))
        patches = slice(1, 1 + len(lists))  # neither CLS nor the rows that fill the square
        axes = neighbour_axes(v[:, patches], lists)
        beta = None if self.beta is None else torch.full_like(y[:, patches, 0], self.beta)
        if "gate.head_weight" in attn:
            gate = {name.replace("mlp_", ""): value for name, value in _below(attn, "gate").items()}
            beta = coefficients(y[:, patches], axes, lists, alike, gate, self.delta, self.most)
            self.betas[number] = beta.detach()
        if beta is not None:
            y = torch.cat([y[:, :1], projected(y[:, patches], axes, beta), y[:, patches.stop :]], dim=1)
        return _linear(attn, "proj", _joined(y))


def _differential(attn: Weights, x: Tensor, heads: int, number: int, mix: Attention) -> Tensor:
    """One map minus lambda times another, RMS norm per head; queries and keys have both branches of a head side by side."""
    q, k = (_split(x @ attn[f"{name}_proj.weight"].T, 2 * heads) for name in ("q", "k"))  # (2H, L, D)
    v = _split(x @ attn["v_proj.weight"].T, heads)  # (H, L, 2D)
    start = 0.8 - 0.6 * math.exp(-0.3 * number)
    first, second = (torch.exp(attn[f"lambda_q{i}"] @ attn[f"lambda_k{i}"]) for i in (1, 2))
    y = mix(q[0::2], k[0::2], v) - (first - second + start) * mix(q[1::2], k[1::2], v)
    y = y / torch.sqrt(y.square().mean(-1, keepdim=True) + 1e-5) * attn["subln.weight"]
    return _joined((1 - start) * y) @ attn["out_proj.weight"].T


def _positions(weights: Weights, rows: Tensor) -> Tensor:
    """PPEG: the square of rows plus its depthwise convolutions."""
    side = math.isqrt(len(rows))
    square = rows.T.reshape(1, -1, side, side)
    sums = square
    for size in (7, 5, 3):
        kernel, bias = weights[f"ppeg.conv{size}.weight"], weights[f"ppeg.conv{size}.bias"]
        sums = sums + F.conv2d(square, kernel, bias, padding=size // 2, groups=len(kernel))
    return sums[0].flatten(1).T


def _below(weights: Weights, name: str) -> Weights:
    return {key.removeprefix(f"{name}."): value for key, value in weights.items() if key.startswith(f"{name}.")}


def _linear(weights: Weights, name: str, x: Tensor) -> Tensor:
    return x @ weights[f"{name}.weight"].T + weights[f"{name}.bias"]


def _layer_norm(weights: Weights, name: str, x: Tensor) -> Tensor:
    centred = x - x.mean(-1, keepdim=True)
    return centred / torch.sqrt(centred.square().mean(-1, keepdim=True) + 1e-5) * weights[f"{name}.weight"] + weights[f"{name}.bias"]  # fmt: skip


def _split(x: Tensor, heads: int) -> Tensor:  # (L, C) -> (H, L, D)
    return x.reshape(len(x), heads, -1).transpose(0, 1)


def _joined(y: Tensor) -> Tensor:  # (H, L, D) -> (L, C)
    return y.transpose(0, 1).flatten(1)
