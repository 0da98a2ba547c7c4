"""GatedSRP as a whole: invariants and agreement with the naive loops."""

import copy
import pickle

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from reference import gated, neighbour_lists
from torch import nn
from torch.nn import functional as F

from gated_srp import GatedSRP, PatchGraph, UserError
from gated_srp.srp import (
    FixedCoefficient,
    NeighbourMean,
    OwnValue,
    RandomDirection,
    ShuffledNeighbours,
    SignedGate,
    SlideMean,
)


def trained(module: GatedSRP, seed: int = 0) -> GatedSRP:
    """A gate that does something."""
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in module.parameters():
            p.copy_(torch.randn(p.shape, generator=draw))
    return module


def bag(count: int = 12, side: int = 5, seed: int = 0, dtype: torch.dtype = torch.float32):
    """y, v (1, 2, count, 4), coordinates and the graph; some patches lone, some cells shared."""
    draw = torch.Generator().manual_seed(seed)
    coords = torch.randint(0, side, (count, 2), generator=draw) * 16
    coords[-1] = 10_000
    features = torch.randn(count, 6, generator=draw)
    y, v = (torch.randn(1, 2, count, 4, generator=draw).to(dtype) for _ in range(2))
    return y, v, coords, PatchGraph.from_coords(coords, features, stride=16)


@given(st.integers(2, 15), st.integers(1, 5), st.integers(0, 999), st.sampled_from([0.5, 2.0]))
def test_the_operator_equals_the_naive_loops(count, side, seed, delta):
    y, v, coords, graph = bag(count, side, seed)
    module = trained(GatedSRP(2, delta=delta, hidden_dim=8), seed)
    expected = gated(
        y[0], v[0], neighbour_lists(coords, 16), graph.homogeneity, module.coefficient.state_dict(), delta, 8
    )
    torch.testing.assert_close(module(y, v, graph)[0], expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
def test_an_untrained_module_is_the_identity_bit_by_bit(dtype):
    y, v, _, graph = bag(dtype=dtype)
    assert torch.equal(GatedSRP(2)(y, v, graph), y)


@pytest.mark.parametrize("direction", [NeighbourMean(), SlideMean(), RandomDirection(2, 4), ShuffledNeighbours()])
def test_cls_padding_and_lone_patches_are_unchanged_under_an_active_gate(direction):
    _, _, _, patches = bag()
    graph = patches.with_isolated(before=1, after=3)
    y, v = torch.randn(1, 2, 16, 4), torch.randn(1, 2, 16, 4)
    z = trained(GatedSRP(2, direction=direction))(y, v, graph)
    alone = graph.neighbour_count == 0
    assert alone.tolist() == [True, *(patches.neighbour_count == 0).tolist(), True, True, True]
    assert torch.equal(z[:, :, alone], y[:, :, alone])
    assert not torch.isclose(z[:, :, ~alone], y[:, :, ~alone]).all(-1).any()


def test_xsa_removes_the_own_value_from_every_row():
    y, v, _, graph = bag()
    z = GatedSRP(2, direction=OwnValue(), coefficient=FixedCoefficient(1.0))(y, v, graph.with_isolated())
    expected = y - (y * v).sum(-1, keepdim=True) / (v * v).sum(-1, keepdim=True) * v
    torch.testing.assert_close(z, expected)


def test_the_slide_mean_control_uses_each_bags_own_patches():
    first, second = PatchGraph.from_grid(2, 2), PatchGraph.from_grid(1, 3)
    graph = PatchGraph.batch([first, second]).with_isolated(before=1)
    v = torch.randn(2, 2, 5, 3)
    axis = SlideMean()(v.transpose(1, 2).flatten(0, 1), graph).view(2, 5, 2, 3)
    torch.testing.assert_close(axis[0, 1], v[0, :, 1:5].mean(1))
    torch.testing.assert_close(axis[1, 2], v[1, :, 1:4].mean(1))
    assert axis[:, 0].abs().sum() == axis[1, 4].abs().sum() == 0


def test_shuffled_neighbours_are_a_fixed_permutation_of_the_same_patches():
    graph = PatchGraph.from_grid(5, 5).with_isolated(before=1)
    v = torch.randn(26, 1, 3)
    axis = ShuffledNeighbours()(v, graph)
    assert torch.equal(axis, ShuffledNeighbours()(v, graph))
    assert not torch.allclose(axis[1:], NeighbourMean()(v, graph)[1:])
    marked = torch.zeros(26, 1, 1)
    marked[1:] = 1
    assert ShuffledNeighbours()(marked, graph)[1:].flatten().tolist() == [1.0] * 25  # CLS never enters


def test_gradients_pass_gradcheck_where_nothing_is_detached():
    y, v, _, graph = bag(6, 3, dtype=torch.float64)
    live = trained(GatedSRP(2, coefficient=SignedGate(2, hidden_dim=4, live=True)).double())
    assert torch.autograd.gradcheck(lambda a: live(a, v, graph), y.requires_grad_())
    xsa = GatedSRP(2, direction=OwnValue(), coefficient=FixedCoefficient(1.0))
    assert torch.autograd.gradcheck(lambda a, b: xsa(a, b, graph), (y.requires_grad_(), v.requires_grad_()))


def test_the_default_gradient_takes_beta_as_a_number_measured_beforehand():
    y, v, _, graph = bag(6, 3, dtype=torch.float64)
    module = trained(GatedSRP(2, hidden_dim=4).double())
    seen = []
    module.coefficient.register_forward_hook(lambda _m, _a, beta: seen.append(beta.detach()))
    module(y, v, graph)
    fixed = copy.deepcopy(module)
    fixed.coefficient = FixedCoefficient(0.0)
    fixed.coefficient.forward = lambda component, norm, graph: seen[0]
    grads = [torch.autograd.grad(m(y.requires_grad_(), v, graph).pow(3).sum(), y)[0] for m in (module, fixed)]
    torch.testing.assert_close(grads[0], grads[1])
    assert torch.autograd.gradcheck(lambda a: fixed(a, v, graph), y.requires_grad_())


def test_by_default_no_gradient_reaches_the_values_and_all_gate_parameters_get_one():
    y, v, _, graph = bag()
    module = trained(GatedSRP(2, hidden_dim=8))
    v.requires_grad_()
    module(y.requires_grad_(), v, graph).square().sum().backward()
    assert v.grad is None
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in module.parameters())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_fused_output_projection_equals_the_plain_one(dtype):
    y, v, _, graph = bag(dtype=dtype)
    layer = nn.Linear(8, 5).to(dtype)
    results = []
    for fused in (False, True):
        module = trained(GatedSRP(2, hidden_dim=8)).to(dtype)
        a = y.clone().requires_grad_()
        merged = module.linear(a, v, graph, layer) if fused else layer(module(a, v, graph).transpose(1, 2).flatten(2))
        layer.zero_grad()
        merged.square().sum().backward()
        results.append([merged, a.grad, layer.weight.grad, layer.bias.grad, *(p.grad for p in module.parameters())])
    for plain, fast in zip(*results, strict=True):
        torch.testing.assert_close(fast, plain)


def test_zero_vectors_give_no_nan_in_any_dtype():
    _, _, _, graph = bag()
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        y, v = (
            torch.zeros(1, 2, 12, 4, dtype=dtype, requires_grad=True),
            torch.zeros(1, 2, 12, 4, dtype=dtype, requires_grad=True),
        )
        for module in (GatedSRP(2), GatedSRP(2, direction=OwnValue(), coefficient=FixedCoefficient(1.0))):
            z = trained(module)(y, v, graph)
            z.float().sum().backward()
            assert torch.equal(z, torch.zeros_like(z))
            assert torch.isfinite(y.grad).all()


def test_rows_may_be_permuted():
    y, v, coords, _ = bag(14, 20)  # cells are not shared, so no patch is privileged
    features = torch.randn(14, 6)
    order = torch.randperm(14)
    module = trained(GatedSRP(2))
    straight = module(y, v, PatchGraph.from_coords(coords, features, stride=16))
    permuted = module(y[:, :, order], v[:, :, order], PatchGraph.from_coords(coords[order], features[order], stride=16))
    torch.testing.assert_close(permuted, straight[:, :, order])


def test_a_batch_equals_its_bags():
    module = trained(GatedSRP(2))
    graphs = [bag(9, 3, 1)[3], bag(12, 4, 2)[3]]
    y, v = torch.randn(2, 2, 12, 4), torch.randn(2, 2, 12, 4)
    both = module(y, v, PatchGraph.batch(graphs))
    for i, graph in enumerate(graphs):
        rows = graph.num_rows
        torch.testing.assert_close(
            both[i : i + 1, :, :rows], module(y[i : i + 1, :, :rows], v[i : i + 1, :, :rows], graph)
        )


def test_state_dict_deepcopy_and_pickle_keep_the_numbers():
    y, v, _, graph = bag()
    module = trained(GatedSRP(2))
    expected = module(y, v, graph)
    other = GatedSRP(2)
    other.load_state_dict(module.state_dict())
    for clone in (other, copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert torch.equal(clone(y, v, graph), expected)


def test_wrong_shapes_are_refused_with_what_to_do():
    y, v, _, graph = bag()
    module = GatedSRP(2)
    with pytest.raises(UserError, match=r"expected both \(B, 2, L, D\)"):
        module(y[0], v[0], graph)
    with pytest.raises(UserError, match="before the output projection"):
        module(y, v[..., :2], graph)
    with pytest.raises(UserError, match=r"graph has 12 rows, y has 1 x 13.*with_isolated"):
        module(F.pad(y, (0, 0, 1, 0)), F.pad(v, (0, 0, 1, 0)), graph)


def test_rows_in_several_chunks_give_what_one_pass_gives_in_value_and_gradient():
    graph = PatchGraph.from_grid(33, 40).with_isolated(before=1)  # 1,321 rows: two chunks
    layer, module = nn.Linear(6, 5).double(), trained(GatedSRP(2)).double()
    y, v = (torch.randn(1, 2, 1321, 3, dtype=torch.float64) for _ in range(2))
    y.requires_grad_()
    inputs = [y, *module.parameters(), *layer.parameters()]
    plain = layer(module(y, v, graph).transpose(1, 2).flatten(2))
    fast = module.linear(y, v, graph, layer)
    torch.testing.assert_close(fast, plain)
    upstream = torch.randn_like(plain)
    ours = torch.autograd.grad(fast, inputs, upstream)
    for a, b in zip(ours, torch.autograd.grad(plain, inputs, upstream), strict=True):
        torch.testing.assert_close(a, b)
