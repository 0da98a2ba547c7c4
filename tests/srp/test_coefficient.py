"""The gate: sizes, ranges, ablations, initialisation."""

import math

import pytest
import torch

from gated_srp.srp import (
    FixedCoefficient,
    PatchGraph,
    SignedGate,
    from_removal,
    kaiming,
    nonnegative,
    range_free,
    rectified,
    xavier,
)

GRAPH = PatchGraph.from_coords(torch.tensor([[0, 0], [1, 0], [0, 1], [50, 50]]), torch.randn(4, 8), stride=1)
COMPONENT, NORM = torch.tensor([[0.5, -1.0]] * 4), torch.tensor([[1.0, 2.0]] * 4)


def parameters(gate: SignedGate) -> int:
    return sum(p.numel() for p in gate.parameters())


@pytest.mark.parametrize(("hidden", "expected"), [(16, 111), (32, 191), (64, 351), (128, 671)])
def test_parameter_counts_are_the_papers(hidden, expected):
    assert parameters(SignedGate(6, hidden_dim=hidden)) == expected


def test_ablations_leave_out_what_they_say():
    assert parameters(SignedGate(6, hidden_dim=16, head=False)) == 64 + 17 + 6  # token only: b_lh stays
    assert parameters(SignedGate(6, hidden_dim=None)) == 18 + 6 + 6  # head only
    assert parameters(SignedGate(6, hidden_dim=16, bias=False)) == 48 + 16 + 18  # no bias


@pytest.mark.parametrize(
    "changes", [{}, {"bound": range_free}, {"head": False}, {"hidden_dim": None}, {"bias": False}, {"live": True}]
)
def test_the_coefficient_starts_at_exactly_zero(changes):
    beta = SignedGate(2, delta=1.5, **changes)(COMPONENT, NORM, GRAPH)
    assert torch.equal(beta, torch.zeros(4, 2))


def test_the_sigmoid_gate_starts_at_half_its_range_by_name():
    assert SignedGate(2, delta=1.5, bound=nonnegative)(COMPONENT, NORM, GRAPH).tolist() == [[0.75, 0.75]] * 4


def test_a_gate_from_removal_starts_at_exactly_one_and_reaches_delta_around_it():
    gate = SignedGate(2, delta=1.5, bound=from_removal)
    assert torch.equal(gate(COMPONENT, NORM, GRAPH), torch.ones(4, 2)) and gate.largest == 2.5
    assert from_removal(torch.tensor([-20.0, 0.5]), 1.5).tolist() == pytest.approx([-0.5, 1 + 1.5 * math.tanh(0.5)])


@pytest.mark.parametrize("init", [xavier, kaiming])
def test_other_initialisations_start_with_a_correction(init):
    gate = SignedGate(2, init=init)
    assert gate(COMPONENT, NORM, GRAPH).abs().min() > 0
    assert gate.head_bias.abs().sum() == gate.layer_head_bias.abs().sum() == gate.token_out.bias.abs().sum() == 0
    bound = {xavier: math.sqrt(6 / (64 + 1)), kaiming: 1 / math.sqrt(64)}[init]
    assert 0.5 * bound < gate.token_out.weight.abs().max() <= bound


@torch.no_grad()
def test_the_logit_is_token_plus_head_plus_biases():
    gate = SignedGate(2, delta=2.0, hidden_dim=4)
    with torch.no_grad():
        for p in gate.parameters():
            p.copy_(torch.randn(p.shape))
    row, head, m = 1, 1, 2
    d_tok = torch.tensor([float(GRAPH.homogeneity[row]), m / 8, math.log(1 + m)])
    token = gate.token_out(torch.nn.functional.gelu(gate.token_hidden(d_tok)))
    d_head = torch.tensor([-0.5, 0.5, math.log(3.0)])  # cos(y, r_hat) = -1 / 2
    logit = token + gate.head_weight[head] @ d_head + gate.head_bias[head] + gate.layer_head_bias[head]
    assert float(gate(COMPONENT, NORM, GRAPH)[row, head]) == pytest.approx(float(2 * torch.tanh(logit)), abs=1e-6)


@pytest.mark.parametrize(("bound", "low", "high"), [(nonnegative, 0.0, 1.5), (range_free, -2.0, 2.0)])
def test_ranges_hold_for_large_logits(bound, low, high):
    logits = torch.tensor([-80.0, 0.0, 80.0])
    values = bound(logits, 1.5)
    assert values[0] == pytest.approx(low, abs=1e-30) and values[2] == high


def test_a_rectified_gate_starts_at_zero_and_can_leave_it():
    logits = torch.tensor([-1.0, 0.0, 1.0], requires_grad=True)
    rectified(logits, 2.0).sum().backward()
    assert rectified(logits, 2.0).tolist() == pytest.approx([0.0, 0.0, 2 * math.tanh(1.0)])
    assert logits.grad.tolist() == pytest.approx([0.0, 2.0, 2 * (1 - math.tanh(1.0) ** 2)])


def test_diagnostics_are_detached_unless_live():
    for live in (False, True):
        component = COMPONENT.clone().requires_grad_()
        gate = SignedGate(2, live=live)
        torch.nn.init.ones_(gate.head_weight)
        beta = gate(component, NORM, GRAPH)
        (gradient,) = torch.autograd.grad(beta.sum(), component, allow_unused=True)
        assert (gradient is not None) == live


def test_a_live_gate_has_no_nan_gradient_at_a_zero_output():
    component, norm = (torch.zeros(4, 2, requires_grad=True) for _ in range(2))
    gate = SignedGate(2, live=True)
    torch.nn.init.ones_(gate.head_weight)
    gate(component, norm, GRAPH).sum().backward()
    assert torch.isfinite(component.grad).all() and torch.isfinite(norm.grad).all()


def test_autocast_does_not_reach_into_the_gate():
    gate = SignedGate(2, init=xavier)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(gate(COMPONENT, NORM, GRAPH), gate(COMPONENT, NORM, GRAPH))
        inside = gate(COMPONENT, NORM, GRAPH)
    assert inside.dtype == torch.float32
    assert torch.equal(inside, gate(COMPONENT, NORM, GRAPH))


def test_a_fixed_coefficient_is_the_same_everywhere():
    assert FixedCoefficient(-1.0)(COMPONENT, NORM, GRAPH).tolist() == [[-1.0, -1.0]] * 4
