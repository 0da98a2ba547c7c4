"""The control without a direction: a gate's weights in a gate's place, blind to neighbours."""

import math

import pytest
import torch

from gated_srp import PatchGraph, trace
from gated_srp.models import build_model, load_model, save_model
from gated_srp.models.block import Adapter
from gated_srp.training.loop import GateRecorder

SMALL = {"in_dim": 10, "num_outputs": 3, "dim": 24, "num_heads": 4, "num_landmarks": 8, "hidden_dim": 8}


def trained(module: torch.nn.Module) -> torch.nn.Module:
    draw = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in module.parameters():
            p.copy_(torch.randn(p.shape, generator=draw))
    return module


def bag():
    """CLS, nine patches of a square, one padding row; y and v (1, 2, 11, 4)."""
    draw = torch.Generator().manual_seed(1)
    y, v = (torch.randn(1, 2, 11, 4, generator=draw) for _ in range(2))
    return y, v, PatchGraph.from_grid(3, 3).with_isolated(before=1, after=1)


def slide():
    draw = torch.Generator().manual_seed(2)
    coords = torch.cartesian_prod(torch.arange(6), torch.arange(5)) * 256
    features = torch.randn(1, 30, 10, generator=draw)
    return features, PatchGraph.from_coords(coords, features[0], stride=256)


def test_it_adds_a_bottleneck_of_each_heads_own_output():
    y, v, graph = bag()
    adapter = trained(Adapter(4, budget=16))
    down, up = adapter.down.weight.tolist(), adapter.up.weight.tolist()  # (2, 4), (4, 2)
    z = adapter(y, v, graph)[0]
    for head in range(2):
        for row in range(1, 10):
            x = y[0, head, row].tolist()
            hidden = [sum(w * a for w, a in zip(weights, x, strict=True)) for weights in down]
            active = [h * 0.5 * (1 + math.erf(h / math.sqrt(2))) for h in hidden]
            expected = [a + sum(w * g for w, g in zip(weights, active, strict=True)) for a, weights in zip(x, up)]  # noqa: B905
            assert z[head, row].tolist() == pytest.approx(expected, abs=1e-5)


def test_a_row_knows_nothing_of_its_neighbours():
    y, v, graph = bag()
    adapter = trained(Adapter(4, budget=16))
    y.requires_grad_()
    adapter(y, v, graph)[0, :, 5].sum().backward()
    touched = y.grad.abs().sum((0, 1, 3)) > 0
    assert touched.nonzero().flatten().tolist() == [5]
    assert torch.equal(adapter(y, torch.zeros_like(v), graph), adapter(y, v, graph))


def test_cls_padding_and_lone_patches_are_never_changed():
    y, v, graph = bag()
    z = trained(Adapter(4, budget=16))(y, v, graph)
    same = (z == y).all(3).all(1)[0]
    assert same.nonzero().flatten().tolist() == [0, 10]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_an_untrained_adapter_is_the_identity_bit_by_bit(dtype):
    y, v, graph = bag()
    z = Adapter(4, budget=16).to(dtype)(y.to(dtype), v.to(dtype), graph)
    assert torch.equal(z, y.to(dtype)) and z.dtype == dtype


def test_the_untrained_arm_is_bit_equal_to_the_base_and_learns():
    features, graph = slide()
    base, model = (build_model(arm, seed=3, **SMALL).eval() for arm in ("na", "adapter"))
    assert torch.equal(model(features, graph), base(features, graph))
    model(features, graph).square().sum().backward()
    assert [block.correction is not None for block in model.blocks] == [True, True, True, False]
    assert all(block.correction.up.weight.grad.abs().sum() > 0 for block in model.blocks[:3])


@pytest.mark.parametrize(
    ("hidden", "gate", "adapter"), [(16, 111, 128), (32, 191, 256), (64, 351, 384), (128, 671, 768)]
)
def test_it_has_at_least_the_weights_of_the_gate_that_it_stands_beside(hidden, gate, adapter):
    sizes = {"in_dim": 8, "num_outputs": 2, "hidden_dim": hidden}
    counts = [sum(p.numel() for p in build_model(arm, **sizes).parameters()) for arm in ("na", "gated_srp", "adapter")]
    assert [counts[1] - counts[0], counts[2] - counts[0]] == [3 * gate, 3 * adapter]


def test_start_values_follow_the_seed():
    first, again, other = (build_model("adapter", seed=seed, **SMALL).blocks[1].correction for seed in (1, 1, 2))
    assert torch.equal(first.down.weight, again.down.weight)
    assert not torch.equal(first.down.weight, other.down.weight)
    assert float(first.down.weight.detach().abs().max()) <= 1 / math.sqrt(6)  # PyTorch's Linear of 6 inputs
    assert not build_model("adapter", seed=1, **SMALL).blocks[0].correction.up.weight.any()


def test_it_is_saved_and_loaded_and_has_no_beta(tmp_path):
    features, graph = slide()
    model = trained(build_model("adapter", **SMALL)).eval()
    save_model(model, tmp_path / "m.safetensors")
    assert torch.equal(load_model(tmp_path / "m.safetensors").eval()(features, graph), model(features, graph))
    with trace(model) as seen:
        model(features, graph)
    assert [layer.beta for layer in seen] == [None] * 4
    assert GateRecorder(model).layers == []
