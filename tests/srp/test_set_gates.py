"""What-ifs: gates set to a number, everywhere or in some layers, patches or regimes."""

import pytest
import torch

from gated_srp import PatchGraph, trace
from gated_srp.models import build_model
from gated_srp.models.fast import plain_forwards
from gated_srp.srp.coefficient import regimes
from gated_srp.srp.trace import set_gates

N = 1500  # more rows than pass through a block at once


@pytest.fixture(scope="module")
def slide():
    generator = torch.Generator().manual_seed(1)
    coords = torch.cartesian_prod(torch.arange(40), torch.arange(40))[:N] * 256
    features = torch.randn(N, 16, generator=generator)
    return features[None], PatchGraph.from_coords(coords, features, stride=256)


@pytest.fixture(scope="module")
def model():
    """Gates that have left the identity, each patch in another way."""
    model = build_model("gated_srp", in_dim=16, num_outputs=3, seed=1, dim=96).eval()
    generator = torch.Generator().manual_seed(2)
    for name, parameter in model.named_parameters():
        if "correction" in name:
            parameter.data = 0.3 * torch.randn(parameter.shape, generator=generator)
    return model


def without_corrections(model, slide):
    held = [block.correction for block in model.blocks]
    for block in model.blocks:
        block.correction = None
    try:
        return model(*slide)
    finally:
        for block, correction in zip(model.blocks, held, strict=True):
            block.correction = correction


@torch.no_grad()
def test_all_gates_off_is_the_model_without_correction_to_the_bit(model, slide):
    with set_gates(model, 0.0):
        off = model(*slide)
    assert torch.equal(off, without_corrections(model, slide))
    assert not torch.equal(off, model(*slide))


@torch.no_grad()
def test_all_gates_off_is_the_model_without_correction_in_the_plain_forward_too(model, slide):
    with plain_forwards(), set_gates(model, 0.0):
        off = model(*slide)
        assert torch.equal(off, without_corrections(model, slide))


@torch.no_grad()
@pytest.mark.parametrize("fast", [True, False])
def test_a_region_of_one_layer_is_set_and_nothing_else(model, slide, fast):
    region = torch.zeros(N, dtype=torch.bool)
    region[1010:1200] = True  # across the border of two chunks
    with trace(model) as before:
        model(*slide)
    with set_gates(model, 2.0, layers=(0,), patches=region), trace(model) as after:
        if fast:
            model(*slide)
        else:
            with plain_forwards():
                model(*slide)
    assert torch.equal(after[0].beta[:, region], torch.full_like(after[0].beta[:, region], 2.0))
    torch.testing.assert_close(after[0].beta[:, ~region], before[0].beta[:, ~region], atol=1e-5, rtol=1e-5)
    assert not torch.allclose(after[1].beta, torch.full_like(after[1].beta, 2.0))


@torch.no_grad()
@pytest.mark.parametrize("arm", ["vit4_gated_srp", "vit4_tome_gated_srp", "vit4_evit_gated_srp"])
def test_a_region_is_the_rows_that_stand_for_its_patches(arm):
    """Where rows are merged or pruned on the way, a row counts if one of its patches does."""
    draw = torch.Generator().manual_seed(3)
    features, region = torch.randn(60, 8, generator=draw), torch.arange(60) // 15 == 1
    model = build_model(arm, in_dim=8, num_outputs=3, dim=16, num_heads=2, hidden_dim=4).eval()
    for parameter in model.parameters():
        parameter.add_(0.2 * torch.randn(parameter.shape, generator=draw))
    owners = []
    for block in model.blocks:
        own = torch.arange(1, 61)
        block.register_forward_pre_hook(lambda _, args, own=own: owners.append(getattr(args[1], "owner", own).tolist()))
    with set_gates(model, 0.5, patches=region), trace(model, attention=False) as seen:
        model(features[None], PatchGraph.from_grid(6, 10).with_features(features))
    for layer, owner in list(zip(seen, owners, strict=True))[:-1]:
        chosen = {owner[patch] for patch in range(60) if region[patch]}
        expected = [row in chosen for row in owner]
        assert (layer.beta == 0.5).tolist() == [expected] * 2 and not all(expected)
    assert (len(set(owners[-2])) < 60) == (arm != "vit4_gated_srp")


@torch.no_grad()
def test_the_one_pass_prediction_and_the_plain_forward_agree_on_a_region(model, slide):
    region = torch.zeros(N, dtype=torch.bool)
    region[900:1300] = True
    with set_gates(model, -1.0, patches=region):
        fast = model(*slide)
        again = model(*slide)
        with plain_forwards():
            plain = model(*slide)
    assert torch.equal(fast, again)
    torch.testing.assert_close(fast, plain, atol=1e-5, rtol=1e-5)


@torch.no_grad()
def test_a_regime_is_replaced_where_the_learned_beta_is_in_it(model, slide):
    with trace(model) as before:
        model(*slide)
    with set_gates(model, 0.25, layers=(0,), regime="anti"), trace(model) as after:
        model(*slide)
    anti = regimes(before[0].beta)["anti"]
    assert anti.any() and not anti.all()
    assert torch.equal(after[0].beta[anti], torch.full_like(after[0].beta[anti], 0.25))
    assert torch.equal(after[0].beta[~anti], before[0].beta[~anti])


@torch.no_grad()
def test_gates_are_themselves_again_afterwards(model, slide):
    before = model(*slide)
    with set_gates(model, 1.0):
        assert not torch.equal(model(*slide), before)
    assert torch.equal(model(*slide), before)
