"""Parts with hand-written backwards equal the plain ones, in value and in gradient."""

import pytest
import torch
from gated_srp_bench import textbook
from torch.nn import functional as F

from gated_srp.models import block
from gated_srp.models.block import PPEG, FeedForward
from gated_srp.models.fast import plain_forwards
from gated_srp.models.fast.gradients import projections, refined


@pytest.mark.parametrize("rows", [1, 5000])
def test_feed_forward_equals_linear_gelu_linear_in_value_and_gradient(rows):
    layer = FeedForward(4, 16).double()
    x = torch.randn(1, rows, 4, dtype=torch.float64, requires_grad=True)
    with plain_forwards():
        plain = layer(x)
    torch.testing.assert_close(plain, layer.fc2(F.gelu(layer.fc1(x))))
    inputs = [x, *layer.parameters()]
    upstream = torch.randn_like(plain)
    expected = torch.autograd.grad(plain, inputs, upstream)
    fast = layer(x)
    torch.testing.assert_close(fast, plain)
    for a, b in zip(torch.autograd.grad(fast, inputs, upstream), expected, strict=True):
        torch.testing.assert_close(a, b)
    with torch.no_grad():
        torch.testing.assert_close(layer(x), plain)


@pytest.mark.parametrize("side", [1, 2, 9])
def test_one_folded_kernel_equals_three_convolutions_and_the_skip(side):
    ours, plain = PPEG(3).double(), textbook.PPEG(3).double()
    plain.load_state_dict(ours.state_dict())
    x = torch.randn(1, 1 + side * side, 3, dtype=torch.float64, requires_grad=True)
    a, b = ours(x)[0], plain(x[0])
    torch.testing.assert_close(a, b)
    assert torch.equal(a[0], x[0, 0])
    inputs = [x, *ours.parameters()]
    mine = torch.autograd.grad(a.pow(3).sum(), inputs)
    theirs = torch.autograd.grad(b.pow(3).sum(), [x, *plain.parameters()])
    for p, q in zip(mine, theirs, strict=True):
        torch.testing.assert_close(p, q)


def test_ppeg_convolves_in_channels_last_layout_without_reordering_rows(monkeypatch):
    seen = []
    monkeypatch.setattr(block, "depthwise", lambda square, weight, bias: seen.append(square) or square)
    x = torch.randn(1, 1 + 16, 3)
    assert torch.equal(PPEG(3)(x), x)
    assert seen[0].stride() == (
        48,
        1,
        12,
        3,
    )  # the library takes the layout from every stride, also from that of the only bag
    assert seen[0].data_ptr() == x[:, 1:].data_ptr()


def test_projections_equal_slices_of_one_linear_layer_in_value_and_gradient():
    x = torch.randn(2, 9, 8, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(24, 8, dtype=torch.float64, requires_grad=True)
    bias = torch.randn(24, dtype=torch.float64, requires_grad=True)
    upstream = torch.randn(2, 9, 24, dtype=torch.float64)
    plain = torch.nn.functional.linear(x, weight, bias)
    parts = projections(x, weight, bias, 8)
    assert len(parts) == 3 and all(part.is_contiguous() for part in parts)
    torch.testing.assert_close(torch.cat(parts, -1), plain)
    ours = torch.autograd.grad(torch.cat(parts, -1), (x, weight, bias), upstream)
    for a, b in zip(ours, torch.autograd.grad(plain, (x, weight, bias), upstream), strict=True):
        torch.testing.assert_close(a, b)


def test_refining_is_six_times_the_formula_with_its_gradients():
    draw = torch.Generator().manual_seed(0)
    a = torch.rand(2, 4, 4, generator=draw, dtype=torch.float64).softmax(-1).requires_grad_()
    start = (a.detach().transpose(1, 2) / 2).requires_grad_()
    z, eye = start, torch.eye(4, dtype=torch.float64)
    for _ in range(6):
        z = 0.25 * z @ (13 * eye - a @ z @ (15 * eye - a @ z @ (7 * eye - a @ z)))
    torch.testing.assert_close(refined(a, start), z)
    weight = torch.linspace(-1, 1, 32, dtype=torch.float64).view(2, 4, 4)
    found, expected = (torch.autograd.grad((r * weight).sum(), (a, start)) for r in (refined(a, start), z))
    torch.testing.assert_close(found, expected)
    assert torch.autograd.gradcheck(refined, (a, start))
