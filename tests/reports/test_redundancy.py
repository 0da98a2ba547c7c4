"""Cosines to neighbours and to random patches against plain loops, and what is written of them."""

import csv
import math
from itertools import pairwise

import numpy as np
import pytest
import torch
from factories import make_slide
from hypothesis import given
from hypothesis import strategies as st

from gated_srp.errors import UserError
from gated_srp.reports.redundancy import POOLED, Redundancy, measure, pooled, quantiles, redundancy, write_table
from gated_srp.srp.graph import PatchGraph


def _slide(seed=0, **shape):
    slide = make_slide(seed, **shape)
    return (
        torch.from_numpy(slide.features),
        PatchGraph.from_coords(torch.from_numpy(slide.cells), stride=1),
        slide.cells,
    )


def _cosine(a, b):
    a, b = [float(x) for x in a], [float(x) for x in b]
    lengths = math.sqrt(sum(x * x for x in a)) * math.sqrt(sum(x * x for x in b))
    return sum(x * y for x, y in zip(a, b, strict=True)) / lengths if lengths else 0.0


def test_the_cosine_to_the_neighbours_mean_is_that_of_a_plain_loop():
    features, graph, cells = _slide(kept=0.5)
    features[0] = 0
    expected = []
    for i, (x, y) in enumerate(cells):
        near = [j for j, (u, v) in enumerate(cells) if max(abs(x - u), abs(y - v)) == 1]
        if near:
            expected.append(_cosine(features[i], features[near].double().mean(0)))
    found, null = redundancy(features, graph, torch.Generator().manual_seed(1))
    assert found.tolist() == pytest.approx(expected, abs=1e-6)
    assert len(null) == len(expected)


class _Recorded(list):
    """The lists of partners that `redundancy` averages over."""

    def __call__(self, rows, lists, offsets):
        self.append([lists[a:b].tolist() for a, b in pairwise(offsets)])
        return torch.zeros_like(rows)


@given(st.integers(0, 200), st.integers(2, 6), st.integers(1, 4))
def test_random_partners_are_as_many_distinct_and_never_the_patch_itself(seed, columns, rows):
    features, graph, _ = _slide(seed, columns=columns, rows=rows, width=2, kept=1.1)
    recorded = _Recorded()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("gated_srp.reports.redundancy.neighbour_mean", recorded)
        redundancy(features, graph, torch.Generator().manual_seed(seed))
    near, far = recorded
    for i, (those, drawn) in enumerate(zip(near, far, strict=True)):
        assert len(drawn) == len(set(drawn)) == len(those)
        assert i not in drawn


def test_smooth_features_are_redundant_and_shuffled_ones_are_not():
    _, graph, cells = _slide(columns=30, rows=30)
    angle = torch.from_numpy(cells).float() / 10
    smooth = torch.stack([angle[:, 0].cos(), angle[:, 0].sin(), angle[:, 1].cos(), angle[:, 1].sin()], 1)
    near, far = redundancy(smooth, graph, torch.Generator().manual_seed(0))
    assert near.median() > 0.99
    assert far.median() < 0.8
    order = torch.randperm(len(smooth), generator=torch.Generator().manual_seed(3))
    near, far = redundancy(smooth[order], graph, torch.Generator().manual_seed(0))
    assert float(near.mean() - far.mean()) == pytest.approx(0, abs=0.05)


def test_the_draw_depends_on_seed_and_slide_alone():
    features, graph, _ = _slide()
    same = [measure("s1", features, graph, seed=4).random for _ in range(2)]
    assert torch.equal(*same)
    assert not torch.equal(same[0], measure("s2", features, graph, seed=4).random)
    assert not torch.equal(same[0], measure("s1", features, graph, seed=5).random)


def test_half_precision_features_are_compared_in_single():
    features, graph, _ = _slide()
    half = features.half()
    assert torch.equal(measure("s", half, graph).neighbours, measure("s", half.float(), graph).neighbours)


def test_pooling_joins_patches_and_keeps_kinds_apart():
    one = [Redundancy(f"s{i}", kind, torch.full((i + 1,), 0.5), torch.zeros(i + 1)) for i in range(3) for kind in "ab"]
    found = pooled(one)
    assert [(each.slide, each.rows, len(each.neighbours)) for each in found] == [(POOLED, "a", 6), (POOLED, "b", 6)]


@given(st.lists(st.floats(-1, 1), min_size=1, max_size=40))
def test_quantiles_are_those_of_numpy(values):
    expected = np.quantile(np.array(values), [0.05, 0.25, 0.5, 0.75, 0.95])
    assert list(quantiles(torch.tensor(values, dtype=torch.float64)).values()) == pytest.approx(list(expected))


def test_the_table_has_a_row_for_each_slide_and_kind_of_partners(tmp_path):
    slide = Redundancy("s,1", "features", torch.tensor([0.0, 0.5, 1.0]), torch.tensor([0.0, 0.0, 0.0]))
    write_table([slide], tmp_path / "new" / "r.csv")
    with (tmp_path / "new" / "r.csv").open(newline="") as file:
        near, far = csv.DictReader(file)
    assert (near["slide"], near["partners"], near["patches"], near["mean"]) == ("s,1", "neighbours", "3", "0.500000")
    assert (near["q05"], near["q75"]) == ("0.050000", "0.750000")
    assert (far["partners"], far["q95"]) == ("random", "0.000000")
    assert [p.name for p in (tmp_path / "new").iterdir()] == ["r.csv"]


def test_a_table_that_cannot_be_written_leaves_nothing_behind(tmp_path):
    (tmp_path / "r.csv").mkdir()
    with pytest.raises(UserError, match="cannot be written"):
        write_table([], tmp_path / "r.csv")
    assert [p.name for p in tmp_path.iterdir()] == ["r.csv"]
