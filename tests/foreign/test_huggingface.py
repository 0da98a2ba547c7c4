"""Gated SRP in Hugging Face transformers, through its attention interface. Random weights, no downloads."""

import copy
import logging
import pickle

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
)

from gated_srp import UserError, attach

transformers = pytest.importorskip("transformers", reason="transformers is not installed (extra: encoders)")
logging.getLogger("transformers").setLevel(logging.ERROR)

SIZES = {
    "hidden_size": WIDTH,
    "num_hidden_layers": 3,
    "num_attention_heads": HEADS,
    "intermediate_size": 4 * WIDTH,
    "image_size": 32,
    "patch_size": 8,
}
TEXT = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16, "vocab_size": 50}
TEXT |= {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 1}
IMAGES = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
ALL, NOT_LAST = [True] * 3, [True, True, False]


def case(name: str, model: str, config: str, gates: list[bool], front: int, **changes: object) -> Case:
    def make() -> torch.nn.Module:
        settings = getattr(transformers, config)(**{**SIZES, **changes})
        return getattr(transformers, model)(settings)

    bare = not model.endswith("Classification")
    output = (lambda out: out.last_hidden_state) if bare else (lambda out: out.logits)
    settings = {"last": True} if bare else {}
    return Case(name, make, {"pixel_values": IMAGES}, output, gates, front, grid=(4, 4), settings=settings)


def both_halves(name: str, model: str, config: str, front: int) -> Case:
    def make() -> torch.nn.Module:
        settings = getattr(transformers, config)(vision_config=SIZES, text_config=TEXT, num_labels=3)
        return getattr(transformers, model)(settings)

    return Case(name, make, {"pixel_values": IMAGES}, lambda out: out.logits, ALL, front, grid=(4, 4))


CASES = {
    c.name: c
    for c in [
        case("vit", "ViTForImageClassification", "ViTConfig", NOT_LAST, 1, num_labels=3),
        case("vit_msn", "ViTMSNForImageClassification", "ViTMSNConfig", NOT_LAST, 1, num_labels=3),
        case("deit", "DeiTForImageClassification", "DeiTConfig", NOT_LAST, 2, num_labels=3),
        case("dinov2", "Dinov2ForImageClassification", "Dinov2Config", ALL, 1, num_labels=3),
        case(
            "dinov2_with_registers",
            "Dinov2WithRegistersForImageClassification",
            "Dinov2WithRegistersConfig",
            ALL,
            5,
            num_labels=3,
            num_register_tokens=4,
        ),
        case("dinov3_vit", "DINOv3ViTModel", "DINOv3ViTConfig", ALL, 5, num_register_tokens=4),
        case("siglip_vision_model", "SiglipVisionModel", "SiglipVisionConfig", ALL, 0),
        case("clip_vision_model", "CLIPVisionModel", "CLIPVisionConfig", ALL, 1),
        case("ijepa", "IJepaForImageClassification", "IJepaConfig", ALL, 0, num_labels=3),
        both_halves("siglip_classifier", "SiglipForImageClassification", "SiglipConfig", 0),
        both_halves("clip_classifier", "CLIPForImageClassification", "CLIPConfig", 1),
    ]
}
MAIN = ["vit", "dinov2_with_registers", "siglip_vision_model"]


@pytest.mark.parametrize("check", CHECKS[:3], ids=lambda f: f.__name__.removeprefix("check_"))
@pytest.mark.parametrize("name", CASES)
def test_what_holds_for_every_model_type(name, check):
    check(CASES[name])


@pytest.mark.parametrize("check", CHECKS[3:], ids=lambda f: f.__name__.removeprefix("check_"))
@pytest.mark.parametrize("name", MAIN)
def test_what_holds_for_every_foreign_model(name, check):
    check(CASES[name])


def test_every_supported_model_type_has_a_case():
    from gated_srp.foreign.huggingface import FRONT

    assert set(FRONT) <= set(CASES)


@pytest.mark.parametrize("name", CASES)
def test_autocast_keeps_the_identity(name):
    check_autocast(CASES[name])


@pytest.mark.parametrize("name", MAIN)
def test_a_compiled_model_is_corrected(name):
    check_compile(CASES[name])


@pytest.mark.parametrize("name", ["dinov2", *MAIN])
def test_gates_go_through_a_file(name, tmp_path):
    check_gate_files(CASES[name], tmp_path)


def test_a_model_is_unpickled_where_nothing_was_attached_yet(monkeypatch):
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS as functions

    model, _ = CASES["vit"].attached()
    out, dump = CASES["vit"](model), pickle.dumps(model)
    for name in [name for name in functions.valid_keys() if name.startswith("gated_srp_")]:
        monkeypatch.delitem(type(functions)._global_mapping, name)  # as in a process of its own
    assert torch.equal(CASES["vit"](pickle.loads(dump)), out)


def test_an_attached_vit_equals_our_own_blocks():
    model, _ = CASES["vit"].attached()

    def parts(layer: torch.nn.Module) -> Weights:
        a = layer.attention
        qkv = [(p.weight, p.bias) for p in (a.q_proj, a.k_proj, a.v_proj)]
        return Weights(layer.layernorm_before, qkv, a.o_proj, layer.layernorm_after, layer.mlp.fc1, layer.mlp.fc2)

    check_equals_our_own_blocks(CASES["vit"], model, list(model.vit.layers), parts)


def test_an_attached_siglip_without_cls_equals_our_own_blocks():
    one = case("siglip", "SiglipVisionModel", "SiglipVisionConfig", ALL, 0, hidden_act="gelu")  # exact, as ours
    model, _ = one.attached()

    def parts(layer: torch.nn.Module) -> Weights:
        a = layer.self_attn
        qkv = [(p.weight, p.bias) for p in (a.q_proj, a.k_proj, a.v_proj)]
        return Weights(layer.layer_norm1, qkv, a.out_proj, layer.layer_norm2, layer.mlp.fc1, layer.mlp.fc2)

    check_equals_our_own_blocks(one, model, list(model.encoder.layers), parts)


def test_an_attached_dinov2_with_registers_equals_our_own_blocks():
    one = CASES["dinov2_with_registers"]
    model, _ = one.attached()

    def scaled(linear: torch.nn.Linear, scale: torch.nn.Module) -> torch.nn.Linear:
        """The layer scale behind a linear layer, as part of it."""
        folded = copy.deepcopy(linear)
        folded.weight.data *= scale.lambda1.data[:, None]
        folded.bias.data *= scale.lambda1.data
        return folded

    def parts(layer: torch.nn.Module) -> Weights:
        a, mlp = layer.attention, layer.mlp
        qkv = [(p.weight, p.bias) for p in (a.q_proj, a.k_proj, a.v_proj)]
        proj, fc2 = scaled(a.o_proj, layer.layer_scale1), scaled(mlp.fc2, layer.layer_scale2)
        return Weights(layer.norm1, qkv, proj, layer.norm2, mlp.fc1, fc2)

    check_equals_our_own_blocks(one, model, list(model.dinov2_with_registers.encoder.layer), parts)


def test_a_forward_that_was_interrupted_leaves_the_gates_in_place(monkeypatch):
    torch.manual_seed(0)
    model = CASES["vit"].make().eval()
    handle = attach(model)
    for parameter in handle.parameters():
        torch.nn.init.normal_(parameter)

    def out_of_memory(*args, **kwargs):
        raise torch.OutOfMemoryError("out of memory")

    with torch.no_grad():
        before = model(IMAGES).logits
        with monkeypatch.context() as once:
            once.setattr(torch.nn.functional, "scaled_dot_product_attention", out_of_memory)
            with pytest.raises(torch.OutOfMemoryError):
                model(IMAGES)
        assert model(IMAGES).logits.equal(before)


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_the_implementation_that_the_model_had_goes_on_and_comes_back(implementation):
    model = CASES["vit"].model()
    model.set_attn_implementation(implementation)
    plain = CASES["vit"](model)
    handle = attach(model)
    assert model.config._attn_implementation == implementation  # the model's own config is left alone
    assert torch.equal(CASES["vit"](model), plain)
    handle.detach()
    assert model.config._attn_implementation == implementation


def test_a_padding_mask_is_not_dropped():
    one = CASES["dinov2"]
    model = one.model()
    mask = torch.ones(2, 17, dtype=torch.long)
    mask[:, -6:] = 0
    plain, masked = one(model), one(model, attention_mask=mask)
    assert not torch.allclose(plain, masked, atol=1e-3)
    attach(model)
    assert torch.equal(one(model, attention_mask=mask), masked)


def test_the_models_own_gradient_checkpointing_gives_the_same_gradients():
    one = CASES["vit"]
    model, handle = one.attached()
    model.train()
    one(model).square().sum().backward()
    grads = [p.grad.clone() for p in handle.parameters()]
    model.zero_grad()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    one(model).square().sum().backward()
    for p, grad in zip(handle.parameters(), grads, strict=True):
        torch.testing.assert_close(p.grad, grad)


def test_images_of_another_size_need_to_be_said():
    one = CASES["vit"]
    model, handle = one.attached()
    wide = torch.randn(1, 3, 32, 64)
    with pytest.raises(UserError, match="set_grid"):
        one(model, pixel_values=wide, interpolate_pos_encoding=True)
    handle.set_grid(4, 8)
    assert torch.isfinite(one(model, pixel_values=wide, interpolate_pos_encoding=True)).all()


def test_a_rectangular_config_gives_a_rectangular_grid():
    config = transformers.ViTConfig(**{**SIZES, "image_size": (16, 40)}, num_labels=3)
    handle = attach(transformers.ViTForImageClassification(config))
    assert handle._neighbourhood.graph.neighbour_count.tolist() == [3, 5, 5, 5, 3] * 2


def test_a_model_whose_tokens_come_out_asks_for_last():
    with pytest.raises(UserError, match="last=False"):
        attach(transformers.Dinov2Model(transformers.Dinov2Config(**SIZES)))


def test_a_wrapped_trunk_is_found_and_asks_for_last():
    trunk = transformers.ViTModel(transformers.ViTConfig(**SIZES))
    wrapped = torch.nn.ModuleDict({"trunk": trunk, "head": torch.nn.Linear(WIDTH, 2)})
    with pytest.raises(UserError, match="last=False"):
        attach(wrapped)
    assert list(attach(wrapped, last=False).gates()) == ["trunk.layers.0.attention", "trunk.layers.1.attention"]


@pytest.mark.parametrize("name", ["vit", "clip_classifier", "dinov3_vit"])
def test_gates_survive_a_change_of_the_attention_implementation(name):
    """set_attn_implementation after attach switched every gate off without a word."""
    one = CASES[name]
    plain = one.model()
    model, _ = one.attached()
    gated = one(model)
    for implementation in ("eager", "sdpa", "eager"):
        model.set_attn_implementation(implementation)
        plain.set_attn_implementation(implementation)
        torch.testing.assert_close(one(model), gated, atol=1e-4, rtol=1e-4)
        assert not torch.allclose(one(model), one(plain), atol=1e-3)
        assert model.config._attn_implementation == implementation


def test_gates_survive_a_change_of_the_vision_half_alone():
    one = CASES["clip_classifier"]
    model, _ = one.attached()
    gated = one(model)
    model.set_attn_implementation({"vision_config": "eager"})
    torch.testing.assert_close(one(model), gated, atol=1e-4, rtol=1e-4)


def test_attention_maps_are_given_out_as_without_gates():
    one = CASES["vit"]
    plain, (model, _) = one.model(), one.attached()
    gated = one(model)
    asleep = one.model()
    attach(asleep, hidden_dim=8)
    for each in (plain, model, asleep):
        each.set_attn_implementation("eager")
        each.config.output_attentions = True
    outputs = [each(pixel_values=IMAGES) for each in (plain, model, asleep)]
    assert [len(out.attentions) for out in outputs] == [3, 3, 3]
    assert all(torch.equal(a, b) for a, b in zip(outputs[0].attentions, outputs[2].attentions, strict=True))
    torch.testing.assert_close(outputs[1].logits, gated, atol=1e-4, rtol=1e-4)
    assert not torch.allclose(outputs[1].attentions[1], outputs[0].attentions[1], atol=1e-3)
    named = model(pixel_values=IMAGES, output_attentions=True)
    assert torch.equal(named.logits, outputs[1].logits) and len(named.attentions) == 3


def test_two_models_of_one_config_do_not_disturb_each_other():
    config = transformers.ViTConfig(**SIZES, num_labels=3)
    one, other = (transformers.ViTForImageClassification(config).eval() for _ in range(2))
    plain = other(pixel_values=IMAGES).logits
    attach(one)
    assert torch.equal(other(pixel_values=IMAGES).logits, plain)
    handle = attach(other)
    assert torch.equal(other(pixel_values=IMAGES).logits, plain)
    handle.detach()
    assert torch.equal(other(pixel_values=IMAGES).logits, plain)


@pytest.mark.parametrize("name", ["vit", "dinov2", "clip_classifier"])
def test_gates_of_a_model_that_was_saved_whole_come_back(name, tmp_path):
    """save_pretrained writes the gates; from_pretrained knows of none, and attaching again used to start new ones."""
    one = CASES[name]
    model, handle = one.attached()
    gated = one(model)
    model.save_pretrained(tmp_path / "saved")
    again = type(model).from_pretrained(tmp_path / "saved").eval()
    other = one.attach(again)
    assert all(torch.equal(a, b) for a, b in zip(handle.parameters(), other.parameters(), strict=True))
    assert torch.equal(one(again), gated)
    other.detach()
    fresh = one.model()
    third = one.attach(fresh)
    third.load(tmp_path / "saved")
    assert all(torch.equal(a, b) for a, b in zip(handle.parameters(), third.parameters(), strict=True))


def test_gates_of_a_saved_model_are_not_begun_anew_by_other_settings(tmp_path):
    one = CASES["vit"]
    model, _ = one.attached()
    model.save_pretrained(tmp_path / "saved")
    again = type(model).from_pretrained(tmp_path / "saved")
    with pytest.raises(UserError, match=r"saved with delta 1.5, this model has 2.0"):
        attach(again, delta=2.0, hidden_dim=8)
    assert not hasattr(again, "_gated_srp") and attach(again, delta=1.5, hidden_dim=8)


def test_a_saved_model_whose_folder_is_gone_says_that_its_gates_are_missing(tmp_path):
    one = CASES["vit"]
    model, _ = one.attached()
    model.save_pretrained(tmp_path / "saved")
    again = type(model).from_pretrained(tmp_path / "saved")
    (tmp_path / "saved" / "model.safetensors").unlink()
    with pytest.raises(UserError, match=r"trained gates \(delta 1.5.*del model.config.gated_srp"):
        one.attach(again)
    del again.config.gated_srp
    assert one.attach(again)


def test_a_detached_model_is_saved_without_a_word_of_gates(tmp_path):
    model, handle = CASES["vit"].attached()
    handle.detach()
    model.save_pretrained(tmp_path / "saved")
    assert "gated_srp" not in (tmp_path / "saved" / "config.json").read_text()
    attach(type(model).from_pretrained(tmp_path / "saved"))
    with pytest.raises(UserError, match="no gates in this folder"):
        attach(model).load(tmp_path / "saved")


def test_swin_is_refused_because_of_its_windows():
    config = transformers.SwinConfig(
        image_size=32, patch_size=4, embed_dim=12, depths=[1, 1], num_heads=[2, 2], window_size=4
    )
    with pytest.raises(UserError, match="windows") as caught:
        attach(transformers.SwinForImageClassification(config))
    assert "Taps" not in str(caught.value)  # no name of its attention could mend that


def test_a_model_of_images_and_text_is_sent_to_its_vision_half():
    model = transformers.SiglipModel(transformers.SiglipConfig(vision_config=SIZES, text_config=TEXT))
    with pytest.raises(UserError, match="vision"):
        attach(model, last=True)
    assert len(attach(model.vision_model, last=True).gates()) == 3


def test_an_unknown_model_type_may_be_tapped():
    from gated_srp.foreign import Taps

    config = transformers.ViTMAEConfig(**SIZES, mask_ratio=0.0)
    model = transformers.ViTMAEModel(config).eval()
    with pytest.raises(UserError, match="vit_mae"):
        attach(model)
    torch.manual_seed(0)
    plain = model(pixel_values=IMAGES, noise=torch.arange(16.0).expand(2, -1)).last_hidden_state
    attention = next(type(m) for n, m in model.named_modules() if n.endswith("0.attention"))
    handle = attach(model, adapters={attention: Taps("v_proj", "o_proj")}, grid=(4, 4), last=True)
    assert torch.equal(model(pixel_values=IMAGES, noise=torch.arange(16.0).expand(2, -1)).last_hidden_state, plain)
    assert len(handle.gates()) == 3
