"""A share of the patches: who stays, that means are those of the whole slide, and the whole forward against a plain one."""

import copy

import pytest
import torch
from models.test_arms import ARMS, bag, shaken

from gated_srp.errors import UserError
from gated_srp.models import build_model, find_arm
from gated_srp.models.attention import merge_heads
from gated_srp.models.fast import plain_forwards
from gated_srp.models.thinned import Thinning, kept_patches, refuse_budget, thinned_logits
from gated_srp.srp import GatedSRP, PatchGraph, projection

SIZES = {"in_dim": 6, "num_outputs": 3, "dim": 12, "num_heads": 2, "depth": 3, "num_landmarks": 4, "hidden_dim": 4}


@pytest.fixture
def slide(generator):
    """A lattice with holes, two lone patches, and features that are alike in one half."""
    cells = torch.cartesian_prod(torch.arange(8), torch.arange(8))[torch.randperm(64, generator=generator)[:50]]
    cells[-2:] = torch.tensor([[40, 40], [60, 60]])
    features = torch.randn(50, 6, generator=generator).double()
    features[cells[:, 0] < 4] = 0.1 * features[cells[:, 0] < 4] + 1
    return features, PatchGraph.from_coords(cells * 256, features, stride=256)


def near(graph, row):
    return graph.neighbours[graph.offsets[row] : graph.offsets[row + 1]].tolist()


@pytest.mark.parametrize("share", [0.9, 0.7, 0.5, 0.3])
def test_the_share_that_was_asked_for_stays_and_everyone_who_goes_leaves_a_neighbour(slide, share):
    _, graph = slide
    kept = kept_patches(graph, share).tolist()
    assert len(kept) == round(50 * share) and kept == sorted(set(kept))
    assert {48, 49} <= set(kept)  # alone in their piece of tissue
    gone = set(range(50)) - set(kept)
    assert all(set(near(graph, row)) - gone or share < 0.5 for row in gone)
    if share > 0.5:  # they go where neighbours are alike
        pool = graph.homogeneity.argsort(descending=True, stable=True)[: 2 * len(gone)].tolist()
        assert gone <= set(pool)
        assert pool[0] in gone


def test_equal_patches_go_in_their_order_and_neighbours_not_together():
    row = PatchGraph.from_grid(1, 9)
    assert kept_patches(row, 5 / 9).tolist() == [1, 3, 5, 7, 8]
    assert kept_patches(row, 0.01).tolist() == [1, 3, 5, 7]  # nobody goes whose neighbours have all gone
    with pytest.raises(UserError, match="budget: is 0"):
        kept_patches(row, 0)


def test_neighbour_means_of_those_who_stay_are_those_of_the_whole_slide(slide, generator):
    _, graph = slide
    kept = kept_patches(graph, 0.5)
    thinning = Thinning.of(graph, kept)
    values = torch.randn(50, 12, generator=generator).double()
    rows = thinning.rows(thinning.graph.with_isolated(before=1, after=2))
    thinned = torch.cat([values[:1] * 0, values[kept], values[:2]])
    found = type(rows)(**{**vars(rows), "outside": values[thinning.outside]})
    torch.testing.assert_close(found.mean(thinned)[1:-2], graph.mean(values)[kept], atol=1e-14, rtol=1e-14)
    assert torch.equal(found.neighbour_count[1:-2], graph.neighbour_count[kept])
    assert torch.equal(found.homogeneity[1:-2], graph.homogeneity[kept])
    assert torch.equal(found.part(slice(5, 9)).sum(thinned, slice(0, 4)), found.sum(thinned, slice(5, 9)))
    assert not found.mean(thinned)[0].any() and not found.mean(thinned)[-2:].any()


def by_hand(model, features, graph, kept):
    """The definition, patch by patch: tokens of those left out, their values, means over all neighbours."""
    kept, blocks = kept.tolist(), model.blocks
    embed = model.in_proj(features)
    missing = (
        model.tokens(features[None, kept], Thinning.of(graph, torch.tensor(kept)).graph)[0].shape[1] - 1 - len(kept)
    )
    x = torch.cat([model.cls_token[0], embed[kept], embed[kept][:missing]])[None]
    start = x.clone()
    for number, block in enumerate(blocks[:-1]):
        y, v = block.attn(block.norm1(x), Thinning.of(graph, torch.tensor(kept)).graph.with_isolated(1, missing))
        token = {}
        for row in range(graph.num_rows):
            if row not in kept:
                mine = [1 + kept.index(j) for j in near(graph, row) if j in kept]
                added = sum((x - start)[0, j] for j in mine) / len(mine) if mine else 0.0
                token[row] = embed[row] + added
        value = {row: block.attn.values(block.norm1(one[None, None]))[0, 0] for row, one in token.items()}
        value |= {row: merge_heads(v)[0, 1 + place] for place, row in enumerate(kept)}
        z = y.clone()
        for place, row in enumerate(kept):
            listed = near(graph, row)
            if not listed:
                continue
            mean = (sum(value[j] for j in listed) / len(listed)).view(y.shape[1], -1)
            axis = mean / mean.norm(dim=-1, keepdim=True)
            part = (y[0, :, 1 + place] * axis).sum(-1)
            lone = PatchGraph(
                torch.zeros(len(listed)).long(), torch.tensor([0, len(listed)]), graph.homogeneity[row : row + 1]
            )
            beta = block.correction.coefficient(part[None], y[0, :, 1 + place].norm(dim=-1)[None], lone)[0]
            z[0, :, 1 + place] -= (beta * part)[:, None] * axis
        x = x + block.attn.proj(merge_heads(z))
        x = x + block.mlp(block.norm2(x))
        if number == 0 and model.ppeg is not None:
            x = model.ppeg(x)
    return model.head(
        model.norm(blocks[-1](x, Thinning.of(graph, torch.tensor(kept)).graph.with_isolated(1, missing))[:, 0])
    )


@pytest.mark.parametrize("arm", ["gated_srp", "vit4_gated_srp", "diff_gated_srp"])
def test_a_thinned_prediction_is_the_one_written_out_by_hand(slide, generator, arm):
    features, graph = slide
    model = build_model(arm, **SIZES).double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator))
        kept = kept_patches(graph, 0.5)
        found = thinned_logits(model, features[None], graph, kept)
        torch.testing.assert_close(found, by_hand(model, features, graph, kept), atol=2e-6, rtol=2e-6)  # pinv: float32
        with plain_forwards():
            torch.testing.assert_close(found, thinned_logits(model, features[None], graph, kept), atol=2e-6, rtol=2e-6)
        assert (found - model(features[None], graph)).abs().max() > 1e-4


@torch.no_grad()
def test_kernels_never_take_lists_that_lack_neighbours(slide, monkeypatch):
    (features, graph), model = slide, build_model("fixed_beta_1", **SIZES).double().eval()
    kept = kept_patches(graph, 0.5)
    whole, thinned = model(features[None], graph), thinned_logits(model, features[None], graph, kept)
    monkeypatch.setattr(projection, "by_kernels", lambda y: True)
    monkeypatch.setattr(GatedSRP, "_by_kernels", lambda module, y, v, graph: 0 * y)  # seen wherever they take over
    assert thinned_logits(model, features[None], graph, kept).equal(thinned)
    with plain_forwards():
        torch.testing.assert_close(thinned_logits(model, features[None], graph, kept), thinned, atol=2e-6, rtol=2e-6)
    assert not model(features[None], graph).isclose(whole).any()


@pytest.mark.parametrize("name", ARMS)
def test_an_arm_takes_a_budget_or_says_why_not(name):
    model, (features, graph) = copy.deepcopy(shaken(name)), bag(name)
    if any(hasattr(part, "reads_graph") and part.reads_graph for part in model.modules()) or find_arm(name).window:
        with pytest.raises(UserError, match=f"arm '{name}' takes no budget") as refused:
            thinned_logits(model, features, graph, kept_patches(graph, 0.6))
        assert refused.value.cure
        return
    try:
        refuse_budget(model)
    except UserError:
        assert not find_arm(name).method or find_arm(name).images
        return
    with torch.no_grad():
        whole = thinned_logits(model, features, graph, kept_patches(graph, 1.0))
        assert torch.equal(whole, model(features, graph))
        assert torch.isfinite(thinned_logits(model, features, graph, kept_patches(graph, 0.6))).all()
