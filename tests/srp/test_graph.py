"""PatchGraph against naive loops."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from reference import homogeneity, neighbour_lists, tolerant_lists

from gated_srp import PatchGraph, UserError
from gated_srp.srp.lattice import infer_stride


def lists(graph: PatchGraph) -> list[list[int]]:
    ends = graph.offsets.tolist()
    return [sorted(graph.neighbours[a:b].tolist()) for a, b in itertools.pairwise(ends)]


def dense_bag(count: int, side: int, seed: int) -> torch.Tensor:
    """Random cells of a small square, some shared."""
    return torch.randint(0, side, (count, 2), generator=torch.Generator().manual_seed(seed))


bags = st.builds(dense_bag, st.integers(1, 40), st.integers(2, 7), st.integers(0, 999))


@given(bags, st.sampled_from([3, 5, 7]), st.sampled_from([1, 224]), st.integers(-3000, 3000), st.booleans())
def test_a_neighbours_place_is_the_step_to_it(cells, window, stride, shift, exact):
    """Also after rows were added, left out, cut into parts and put together; a graph without places stays one."""
    graph = PatchGraph.from_coords(
        cells * stride + shift, stride=stride, window=window, lattice="exact" if exact else "floor"
    )
    at = torch.div(cells * stride + shift, stride, rounding_mode="floor")
    count = max(1, len(cells) // 2)
    several = PatchGraph.batch([graph, graph.first(count)]).with_isolated(before=1)
    owners = torch.arange(several.num_rows).repeat_interleave(several.neighbour_count)
    rows, found = ((one % (len(cells) + 1)) - 1 for one in (owners, several.neighbours))
    steps = at[found] - at[rows] + window // 2
    assert several.places.tolist() == (steps[:, 0] * window + steps[:, 1]).tolist()
    half = slice(len(cells) // 3, len(cells))
    assert torch.cat([graph.part(slice(0, half.start)).places, graph.part(half).places]).equal(graph.places)
    bare = PatchGraph(graph.neighbours, graph.offsets, graph.homogeneity, window, graph.lengths)
    assert bare.first(count).places is bare.part(half).places is PatchGraph.batch([bare, graph]).places is None
    assert bare.to("cpu").places is None and graph.to("cpu").places.equal(graph.places)
    most = max(window**2 - 1, int(graph.neighbour_count.max()))  # more where patches share a place
    assert (
        bare.most_listed
        == graph.most_listed
        == several.most_listed
        == PatchGraph.batch([bare, graph]).most_listed
        == most
    )


@given(bags, st.sampled_from([3, 5, 7]), st.sampled_from([1, 224, 512]), st.integers(-3000, 3000))
def test_floor_neighbours_equal_the_naive_loop(cells, window, stride, shift):
    coords = cells * stride + shift
    graph = PatchGraph.from_coords(coords, stride=stride, window=window)
    assert lists(graph) == neighbour_lists(coords, stride, window)
    assert graph.neighbour_count.tolist() == [len(found) for found in neighbour_lists(coords, stride, window)]


@given(bags, st.sampled_from([3, 5]), st.integers(0, 999))
def test_exact_neighbours_equal_the_naive_loop_on_shifted_lattices(cells, window, seed):
    draw = torch.Generator().manual_seed(seed)
    jitter = torch.randint(-80, 81, cells.shape, generator=draw)
    coords = cells * 512 + jitter
    graph = PatchGraph.from_coords(coords, stride=512, window=window, lattice="exact")
    assert lists(graph) == tolerant_lists(coords, 512, window)


@given(bags)
def test_the_lattices_agree_when_no_cell_is_shared(cells):
    coords = cells.unique(dim=0) * 256
    floor, exact = (PatchGraph.from_coords(coords, stride=256, lattice=name) for name in ("floor", "exact"))
    assert lists(floor) == lists(exact)


@given(
    bags,
    st.sampled_from([torch.float32, torch.float64]),
    st.sampled_from([0.1, 0.25, 1.0, 25.6, 64.6912, 256.0]),
    st.sampled_from([0, 0.3, 0.7]),
)
def test_float_and_negative_coordinates_work(cells, dtype, stride, start):
    """Products and quotients of microns are rounded: 5 * 25.6 // 25.6 is 4."""
    coords = (cells.to(dtype) - 3 + start) * stride
    graph = PatchGraph.from_coords(coords, stride=stride)
    assert lists(graph) == neighbour_lists(cells - 3, 1)
    assert graph.places.equal(PatchGraph.from_coords(cells - 3, stride=1).places)


@pytest.mark.parametrize("lattice", ["floor", "exact"])
@pytest.mark.parametrize("kind", ["uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32"])
def test_coordinates_of_every_integer_type_give_the_same_graph(kind, lattice):
    coords = torch.cartesian_prod(torch.arange(5), torch.arange(5)) * 8 - (0 if kind.startswith("u") else 16)
    wanted, found = (PatchGraph.from_coords(c, lattice=lattice) for c in (coords, coords.to(getattr(torch, kind))))
    assert lists(found) == lists(wanted) == tolerant_lists(coords, 8) and found.places.equal(wanted.places)


def test_whole_pixels_are_never_taken_for_rounding():
    coords = torch.tensor([[0.0, 0.0], [2047.0, 0.0], [4096.0, 0.0]])
    assert lists(PatchGraph.from_coords(coords, stride=2048)) == lists(
        PatchGraph.from_coords(coords.long(), stride=2048)
    )


@pytest.mark.parametrize("far", [2**40, 2**61])
def test_extreme_coordinates_do_not_overflow(far):
    coords = torch.tensor([[-far, -far], [-far + 1, -far], [far, far], [far, far - 1], [far, -far]])
    assert lists(PatchGraph.from_coords(coords, stride=1)) == [[1], [0], [3], [2], []]


def test_later_patches_of_a_cell_see_neighbours_but_are_nobodys():
    coords = torch.tensor([[0, 0], [10, 10], [512, 0]])  # the first two share a cell
    assert lists(PatchGraph.from_coords(coords, stride=512)) == [[2], [2], [0]]


@given(bags, st.sampled_from([3, 5]), st.sampled_from([torch.float32, torch.float16, torch.bfloat16]))
def test_homogeneity_equals_the_naive_loop(cells, window, dtype):
    features = torch.randn(len(cells), 6, generator=torch.Generator().manual_seed(len(cells))).to(dtype)
    features[::7] = 0
    graph = PatchGraph.from_coords(cells * 8, features, stride=8, window=window)
    expected = homogeneity(features.float(), neighbour_lists(cells * 8, 8, window))
    assert graph.homogeneity.dtype == torch.float32
    torch.testing.assert_close(graph.homogeneity, expected, atol=1e-6, rtol=0)


def test_homogeneity_of_more_rows_than_one_chunk():
    coords = torch.cartesian_prod(torch.arange(60), torch.arange(50))
    features = torch.randn(3000, 5, generator=torch.Generator().manual_seed(1))
    graph = PatchGraph.from_coords(coords, features, stride=1)
    unit = torch.nn.functional.normalize(features, dim=-1)
    for i in (0, 1, 1023, 1024, 2048, 2999):
        found = graph.neighbours[graph.offsets[i] : graph.offsets[i + 1]]
        assert float(graph.homogeneity[i]) == pytest.approx(float((unit[found] @ unit[i]).mean()), abs=1e-6)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_long_slide_s_halves_are_widened_in_parts_without_a_difference(dtype, monkeypatch):
    draw = torch.Generator().manual_seed(0)
    cells = torch.cartesian_prod(torch.arange(30), torch.arange(30))[torch.randperm(900, generator=draw)]
    features = torch.randn(900, 12, generator=draw).to(dtype)
    features[5] = 0
    expected = PatchGraph.from_coords(cells, features, stride=1).homogeneity
    widened = []
    monkeypatch.setattr("gated_srp.srp.graph.LONG", 100)
    monkeypatch.setattr("gated_srp.srp.graph._PART", 100)
    monkeypatch.setattr("gated_srp.srp.graph.wide", lambda x: widened.append(len(x)) or x.float())
    assert torch.equal(PatchGraph.from_coords(cells, features, stride=1).homogeneity, expected)
    assert 0 < max(widened) < 900


def test_without_features_homogeneity_is_zero():
    assert PatchGraph.from_grid(3, 3).homogeneity.tolist() == [0.0] * 9


def test_a_grid_is_row_by_row():
    graph = PatchGraph.from_grid(2, 3)
    assert lists(graph) == [[1, 3, 4], [0, 2, 3, 4, 5], [1, 4, 5], [0, 1, 4], [0, 1, 2, 3, 5], [1, 2, 4]]
    assert PatchGraph.from_grid(17, 17, window=5).most_neighbours == 24


def test_isolated_rows_shift_the_others():
    features = torch.randn(4, 3)
    graph = PatchGraph.from_coords(torch.tensor([[0, 0], [1, 0], [0, 1], [9, 9]]), features, stride=1)
    longer = graph.with_isolated(before=2, after=1)
    assert lists(longer) == [[], [], *[[j + 2 for j in found] for found in lists(graph)], []]
    assert longer.homogeneity.tolist() == [0, 0, *graph.homogeneity.tolist(), 0]
    assert (longer.before, longer.lengths) == (2, (4,))


def test_a_batch_is_one_flat_graph_and_isolated_rows_go_to_each_bag():
    small, large = PatchGraph.from_grid(1, 2), PatchGraph.from_grid(2, 2)
    both = PatchGraph.batch([small, large])
    assert lists(both) == [[1], [0], [], [], [5, 6, 7], [4, 6, 7], [4, 5, 7], [4, 5, 6]]
    assert lists(both.with_isolated(before=1)) == [[], [2], [1], [], [], [], [7, 8, 9], [6, 8, 9], [6, 7, 9], [6, 7, 8]]
    assert both.lengths == (2, 4)


def test_patches_are_the_columns_without_cls_and_padding():
    graph = PatchGraph.from_grid(1, 3).with_isolated(before=1, after=2)
    values = torch.arange(12.0).view(1, 2, 6)
    assert graph.patches(values).tolist() == [[1, 2, 3], [7, 8, 9]]


@given(st.sampled_from([112, 224, 256, 448, 512]), st.integers(0, 99))
def test_the_stride_is_inferred_from_a_sparse_lattice(stride, seed):
    coords = torch.cartesian_prod(torch.arange(12), torch.arange(12))
    kept = torch.randperm(144, generator=torch.Generator().manual_seed(seed))[:90]
    assert infer_stride(coords[kept] * stride + 37) == stride
    noisy = coords[kept].double() * stride
    assert infer_stride(noisy) == pytest.approx(stride, rel=0.01)


def test_a_graph_moves_as_a_whole():
    moved = PatchGraph.from_grid(2, 2).to("meta")
    assert {t.device.type for t in (moved.neighbours, moved.offsets, moved.homogeneity)} == {"meta"}


GRID = torch.cartesian_prod(torch.arange(5), torch.arange(5)) * 512


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"coords": GRID[:, 0]}, r"coords: shape \(25,\), expected \(N, 2\)"),
        ({"coords": GRID[:0]}, "at least one patch"),
        ({"coords": torch.full((3, 2), float("nan")), "stride": 1}, "NaN or infinite"),
        ({"coords": GRID, "features": torch.zeros(24, 3)}, "for 25 coordinates"),
        (
            {"coords": GRID, "features": torch.full((25, 3), float("nan"))},
            "25 of 25 rows are not finite.*first is row 0",
        ),
        ({"coords": GRID, "window": 4}, "window is 4: expected an odd number"),
        ({"coords": GRID, "window": 1}, "window is 1: expected an odd number"),
        ({"coords": GRID, "stride": 0}, "stride is 0: expected a positive number"),
        ({"coords": GRID, "stride": 256}, "0.000 neighbours per patch.*mostly 512 apart"),
        ({"coords": GRID, "lattice": "hexagon"}, "lattice is 'hexagon': expected 'floor'"),
        ({"coords": torch.tensor([[0, 0], [3, 7]])}, "cannot be inferred"),
    ],
)
def test_bad_input_is_refused_with_a_reason(arguments, message):
    with pytest.raises(UserError, match=message):
        PatchGraph.from_coords(**arguments)


def test_one_non_finite_row_is_named():
    features = torch.ones(25, 3)
    features[7, 1] = float("inf")
    with pytest.raises(UserError, match=r"1 of 25 rows .* first is row 7"):
        PatchGraph.from_coords(GRID, features)


def test_batches_of_unlike_graphs_are_refused():
    with pytest.raises(UserError, match="windows differ"):
        PatchGraph.batch([PatchGraph.from_grid(3, 3), PatchGraph.from_grid(3, 3, window=5)])
    with pytest.raises(UserError, match="graphs of patches alone"):
        PatchGraph.batch([PatchGraph.from_grid(3, 3).with_isolated(before=1)])


def test_the_first_patches_alone_have_the_graph_of_their_own_coordinates():
    draw = torch.Generator().manual_seed(0)
    coords = torch.randperm(100, generator=draw)[:60]
    coords = torch.stack([coords % 10, coords // 10], 1)
    whole = PatchGraph.from_coords(coords, stride=1)
    for count in (1, 17, 60):
        cut, own = whole.first(count), PatchGraph.from_coords(coords[:count], stride=1)
        assert torch.equal(cut.offsets, own.offsets) and cut.lengths == own.lengths and cut.num_rows == count
        for row in range(count):
            start, stop = own.offsets[row], own.offsets[row + 1]
            assert set(cut.neighbours[start:stop].tolist()) == set(own.neighbours[start:stop].tolist())
