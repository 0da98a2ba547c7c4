"""The fast forms of a block's parts equal the plain ones."""

import pytest
import torch
from gated_srp_bench import textbook
from torch.nn import functional as F

from gated_srp.models import position
from gated_srp.models.block import FeedForward
from gated_srp.models.position import PPEG


@pytest.mark.parametrize("rows", [1, 5000])
def test_feed_forward_equals_linear_gelu_linear_in_value_and_gradient(rows):
    layer = FeedForward(4, 16).double()
    x = torch.randn(1, rows, 4, dtype=torch.float64, requires_grad=True)
    plain = layer.fc2(F.gelu(layer.fc1(x)))
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
    monkeypatch.setattr(position, "depthwise", lambda square, weight, bias: seen.append(square) or square)
    x = torch.randn(1, 1 + 16, 3)
    assert torch.equal(PPEG(3)(x), x)
    assert seen[0].stride() == (
        48,
        1,
        12,
        3,
    )  # the library takes the layout from every stride, also from that of the only bag
    assert seen[0].data_ptr() == x[:, 1:].data_ptr()
