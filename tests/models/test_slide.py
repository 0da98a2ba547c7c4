"""Slide models: against the textbook, paired, and through PyTorch's transformations."""

import copy

import pytest
import torch
from gated_srp_bench import textbook
from hypothesis import given
from hypothesis import strategies as st
from models.test_arms import bag as arm_bag
from models.test_arms import shaken
from torch.nn import functional as F

from gated_srp import GatedSRP, PatchGraph, UserError, trace
from gated_srp.models import build_model

SMALL = {"in_dim": 10, "num_outputs": 3, "dim": 24, "num_heads": 4, "num_landmarks": 8, "hidden_dim": 8}


def bag(count: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Features (1, count, 10) and coordinates on a loose lattice."""
    draw = torch.Generator().manual_seed(seed)
    side = max(2, int((2 * count) ** 0.5))
    cells = torch.cartesian_prod(torch.arange(side), torch.arange(side))
    cells = cells[torch.randperm(len(cells), generator=draw)[:count]]
    return torch.randn(1, len(cells), 10, generator=draw), cells * 256


def graph_of(features: torch.Tensor, coords: torch.Tensor, window: int = 3) -> PatchGraph:
    return PatchGraph.from_coords(coords, features[0], stride=256, window=window)


def awake(model: torch.nn.Module, seed: int = 0) -> torch.nn.Module:
    """Weights large enough that every part of the model shows in its output."""
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.2 * torch.randn(p.shape, generator=draw))
    return model.eval()


@given(st.integers(1, 120), st.sampled_from([3, 5]), st.booleans(), st.integers(0, 99))
def test_the_model_equals_the_textbook_in_logits_and_gradients(count, window, gated, seed):
    features, coords = bag(count, seed)
    ours = awake(build_model("gated_srp" if gated else "na", delta=1.5, seed=seed, **SMALL), seed).double()
    plain = textbook.SlideModel(
        10, 3, gated=gated, dim=24, num_heads=4, num_landmarks=8, delta=1.5, hidden_dim=8
    ).double()
    plain.load_state_dict(ours.state_dict())
    index, mask = textbook.neighbour_table(coords, 256, window)
    features = features.double()
    h_local = textbook.homogeneity(features[0], index, mask)
    graph = graph_of(features, coords, window)
    a, b = (features.clone().requires_grad_() for _ in range(2))
    mine, theirs = ours(a, graph)[0], plain(b[0], (index, mask, h_local))
    torch.testing.assert_close(mine, theirs, atol=2e-5, rtol=2e-5)  # pinv is float32 in both
    F.cross_entropy(mine, torch.tensor(1)).backward()
    F.cross_entropy(theirs, torch.tensor(1)).backward()
    torch.testing.assert_close(a.grad, b.grad, atol=2e-5, rtol=1e-3)
    grads = dict(plain.named_parameters())
    for name, p in ours.named_parameters():
        torch.testing.assert_close(p.grad, grads[name].grad, atol=5e-5, rtol=2e-3, msg=name)


def test_building_a_model_does_not_touch_the_global_random_stream():
    torch.manual_seed(1)
    expected = torch.rand(3)
    torch.manual_seed(1)
    build_model("gated_srp", **SMALL)
    assert torch.equal(torch.rand(3), expected)


def test_start_values_are_the_papers():
    model = build_model("gated_srp", **{**SMALL, "dim": 96})
    weight = model.blocks[0].mlp.fc1.weight
    assert float(weight.detach().std()) == pytest.approx(0.02, rel=0.05)
    assert model.blocks[0].attn.qkv.bias.abs().sum() == 0
    assert torch.equal(model.norm.weight, torch.ones(96))


@pytest.mark.parametrize(("hidden", "gate"), [(16, 111), (128, 671)])
def test_parameter_counts_are_the_papers(hidden, gate):
    sizes = {"in_dim": 1536, "num_outputs": 4}
    assert sum(p.numel() for p in build_model("na", **sizes).parameters()) == 7_723_780
    assert (
        sum(p.numel() for p in build_model("gated_srp", hidden_dim=hidden, **sizes).parameters())
        == 7_723_780 + 3 * gate
    )


def test_the_last_block_has_a_correction_only_for_xsa():
    assert isinstance(build_model("xsa", **SMALL).blocks[-1].correction, GatedSRP)
    assert build_model("gated_srp", **SMALL).blocks[-1].correction is None


def test_rows_of_a_dense_model_may_be_permuted():
    features, coords = bag(30)
    model = awake(build_model("vit4_gated_srp", **SMALL))
    order = torch.randperm(30, generator=torch.Generator().manual_seed(0))
    straight = model(features, graph_of(features, coords))
    permuted = model(features[:, order], graph_of(features[:, order], coords[order]))
    torch.testing.assert_close(permuted, straight, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("arm", ["vit4", "vit4_gated_srp", "vit4_diff"])
def test_bags_of_several_lengths_in_a_dense_batch_equal_one_by_one(arm):
    bags = [bag(n, n) for n in (5, 17, 30)]
    model = awake(build_model(arm, **SMALL))
    graphs = [graph_of(*b) for b in bags]
    padded = torch.cat([F.pad(f, (0, 0, 0, 30 - f.shape[1]), value=7.0) for f, _ in bags])
    together = model(padded, PatchGraph.batch(graphs))
    alone = torch.cat([model(f, g) for (f, _), g in zip(bags, graphs, strict=True)])
    torch.testing.assert_close(together, alone, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("arm", ["gated_srp", "xsa", "diff", "vit4_gated_srp"])
def test_gradients_add_up_in_memory_of_their_own(arm):
    """Gradients that shared memory would be counted several times by the second backward."""
    features, coords = bag(30)
    graph = graph_of(features, coords)
    model = awake(build_model(arm, **SMALL))
    model(features, graph).square().sum().backward()
    once = {name: p.grad.clone() for name, p in model.named_parameters()}
    model(features, graph).square().sum().backward()
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.grad, 2 * once[name], msg=name)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_features_are_widened(dtype):
    features, coords = bag(60)
    model = awake(build_model("gated_srp", **SMALL))
    half = features.to(dtype)
    graph = graph_of(half, coords)
    with torch.no_grad():
        torch.testing.assert_close(model(half, graph), model(half.float(), graph), atol=1e-6, rtol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("arm", ["gated_srp", "vit4_gated_srp"])
def test_a_compiled_model_gives_the_same_numbers(arm):
    features, coords = bag(25)
    graph = graph_of(features, coords)
    model = awake(build_model(arm, **{**SMALL, "depth": 2}))
    expected = model(features, graph)
    compiled = torch.compile(model, backend="aot_eager")
    got = compiled(features, graph)
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)
    a, b = (torch.autograd.grad(x.square().sum(), list(model.parameters())) for x in (got, expected))
    for p, q in zip(a, b, strict=True):
        torch.testing.assert_close(p, q, atol=1e-4, rtol=1e-3)


def test_slides_of_all_lengths_compile_twice_and_without_a_graph_break():
    """Once for the first length, once for all others: a set of lengths and a branch on the last segment made it once per length."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    model = awake(build_model("gated_srp", **{**SMALL, "depth": 2, "num_landmarks": 8}))
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    for patches in (20, 30, 9, 61):  # of 9 nothing is left after 5 segments of 2 rows
        features, coords = bag(patches)
        graph = graph_of(features, coords)
        torch.testing.assert_close(compiled(features, graph), model(features, graph), atol=1e-5, rtol=1e-4)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 2
    torch._dynamo.reset()


@pytest.mark.parametrize("name", ["gated_srp_scales", "two_scales_gated_srp"])
def test_arms_that_mix_neighbourhoods_compile_without_a_graph_break(name):
    """Boolean indexing by rings had made the number of their entries a size that only the data know."""
    torch._dynamo.reset()
    model, (features, graph) = shaken(name), arm_bag(name)
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(features, graph), model(features, graph), atol=1e-5, rtol=1e-4)
    torch._dynamo.reset()


def test_the_dense_model_exports():
    features, coords = bag(25)
    graph = graph_of(features, coords)
    model = awake(build_model("vit4_gated_srp", **{**SMALL, "depth": 2}))
    program = torch.export.export(model, (features, graph), strict=False)
    torch.testing.assert_close(program.module()(features, graph), model(features, graph), atol=1e-6, rtol=1e-5)


def test_deepcopy_and_state_dict_keep_the_numbers():
    features, coords = bag(25)
    graph = graph_of(features, coords)
    model = awake(build_model("gated_srp", **SMALL))
    other = build_model("gated_srp", seed=9, **SMALL).eval()
    other.load_state_dict(model.state_dict())
    for clone in (other, copy.deepcopy(model)):
        assert torch.equal(clone(features, graph), model(features, graph))


def test_drop_path_rises_over_depth_and_keeps_the_expectation():
    model = build_model("na", **{**SMALL, "drop_path": 0.4})
    keep = model.draw_keep(20_000, generator=torch.Generator().manual_seed(0))
    shares = (keep == 0).float().mean((1, 2)).tolist()
    assert shares == pytest.approx([0, 0.4 / 3, 0.8 / 3, 0.4], abs=0.01)
    assert keep.mean((1, 2)).tolist() == pytest.approx([1] * 4, abs=0.02)


def test_a_dropped_block_is_skipped():
    features, coords = bag(20)
    graph = graph_of(features, coords)
    model = awake(build_model("na", **SMALL)).train()
    keep = torch.zeros(4, 2, 1)
    x = torch.cat([model.cls_token, model.in_proj(features), model.in_proj(features)[:, :5]], 1)
    expected = model.head(model.norm(model.ppeg(x)[:, 0]))
    torch.testing.assert_close(model(features, graph, keep), expected)


def test_wrong_features_and_graphs_are_refused():
    features, coords = bag(20)
    graph = graph_of(features, coords)
    model = build_model("na", **SMALL)
    with pytest.raises(UserError, match=r"expected \(B, N, 10\).*features\[None\]"):
        model(features[0], graph)
    with pytest.raises(UserError, match="features of another encoder"):
        model(features[..., :4], graph)
    with pytest.raises(UserError, match="1 bags and 20 rows"):
        model(features[:, :10], graph)
    with pytest.raises(UserError, match="the model adds CLS and padding itself"):
        model(features, graph.with_isolated(before=1))


def test_an_unknown_arm_or_size_names_the_nearest():
    with pytest.raises(UserError, match="Did you mean 'gated_srp'"):
        build_model("gatedsrp", **SMALL)
    with pytest.raises(UserError, match="unknown size 'width'"):
        build_model("na", width=3, **SMALL)


def test_trace_records_what_the_layers_did():
    features, coords = bag(30)
    graph = graph_of(features, coords)
    model = awake(build_model("gated_srp", **SMALL))
    with trace(model) as seen, torch.no_grad():
        model(features, graph)
        model(features * 2, graph)  # only the first forward counts
    with trace(model) as again, torch.no_grad():
        model(features, graph)
    assert len(seen) == 4 and seen[3].beta is None and seen[3].correction is None
    for layer, same in zip(seen, again, strict=True):
        assert torch.equal(layer.cls_attention, same.cls_attention)
        assert layer.cls_attention.shape == (4, 30)
    lone = graph.neighbour_count == 0
    assert seen[0].beta.abs().min() > 0 and seen[0].correction[:, ~lone].min() > 0
    assert seen[0].correction[:, lone].abs().sum() == 0


def test_trace_survives_checkpointing_and_leaves_no_hooks():
    features, coords = bag(30)
    graph = graph_of(features, coords)
    model = awake(build_model("gated_srp", **SMALL))
    model.checkpointing = True
    with trace(model, attention=False) as seen:
        model(features, graph).sum().backward()
    assert seen[0].beta.shape == (4, 30) and seen[0].cls_attention is None
    assert not any(m._forward_hooks for m in model.modules())


def test_trace_says_when_nothing_was_seen():
    model = build_model("gated_srp", **SMALL)
    with pytest.raises(RuntimeError, match="none of the 4 layers"), trace(model):
        pass


@pytest.mark.parametrize("arm", ["na", "gated_srp"])
def test_a_model_of_one_block_trains_and_predicts_without_a_position(arm):
    features, coords = bag(20)
    model = build_model(arm, depth=1, **SMALL)
    model.train()(features, graph_of(features, coords)).sum().backward()
    assert model.head.weight.grad is not None and model.in_proj.weight.grad.abs().sum() > 0
    with torch.no_grad():
        assert torch.isfinite(model.eval()(features, graph_of(features, coords))).all()
