"""What an arm says of itself is true of the model that it builds."""

from dataclasses import fields

import pytest

from gated_srp.config.cohort import ModelConfig
from gated_srp.errors import UserError
from gated_srp.models import ARMS, METHOD, TUNED, Sizes, arm_title, build_model, find_arm
from gated_srp.models.attention import DenseAttention
from gated_srp.models.nystrom import DifferentialAttention
from gated_srp.srp import FixedCoefficient, SignedGate

SMALL = {"in_dim": 8, "num_outputs": 2, "dim": 12, "num_heads": 2, "depth": 2, "num_landmarks": 4}


@pytest.mark.parametrize("name", ARMS)
def test_an_arm_knows_what_it_builds(name):
    arm, parts = find_arm(name), list(build_model(name, **SMALL).modules())
    assert arm.gated == any(isinstance(part, SignedGate) for part in parts)
    assert arm.dense == any(type(part) in (DenseAttention, DifferentialAttention) for part in parts)
    assert arm.images == build_model(name, **SMALL).images
    assert arm.method <= arm.gated  # Gated SRP is gated


@pytest.mark.parametrize("name", ARMS)
def test_the_base_of_an_arm_has_its_trunk_and_no_correction(name):
    base = find_arm(find_arm(name).base)
    assert base is find_arm(base.base)
    assert (base.images, base.dense) == (find_arm(name).images, find_arm(name).dense)
    parts = build_model(find_arm(name).base, **SMALL).modules()
    assert not any(isinstance(part, SignedGate | FixedCoefficient) for part in parts)


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
