"""Naive loops, written from the equations one number at a time: what the fast code must equal."""

import math

import torch
from torch import Tensor


def neighbour_lists(coords: Tensor, stride: float, window: int = 3) -> list[list[int]]:
    """Lattice `floor`: the first patches of the other cells of the window."""
    cells = [(x // stride, y // stride) for x, y in coords.tolist()]
    radius = window // 2
    lists = []
    for cell in cells:
        found = []
        for j, other in enumerate(cells):
            first = cells.index(other) == j
            apart = (abs(other[0] - cell[0]), abs(other[1] - cell[1]))
            if first and other != cell and max(apart) <= radius:
                found.append(j)
        lists.append(found)
    return lists


def tolerant_lists(coords: Tensor, stride: float, window: int = 3) -> list[list[int]]:
    """Lattice `exact`: every patch within stride / 8 of a lattice offset other than (0, 0)."""
    radius = window // 2
    offsets = [(a, b) for a in range(-radius, radius + 1) for b in range(-radius, radius + 1) if (a, b) != (0, 0)]
    points = coords.tolist()

    def near(i: int, j: int) -> bool:
        dx, dy = points[j][0] - points[i][0], points[j][1] - points[i][1]
        return any(abs(dx - a * stride) <= stride / 8 and abs(dy - b * stride) <= stride / 8 for a, b in offsets)

    return [[j for j in range(len(points)) if near(i, j)] for i in range(len(points))]


def homogeneity(features: Tensor, lists: list[list[int]]) -> Tensor:
    out = []
    for i, found in enumerate(lists):
        cosines = [torch.nn.functional.cosine_similarity(features[i], features[j], dim=0, eps=1e-30) for j in found]
        out.append(sum(float(c) for c in cosines) / len(found) if found else 0.0)
    return torch.tensor(out)


def gated(
    y: Tensor, v: Tensor, lists: list[list[int]], h_local: Tensor, gate: dict[str, Tensor], delta: float, most: int
) -> Tensor:
    """Eq. 4-10 for y, v (H, N, D) and the parameters of a full gate, patch by patch and head by head."""
    z = y.clone()
    for i, found in enumerate(lists):
        if not found:
            continue
        m = len(found)
        d_tok = torch.tensor([float(h_local[i]), m / most, math.log(1 + m)], dtype=y.dtype)
        hidden = torch.nn.functional.gelu(gate["token_hidden.weight"] @ d_tok + gate["token_hidden.bias"])
        token = gate["token_out.weight"][0] @ hidden + gate["token_out.bias"][0]
        for h in range(len(y)):
            r = sum(v[h, j] for j in found) / m
            r_hat = r / r.norm() if r.norm() > 0 else r
            size = y[h, i].norm()
            cosine = (y[h, i] @ r_hat) / size if size > 0 else torch.zeros(())
            d_head = torch.stack([cosine, cosine.abs(), torch.log1p(size)])
            logit = token + gate["head_weight"][h] @ d_head + gate["head_bias"][h] + gate["layer_head_bias"][h]
            z[h, i] = y[h, i] - delta * torch.tanh(logit) * (y[h, i] @ r_hat) * r_hat
    return z
