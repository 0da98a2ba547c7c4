"""Attentions of other publications against loops over their formulas, dense and through landmarks."""

import math

import pytest
import torch

from gated_srp import PatchGraph, UserError
from gated_srp.models import build_model
from gated_srp.models.attention import DenseAttention, split_heads
from gated_srp.models.nystrom import NystromAttention, landmarks, pinv, segment_means
from gated_srp.models.variants import (
    CogAttention,
    GatedDifferentialAttention,
    GatedDifferentialNystrom,
    IntegralAttention,
    IntegralNystrom,
)

ROWS, DIM, HEADS, WIDTH, MARKS = 11, 16, 2, 8, 4
GRAPH = PatchGraph.from_grid(1, ROWS - 1).with_isolated(before=1)


def awake(layer):
    draw = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for p in layer.parameters():
            p.copy_(0.4 * torch.randn(p.shape, generator=draw))
    return layer.double().requires_grad_(False)


def rows():
    return torch.randn(1, ROWS, DIM, dtype=torch.float64, generator=torch.Generator().manual_seed(5))


def softmax(values):
    exps = [math.exp(v - max(values)) for v in values]
    return [e / sum(exps) for e in exps]


def check(layer, x, y, maps):
    """y (H, L, width) and the CLS maps (H, L) are what the layer gives, of all rows, of the first one, and as a map."""
    got, v = layer(x, GRAPH)
    torch.testing.assert_close(got[0], y, atol=1e-5, rtol=1e-5)  # pinv and weights are float32 in ours
    torch.testing.assert_close(layer.first_row(x, GRAPH)[0][0], y[:, :1], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(layer.cls_map(x, GRAPH)[0].double(), maps, atol=1e-5, rtol=1e-5)
    return v[0]


def test_cog_weights_have_the_sign_of_their_logits():
    layer, x = awake(CogAttention(DIM, HEADS)), rows()
    q, k, v = (part[0] for part in layer.heads(x))
    y, maps = torch.zeros(v.shape, dtype=v.dtype), torch.zeros(HEADS, ROWS, dtype=v.dtype)
    for h in range(HEADS):
        for i in range(ROWS):
            p = [float(q[h, i] @ k[h, j]) / math.sqrt(WIDTH) for j in range(ROWS)]
            weights = [
                math.copysign(w, value) for w, value in zip(softmax([abs(value) for value in p]), p, strict=True)
            ]
            y[h, i] = sum(w * v[h, j] for j, w in enumerate(weights))
            maps[h] = torch.tensor(weights) if i == 0 else maps[h]
    assert (maps < 0).any() and (maps > 0).any()
    check(layer, x, y, maps)


def test_cog_attention_does_not_read_the_padding_of_a_shorter_bag():
    layer = awake(CogAttention(DIM, HEADS))
    x = torch.cat([rows(), rows().flip(1)])
    graph = PatchGraph.batch([PatchGraph.from_grid(1, 6), PatchGraph.from_grid(1, ROWS - 1)]).with_isolated(before=1)
    alone = layer(x[:1, :7], PatchGraph.from_grid(1, 6).with_isolated(before=1))[0]
    torch.testing.assert_close(layer(x, graph)[0][0, :, :7], alone[0])


def test_cog_attention_keeps_the_softmax_in_the_first_and_the_last_block():
    model = build_model("vit4_cog", in_dim=4, num_outputs=2, dim=8, num_heads=2, depth=4)
    assert [type(block.attn) for block in model.blocks] == [DenseAttention, CogAttention, CogAttention, DenseAttention]
    with pytest.raises(UserError, match="depth 2: Cog attention leaves the first and the last block"):
        build_model("vit4_cog", in_dim=4, num_outputs=2, dim=8, num_heads=2, depth=2)


def averaged(q, k, signals=8):
    """Logits (rows of q, rows of k): each signal of its own channels scaled by its own width, then the mean."""
    width = WIDTH // signals
    found = torch.zeros(len(q), len(k), dtype=torch.float64)
    for s in range(signals):
        part = slice(s * width, (s + 1) * width)
        for i in range(len(q)):
            for j in range(len(k)):
                found[i, j] += float(q[i, part] @ k[j, part]) / math.sqrt(width) / signals
    return found


def test_integral_attention_averages_the_logits_of_eight_signals():
    layer, x = awake(IntegralAttention(DIM, HEADS)), rows()
    q, k, v = (part[0] for part in DenseAttention.heads(plain(layer, DenseAttention(DIM, HEADS)), x))
    maps = torch.stack([averaged(q[h], k[h]).softmax(-1) for h in range(HEADS)])
    check(layer, x, maps @ v, maps[:, 0])


def test_integral_attention_through_landmarks_averages_in_all_three_softmaxes():
    layer, x = awake(IntegralNystrom(DIM, HEADS, num_landmarks=MARKS)), rows()
    base = plain(layer, NystromAttention(DIM, HEADS, num_landmarks=MARKS))
    q, k, v = (part[0] for part in base.heads(x))
    q_marks, k_marks = (part[0] for part in base.landmarks(segment_means(x, MARKS)))
    f, a, b = (
        torch.stack([averaged(one[h], other[h]).softmax(-1) for h in range(HEADS)])
        for one, other in ((q, k_marks), (q_marks, k_marks), (q_marks, k))
    )
    maps = f @ pinv(a[None])[0].double() @ b
    check(layer, x, maps @ v, maps[:, 0])


def plain(layer, base):
    """The layer's weights in an attention that has nothing averaged."""
    base.double().load_state_dict(layer.state_dict())
    return base.requires_grad_(False)


@pytest.mark.parametrize("nystrom", [False, True])
def test_a_gate_of_the_token_weighs_excitation_against_inhibition(nystrom):
    made = (
        GatedDifferentialNystrom(DIM, 2 * HEADS, num_landmarks=MARKS)
        if nystrom
        else GatedDifferentialAttention(DIM, 2 * HEADS)
    )
    layer, x = awake(made), rows()
    width = DIM // (2 * HEADS)
    q, k = ((x[0] @ part.weight.T).view(ROWS, 2 * HEADS, width) for part in (layer.q_proj, layer.k_proj))
    v = (x[0] @ layer.v_proj.weight.T).view(ROWS, HEADS, 2 * width)
    means = segment_means(x, MARKS)
    marks = [split_heads(landmarks(means, p.weight, None, MARKS), 2 * HEADS)[0] for p in (layer.q_proj, layer.k_proj)]
    soft = [[], []]  # of each branch, the map of each head
    for branch in (0, 1):
        heads = range(branch, 2 * HEADS, 2)
        if nystrom:
            parts = [[(one @ other.T / math.sqrt(width)).softmax(-1) for one, other in (
                (q[:, h], marks[1][h]), (marks[0][h], marks[1][h]), (marks[0][h], k[:, h])
            )] for h in heads]  # fmt: skip
            inverse = pinv(torch.stack([a for _, a, _ in parts])[None])[
                0
            ].double()  # one scale for the heads of a branch
            soft[branch] = [f @ inverse[i] @ b for i, (f, _, b) in enumerate(parts)]
        else:
            soft[branch] = [(q[:, h] @ k[:, h].T / math.sqrt(width)).softmax(-1) for h in heads]
    y, maps = torch.zeros(HEADS, ROWS, 2 * width, dtype=torch.float64), torch.zeros(HEADS, ROWS, dtype=torch.float64)
    for h in range(HEADS):
        for i in range(ROWS):
            g = 1 / (1 + math.exp(-float(layer.gate.weight[h] @ x[0, i] + layer.gate.bias[h])))
            weights = g * soft[0][h][i] - (1 - g) * soft[1][h][i]
            mixed = weights @ v[:, h]
            y[h, i] = 0.2 * layer.subln.weight * mixed / (mixed.square().mean() + 1e-5).sqrt()
            maps[h] = weights if i == 0 else maps[h]
    check(layer, x, y.detach(), maps.detach())
