"""What an arm says of itself is true of the model that it builds, and every arm does what every command asks of it.

All tests run over the whole table: a new arm is tried by itself.
"""

import copy
from dataclasses import fields
from functools import cache

import pytest
import torch
from torch.nn import functional as F

from gated_srp import PatchGraph, trace
from gated_srp.config.cohort import ModelConfig
from gated_srp.data.two_scales import find_parents
from gated_srp.errors import UserError
from gated_srp.machine import has_bf16
from gated_srp.models import (
    ARMS,
    METHOD,
    TUNED,
    Sizes,
    arm_title,
    build_model,
    find_arm,
    fitting_arms,
    load_model,
    save_model,
)
from gated_srp.models.attention import Attention
from gated_srp.models.fast import plain_forwards
from gated_srp.models.nystrom import NystromAttention, NystromMaps
from gated_srp.models.two_scales import TwoScaleGraph
from gated_srp.srp import FixedCoefficient, SignedGate
from gated_srp.tasks import task_names

SMALL = {"in_dim": 8, "num_outputs": 2, "dim": 12, "num_heads": 2, "depth": 3, "num_landmarks": 4, "hidden_dim": 4}
PATCHES = 13
TARGET = torch.tensor([1])


@cache
def bag(name: str = "na") -> tuple[torch.Tensor, PatchGraph]:
    """A lattice with a hole and a patch apart, with the window that the arm needs; coarse patches behind it where it takes some."""
    count, draw = PATCHES, torch.Generator().manual_seed(PATCHES)
    cells = torch.cartesian_prod(torch.arange(4), torch.arange(5))[torch.randperm(20, generator=draw)[:count]]
    cells[-1] += 20
    features = torch.randn(1, count, 8, generator=draw)
    graph = PatchGraph.from_coords(cells * 256, features[0], stride=256, window=find_arm(name).window or 3)
    if find_arm(name).scales > 1:
        coarse = torch.randn(1, 3, 8, generator=draw)
        features, graph = torch.cat([features, coarse], 1), two_scales(graph, cells * 256, coarse[0])
    return features, graph.with_covariates(torch.tensor([[1.5, -0.5, 1.0]]))


def two_scales(fine: PatchGraph, corners: torch.Tensor, features: torch.Tensor) -> TwoScaleGraph:
    """With coarse patches of 4 x 4 fine ones, as many as there are ``features``."""
    above = torch.cartesian_prod(torch.arange(2), torch.arange(2))[: len(features)] * 1024
    coarse = PatchGraph.from_coords(above, features, stride=1024)
    return TwoScaleGraph.of(fine, coarse, *find_parents(corners, above, (256, 1024)))


def small(name: str, seed: int = 3, **changes):
    sizes = {**SMALL, "num_patches": PATCHES, "covariates": 3 * find_arm(name).needs_covariates}
    return build_model(name, seed=seed, **{**sizes, **changes})


@cache
def shaken(name: str):
    """Away from the start values, so that every part shows in the logits."""
    model, draw = small(name), torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn(parameter.shape, generator=draw))
    return model.eval()


@pytest.mark.parametrize("name", [name for name, arm in ARMS.items() if arm.starts_as])
def test_an_arm_starts_as_the_one_that_it_names_bit_for_bit(name):
    """With gradients and without: training and prediction take different paths."""
    model, other = (small(arm).eval() for arm in (name, find_arm(name).starts_as))
    assert torch.equal(model(*bag(name)), other(*bag(name)))
    with torch.no_grad():
        assert torch.equal(model(*bag(name)), other(*bag(name)))


def test_gates_and_controls_start_as_what_they_correct_unless_they_say_otherwise():
    gated = {name for name, arm in ARMS.items() if arm.gated}
    started = {name for name, arm in ARMS.items() if arm.starts_as}
    at_removal = {"features_gated_srp_from_1", "srp_abmil_from_1"}
    assert gated - started == {"gated_srp_sigmoid", "gated_srp_xavier", "gated_srp_kaiming"} | at_removal
    assert not any(find_arm(name).moved_by_biases for name in gated - started)
    assert started - gated == {"adapter", "neighbourhood", "split_norm"}


@pytest.mark.parametrize("name", ARMS)
class TestEveryArm:
    def test_it_shares_every_start_weight_of_the_same_name_and_shape(self, name):
        model, base = (small(arm).state_dict() for arm in (name, find_arm(name).base))
        common = [key for key in model if key in base and model[key].shape == base[key].shape]
        assert "head.bias" in common and all(torch.equal(model[key], base[key]) for key in common)
        again, other = (small(name, seed=seed).state_dict() for seed in (3, 4))
        assert all(torch.equal(model[key], again[key]) for key in model)
        assert any(not torch.equal(model[key], other[key]) for key in model)

    def test_it_learns_in_every_weight_with_a_random_stream_of_its_own(self, name):
        features, graph = bag(name)
        model = copy.deepcopy(shaken(name)).train()
        losses = []
        for _ in range(2):
            keep = model.draw_keep(1, generator=torch.Generator().manual_seed(1))
            losses.append(model.training_loss(features, graph, TARGET, loss=F.cross_entropy, keep=keep))
        assert torch.equal(*losses)
        model.drop_path = 0.0
        model.training_loss(features, graph, TARGET, loss=F.cross_entropy).backward()
        assert all(p.grad is not None and torch.isfinite(p.grad).all() for p in model.parameters())
        silent = {key for key, p in model.named_parameters() if not p.grad.any()}
        may_be = ("instance_heads", *(["correction"] if name == "gated_srp_nonnegative" else []))  # sure; shut
        assert not {key for key in silent if not any(part in key for part in may_be)}

    def test_checkpointing_changes_no_number(self, name):
        features, graph = bag(name)
        model, grads = copy.deepcopy(shaken(name)).train(), []
        keep = model.draw_keep(1, generator=torch.Generator().manual_seed(0))
        for model.checkpointing in (False, True):
            model.zero_grad()
            model(features, graph, keep).square().sum().backward()
            grads.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
        assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))

    def test_a_prediction_equals_the_plain_forward(self, name):
        """The pseudo-inverse of landmarks is float32 whatever comes in; TransMIL has 256 of them."""
        model, (features, graph) = copy.deepcopy(shaken(name)).double(), bag(name)
        landmarks = any(isinstance(part, NystromAttention | NystromMaps) for part in model.modules())
        near = {"transmil": 1e-5}.get(name, 2e-6 if landmarks else 1e-11)
        with torch.no_grad():
            fast = model(features.double(), graph)
            with plain_forwards():
                torch.testing.assert_close(fast, model(features.double(), graph), atol=near, rtol=near)

    def test_it_runs_in_bf16_near_float32(self, name):
        if not has_bf16():
            pytest.skip("this machine cannot multiply in bf16")
        model, (features, graph) = copy.deepcopy(shaken(name)), bag(name)
        with torch.autocast("cpu", torch.bfloat16):
            logits = model(features, graph)
            logits.float().square().sum().backward()
        expected = model(features, graph).detach()
        torch.testing.assert_close(logits.float(), expected, atol=0.15 * max(1.0, float(expected.abs().max())), rtol=0)
        assert all(torch.isfinite(p.grad).all() for p in model.parameters() if p.grad is not None)

    def test_its_maps_have_a_value_for_each_patch(self, name):
        model, (features, graph) = shaken(name), bag(name)
        if not any(hasattr(part, "cls_attention") for part in model.modules()):
            pytest.skip("has no attention to show")
        with trace(model) as seen, torch.no_grad():
            logits = model(features, graph)
        assert torch.isfinite(logits).all()
        maps = [layer.cls_attention for layer in seen if layer.cls_attention is not None]
        assert maps and all(one.shape[-1] == PATCHES and torch.isfinite(one).all() for one in maps)
        if find_arm(name).gated:
            betas = [layer.beta for layer in seen if layer.beta is not None]
            assert betas and all(beta.shape[-1] == PATCHES for beta in betas)

    def test_covariates_are_concatenated_before_its_head(self, name):
        """One linear layer over [z, c]: logits without c, and c times the weights of its own."""
        model, (features, graph) = small(name, covariates=3).eval(), bag(name)
        draw = torch.Generator().manual_seed(2)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.2 * torch.randn(parameter.shape, generator=draw))
            found, weight = model(features, graph), model.covariates.weight.detach()
            zero = model(features, graph.with_covariates(torch.zeros(1, 3)))
        own = [sum(float(weight[k, f]) * float(graph.covariates[0, f]) for f in range(3)) for k in range(2)]
        half = 2 if "instance_head.weight" in model.state_dict() else 1  # DSMIL's head is one of two streams
        torch.testing.assert_close(found - zero, torch.tensor([own]) / half, atol=1e-5, rtol=1e-4)
        model.training_loss(features, graph, TARGET, loss=F.cross_entropy).backward()
        assert model.covariates.weight.grad.abs().sum() > 0

    def test_it_comes_back_from_a_file_and_takes_one_patch_in_half_precision(self, name, tmp_path):
        model = shaken(name)
        save_model(model, tmp_path / "model.safetensors")
        loaded = load_model(tmp_path / "model.safetensors")
        with torch.no_grad():
            assert torch.equal(loaded(*bag(name)), model(*bag(name)))
            if not model.images:
                place, window = torch.zeros(1, 2, dtype=torch.long), find_arm(name).window or 3
                lone = PatchGraph.from_coords(place, stride=1, window=window)
                if model.scales > 1:
                    lone = two_scales(lone, place, torch.randn(1, 8))
                lone = lone.with_covariates(bag()[1].covariates)
                logits = model(torch.randn(1, lone.num_rows, 8).half(), lone)
                assert logits.dtype == torch.float32 and torch.isfinite(logits).all()


@pytest.mark.parametrize("name", ARMS)
def test_an_arm_knows_what_it_builds(name):
    arm, parts = find_arm(name), list(build_model(name, **SMALL).modules())
    assert arm.gated == any(isinstance(part, SignedGate) for part in parts)
    assert arm.dense == any(isinstance(part, Attention) and part.dense for part in parts)
    assert (arm.images, arm.scales) == (build_model(name, **SMALL).images, build_model(name, **SMALL).scales)
    assert arm.method <= arm.gated  # Gated SRP is gated


@pytest.mark.parametrize("name", ARMS)
def test_an_arm_refuses_the_tasks_that_its_model_refuses_in_words_and_comparisons_leave_it_out_there(name):
    arm = find_arm(name)
    assert arm.refuses == build_model(name, **SMALL).refuses and all(len(why) > 20 for why in arm.refuses.values())
    assert set(arm.refuses) <= set(task_names())
    for task in task_names():
        fitting = fitting_arms(task, images=arm.images, covariates=True, scales=2)
        assert (name in fitting) == (task not in arm.refuses)
    assert (name in fitting_arms("classification", images=arm.images)) == (
        not arm.needs_covariates and arm.scales == 1 and "classification" not in arm.refuses
    )


@pytest.mark.parametrize("name", ARMS)
def test_the_base_of_an_arm_has_its_trunk_and_no_correction(name):
    base = find_arm(find_arm(name).base)
    assert base is find_arm(base.base)
    assert (base.images, base.dense) == (find_arm(name).images, find_arm(name).dense)
    parts = build_model(find_arm(name).base, **SMALL).modules()
    assert not any(isinstance(part, SignedGate | FixedCoefficient) for part in parts)


@pytest.mark.parametrize("name", ARMS)
def test_a_model_of_another_publication_says_what_was_checked(name):
    written = {"variants", "locality", "reduced", "class_token", "patch_gcn", "two_scales"}
    parts = list(small(name).modules())
    others = [part for part in parts if type(part).__module__.rpartition(".")[2] in written]
    assert bool(others) == any(getattr(part, "checked", "") for part in parts)


def test_each_trunk_has_one_gated_srp():
    methods = [(arm.trunk, name) for name, arm in ARMS.items() if arm.method]
    assert methods == [("nystrom", METHOD), ("vit4", "vit4_gated_srp"), ("vit_s16", "vit_s16_gated_srp")]


def test_tables_print_the_papers_names_and_else_the_name_itself():
    assert [arm_title(name) for name in ("na", "xsa", "diff", METHOD)] == ["NA", "XSA", "Diff", "Gated SRP"]
    assert arm_title(METHOD + TUNED) == "Gated SRP, tuned"
    assert arm_title("gated_srp@train.gate_lr=10@window=5") == "Gated SRP, gate_lr 10, window 5"
    assert [arm_title(name) for name in ("vit4", "vit4_tuned", "Gated SRP 5x5")] == [
        "vit4",
        "vit4_tuned",
        "Gated SRP 5x5",
    ]


def test_an_unknown_arm_is_answered_with_the_nearest_and_the_list():
    with pytest.raises(
        UserError, match=r"^arm 'gated_spr' is not known. Did you mean 'gated_srp'\? Arms: na, xsa"
    ) as error:
        find_arm("gated_spr")
    assert error.value.kind == "unknown_arm"
    with pytest.raises(UserError, match=r"^arm '0' is not known. Arms: na"):
        find_arm("0")


def test_the_sizes_of_a_cohort_and_of_a_model_have_the_same_defaults():
    """Width and range of the gate aside: None stands for the paper's of the cohort."""
    of_cohort = {key: value for key, value in ModelConfig().model_dump().items() if value is not None}
    assert of_cohort == {key: getattr(Sizes(), key) for key in of_cohort}
    assert {f.name for f in fields(Sizes)} - set(ModelConfig.model_fields) == {"num_patches"}
