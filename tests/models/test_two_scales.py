"""Two magnifications in one bag: edges, parents, positions and axis against loops over patches, and where models refuse."""

import math

import pytest
import torch

from gated_srp import GatedSRP, PatchGraph
from gated_srp.data.two_scales import find_parents
from gated_srp.errors import UserError
from gated_srp.models import build_model
from gated_srp.models.two_scales import NeighboursAndParent, TwoScaleGraph

SMALL = {"in_dim": 6, "num_outputs": 2, "dim": 12, "num_heads": 2, "depth": 3, "num_landmarks": 4, "hidden_dim": 4}
STEP, RATIO = 256, 4


def places(generator, *, fine: int = 40, coarse: int = 5) -> tuple[torch.Tensor, torch.Tensor]:
    """Corners of fine and coarse patches with holes, in any order; some fine ones lie in no coarse one."""
    grid = torch.cartesian_prod(torch.arange(12), torch.arange(8))
    some = grid[torch.randperm(len(grid), generator=generator)[:fine]]
    large = torch.cartesian_prod(torch.arange(3), torch.arange(2))[torch.randperm(6, generator=generator)[:coarse]]
    return some * STEP, large * STEP * RATIO


def graph_of(fine: torch.Tensor, coarse: torch.Tensor, features: torch.Tensor | None = None) -> TwoScaleGraph:
    own = None if features is None else features.split([len(fine), len(coarse)])
    graphs = [
        PatchGraph.from_coords(xy, None if own is None else own[n], stride=step)
        for n, (xy, step) in enumerate(((fine, STEP), (coarse, STEP * RATIO)))
    ]
    return TwoScaleGraph.of(*graphs, *find_parents(fine, coarse, (STEP, STEP * RATIO)))


def parents_by_hand(fine, coarse, sides) -> dict[int, int]:
    """Patch by patch: every coarse square that holds the centre, the nearest, the first."""
    found = {}
    for i, (x, y) in enumerate(fine.tolist()):
        x, y, best = x + sides[0] / 2, y + sides[0] / 2, math.inf
        for j, (a, b) in enumerate(coarse.tolist()):
            far = max(abs(x - a - sides[1] / 2), abs(y - b - sides[1] / 2))
            if a <= x < a + sides[1] and b <= y < b + sides[1] and far < best:
                found[i], best = j, far
    return found


@pytest.mark.parametrize("sides", [(256, 1024), (256, 1536), (300, 900.5), (512, 1024)])
def test_a_parent_is_the_coarse_patch_around_the_childs_centre(sides, generator):
    """Overlapping squares, lattices of several origins, negative positions, centres on edges."""
    for draw in range(4):
        fine, coarse = places(generator)
        if draw % 2:
            fine, coarse = fine - 1000, torch.cat([coarse, coarse[:3] + 200]) - 1000
        children, parents = find_parents(fine, coarse, sides)
        assert dict(zip(children.tolist(), parents.tolist(), strict=True)) == parents_by_hand(fine, coarse, sides)
        assert len(children) and children.tolist() == sorted(children.tolist())


def test_edges_lie_within_a_scale_and_lead_from_children_to_parents_alone(generator):
    fine, coarse = places(generator)
    graph, wanted = graph_of(fine, coarse), parents_by_hand(fine, coarse, (STEP, STEP * RATIO))
    assert 0 < len(wanted) < len(fine)
    rows = graph.with_isolated(before=1, after=2)
    for i in range(1 + len(fine) + len(coarse) + 2):
        near = sorted(rows.neighbours[rows.offsets[i] : rows.offsets[i + 1]].tolist())
        above = rows.parents[rows.parent_offsets[i] : rows.parent_offsets[i + 1]].tolist()
        expected: list[int] = []
        for first, places_, step in ((1, fine, STEP), (1 + len(fine), coarse, STEP * RATIO)):
            if first <= i < first + len(places_):
                apart = (places_ - places_[i - first]).abs().amax(1)
                expected = [first + j for j in range(len(places_)) if 0 < apart[j] <= step]
        assert near == expected
        mine = wanted.get(i - 1)
        assert above == ([] if mine is None or i > len(fine) else [1 + len(fine) + mine])
    part = rows.part(slice(3, 9))
    listed = [part.parents[a:b].tolist() for a, b in zip(part.parent_offsets, part.parent_offsets[1:], strict=False)]
    assert listed == [[1 + len(fine) + wanted[i - 1]] if i - 1 in wanted else [] for i in range(3, 9)]


def axis_by_hand(v, direction, rows, row, head):
    logits, axes = [], []
    lists = ((rows.neighbours, rows.offsets, 8), (rows.parents, rows.parent_offsets, 1))
    for place, (near, ends, most) in enumerate(lists):
        values = [v[j, head] for j in near[ends[row] : ends[row + 1]].tolist()]
        total = sum(values) if values else torch.zeros(v.shape[-1]).double()
        agree = total.norm() / sum(one.norm() for one in values) if values else torch.tensor(0.0)
        facts = torch.stack([torch.tensor(len(values) / most), agree]).double()
        logits.append(direction.weight[head] @ facts + direction.bias[head, place])
        axes.append(total / total.norm() if values else total)
    first, second = torch.stack(logits).softmax(0)
    return first * axes[0] + second * axes[1]


def test_the_axis_mixes_the_neighbours_mean_and_the_parents_value(generator):
    fine, coarse = places(generator)
    fine[-1] += 100 * STEP * RATIO  # neither neighbours nor parent
    fine[-2] = coarse[0] + torch.tensor([STEP // 3, STEP // 3])
    rows = graph_of(fine, coarse).with_isolated(before=1, after=3)
    direction = NeighboursAndParent(2).double()
    for parameter in direction.parameters():
        torch.nn.init.normal_(parameter, generator=generator)
    v = torch.randn(rows.num_rows, 2, 5, generator=generator).double()
    found = direction(v, rows)
    for row in range(rows.num_rows):
        for head in range(2):
            torch.testing.assert_close(found[row, head], axis_by_hand(v, direction, rows, row, head))
    lone = len(fine)  # the last fine row, after CLS
    assert not found[0].any() and not found[lone].any() and not found[-3:].any()
    srp = GatedSRP(2, direction=direction).double()
    y = torch.randn(1, 2, rows.num_rows, 5, generator=generator).double()
    values = v.transpose(0, 1)[None]
    assert torch.equal(srp(y, values, rows), y)  # shut at the start
    for parameter in srp.coefficient.parameters():
        torch.nn.init.normal_(parameter, generator=generator)
    z = srp(y, values, rows)
    with torch.no_grad():
        torch.testing.assert_close(srp.by_rows(values, rows)(y, slice(0, rows.num_rows)), z[0].transpose(0, 1))
    z.square().sum().backward()
    assert all(p.grad.any() for p in direction.parameters())


def shaken(name: str, generator):
    model = build_model(name, **SMALL).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn(parameter.shape, generator=generator))
    return model


@pytest.mark.parametrize("name", ["two_scales", "two_scales_gated_srp"])
def test_positions_are_convolved_on_the_square_of_each_scale(name, generator):
    """PPEG's three kernels, written out: fine patches and the first of them again up to a square, coarse ones likewise."""
    model = shaken(name, generator)
    fine, coarse = places(generator, fine=11, coarse=5)
    features = torch.randn(1, 16, 6, generator=generator)
    x, rows = model.tokens(features, graph_of(fine, coarse))
    assert x.shape[1] == 1 + 16 + 5 + 4 and torch.equal(x[0, 17:22], x[0, 1:6]) and torch.equal(x[0, 22:], x[0, 12:16])
    fresh = torch.randn(x.shape, generator=generator)
    found = model.positions(fresh, rows)
    assert torch.equal(found[0, 0], fresh[0, 0])
    for kept, fill, side in (((1, 12), (17, 22), 4), ((12, 17), (22, 26), 3)):
        square = torch.cat([fresh[0, slice(*kept)], fresh[0, slice(*fill)]]).T.reshape(1, 12, side, side)
        wanted = square + model.ppeg.conv7(square) + model.ppeg.conv5(square) + model.ppeg.conv3(square)
        got = torch.cat([found[0, slice(*kept)], found[0, slice(*fill)]])
        torch.testing.assert_close(got, wanted.reshape(12, -1).T, atol=1e-5, rtol=1e-5)


def test_rows_of_each_scale_may_be_permuted(generator):
    """The axis of every patch stays; PPEG and Nystrom's landmarks see an order, as in NA."""
    fine, coarse = places(generator)
    features = torch.randn(45, 6, generator=generator)
    direction, v = NeighboursAndParent(2), torch.randn(45, 2, 5, generator=generator)
    for parameter in direction.parameters():
        torch.nn.init.normal_(parameter, generator=generator)
    one, two = torch.randperm(40, generator=generator), torch.randperm(5, generator=generator)
    order = torch.cat([one, 40 + two])
    graph, other = graph_of(fine, coarse, features), graph_of(fine[one], coarse[two], features[order])
    torch.testing.assert_close(direction(v, graph)[order], direction(v[order], other), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(graph.homogeneity[order], other.homogeneity)


def test_without_coarse_patches_it_is_na_and_with_them_it_is_not(generator):
    fine, coarse = places(generator, fine=13)
    features = torch.randn(1, 18, 6, generator=generator)
    none = torch.zeros(0, dtype=torch.long)
    empty = PatchGraph(none, torch.zeros(1, dtype=torch.long), torch.zeros(0), 3, (0,), places=none.byte())
    alone = PatchGraph.from_coords(fine, stride=STEP)
    model, na = build_model("two_scales", seed=5, **SMALL).eval(), build_model("na", seed=5, **SMALL).eval()
    expected = na(features[:, :13], alone)
    assert torch.equal(model(features[:, :13], TwoScaleGraph.of(alone, empty, none, none)), expected)
    assert not torch.allclose(model(features, graph_of(fine, coarse)), expected)


def test_a_model_refuses_bags_of_another_number_of_magnifications(generator):
    fine, coarse = places(generator, fine=9)
    features, both, one = torch.randn(1, 14, 6), graph_of(fine, coarse), PatchGraph.from_grid(2, 7)
    for name in ("na", "gated_srp", "abmil", "patch_gcn"):
        with pytest.raises(UserError, match="patches of 2 magnifications, but the model takes 1"):
            build_model(name, **SMALL)(features, both)
    with pytest.raises(UserError, match="patches of 1 magnification, but the model takes 2"):
        build_model("two_scales", **SMALL)(features, one)
    with pytest.raises(UserError, match="graphs of patches alone"):
        PatchGraph.batch([both, both])
