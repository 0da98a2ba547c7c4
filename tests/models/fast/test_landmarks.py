"""Rows that meet landmarks in logits, in chunks, give what two attention calls give, and the same gradients."""

import pytest
import torch

from gated_srp.models.attention import split_heads
from gated_srp.models.fast import in_row_chunks, plain_forwards
from gated_srp.models.fast.gradients import Gathered, attend, landmark_logits
from gated_srp.models.nystrom import NystromAttention
from gated_srp.srp import PatchGraph


def test_landmark_logits_are_those_of_projected_rows():
    draw = torch.Generator().manual_seed(0)
    rows, weight, bias, marks = (
        torch.randn(*shape, generator=draw, dtype=torch.float64) for shape in ((7, 8), (8, 8), (8,), (2, 5, 4))
    )
    logits = torch.nn.functional.linear(rows, *landmark_logits(marks, weight, bias))
    projected = split_heads(torch.nn.functional.linear(rows, weight, bias)[None], 2)[0]  # (H, rows, D)
    expected = torch.einsum("hld,hmd->lhm", projected, marks) / 4**0.5
    torch.testing.assert_close(logits.view(7, 2, 5), expected)


def test_rows_gathered_in_chunks_are_softmax_attention_however_the_logits_rise():
    draw = torch.Generator().manual_seed(0)
    logits, values = (torch.randn(9, n, generator=draw) for n in (2 * 3, 2 * 4))
    logits[4:7] += 300  # exp(300) is infinite: the first chunk must shrink to nothing
    logits[7:] -= 300
    expected = torch.einsum("lhm,lhd->hmd", logits.view(9, 2, 3).softmax(0), values.view(9, 2, 4))
    gathered = Gathered(torch.Size((2, 3, 4)), values)
    for part in (slice(0, 4), slice(4, 7), slice(7, 9)):
        gathered.add(logits[part].clone(), values[part])
    torch.testing.assert_close(gathered.means(), expected)


def attention(rows):
    """A small attention away from its start, and the normalised rows of one bag: three chunks of them, or a few."""
    torch.manual_seed(0)
    layer = NystromAttention(16, 2, num_landmarks=8).double()
    torch.nn.init.normal_(layer.qkv.bias)
    return layer, torch.randn(1, rows, 16, dtype=torch.float64, requires_grad=True)


@pytest.mark.parametrize("rows", [5, 64, 2500])  # fewer than landmarks, one chunk, three
@pytest.mark.parametrize("first", [False, True])
def test_forward_and_gradients_equal_those_of_two_attention_calls(rows, first):
    layer, x = attention(rows)
    graph = PatchGraph.from_grid(1, rows)
    run = layer.first_row if first else layer
    y, v = run(x, graph)
    with plain_forwards():
        plain_y, plain_v = run(x, graph)
    torch.testing.assert_close(y, plain_y, atol=1e-6, rtol=1e-6)  # pinv is float32
    torch.testing.assert_close(v, plain_v)
    weight = torch.linspace(-1, 1, y.numel(), dtype=torch.float64).view(y.shape)
    leaves = [x, layer.qkv.weight, layer.qkv.bias]

    def gradients(y, v, asked):
        losses = {"y": (y * weight).sum(), "v": v.square().sum()}
        return torch.autograd.grad(sum(losses[name] for name in asked), leaves, retain_graph=True)

    for asked in ("yv", "y", "v"):  # v takes part in XSA alone
        for a, b in zip(gradients(y, v, asked), gradients(plain_y, plain_v, asked), strict=True):
            torch.testing.assert_close(a, b, atol=1e-5 * float(b.abs().max()), rtol=1e-5)


def test_every_gradient_of_attend_is_that_of_finite_differences():
    draw = torch.Generator().manual_seed(0)
    heads, marks, width, rows = 2, 3, 2, 6

    def some(*shape):
        return torch.randn(*shape, generator=draw, dtype=torch.float64, requires_grad=True)

    channels = heads * width
    arguments = (
        some(rows, channels),
        some(heads, marks, marks),
        some(heads * marks, channels),
        some(heads * marks, channels),
        some(heads * marks),
        some(channels, channels),
        some(channels),
    )

    def run(x, inverse, keys, wq, bq, wv, bv):
        return attend(x, inverse, keys, (wq, bq), (wv, bv), 4)

    assert torch.autograd.gradcheck(run, arguments)


def test_half_precision_batches_and_accelerators_keep_the_attention_calls():
    x = torch.zeros(1, 20, 16)
    assert in_row_chunks(x) and not in_row_chunks(torch.cat([x, x]))
    assert not in_row_chunks(x.to("meta"))  # nor does an accelerator
    with torch.autocast("cpu", torch.bfloat16):
        assert not in_row_chunks(x.float())


def test_logits_of_any_size_stay_finite():
    torch.manual_seed(0)
    x, keys, wq, wv = (torch.randn(*shape, dtype=torch.float64) for shape in ((2500, 4), (6, 4), (6, 4), (4, 4)))
    x[2000:] *= 300  # in the last chunk
    none = torch.zeros(6, dtype=torch.float64)
    y, v = attend(x, torch.eye(3, dtype=torch.float64).expand(2, 3, 3), keys, (wq, none), (wv, none[:4]), 2500)
    far = (x @ keys.t()).view(2500, 2, 3).softmax(0)
    near = (x @ wq.t()).view(2500, 2, 3).softmax(-1)
    torch.testing.assert_close(y, torch.einsum("lhm,khm,khd->lhd", near, far, v.view(2500, 2, 2)))
