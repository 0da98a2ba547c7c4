"""The support table of docs/attach.md says what the code does: every class in it is tried. timm's are tried by timm_checks.py."""

import pytest
import support_table
import torch
from foreign_models import HEADS, WIDTH, slow_path, wake
from torch import nn

from gated_srp import PatchGraph, UserError, attach
from gated_srp.foreign import Taps
from gated_srp.foreign.huggingface import FRONT

GRAPH = PatchGraph.from_grid(3, 4)
X = torch.randn(1, 13, WIDTH, generator=torch.Generator().manual_seed(0))
LAYER = {"d_model": WIDTH, "nhead": HEADS, "dim_feedforward": WIDTH, "dropout": 0.0, "batch_first": True}
SIZES = {"hidden_size": WIDTH, "num_hidden_layers": 2, "num_attention_heads": HEADS, "intermediate_size": WIDTH}
SIZES |= {"image_size": 32, "patch_size": 8}

TORCH_MODELS = {
    "MultiheadAttention": lambda: nn.MultiheadAttention(WIDTH, HEADS, batch_first=True),
    "TransformerEncoderLayer": lambda: nn.TransformerEncoderLayer(**LAYER),
    "TransformerEncoder": lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(**LAYER), 2),
}
TORCH_REFUSED = {
    "add_bias_kv": lambda: nn.MultiheadAttention(WIDTH, HEADS, batch_first=True, add_bias_kv=True),
    "add_zero_attn": lambda: nn.MultiheadAttention(WIDTH, HEADS, batch_first=True, add_zero_attn=True),
    "Transformer": lambda: nn.Transformer(num_encoder_layers=1, num_decoder_layers=1, **LAYER),
}


def call(model: nn.Module) -> torch.Tensor:
    """Each with as many copies of the rows as it wants."""
    if isinstance(model, nn.MultiheadAttention):
        return model(X, X, X)[0]
    return model(X, X) if isinstance(model, nn.Transformer) else model(X)


def test_the_table_has_the_columns_and_families_that_it_promises():
    head, *rows = support_table.rows()
    assert head == support_table.COLUMNS
    assert [row[0] for row in rows] == ["PyTorch", "Hugging Face", "timm", "your own"]
    assert all(len(row) == 5 and all(row) for row in rows)


@pytest.mark.parametrize("name", sorted(support_table.handled("PyTorch")))
def test_a_torch_class_of_the_table_is_corrected(name):
    model = TORCH_MODELS[name]().eval()
    with slow_path():
        plain = call(model)
    handle = attach(model, last=True)
    handle.set_graph(GRAPH, stay=True)
    assert torch.equal(call(model), plain)
    wake(handle)
    with torch.no_grad():
        assert not torch.allclose(call(model), plain, atol=1e-3)


@pytest.mark.parametrize("name", sorted(support_table.refused("PyTorch")))
def test_what_the_table_refuses_of_torch_is_refused(name):
    def whole() -> None:
        model = TORCH_REFUSED[name]()
        attach(model, last=True).set_graph(GRAPH)
        call(model)

    with pytest.raises(UserError, match="MultiheadAttention"):
        whole()


def test_the_hugging_face_classes_of_the_table_are_those_that_are_known():
    transformers = pytest.importorskip("transformers", reason="transformers is not installed (extra: encoders)")
    classes = [getattr(transformers, name) for name in support_table.handled("Hugging Face")]
    assert {one.config_class.model_type for one in classes} == set(FRONT) and len(classes) == len(FRONT)


@pytest.mark.parametrize("name", sorted(support_table.handled("Hugging Face")))
def test_a_hugging_face_class_of_the_table_is_corrected(name):
    transformers = pytest.importorskip("transformers", reason="transformers is not installed (extra: encoders)")
    kind = getattr(transformers, name)
    model = kind(kind.config_class(**SIZES)).eval()
    images = torch.randn(1, 3, 32, 32)
    plain = model(pixel_values=images).last_hidden_state
    handle = attach(model, last=True)
    assert torch.equal(model(pixel_values=images).last_hidden_state, plain)
    wake(handle)
    assert not torch.allclose(model(pixel_values=images).last_hidden_state, plain, atol=1e-4)
    assert plain.shape[1] == FRONT[kind.config_class.model_type](model.config) + 16  # the rows in front are all known


@pytest.mark.parametrize("name", sorted(support_table.refused("Hugging Face")))
def test_what_the_table_refuses_of_hugging_face_is_refused(name):
    transformers = pytest.importorskip("transformers", reason="transformers is not installed (extra: encoders)")
    kind = getattr(transformers, name)
    swin = {"image_size": 32, "patch_size": 4, "embed_dim": 12, "depths": [1], "num_heads": [2], "window_size": 4}
    text = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    text |= {"vocab_size": 50, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 1}
    both = {"vision_config": SIZES, "text_config": text}
    settings = swin if "Swin" in name else both if name in ("CLIPModel", "SiglipModel") else SIZES
    reason = "windows" if "Swin" in name else "vision_model" if settings is both else "adapters"
    with pytest.raises(UserError, match=reason):
        attach(kind(kind.config_class(**settings)), last=True)


def test_an_adapter_and_taps_reach_what_is_ones_own():
    assert support_table.handled("your own") == {
        Taps.__name__
    }  # and functions; tests/foreign/test_adapters.py has both


@pytest.mark.parametrize("heading", ["PyTorch", "Hugging Face", "timm", "Your own attention"])
def test_every_family_has_three_lines_after_the_model(heading):
    *_, mine = support_table.code(heading).strip().split("\n\n")
    assert len(mine.splitlines()) == 3 and "attach(" in mine
