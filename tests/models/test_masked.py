"""Pretraining models: the loss against loops, nothing of what is masked reaches a prediction, and gates learn."""

import itertools
import math

import pytest
import torch

from gated_srp.errors import UserError
from gated_srp.models import ARMS, build_model
from gated_srp.models.fast.packed import packed_logits
from gated_srp.models.masked import MaskedGraph, Masking, copying_r2
from gated_srp.models.parts import PeerArm
from gated_srp.models.slide import SlideTransformer
from gated_srp.srp import PatchGraph

SIZES = {"in_dim": 5, "num_outputs": 5, "dim": 12, "depth": 3, "num_heads": 2, "num_landmarks": 4, "hidden_dim": 3}
CAN = [name for name, arm in ARMS.items() if not arm.no_pretraining]


def lattice(height: int, width: int) -> torch.Tensor:
    return torch.tensor([(x, y) for y in range(height) for x in range(width)])


def make_bag(height: int = 4, width: int = 5, seed: int = 0, window: int = 3) -> tuple[torch.Tensor, MaskedGraph]:
    draws = torch.Generator().manual_seed(seed)
    coords = lattice(height, width)
    features = torch.randn(len(coords), 5, generator=draws)
    graph = PatchGraph.from_coords(coords, stride=1, window=window)
    return features, MaskedGraph.of(graph, features, Masking().draw(coords, 1.0, draws))


def make_model(arm: str, *, opened: bool = True):
    model = build_model(arm, masked=True, seed=3, **SIZES).eval()
    if opened:  # gates that do something
        for name, one in model.named_parameters():
            if ".correction." in name:
                torch.nn.init.normal_(one, std=0.5, generator=torch.Generator().manual_seed(len(name)))
    return model


def test_the_loss_is_that_of_a_loop_over_masked_patches_and_channels():
    model, (features, graph) = make_model("gated_srp"), make_bag()
    features[:, 2] = 0.1
    features[0, 2] = torch.nextafter(features[0, 2], torch.tensor(1.0))  # constant, but for rounding
    graph = MaskedGraph.of(graph, features, graph.masked)
    tokens = model.norm(model.encode(features[None], graph))[0, 1 : 1 + len(features)]
    squares, own = [0.0] * 5, 0.0
    for c in (0, 1, 3, 4):
        column = features[:, c].tolist()
        mean = sum(column) / len(column)
        std = math.sqrt(sum((one - mean) ** 2 for one in column) / len(column))
        for i in graph.masked.tolist():
            predicted = sum(w * x for w, x in zip(model.head.weight[c].tolist(), tokens[i].tolist(), strict=True))
            wanted = (column[i] - mean) / std
            squares[c] += (predicted + model.head.bias[c].item() - wanted) ** 2
            own += wanted**2
    found = model(features[None], graph)
    assert found.shape == (1, 5) and found[0].tolist() == pytest.approx([5 * one / own for one in squares], rel=1e-5)
    assert found.mean().item() == pytest.approx(sum(squares) / own, rel=1e-5)


def test_predicting_the_slide_s_mean_has_a_loss_of_one_whatever_is_masked():
    model, (features, graph) = make_model("na"), make_bag()
    features[:, 2] = 0.0
    torch.nn.init.zeros_(model.head.weight)
    torch.nn.init.zeros_(model.head.bias)
    for masked in ([3], [0, 1, 7], list(range(len(features)))):
        found = model(features[None], MaskedGraph.of(graph, features, torch.tensor(masked)))
        assert found[0, 2] == 0 and found.mean().item() == pytest.approx(1)
    one = PatchGraph.from_coords(lattice(1, 1), stride=1)
    assert model(features[None, :1], MaskedGraph.of(one, features[:1], torch.tensor([0]))).mean().item() == 1


def test_where_only_means_are_masked_the_loss_is_one_and_its_gradient_zero():
    model = make_model("na")
    features = (
        torch.tensor([-1.0, 0.0, 1.0]).repeat(5, 1).T.contiguous()
    )  # (3, 5): the middle patch is the slide's mean
    graph = PatchGraph.from_coords(lattice(1, 3), stride=1)
    loss = model(features[None], MaskedGraph.of(graph, features, torch.tensor([1]))).mean()
    loss.backward()
    assert loss.item() == 1 and all(not one.grad.any() for one in model.parameters() if one.grad is not None)


@pytest.mark.parametrize("arm", CAN)
def test_features_of_masked_patches_do_not_reach_any_token(arm):
    window = ARMS[arm].window or 3
    model, (features, graph) = make_model(arm), make_bag(window=window)
    assert 0 < len(graph.masked) < len(features)
    other = features.index_copy(0, graph.masked, torch.randn(len(graph.masked), 5))
    plain = PatchGraph.from_coords(lattice(4, 5), stride=1, window=window)
    again = MaskedGraph.of(plain, other, graph.masked)
    visible = next(i for i in range(len(features)) if i not in graph.masked.tolist())
    seen = features.index_fill(0, torch.tensor([visible]), 2.0)
    for context in (torch.no_grad(), torch.enable_grad()):  # in one pass, and as in training
        with context:
            tokens = model.encode(features[None], graph)
            assert torch.equal(tokens, model.encode(other[None], again))
            assert not torch.equal(tokens, model.encode(seen[None], MaskedGraph.of(plain, seen, graph.masked)))
    assert not torch.equal(model(features[None], graph), model(other[None], again))  # what is asked for has changed


@pytest.mark.parametrize("arm", ["gated_srp", "vit4_gated_srp", "diff_gated_srp", "na"])
def test_the_gradient_reaches_gates_mask_token_and_last_block(arm):
    model, (features, graph) = make_model(arm, opened=False), make_bag()
    model(features[None], graph).mean().backward()
    at_start = {name for name, one in model.named_parameters() if not one.grad.any()}
    assert all("token_hidden" in name for name in at_start)  # behind weights that start at zero
    opened = make_model(arm)
    opened(features[None], graph).mean().backward()
    assert all(one.grad.any() for one in opened.parameters())


def test_homogeneity_is_of_visible_patches_and_their_visible_neighbours():
    features, graph = make_bag(5, 6)
    plain, masked = PatchGraph.from_coords(lattice(5, 6), stride=1), set(graph.masked.tolist())
    found = {}
    for i in set(range(30)) - masked:
        near = plain.neighbours[plain.offsets[i] : plain.offsets[i + 1]].tolist()
        cosines = [float(torch.cosine_similarity(features[i], features[j], dim=0)) for j in near if j not in masked]
        if cosines:
            found[i] = sum(cosines) / len(cosines)
    mean = sum(found.values()) / len(found)
    assert graph.homogeneity.tolist() == pytest.approx([found.get(i, mean) for i in range(30)], abs=1e-6)


@pytest.mark.parametrize("arm", ["gated_srp", "vit4", "xsa"])
def test_packed_bags_have_the_errors_of_one_after_the_other(arm):
    model = make_model(arm)
    bags = [make_bag(4, 5, 1), make_bag(2, 3, 2), make_bag(5, 4, 3)]
    alone = torch.cat([model(features[None], graph) for features, graph in bags])
    torch.testing.assert_close(packed_logits(model, bags), alone, rtol=1e-5, atol=1e-6)


def test_what_copying_explains_is_that_of_a_loop_with_the_best_of_many_scales():
    bags = [make_bag(4, 5, 1), make_bag(5, 6, 2)]
    pairs = []
    for features, graph in bags:
        wanted = (features - features.mean(0)) / features.std(0, correction=0)
        masked = set(graph.masked.tolist())
        for i in masked:
            near = graph.neighbours[graph.offsets[i] : graph.offsets[i + 1]].tolist()
            seen = [wanted[j] for j in near if j not in masked]
            mean = sum(seen) / len(seen) if seen else torch.zeros(5)
            pairs += list(zip(wanted[i].tolist(), mean.tolist(), strict=True))
    total = sum(t * t for t, _ in pairs)
    best = max(1 - sum((t - scale / 200 * p) ** 2 for t, p in pairs) / total for scale in range(-400, 401))
    assert copying_r2(bags) == pytest.approx(best, abs=1e-5)


@pytest.mark.parametrize(("share", "block"), [(0.5, 3), (0.3, 2), (0.75, 1)])
def test_whole_windows_of_the_lattice_are_masked_but_for_the_last(share, block):
    coords = lattice(12, 10) * 256
    masked = Masking(share, block).draw(coords, 256.0, torch.Generator().manual_seed(5)).tolist()
    assert len(masked) == len(set(masked)) == round(share * 120)
    partly = []
    for left, top in itertools.product(range(block), repeat=2):  # its origin is random
        windows: dict[tuple[int, int], list[bool]] = {}
        for i, (x, y) in enumerate((coords // 256).tolist()):
            windows.setdefault(((x + left) // block, (y + top) // block), []).append(i in masked)
        partly.append(sum(any(one) and not all(one) for one in windows.values()))
    assert min(partly) <= 1


def test_a_slide_of_one_or_two_patches_has_one_masked():
    for count in (1, 2):
        assert len(Masking(0.9, 3).draw(lattice(1, count), 1.0, torch.Generator())) == 1


@pytest.mark.parametrize("wrong", [{"share": 0.0}, {"share": 1.0}, {"block": 0}])
def test_a_share_or_a_block_that_makes_no_sense_is_refused(wrong):
    with pytest.raises(UserError, match="Expected"):
        Masking(**wrong)


def test_arms_without_tokens_of_patches_at_their_end_say_why_and_name_those_that_can():
    other = {
        name for name, arm in ARMS.items() if isinstance(arm, PeerArm) or arm.images or arm.kind is not SlideTransformer
    }
    assert set(ARMS) - set(CAN) == other and {"mean_pool", "clam_sb", "vit4_tome", "vit_s16"} <= other
    for arm in sorted(other):
        with pytest.raises(UserError, match=rf"arm '{arm}': cannot be pretrained .*\. Arms that can: na, xsa, diff,"):
            build_model(arm, masked=True, **SIZES)
