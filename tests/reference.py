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


def coefficients(
    y: Tensor, axes: Tensor, lists: list[list[int]], h_local: Tensor, gate: dict[str, Tensor], delta: float, most: int
) -> Tensor:
    """beta (H, N) of Eq. 7-10 for y, axes (H, N, D), patch by patch and head by head; what is measured is detached.

    A hidden layer with four inputs gets the mean over heads of log(1 + |y|) as the fourth.
    """
    y, rows = y.detach(), []
    for i, found in enumerate(lists):
        m = len(found)
        told = [float(h_local[i]), m / most, math.log(1 + m)]
        if gate["token_hidden.weight"].shape[1] == 4:
            told.append(sum(math.log(1 + float(y[h, i].norm())) for h in range(len(y))) / len(y))
        d_tok = torch.tensor(told, dtype=y.dtype)
        hidden = torch.nn.functional.gelu(gate["token_hidden.weight"] @ d_tok + gate["token_hidden.bias"])
        token = gate["token_out.weight"][0] @ hidden + gate["token_out.bias"][0]
        heads = []
        for h in range(len(y)):
            size = y[h, i].norm()
            cosine = (y[h, i] @ axes[h, i]) / size if size > 0 else torch.zeros((), dtype=y.dtype)
            d_head = torch.stack([cosine, cosine.abs(), torch.log1p(size)])
            logit = token + gate["head_weight"][h] @ d_head + gate["head_bias"][h] + gate["layer_head_bias"][h]
            heads.append(delta * torch.tanh(logit))
        rows.append(torch.stack(heads))
    return torch.stack(rows, dim=1)


def neighbour_axes(v: Tensor, lists: list[list[int]]) -> Tensor:
    """r_hat (H, N, D), Eq. 6: the unit mean of the neighbours' detached values, zero without neighbours."""
    v, axes = v.detach(), torch.zeros_like(v)
    for i, found in enumerate(lists):
        for h in range(len(v)):
            if found:
                r = sum(v[h, j] for j in found) / len(found)
                axes[h, i] = r / r.norm() if r.norm() > 0 else r
    return axes


def gated(
    y: Tensor, v: Tensor, lists: list[list[int]], h_local: Tensor, gate: dict[str, Tensor], delta: float, most: int
) -> Tensor:
    """Eq. 4-10 for y, v (H, N, D) and the parameters of a full gate."""
    axes = neighbour_axes(v, lists)
    beta = coefficients(y, axes, lists, h_local, gate, delta, most)
    return projected(y, axes, beta)


def projected(y: Tensor, axes: Tensor, beta: Tensor) -> Tensor:
    """Eq. 4-5: y - beta <y, axis> axis."""
    return y - (beta * (y * axes).sum(-1)).unsqueeze(-1) * axes
