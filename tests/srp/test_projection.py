"""Eq. 4-6 by hand, by naive reference, and by gradcheck."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gated_srp.srp.projection import along, corrected, corrected_linear, length, measure, neighbour_mean, project, unit

DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16]


def test_the_neighbour_mean_of_a_row_without_neighbours_is_zero():
    rows = torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 60.0]])
    mean = neighbour_mean(rows, torch.tensor([1, 2, 0]), torch.tensor([0, 2, 2, 3]))
    assert mean.tolist() == [[4.0, 32.0], [0.0, 0.0], [1.0, 2.0]]


def test_the_neighbour_mean_of_halves_is_taken_in_float32():
    rows = torch.tensor([[256.0], [1.0], [1.0]], dtype=torch.bfloat16)
    assert neighbour_mean(rows, torch.tensor([0, 1, 2]), torch.tensor([0, 3])).tolist() == [[86.0]]


def test_no_gradient_reaches_the_neighbours():
    rows = torch.randn(3, 2, requires_grad=True)
    assert not neighbour_mean(rows, torch.tensor([1, 2]), torch.tensor([0, 2])).requires_grad


@pytest.mark.parametrize("dtype", DTYPES)
def test_zero_vectors_stay_zero_in_value_and_gradient(dtype):
    x = torch.zeros(2, 3, dtype=dtype, requires_grad=True)
    (unit(x).sum() + length(x).sum()).backward()
    assert unit(x).abs().sum() == 0
    assert torch.isfinite(x.grad).all()


@given(st.integers(0, 999), st.sampled_from([-1.0, 0.0, 0.3, 1.0, 2.0]))
def test_project_is_the_textbook_formula(seed, beta):
    draw = torch.Generator().manual_seed(seed)
    y, axis = torch.randn(7, 5, generator=draw), unit(torch.randn(7, 5, generator=draw))
    expected = torch.stack([a - beta * torch.dot(a, b) * b for a, b in zip(y, axis, strict=True)])
    torch.testing.assert_close(project(y, axis, torch.full((7,), beta)), expected)


@given(st.integers(0, 999))
def test_beta_one_is_orthogonal_and_beta_two_keeps_the_norm(seed):
    draw = torch.Generator().manual_seed(seed)
    y, axis = (torch.randn(50, 8, generator=draw, dtype=torch.float64) for _ in range(2))
    axis = unit(axis)
    assert along(project(y, axis, torch.ones(50)), axis).abs().max() < 1e-12
    torch.testing.assert_close(project(y, axis, torch.full((50,), 2.0)).norm(dim=-1), y.norm(dim=-1))


@pytest.mark.parametrize("dtype", DTYPES)
def test_beta_zero_and_a_zero_axis_return_y_exactly(dtype):
    y = torch.randn(20, 6).to(dtype)
    axis = unit(torch.randn(20, 6))
    assert torch.equal(project(y, axis, torch.zeros(20)), y)
    assert torch.equal(project(y, torch.zeros(20, 6), torch.randn(20)), y)
    assert project(y, axis, torch.ones(20)).dtype == dtype


def test_gradients_of_project_pass_gradcheck_in_all_three_arguments():
    y, axis = (torch.randn(4, 3, dtype=torch.float64, requires_grad=True) for _ in range(2))
    beta = torch.randn(4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(project, (y, axis, beta))


def test_the_backward_of_project_is_not_differentiated_silently():
    y = torch.randn(2, 3, requires_grad=True)
    z = project(y, unit(torch.randn(2, 3)), torch.ones(2))
    (first,) = torch.autograd.grad(z.square().sum(), y, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        first.sum().backward()


@pytest.mark.parametrize("rows", [1, 5, 2500])
@pytest.mark.parametrize("biased", [True, False])
def test_corrected_linear_equals_project_then_linear(rows, biased):
    draw = torch.Generator().manual_seed(rows)
    y, v, raw = (torch.randn(rows, 2, 4, generator=draw, dtype=torch.float64) for _ in range(3))
    raw[::3] = 0
    y.requires_grad_()
    beta = torch.randn(rows, 2, generator=draw, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(3, 8, generator=draw, dtype=torch.float64, requires_grad=True)
    bias = torch.randn(3, generator=draw, dtype=torch.float64, requires_grad=True) if biased else None
    inputs = [t for t in (y, beta, weight, bias) if t is not None]
    upstream = torch.randn(rows, 3, generator=draw, dtype=torch.float64)

    plain = torch.nn.functional.linear(project(y, unit(raw), beta).flatten(1), weight, bias)
    expected = torch.autograd.grad(plain, inputs, upstream)
    fused = corrected_linear(y, v, beta, (weight, bias), measure(y, raw.__getitem__), lambda values: raw.__getitem__)
    got = torch.autograd.grad(fused, inputs, upstream)
    torch.testing.assert_close(fused, plain)
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b)


def test_what_is_measured_equals_the_definitions():
    y, axis = torch.randn(1500, 2, 4), torch.randn(1500, 2, 4)
    axis[3] = 0
    y[4] = 0
    seen = measure(y, axis.__getitem__)
    torch.testing.assert_close(seen.component, along(y, unit(axis)))
    torch.testing.assert_close(seen.norm, length(y))
    torch.testing.assert_close(seen.scale[5:], 1 / axis[5:].norm(dim=-1))
    assert seen.scale[3].tolist() == [0.0, 0.0]


@pytest.mark.parametrize("rows", [5, 2500])  # one chunk, and several
def test_the_correction_in_chunks_equals_project_in_value_and_gradient(rows):
    draw = torch.Generator().manual_seed(rows)
    y, axis, dz = (torch.randn(rows, 2, 4, generator=draw, dtype=torch.float64) for _ in range(3))
    beta = torch.randn(rows, 2, generator=draw, dtype=torch.float64)
    axis[3] = 0
    results = []
    for chunked in (False, True):
        leaves = y.clone().requires_grad_(), beta.clone().requires_grad_()
        measured = measure(y, lambda part: axis[part])
        z = corrected(leaves[0], axis, leaves[1], measured) if chunked else project(leaves[0], unit(axis), leaves[1])
        z.backward(dz)
        results.append((z, *(leaf.grad for leaf in leaves)))
    for plain, ours in zip(*results, strict=True):
        torch.testing.assert_close(ours, plain)
    assert torch.equal(results[1][0][3], y[3])
