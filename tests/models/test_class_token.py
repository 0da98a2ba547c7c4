"""CLS apart from the patches, against forwards written out by hand."""

import math

import torch
from torch.nn import functional as F

from gated_srp import PatchGraph
from gated_srp.models import build_model
from gated_srp.models.class_token import SplitNorm

SMALL = {"in_dim": 6, "num_outputs": 2, "dim": 8, "num_heads": 2, "depth": 4, "num_landmarks": 4, "hidden_dim": 4}


def awake(model):
    draw = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.3 * torch.randn(p.shape, generator=draw))
    return model.double().eval().requires_grad_(False)


def test_patches_do_not_see_cls_before_the_last_two_blocks_and_are_left_alone_there():
    graph = PatchGraph.from_grid(2, 4)
    features = torch.randn(1, 8, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    graph = graph.with_features(features[0])
    model = awake(build_model("cait_gated_srp", **SMALL))
    x = features[0] @ model.in_proj.weight.T + model.in_proj.bias
    x, rows = torch.cat([x, x[:1]])[None], graph.with_isolated(after=1)  # 3 x 3
    for number, block in enumerate(model.blocks):
        if number < 2:
            y, v = block.attn(block.norm1(x), rows)
            y = block.correction(y, v, rows)
            x = x + y.transpose(1, 2).flatten(2) @ block.attn.proj.weight.T + block.attn.proj.bias
            x = x + block.mlp(block.norm2(x))
        else:
            if number == 2:
                x, rows = torch.cat([model.cls_token, x], 1), rows.with_isolated(before=1)
            y, _ = block.attn(block.norm1(x), rows)
            cls = x[:, :1] + y[:, :, :1].transpose(1, 2).flatten(2) @ block.attn.proj.weight.T + block.attn.proj.bias
            x = torch.cat([cls + block.mlp(block.norm2(cls)), x[:, 1:]], 1)
        if number == 0:
            square = x.transpose(1, 2).view(1, 8, 3, 3)
            x = (square + sum(getattr(model.ppeg, f"conv{k}")(square) for k in (7, 5, 3))).flatten(2).transpose(1, 2)
    expected = model.head(F.layer_norm(x[:, 0], (8,), model.norm.weight, model.norm.bias))
    torch.testing.assert_close(model(features, graph), expected, atol=1e-5, rtol=1e-5)
    with torch.no_grad():
        torch.testing.assert_close(model(features, graph), expected, atol=1e-5, rtol=1e-5)
    assert [block.correction is not None for block in model.blocks] == [True, True, False, False]


def test_a_split_norm_has_weights_of_its_own_for_row_0():
    norm = awake(SplitNorm(5))
    x = torch.randn(2, 3, 5, dtype=torch.float64)
    out = norm(x)
    for bag in range(2):
        for i in range(3):
            part, row = norm.cls if i == 0 else norm, x[bag, i].tolist()
            mean = sum(row) / 5
            spread = math.sqrt(sum((value - mean) ** 2 for value in row) / 5 + 1e-5)
            expected = torch.tensor([(value - mean) / spread for value in row]) * part.weight + part.bias
            torch.testing.assert_close(out[bag, i], expected)
