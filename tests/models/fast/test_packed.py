"""Bags that go through a model together give what each gives alone, in value and in every gradient."""

from collections import Counter

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from gated_srp.models import build_model
from gated_srp.models.fast import plain_forwards
from gated_srp.models.fast.packed import packed_logits
from gated_srp.srp import PatchGraph

SIZES = {"in_dim": 10, "num_outputs": 3, "dim": 24, "num_heads": 4, "depth": 3, "num_landmarks": 8, "hidden_dim": 5}


def make_bags(*lengths):
    """Bags on a lattice with holes; lengths repeat, and 7 and 9 patches fill the same square."""
    bags = []
    for number, patches in enumerate(lengths):
        draw = torch.Generator().manual_seed(number)
        side = int((patches / 0.8) ** 0.5) + 1
        kept = torch.randperm(side * side, generator=draw)[:patches].sort().values
        features = torch.randn(patches, 10, generator=draw)
        bags.append((features, PatchGraph.from_coords(torch.stack([kept // side, kept % side], 1), features, stride=1)))
    return bags


def make_model(arm, **sizes):
    """With weights that are far from an identity."""
    model = build_model(arm, seed=0, **{**SIZES, "drop_path": 0.4, **sizes})
    with torch.no_grad():
        for number, (_, p) in enumerate(sorted(model.named_parameters())):
            p.add_(0.1 * torch.randn(p.shape, generator=torch.Generator().manual_seed(number)))
    return model.train()


def gradients(model, logits):
    slope = torch.linspace(-1, 1, logits.numel()).view_as(logits)
    found = torch.autograd.grad((logits * slope).sum(), list(model.parameters()), allow_unused=True)
    return {name: g for (name, _), g in zip(model.named_parameters(), found, strict=True)}


PAPER = [
    "na",
    "xsa",
    "diff",
    "gated_srp",
    "axis_own_value",
    "axis_slide_mean",
    "axis_random",
    "axis_shuffled",
    "adapter",
]
OTHERS = [
    "gated_srp_live",
    "vit4_gated_srp",
    "vit4_cog",
    "local_attention_gated_srp",
    "convit_gated_srp",
    "dgsa",
    "features_gated_srp",
]


@pytest.mark.parametrize("arm", PAPER + OTHERS)
def test_packed_bags_give_what_each_gives_alone_in_value_and_gradient(arm):
    model, bags = make_model(arm), make_bags(7, 30, 9, 1, 9, 20)
    keep = model.draw_keep(len(bags), generator=torch.Generator().manual_seed(5))
    assert (keep == 0).any() and (keep[1:] > 1).any()  # some branches are dropped, others count more
    alone = torch.cat([model(f[None], g, keep[..., i : i + 1]) for i, (f, g) in enumerate(bags)])
    together = packed_logits(model, bags, keep)
    torch.testing.assert_close(together, alone, atol=2e-5, rtol=1e-4)
    expected, found = gradients(model, alone), gradients(model, together)
    for name, gradient in expected.items():
        if gradient is None:
            assert found[name] is None, name
        else:
            scale = float(gradient.abs().max())
            torch.testing.assert_close(found[name], gradient, atol=1e-4 * scale + 1e-6, rtol=1e-3, msg=name)


@pytest.mark.parametrize("name", ["attn", "attn.qkv"])
def test_whoever_hooks_an_attention_sees_the_rows_of_packed_bags(name):
    model, bags, seen = make_model("gated_srp"), make_bags(9, 20, 9), []
    keep = model.draw_keep(3)
    expected = packed_logits(model, bags, keep)
    model.blocks[1].get_submodule(name).register_forward_hook(
        lambda module, args, output: seen.append(args[0].shape[:2])
    )
    torch.testing.assert_close(packed_logits(model, bags, keep), expected, atol=2e-5, rtol=1e-4)
    assert seen == [(2, 10), (1, 26)]  # CLS and the square, bags of equal rows together


def test_packed_bags_keep_their_own_covariates():
    model, bags = make_model("na", covariates=2), make_bags(30, 7, 20)
    bags = [(f, g.with_covariates(torch.tensor([[i, -3.0 * i]]))) for i, (f, g) in enumerate(bags, 1)]
    alone = torch.cat([model(f[None], g, model.draw_keep(1) * 0 + 1) for f, g in bags])
    torch.testing.assert_close(packed_logits(model, bags), alone, atol=2e-5, rtol=1e-4)


def test_models_that_change_what_enters_a_block_take_one_bag_at_a_time():
    one_by_one = ("vit4_tome", "cait", "split_norm", "abmil", "transmil", "vit_s16")
    assert not any(build_model(arm, **SIZES).packs for arm in one_by_one)


def test_recomputing_blocks_and_plain_forwards_change_nothing_for_packed_bags():
    model, bags = make_model("gated_srp"), make_bags(7, 9, 20)
    keep = model.draw_keep(3, generator=torch.Generator().manual_seed(1))
    logits = packed_logits(model, bags, keep)
    expected = gradients(model, logits)
    model.checkpointing = True
    again = gradients(model, packed_logits(model, bags, keep))
    model.checkpointing = False
    with plain_forwards():
        plain = packed_logits(model, bags, keep)
    torch.testing.assert_close(plain, logits, atol=1e-5, rtol=1e-4)
    for name, gradient in expected.items():
        assert torch.equal(again[name], gradient), name


def test_a_short_bag_s_zero_landmarks_count_as_one_without_a_difference():
    """8 landmarks for 5 rows: three are zero, and take part in every softmax."""
    model, bags = make_model("na", num_landmarks=40), make_bags(4, 3, 20)
    alone = torch.cat([model(f[None], g, model.draw_keep(1) * 0 + 1) for f, g in bags])
    torch.testing.assert_close(packed_logits(model, bags), alone, atol=1e-5, rtol=1e-4)


class Calls(TorchDispatchMode):
    """Counts operator calls that compute: views cost nothing, and are no launch on a GPU."""

    def __init__(self):
        super().__init__()
        self.found = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if not func.is_view:
            self.found[func.name()] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("lengths", [(9,) * 8, (7, 9, 12, 9, 16, 20, 25, 14)])
def test_packing_more_than_halves_the_operator_calls_of_a_window(lengths):
    model, bags = make_model("gated_srp"), make_bags(*lengths)
    keep = model.draw_keep(8, generator=torch.Generator().manual_seed(1))
    with Calls() as alone:
        for number, (features, graph) in enumerate(bags):
            model(features[None], graph, keep[..., number : number + 1]).sum().backward()
    with Calls() as together:
        packed_logits(model, bags, keep).sum().backward()
    assert sum(together.found.values()) < 0.5 * sum(alone.found.values())


class NoWaiting(TorchDispatchMode):
    """Refuses whatever would wait for a device: a value that Python asks for, a shape that depends on values."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        depends = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape} & set(func.tags)
        if (kwargs or {}).get("output_size") is not None:
            depends = set()
        elif func.name().startswith(("aten::index.", "aten::index_put")):  # a mask is counted first, numbers are not
            depends = {one.dtype for one in args[1] if one is not None} & {torch.bool, torch.uint8}
        assert not depends, func
        return func(*args, **(kwargs or {}))


_WAITS = [
    torch.nonzero,
    torch.bincount,
    torch.Tensor.unique,
    lambda x: bool(x.any()),
    lambda x: x[x > 0],
    lambda x: x.equal(x),
]
_WAITS += [lambda x: x.repeat_interleave(x), lambda x: x.masked_select(x > 0), lambda x: x.index_put_((x > 0,), x[0])]


@pytest.mark.parametrize("wait", _WAITS)
def test_what_would_wait_is_refused(wait):
    x = torch.tensor([1, 0, 2])
    with NoWaiting():
        x[x].any(), x.repeat_interleave(x, output_size=3), x.index_select(0, x), x.clone().index_put_((x,), x)  # do not
        with pytest.raises(AssertionError):
            wait(x)


@pytest.mark.parametrize("arm", [*PAPER, *OTHERS])
def test_no_step_and_no_prediction_waits_for_a_device(arm):
    model, bags = make_model(arm), make_bags(9, 20)
    keep = model.draw_keep(2)
    with NoWaiting():
        model(bags[0][0][None], bags[0][1], keep[..., :1]).sum().backward()
        packed_logits(model, bags, keep).sum().backward()
        with torch.no_grad():
            model.eval()(bags[0][0][None], bags[0][1])
