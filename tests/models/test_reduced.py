"""Merging and pruning of rows, against loops; what a map says of patches whose rows are gone."""

import math
from itertools import pairwise

import pytest
import torch

from gated_srp import PatchGraph, UserError, trace
from gated_srp.models import build_model
from gated_srp.models.attention import DenseAttention
from gated_srp.models.reduced import KEPT, ReducedGraph, SizedAttention, contracted, match_rows, merge_rows

SMALL = {"in_dim": 6, "num_outputs": 2, "dim": 8, "num_heads": 2, "depth": 3, "hidden_dim": 4}


def bag(count=14):
    draw = torch.Generator().manual_seed(3)
    cells = torch.cartesian_prod(torch.arange(4), torch.arange(5))[torch.randperm(20, generator=draw)[:count]]
    features = torch.randn(1, count, 6, generator=draw)
    return features, PatchGraph.from_coords(cells * 256, features[0], stride=256)


def lists_of(graph):
    ends = graph.offsets.tolist()
    return [set(graph.neighbours[a:b].tolist()) for a, b in pairwise(ends)]


def test_the_most_similar_pairs_of_two_hands_match():
    keys = torch.randn(12, 5, generator=torch.Generator().manual_seed(0))
    pairs = []
    for i in range(1, 12, 2):  # CLS is dealt to nobody
        cosines = {j: float(torch.cosine_similarity(keys[i], keys[j], dim=0)) for j in range(2, 12, 2)}
        best = max(cosines, key=cosines.get)
        pairs.append((cosines[best], i, best))
    expected = list(range(12))
    for _, i, j in sorted(pairs, reverse=True)[:3]:
        expected[i] = j
    assert match_rows(keys, 3).tolist() == expected


def test_merged_rows_are_means_by_size_and_their_lists_are_joined():
    _, graph = bag()
    rows = graph.with_isolated(before=1)
    size = torch.tensor([1.0] + [2.0, 1.0] * 7)
    rows = ReducedGraph(**vars(rows) | {"places": None}, owner=torch.arange(1, 15), size=size)
    x = torch.randn(1, 15, 8, dtype=torch.float64)
    target = torch.arange(15)
    target[3], target[5], target[7] = 4, 4, 10
    merged, reduced = merge_rows(x, rows, target)
    groups = [[i for i in range(15) if int(target[i]) == j] for j in range(15) if int(target[j]) == j]
    before, after = lists_of(rows), lists_of(reduced)
    for number, members in enumerate(groups):
        total = sum(float(size[i]) for i in members)
        mean = sum(float(size[i]) * x[0, i] for i in members) / total
        torch.testing.assert_close(merged[0, number], mean, atol=1e-6, rtol=1e-6)
        assert float(reduced.size[number]) == total
        expected = sum(float(size[i]) * float(rows.homogeneity[i]) for i in members) / total
        assert float(reduced.homogeneity[number]) == pytest.approx(expected, abs=1e-6)
        around = {n for n, other in enumerate(groups) if any(before[i] & set(other) for i in members)} - {number}
        assert after[number] == around
    assert reduced.owner.tolist() == [next(n for n, g in enumerate(groups) if i in g) for i in range(1, 15)]


def test_a_dropped_row_leaves_all_lists():
    graph = PatchGraph.from_grid(1, 4)
    neighbours, offsets = contracted(graph, torch.tensor([0, -1, 1, 2]), 3)
    assert (neighbours.tolist(), offsets.tolist()) == ([2, 1], [0, 0, 1, 2])


def test_attention_with_sizes_is_attention_over_copies():
    layer = SizedAttention(8, 2).double()
    sizes = [1, 3, 1, 2]
    x = torch.randn(1, 4, 8, dtype=torch.float64)
    graph = PatchGraph.from_grid(1, 3).with_isolated(before=1)
    graph = ReducedGraph(**vars(graph), owner=torch.tensor([1, 1, 1, 2, 3, 3]), size=torch.tensor(sizes).float())
    copies = x.repeat_interleave(torch.tensor(sizes), dim=1)
    plain = PatchGraph.from_grid(1, 6).with_isolated(before=1)
    firsts = [0, 1, 4, 5]
    torch.testing.assert_close(layer(x, graph)[0], DenseAttention.forward(layer, copies, plain)[0][:, :, firsts])
    torch.testing.assert_close(layer.first_row(x, graph)[0], layer(x, graph)[0][:, :, :1])
    of_copies = DenseAttention.cls_map(layer, copies, plain)
    torch.testing.assert_close(layer.cls_map(x, graph), of_copies[:, :, firsts])
    torch.testing.assert_close(graph.patches(layer.cls_map(x, graph)), of_copies[0, :, 1:])


def test_pruning_keeps_what_cls_looks_at_and_sums_the_rest():
    model, (features, graph) = build_model("vit4_evit_gated_srp", **SMALL).double().eval(), bag()
    x, rows = model.tokens(features.double(), graph)
    reduced, after = model.before_block(1, x, rows)
    block = model.blocks[1]
    attention = block.attn.cls_map(block.norm1(x), rows)[0].mean(0)[1:].tolist()
    kept = math.ceil(KEPT * 14)
    order = sorted(range(14), key=lambda i: -attention[i])
    stays, left = sorted(order[:kept]), sorted(order[kept:])
    torch.testing.assert_close(reduced[0, : kept + 1], x[0, [0, *(i + 1 for i in stays)]])
    torch.testing.assert_close(reduced[0, -1], sum(attention[i] * x[0, i + 1] for i in left))
    new = {i + 1: number + 1 for number, i in enumerate(stays)}
    before, lists = lists_of(rows), lists_of(after)
    assert lists == [set(), *({new[j] for j in before[i + 1] if j in new} for i in stays), set()]
    assert after.owner.tolist() == [new.get(i + 1, kept + 1) for i in range(14)]
    assert after.size.tolist() == [1.0] * (kept + 1) + [14.0 - kept]


@pytest.mark.parametrize("arm", ["vit4_tome", "vit4_evit"])
def test_attention_of_merged_patches_is_shared_among_them_and_sums_to_that_of_all(arm):
    model, (features, graph) = build_model(arm, **SMALL).eval(), bag()
    seen = []
    model.blocks[-1].register_forward_hook(lambda module, args, output: seen.append(args[:2]))
    with trace(model) as layers, torch.no_grad():
        model(features, graph)
    ((x, rows),) = seen
    assert x.shape[1] < 15 and isinstance(rows, ReducedGraph)
    last = layers[-1].cls_attention
    with torch.no_grad():
        of_cls = model.blocks[-1].attn.cls_map(model.blocks[-1].norm1(x), rows)[0, :, 0]
    torch.testing.assert_close(last.sum(-1) + of_cls, torch.ones(2))


def test_rows_are_reduced_slide_by_slide():
    features, graph = bag()
    model = build_model("vit4_tome", **SMALL)
    with pytest.raises(UserError, match=r"2 bags at once.*bag by bag"):
        model(features.repeat(2, 1, 1), PatchGraph.batch([graph, graph]))
