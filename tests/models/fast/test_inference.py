"""A prediction passes over a slide some rows at a time; it equals what the parts give when they are called as they are written."""

from contextlib import nullcontext

import pytest
import torch
from torch.nn.utils.parametrize import register_parametrization

from gated_srp import PatchGraph, UserError, trace
from gated_srp.machine import has_bf16
from gated_srp.models import build_model
from gated_srp.models.fast import one_pass, plain, plain_forwards
from gated_srp.models.fast.inference import RowLayer, Scratch
from gated_srp.models.fast.packed import packed_logits
from gated_srp.models.nystrom import NystromAttention
from gated_srp.models.thinned import thinned_logits

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


@pytest.fixture(scope="module")
def small(slide):
    return slide[0][:, :64], slide[1].first(64)


def trained(arm, seed=1):
    """A small model whose every number is away from its start: gates that are open, biases that are not zero."""
    model = build_model(arm, in_dim=8, num_outputs=3, dim=16, num_heads=2, drop_path=0.0).double().eval()
    draw = torch.Generator().manual_seed(seed)
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
        assert one_pass(watched, x=x) and plain(watched) and not plain(watched, torch.nn.Conv2d)
        watched.forward = lambda x: x  # some libraries wrap a layer so
        assert not plain(watched)


@pytest.mark.parametrize("name", ["mlp.fc1", "mlp.fc2", "attn.proj", "attn.qkv", "norm1", "norm2"])
@pytest.mark.parametrize("grad", [False, True])
def test_whoever_hooks_a_layer_sees_what_it_gave(name, grad, slide):
    model, kept = trained("gated_srp"), []
    expected = model(*slide).detach()
    layer = model.blocks[1].get_submodule(name)
    handle = layer.register_forward_hook(lambda module, args, output: kept.append((args[0], output)))
    with torch.set_grad_enabled(grad):
        logits = model(*slide)
    handle.remove()
    ((rows, given),) = kept
    assert rows.shape[:2] == (1, 2501)
    with torch.no_grad():
        torch.testing.assert_close(given, layer(rows))
    torch.testing.assert_close(logits, expected, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("name", ["mlp", "mlp.fc1", "mlp.fc2", "attn.proj", "attn.qkv", "attn", "correction", "norm1"])
def test_whoever_hooks_a_backward_sees_its_gradient(name, small):
    model, seen = trained("gated_srp"), []
    weights = list(model.parameters())
    expected = torch.autograd.grad(model(*small).sum(), weights)
    module = model.blocks[1].get_submodule(name)
    module.register_full_backward_hook(lambda module, into, out: seen.append(out[0].shape[-1]))
    found = torch.autograd.grad(model(*small).sum(), weights)
    assert len(seen) == 1
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)  # pinv is float32


class Doubled(torch.nn.Module):
    """As an adapter around a layer is: it shows the layer's weights, and computes more."""

    def __init__(self, layer):
        super().__init__()
        self.base = layer
        self.weight, self.bias, self.in_features = layer.weight, layer.bias, getattr(layer, "in_features", 0)

    def forward(self, x):
        return 2 * self.base(x)


LAYERS = [("gated_srp", f"blocks.1.{name}") for name in ("attn.qkv", "attn.proj", "mlp.fc1", "mlp.fc2")]
LAYERS += [("na", "blocks.3.attn.qkv"), ("diff", "blocks.1.attn.k_proj"), ("na", "ppeg.conv5")]


@pytest.mark.parametrize(("arm", "name"), LAYERS)
def test_a_wrapped_layer_whose_weights_would_be_read_past_it_is_refused(arm, name, small):
    (features, graph), model = small, trained(arm)
    model.set_submodule(name, Doubled(model.get_submodule(name)))
    calls = [lambda: model(features, graph), lambda: packed_logits(model, [(features[0], graph)] * 2)]
    calls.append(lambda: thinned_logits(model, features, graph, torch.arange(40)))
    for call in calls:
        with pytest.raises(UserError, match=rf"{name}: is a .*Doubled, but.*merge_and_unload"):
            call()


def test_adapters_of_the_first_and_the_last_layer_count(small):
    model, doubled = trained("gated_srp"), trained("gated_srp")
    for name in ("in_proj", "head"):
        model.set_submodule(name, Doubled(model.get_submodule(name)))
        with torch.no_grad():
            for parameter in doubled.get_submodule(name).parameters():
                parameter.mul_(2)
    for grad in (False, True):
        with torch.set_grad_enabled(grad):
            torch.testing.assert_close(model(*small), doubled(*small), atol=1e-9, rtol=1e-9)


@pytest.mark.parametrize("name", ["attn.qkv", "attn.proj", "mlp.fc1"])
def test_parametrized_weights_are_what_the_model_reads(name, small):
    class Twice(torch.nn.Module):
        def forward(self, weight):
            return 2 * weight

    model, doubled = trained("gated_srp"), trained("gated_srp")
    register_parametrization(model.blocks[1].get_submodule(name), "weight", Twice())
    with torch.no_grad():
        doubled.blocks[1].get_submodule(name).weight.mul_(2)
        torch.testing.assert_close(model(*small), doubled(*small), atol=1e-9, rtol=1e-9)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("gelu", [False, True])
def test_a_layer_laid_out_for_many_rows_gives_what_linear_gives(dtype, gelu):
    draw = torch.Generator().manual_seed(0)
    rows, weight, bias = (
        torch.randn(*shape, generator=draw, dtype=torch.float64) for shape in ((70, 24), (40, 24), (40,))
    )
    rows, weight, bias = (one.to(dtype) for one in (rows, weight, bias))
    expected = torch.nn.functional.linear(rows.double(), weight.double(), bias.double())
    expected = torch.nn.functional.gelu(expected) if gelu else expected
    for count in (70, 5000):
        layer = RowLayer(weight, bias, rows, count, gelu=gelu)
        laid_out = torch.float32 if not has_bf16() else dtype  # whatever oneDNN has on this processor
        assert layer.packed == (
            count == 5000 and dtype == laid_out != torch.float64 and torch.backends.mkldnn.is_available()
        )
        found = layer(rows)
        assert found.dtype == dtype
        close = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float64: 1e-12}[dtype]
        torch.testing.assert_close(found.double(), expected, atol=close * 10, rtol=close)
    without = RowLayer(weight, None, rows, 5000)(rows)
    torch.testing.assert_close(without + bias, RowLayer(weight, bias, rows, 5000)(rows), atol=0.1, rtol=0.02)


def test_predictions_are_as_close_to_the_truth_as_plain_forwards_of_their_precision(slide):
    """In float32 and bf16 rows pass in chunks through layers laid out for them, which adds nothing to the rounding: rms over models."""
    errors = {(precision, form): [] for precision in ("float32", "bf16") for form in ("fast", "plain")}
    features = slide[0].float()
    for seed in range(4):
        model = trained("gated_srp", seed)
        with plain_forwards(), torch.no_grad():
            truth = model(features.double(), slide[1])
        model = model.float()
        for precision, form in errors:
            half = torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16")
            with torch.no_grad(), half, plain_forwards() if form == "plain" else nullcontext():
                errors[precision, form].append((model(features, slide[1]) - truth).norm() / truth.norm())
    rms = {name: float(torch.stack(found).square().mean().sqrt()) for name, found in errors.items()}
    assert rms["float32", "fast"] < 1.5 * rms["float32", "plain"] < 1e-5
    assert rms["bf16", "fast"] < 1.5 * rms["bf16", "plain"] < 0.05


@pytest.mark.parametrize("arm", ["na", "gated_srp", "convit", "integral"])
def test_a_very_long_slide_in_halves_equals_the_plain_forward_within_their_rounding(arm, slide, monkeypatch):
    from gated_srp.models import block, fast
    from gated_srp.models.fast import long

    (features, graph), calls, errors = slide, [], []
    monkeypatch.setattr(long, "_LINES", 7)
    for name in ("nystrom_in_parts", "convolve_in_place"):
        real = getattr(long, name)
        monkeypatch.setattr(long, name, lambda *a, real=real, name=name: calls.append(name) or real(*a))

    def logits(model, dtype):
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=dtype != torch.float32):
            return model(features.to(dtype), graph).float()

    for seed in range(6):  # of one model alone a last bit of three logits would decide
        model = trained(arm, seed).float()
        exact, halves = logits(model, torch.float32), logits(model, torch.bfloat16)
        assert not calls
        with monkeypatch.context() as patched:
            patched.setattr(fast, "LONG", 1000)
            patched.setattr(block, "LONG", 1000)
            parts = logits(model, torch.bfloat16)
        first, *others = (type(block.attn) is NystromAttention for block in model.blocks)  # others as they are written
        assert calls == [*["nystrom_in_parts"] * first, "convolve_in_place", *["nystrom_in_parts"] * sum(others)]
        calls.clear()
        errors.append(torch.stack([parts - exact, halves - exact]))
        torch.testing.assert_close(parts, halves, atol=0.05 * float(exact.abs().max()), rtol=0)
    # In halves both are as far from float32 as their rounding: sums in float32 bring them no farther.
    in_parts, whole = torch.cat(errors, 1).square().mean((1, 2)).sqrt().tolist()
    assert in_parts <= 1.5 * whole


def test_a_convolution_in_place_equals_the_whole_one(monkeypatch):
    from gated_srp.models.fast import long

    draw = torch.Generator().manual_seed(0)
    square, weight = torch.randn(1, 17, 17, 5, generator=draw), torch.randn(5, 1, 7, 7, generator=draw)
    bias = torch.randn(5, generator=draw)
    whole = torch.nn.functional.conv2d(square.movedim(-1, 1), weight, bias, padding=3, groups=5).movedim(1, -1)
    for lines in (3, 4, 16, 17, 64):
        monkeypatch.setattr(long, "_LINES", lines)
        found = square.clone()
        long.convolve_in_place(found, weight, bias)
        torch.testing.assert_close(found, whole, atol=1e-5, rtol=1e-5)


def test_gradients_in_bf16_are_as_close_to_the_truth_as_those_of_plain_forwards(slide):
    features, graph = slide[0][:, :1100], slide[1].first(1100)
    errors = {"fast": [], "plain": []}
    for seed in range(6):
        model = trained("gated_srp", seed)
        weights = list(model.parameters())
        truth = torch.autograd.grad(model(features, graph).square().sum(), weights)
        model = model.float()
        for form, found in errors.items():
            with plain_forwards() if form == "plain" else nullcontext():
                with torch.autocast("cpu", torch.bfloat16):
                    logits = model(features.float(), graph)
                grads = torch.autograd.grad(logits.float().square().sum(), list(model.parameters()))
            found += [(a - b).norm() / b.norm() for a, b in zip(grads, truth, strict=True) if b.norm() > 0]
    middle = {form: float(torch.stack(found).median()) for form, found in errors.items()}
    assert middle["fast"] < 1.3 * middle["plain"] < 0.5
