"""Attention that knows where neighbours lie, against loops over the neighbours' coordinates."""

import math

import pytest
import torch
from reference import neighbour_lists, tolerant_lists

from gated_srp import PatchGraph, UserError
from gated_srp.models.attention import LocalAttention, place_table
from gated_srp.models.locality import Focus, NeighbourhoodAttention, PositionalNystrom
from gated_srp.models.nystrom import NystromAttention

HEADS, WIDTH, PATCHES = 2, 4, 15


def bag(window, overlap=0):
    """``overlap``: so many patches come again, 20 px further on, and count too."""
    draw = torch.Generator().manual_seed(7)
    cells = torch.cartesian_prod(torch.arange(5), torch.arange(6))[torch.randperm(30, generator=draw)[:PATCHES]]
    cells[-1] += 40  # a patch apart
    cells = torch.cat([cells, cells[:overlap]])
    coords = cells * 256 + 20 * (torch.arange(len(cells)) >= PATCHES).unsqueeze(1)
    lattice, listed = ("exact", tolerant_lists) if overlap else ("floor", neighbour_lists)
    graph = PatchGraph.from_coords(coords, stride=256, window=window, lattice=lattice).with_isolated(before=1, after=2)
    lists = [[], *([j + 1 for j in found] for found in listed(coords, 256, window)), [], []]
    steps = {(i, j): (cells[j - 1] - cells[i - 1]).tolist() for i, found in enumerate(lists) for j in found}
    x = torch.randn(1, len(cells) + 3, HEADS * WIDTH, dtype=torch.float64, generator=draw)
    assert (max(map(len, lists)) > window**2 - 1) == bool(overlap)
    return x, graph, lists, steps


def awake(layer):
    draw = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for p in layer.parameters():
            p.copy_(0.4 * torch.randn(p.shape, generator=draw))
    return layer.double().requires_grad_(False)


def softmax(values):
    exps = [math.exp(v - max(values)) for v in values]
    return [e / sum(exps) for e in exps]


BAGS = pytest.mark.parametrize(("window", "overlap"), [(3, 0), (5, 0), (3, 12)])


@BAGS
@pytest.mark.parametrize("kind", [NeighbourhoodAttention, LocalAttention])
def test_neighbourhood_attention_adds_a_bias_by_relative_position(window, overlap, kind):
    x, graph, lists, steps = bag(window, overlap)
    layer = awake(kind(HEADS * WIDTH, HEADS))
    y, v = layer(x, graph)
    q, k, _ = (part[0] for part in layer.heads(x))
    bias = layer.relative.table.view(HEADS, 7, 7) if kind is NeighbourhoodAttention else torch.zeros(HEADS, 7, 7)
    for i in range(1, len(lists)):
        listed = [i, *lists[i]]
        places = [(3, 3), *((3 + steps[i, j][0], 3 + steps[i, j][1]) for j in lists[i])]
        for h in range(HEADS):
            logits = [
                float(q[h, i] @ k[h, j]) / 2 + float(bias[h, a, b]) for j, (a, b) in zip(listed, places, strict=True)
            ]
            expected = sum(w * v[0, h, j] for w, j in zip(softmax(logits), listed, strict=True))
            torch.testing.assert_close(y[0, h, i], expected)


@BAGS
def test_gated_positional_attention_mixes_content_and_places(window, overlap):
    x, graph, lists, steps = bag(window, overlap)
    layer = awake(PositionalNystrom(HEADS * WIDTH, HEADS, num_landmarks=4))
    plain = NystromAttention(HEADS * WIDTH, HEADS, num_landmarks=4).double()
    plain.load_state_dict({name: p for name, p in layer.state_dict().items() if "focus" not in name})
    content, v = (part[0].detach() for part in plain(x, graph))
    y = layer(x, graph)[0][0]
    for i, found in enumerate(lists):
        for h in range(HEADS):
            expected = content[h, i]
            if found:
                u, s = layer.focus.place[h], 1 / (1 + math.exp(-float(layer.focus.gate[h])))
                steps_of = [(0, 0), *(steps[i, j] for j in found)]
                weights = softmax([float(u[0] * (a * a + b * b) + u[1] * a + u[2] * b) for a, b in steps_of])
                near = sum(w * v[h, j] for w, j in zip(weights, [i, *found], strict=True))
                expected = (1 - s) * expected + s * near
            torch.testing.assert_close(y[h, i], expected, atol=1e-6, rtol=1e-6)


def test_heads_of_positional_attention_start_at_a_place_of_their_own():
    logits = Focus(4).logits().detach().view(4, 7, 7)
    for head, (a, b) in enumerate([(-1, -1), (-1, 0), (-1, 1), (0, -1)]):
        place = logits[head].argmax().item()
        assert (place // 7 - 3, place % 7 - 3) == (a, b)
        assert float(logits[head, 3 + a, 3 + b] - logits[head, 3 + a, 4 + b]) == pytest.approx(
            1
        )  # alpha 1, one step away


def test_relative_positions_need_places_and_a_window_that_was_foreseen():
    graph = PatchGraph.from_grid(3, 3, window=9)
    with pytest.raises(UserError, match=r"graph: window 9.*window of 3, 5 or 7"):
        place_table(graph)
    bare = PatchGraph(graph.neighbours, graph.offsets, graph.homogeneity, 3, (9,))
    with pytest.raises(UserError, match="does not know where neighbours lie"):
        place_table(bare)
