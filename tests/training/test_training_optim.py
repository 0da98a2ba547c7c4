import math

import pytest
import torch

from gated_srp.models import build_model
from gated_srp.training.optim import flat_gradients, learning_rate, make_optimiser, parameter_groups

SMALL = {"in_dim": 8, "num_outputs": 2, "dim": 24, "depth": 2, "num_heads": 2, "num_landmarks": 4, "hidden_dim": 4}


def test_the_learning_rate_of_every_step_is_the_one_worked_out_by_hand():
    # T = 60: W = floor(3.0) = 3, then a cosine over 57 steps.
    rates = [learning_rate(step, 60, lr=2e-4) for step in range(60)]
    assert rates[:4] == pytest.approx([2e-4 / 3, 4e-4 / 3, 2e-4, 2e-4])
    assert rates[31] == pytest.approx(1e-4 * (1 + math.cos(math.pi * 28 / 57)))
    assert rates[59] == pytest.approx(1e-4 * (1 + math.cos(math.pi * 56 / 57)))


@pytest.mark.parametrize("total", [1, 2, 19])
def test_a_short_training_warms_up_for_one_step(total):
    rates = [learning_rate(step, total, lr=1.0) for step in range(total)]
    assert rates[0] == 1.0
    assert rates[1:2] == [1.0][: total - 1]


def test_the_trunk_decays_whole_and_of_a_gate_the_weights_alone():
    model = build_model("gated_srp", **SMALL)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    decayed, spared = ({names[id(p)] for p in group["params"]} for group in parameter_groups(model, 0.05))
    gate = "blocks.0.correction.coefficient"
    assert spared == {
        f"{gate}.{name}" for name in ("token_hidden.bias", "token_out.bias", "head_bias", "layer_head_bias")
    }
    assert {"norm.bias", "blocks.0.norm1.weight", "head.bias", f"{gate}.head_weight"} <= decayed
    assert decayed | spared == set(names.values())
    assert [group["weight_decay"] for group in parameter_groups(model, 0.05)] == [0.05, 0.0]


def test_gates_get_their_own_learning_rate_and_at_factor_1_the_groups_are_the_papers():
    model = build_model("gated_srp", **SMALL)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    assert [set(group) for group in parameter_groups(model, 0.05, gate_lr=1.0)] == [{"params", "weight_decay"}] * 2
    trunk, weights, biases = parameter_groups(model, 0.05, gate_lr=10.0)
    assert [(g["weight_decay"], g.get("lr_factor")) for g in (trunk, weights, biases)] == [
        (0.05, None),
        (0.05, 10.0),
        (0.0, 10.0),
    ]
    found = {names[id(p)] for group in (weights, biases) for p in group["params"]}
    assert found == {name for name in names.values() if ".correction." in name}
    assert len(trunk["params"]) + len(found) == len(names)


def test_frozen_parameters_are_not_optimised():
    model = build_model("gated_srp", **SMALL).requires_grad_(False)
    model.head.weight.requires_grad_(True)
    (group,) = make_optimiser(model, lr=1e-3, weight_decay=0.1).param_groups
    assert [id(p) for p in group["params"]] == [id(model.head.weight)]
    assert group["betas"] == (0.9, 0.999)


def test_no_two_gradients_share_memory_even_where_backward_hands_out_one_tensor():
    biases = torch.nn.ParameterList([torch.zeros(3) for _ in range(3)])
    flat = flat_gradients(biases)
    for _ in range(2):  # stack's backward gives views of one tensor
        torch.stack(list(biases)).sum(0).mul(torch.tensor([1.0, 2.0, 3.0])).sum().backward()
    assert flat.tolist() == [2.0, 4.0, 6.0] * 3
