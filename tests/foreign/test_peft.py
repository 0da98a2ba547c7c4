"""Gates travel with peft's adapters: trained with them, saved in their folder, loaded from it. Random weights, no downloads."""

import logging

import pytest
import torch
from foreign_models import wake

from gated_srp import attach, trace
from gated_srp.foreign import handle_of

transformers = pytest.importorskip("transformers", reason="transformers is not installed (extra: encoders)")
peft = pytest.importorskip("peft", reason="peft is not installed (extra: dev)")
logging.getLogger("transformers").setLevel(logging.ERROR)
SIZES = {"hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 32}
IMAGES = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))


def base():
    torch.manual_seed(0)
    config = transformers.ViTConfig(image_size=32, patch_size=8, num_labels=3, **SIZES)
    return transformers.ViTForImageClassification(config).eval()


def lora():
    return peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], modules_to_save=["correction", "classifier"])


def logits(model):
    with torch.no_grad():
        return model.eval()(pixel_values=IMAGES).logits


@pytest.fixture
def adapted():
    """A model with gates and an adapter, both moved away from their start, and the handle of its gates."""
    model = base()
    handle = attach(model, hidden_dim=4)
    model = peft.get_peft_model(model, lora())
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.copy_(0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))
    wake(handle)
    return model, handle


def test_the_gates_are_trained_with_the_adapter_and_nothing_else_of_the_base_is(adapted):
    model, handle = adapted
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    optimiser = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    model.train()(pixel_values=IMAGES, labels=torch.tensor([0, 1])).loss.backward()
    optimiser.step()
    moved = {name for name, parameter in model.named_parameters() if not torch.equal(parameter, before[name])}
    assert any("correction.modules_to_save" in name for name in moved)
    assert all("lora_" in name or "modules_to_save" in name for name in moved)
    assert all(parameter.requires_grad for parameter in handle.parameters())


def test_the_gates_are_in_the_adapters_folder_and_come_back_from_it(adapted, tmp_path):
    model, _ = adapted
    model.save_pretrained(tmp_path)
    fresh = base()
    attach(fresh, hidden_dim=4)
    start = logits(fresh)
    loaded = peft.PeftModel.from_pretrained(fresh, tmp_path)
    assert torch.equal(logits(loaded), logits(model)) and not torch.allclose(logits(loaded), start)
    with loaded.disable_adapter():
        assert torch.equal(logits(loaded), start)
    with trace(loaded) as seen:
        logits(loaded)
    assert all(one.beta is not None and one.beta.abs().max() > 0 for one in seen[:-1])


def test_a_merged_model_keeps_its_gates(adapted):
    model, _ = adapted
    expected = logits(model)
    merged = model.merge_and_unload()
    assert torch.allclose(logits(merged), expected, atol=1e-5)
    assert [type(gate).__name__ for gate in handle_of(merged).gates().values()] == ["GatedSRP", "GatedSRP"]


def test_the_handle_saves_the_trained_copies_for_a_model_without_peft(adapted, tmp_path):
    _, handle = adapted
    handle.save(tmp_path / "gates.safetensors")
    plain = base()
    other = attach(plain, hidden_dim=4)
    other.load(tmp_path / "gates.safetensors")
    named = dict(other.named_parameters())
    assert list(named) == [name for name, _ in handle.named_parameters()]
    for name, parameter in handle.named_parameters():
        assert torch.equal(parameter, named[name]) and parameter.abs().sum() > 0
