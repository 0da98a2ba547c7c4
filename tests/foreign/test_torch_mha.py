"""Gated SRP in nn.MultiheadAttention and nn.TransformerEncoder."""

import pytest
import torch
from foreign_models import (
    CHECKS,
    HEADS,
    WIDTH,
    Case,
    Weights,
    check_autocast,
    check_compile,
    check_equals_our_own_blocks,
    check_gate_files,
    slow_path,
    wake,
)
from torch import nn

from gated_srp import PatchGraph, UserError, attach

FEATURES = torch.randn(1, 14, WIDTH, generator=torch.Generator().manual_seed(5))
COORDS = torch.cartesian_prod(torch.arange(4), torch.arange(4))[:14]
GRAPH = PatchGraph.from_coords(COORDS, FEATURES[0], stride=1)


def encoder(**changes: object) -> nn.TransformerEncoder:
    settings = {
        "batch_first": True,
        "dropout": 0.0,
        "activation": "gelu",
        "norm_first": True,
        "dim_feedforward": 4 * WIDTH,
    }
    layer = nn.TransformerEncoderLayer(WIDTH, HEADS, **{**settings, **changes})
    return nn.TransformerEncoder(layer, 3, enable_nested_tensor=not layer.norm_first and layer.self_attn.batch_first)


class SlideModel(nn.Module):
    """CLS in front of the patches, an encoder of PyTorch, a head on CLS."""

    def __init__(self, **changes: object) -> None:
        super().__init__()
        self.cls = nn.Parameter(torch.zeros(1, 1, WIDTH))
        self.encoder, self.head = encoder(**changes), nn.Linear(WIDTH, 3)
        self.batch_first = changes.get("batch_first", True)

    def forward(self, features: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        x = torch.cat([self.cls.expand(len(features), -1, -1), features], dim=1)
        if mask is not None:
            mask = torch.cat([torch.zeros_like(mask[:, :1]), mask], dim=1)
        x = x if self.batch_first else x.transpose(0, 1)
        x = self.encoder(x, src_key_padding_mask=mask)
        return self.head(x[:, 0] if self.batch_first else x[0])


def case(name: str, **changes: object) -> Case:
    return Case(
        name,
        lambda: SlideModel(**changes),
        {"features": FEATURES},
        lambda out: out,
        [True, True, False],
        1,
        graph=GRAPH,
        settings={"last": False},
    )


CASES = [
    case("pre_norm"),
    case("post_norm_relu", norm_first=False, activation="relu"),
    case("sequence_first", batch_first=False),
    case("no_bias", bias=False),
]


@pytest.mark.parametrize("check", CHECKS, ids=lambda f: f.__name__.removeprefix("check_"))
@pytest.mark.parametrize("one", CASES, ids=lambda c: c.name)
def test_what_holds_for_every_foreign_model(one, check):
    check(one)


def test_autocast_keeps_the_identity():
    check_autocast(CASES[0])


def test_a_compiled_model_is_corrected():
    check_compile(CASES[0])


def test_gates_go_through_a_file(tmp_path):
    check_gate_files(CASES[0], tmp_path)


def test_an_attached_encoder_equals_our_own_blocks():
    model, _ = CASES[0].attached()

    def parts(layer: nn.TransformerEncoderLayer) -> Weights:
        attn = layer.self_attn
        qkv = list(zip(attn.in_proj_weight.chunk(3), attn.in_proj_bias.chunk(3), strict=True))
        return Weights(layer.norm1, qkv, attn.out_proj, layer.norm2, layer.linear1, layer.linear2)

    check_equals_our_own_blocks(CASES[0], model, list(model.encoder.layers), parts)


def test_the_inference_fast_path_does_not_bypass_the_correction():
    one = case("fast", norm_first=False)
    model, _ = one.attached()
    mask = torch.zeros(1, 14, dtype=torch.bool)
    mask[0, -3:] = True
    for extra in ({}, {"mask": mask}):
        with slow_path():
            slow = one(model, **extra)
        with torch.no_grad():
            assert torch.equal(one(model, **extra), slow.detach())


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize("masked", ["none", "causal", "boolean", "float", "per_head", "padding", "both"])
def test_every_kind_of_mask_gives_pytorchs_own_bits(batch_first, need_weights, masked):
    draw = torch.Generator().manual_seed(1)
    attention = nn.MultiheadAttention(WIDTH, HEADS, batch_first=batch_first)
    x = torch.randn(2, 9, WIDTH, generator=draw)
    x = x if batch_first else x.transpose(0, 1)
    causal = torch.triu(torch.ones(9, 9, dtype=torch.bool), 1)
    padding = torch.zeros(2, 9, dtype=torch.bool)
    padding[1, -2:] = True
    options = {
        "none": {},
        "causal": {"attn_mask": causal, "is_causal": True},
        "boolean": {"attn_mask": causal},
        "float": {"attn_mask": torch.randn(9, 9, generator=draw)},
        "per_head": {"attn_mask": torch.randn(2 * HEADS, 9, 9, generator=draw)},
        "padding": {"key_padding_mask": padding},
        "both": {"attn_mask": causal, "key_padding_mask": padding},
    }[masked]
    for average in (True, False):
        arguments = {"need_weights": need_weights, "average_attn_weights": average, **options}
        plain, weights = attention(x, x, x, **arguments)
        handle = attach(attention, last=True)
        handle.set_graph(PatchGraph.from_grid(3, 3))
        out, seen = attention(x, x, x, **arguments)
        handle.detach()
        assert torch.equal(out, plain)
        assert (seen is None) == (weights is None)
        if seen is not None:
            assert torch.equal(seen, weights)


def test_a_bag_without_batch_axis_is_corrected_like_a_batch_of_one():
    attention = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)
    handle = attach(attention, last=True)
    wake(handle)
    handle.set_graph(GRAPH, stay=True)
    rows = FEATURES[0]
    torch.testing.assert_close(attention(rows, rows, rows)[0], attention(*(FEATURES,) * 3)[0][0])


def test_padded_bags_are_what_they_are_alone():
    one = CASES[0]
    model, handle = one.attached()
    short = PatchGraph.from_coords(COORDS[:9], FEATURES[0, :9], stride=1)
    alone = []
    for features, graph in ((FEATURES, GRAPH), (FEATURES[:, :9], short)):
        handle.set_graph(graph)
        alone.append(model(features))
    handle.set_graph(PatchGraph.batch([GRAPH, short]))
    both = torch.cat([FEATURES, torch.cat([FEATURES[:, :9], torch.randn(1, 5, WIDTH)], dim=1)])
    mask = torch.zeros(2, 14, dtype=torch.bool)
    mask[1, 9:] = True
    torch.testing.assert_close(model(both, mask), torch.cat(alone), atol=1e-5, rtol=1e-5)


def test_one_graph_serves_every_bag_of_a_batch():
    model, handle = CASES[0].attached()
    other = torch.randn(1, 14, WIDTH)
    apart = [model(f) for f in (FEATURES, other)]
    torch.testing.assert_close(model(torch.cat([FEATURES, other])), torch.cat(apart), atol=1e-5, rtol=1e-5)
    handle.set_graph(GRAPH)


def test_cls_is_never_corrected():
    attention = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)
    x = torch.cat([torch.randn(1, 2, WIDTH), FEATURES], dim=1)
    plain = attention(x, x, x)[0]
    handle = attach(attention, last=True)
    wake(handle)
    handle.set_graph(GRAPH)
    out = attention(x, x, x)[0]
    assert torch.equal(out[:, :2], plain[:, :2]) and not torch.allclose(out[:, 2:], plain[:, 2:], atol=1e-3)


def test_a_fixed_grid_measures_homogeneity_on_the_tokens_of_each_image():
    model = encoder()
    handle = attach(model, last=True, grid=(2, 3))
    wake(handle)
    images = torch.randn(2, 7, WIDTH)
    apart = torch.cat([model(image[None]) for image in images])
    torch.testing.assert_close(model(images), apart, atol=1e-5, rtol=1e-5)
    handle.set_graph(PatchGraph.from_grid(2, 3).with_features(images[0, 1:]))
    torch.testing.assert_close(model(images[:1]), apart[:1], atol=1e-5, rtol=1e-5)
    handle.set_graph(PatchGraph.from_grid(2, 3))
    assert not torch.allclose(model(images[:1]), apart[:1], atol=1e-4)
    handle.set_grid(3, 2)
    assert not torch.allclose(model(images[:1]), apart[:1], atol=1e-4)


def test_dropout_of_the_attention_stays_on_in_training():
    attention = nn.MultiheadAttention(WIDTH, HEADS, dropout=0.5, batch_first=True).train()
    handle = attach(attention, last=True)
    handle.set_graph(GRAPH, stay=True)
    one, two = (attention(*(FEATURES,) * 3)[0] for _ in range(2))
    assert not torch.equal(one, two)


def test_cross_attention_is_refused():
    attention = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)
    attach(attention, last=True).set_graph(GRAPH)
    with pytest.raises(UserError, match="self-attention"):
        attention(FEATURES[:, :1], FEATURES, FEATURES)


def test_values_that_belong_to_no_row_are_refused():
    with pytest.raises(UserError, match="add_bias_kv"):
        attach(nn.MultiheadAttention(WIDTH, HEADS, add_bias_kv=True), last=True)
