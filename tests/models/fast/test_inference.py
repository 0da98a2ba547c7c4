"""A prediction passes over a slide some rows at a time; it equals what the parts give when they are called as they are written."""

import pytest
import torch

from gated_srp import PatchGraph, trace
from gated_srp.models import build_model
from gated_srp.models.fast import one_pass, plain_forwards
from gated_srp.models.fast.inference import Scratch

ARMS = [
    "na",
    "gated_srp",
    "xsa",
    "diff",
    "adapter",
    "axis_slide_mean",
    "axis_shuffled",
    "gated_srp_live",
    "vit4",
    "vit4_gated_srp",
]
PATCHES = 2500  # two chunks of rows


@pytest.fixture(scope="module")
def slide():
    draw = torch.Generator().manual_seed(0)
    features = torch.randn(PATCHES, 8, generator=draw, dtype=torch.float64)
    coords = torch.stack([torch.arange(PATCHES) % 50, torch.arange(PATCHES) // 50], 1) * 256
    return features[None], PatchGraph.from_coords(coords, features, stride=256)


def trained(arm):
    """A small model whose every number is away from its start: gates that are open, biases that are not zero."""
    model = build_model(arm, in_dim=8, num_outputs=3, dim=16, num_heads=2, drop_path=0.0).double().eval()
    draw = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        parameter.data += 0.3 * torch.randn(parameter.shape, generator=draw, dtype=torch.float64)
    return model


@pytest.mark.parametrize("arm", ARMS)
def test_logits_and_gradients_equal_those_of_the_plain_forward(arm, slide):
    model = trained(arm)
    weights = list(model.parameters())

    def gradients(logits):
        return torch.autograd.grad(logits.square().sum(), weights, allow_unused=True)

    with plain_forwards():
        plain = model(*slide)
        expected = gradients(plain)
    logits = model(*slide)
    torch.testing.assert_close(logits, plain, atol=1e-6, rtol=1e-6)  # pinv is float32
    for ours, theirs in zip(gradients(logits), expected, strict=True):
        if theirs is not None:
            torch.testing.assert_close(ours, theirs, atol=1e-4 * float(theirs.abs().max()), rtol=1e-4)
    with torch.no_grad():
        torch.testing.assert_close(model(*slide), logits.detach(), atol=1e-9, rtol=1e-9)


def test_a_trace_sees_the_gates_of_all_rows(slide):
    model = trained("gated_srp")
    with trace(model) as plain:
        model(*slide)
    with torch.no_grad(), trace(model) as seen:
        model(*slide)
    for a, b in zip(seen[:3], plain[:3], strict=True):
        assert a.beta.shape == (2, PATCHES)
        for name in ("beta", "correction", "cls_attention"):
            torch.testing.assert_close(getattr(a, name), getattr(b, name).detach(), atol=1e-9, rtol=1e-9)


def test_a_block_leaves_its_input_alone_unless_its_memory_is_lent(slide):
    model = trained("gated_srp")
    block = model.blocks[1]
    with torch.no_grad():
        x, graph = model.tokens(*slide)
        kept = x.clone()
        expected = block(x, graph)
        assert torch.equal(x, kept)
        result = block(x, graph, scratch=Scratch())
    assert result is x and torch.equal(x, expected)


@pytest.mark.parametrize("name", ["in_proj", "blocks.0", "ppeg", "blocks.1", "blocks.2"])
def test_what_a_hook_keeps_is_not_written_over_afterwards(name, slide):
    model, kept = trained("gated_srp"), []
    model.get_submodule(name).register_forward_hook(lambda module, args, output: kept.append(output))
    plain = model(*slide)
    with torch.no_grad():
        logits = model(*slide)
    torch.testing.assert_close(kept[1], kept[0].detach(), atol=1e-9, rtol=1e-9)
    torch.testing.assert_close(logits, plain.detach(), atol=1e-9, rtol=1e-9)


def test_whoever_hooks_the_attention_sees_all_its_rows(slide):
    model, seen = trained("gated_srp"), []
    model.blocks[0].attn.register_forward_hook(lambda module, args, output: seen.append(output[0].shape))
    with torch.no_grad():
        model(*slide)
    assert seen == [(1, 2, 2501, 8)]


def test_half_precision_by_rows_equals_half_precision_at_once(slide):
    model = trained("gated_srp").float()
    features, graph = slide[0].float(), slide[1]
    with torch.autocast("cpu", torch.bfloat16):
        plain = model(features, graph).detach()
        with torch.no_grad():
            torch.testing.assert_close(model(features, graph), plain, atol=0.05, rtol=0.05)


def test_one_place_says_when_a_prediction_passes_in_one_go():
    watched, x = torch.nn.Linear(2, 2), torch.zeros(1, 3, 2)
    assert not one_pass(x=x)  # a gradient is wanted
    with torch.no_grad():
        assert one_pass(watched, None, x=x)
        assert not one_pass(x=torch.cat([x, x]))  # several bags
        assert not one_pass(x=x, keep=torch.ones(2, 1))  # drop path
        with plain_forwards():
            assert not one_pass(x=x)
        handle = watched.register_forward_pre_hook(lambda *_: None)
        assert not one_pass(watched, x=x)
        handle.remove()
        assert one_pass(watched, x=x)


@pytest.mark.parametrize("name", ["mlp.fc1", "mlp.fc2", "attn.proj"])
@pytest.mark.parametrize("grad", [False, True])
def test_whoever_hooks_a_linear_layer_sees_what_it_gave(name, grad, slide):
    model, kept = trained("gated_srp"), []
    layer = model.blocks[1].get_submodule(name)
    layer.register_forward_hook(lambda module, args, output: kept.append((args[0], output)))
    with torch.set_grad_enabled(grad):
        model(*slide)
    ((rows, given),) = kept
    with torch.no_grad():
        torch.testing.assert_close(given, torch.nn.functional.linear(rows, layer.weight, layer.bias))
