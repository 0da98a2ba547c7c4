"""One name an encoder, whatever the tool calls it."""

from pathlib import Path

import pytest

from gated_srp.data.files.siblings import canonical, encoder_of_folder, known_widths, may_be_same

SPELLINGS = {
    "uni_v1": ["uni_v1", "uni", "UNI"],
    "uni_v2": ["uni_v2", "uni2", "UNI2-h", "uni2-0a1b2c3d"],
    "conch_v1": ["conch_v1", "conch"],
    "conch_v15": ["conch_v15", "conch1_5", "CONCH v1.5"],
    "virchow": ["virchow", "virchow_v1", "virchow-full"],
    "virchow2": ["virchow2", "virchow_v2"],
    "gigapath": ["gigapath", "prov_gigapath", "prov-gigapath"],
    "hoptimus0": ["hoptimus0", "h_optimus_0", "h-optimus-0", "hoptimus"],
    "hoptimus1": ["hoptimus1", "h_optimus_1", "H-optimus-1"],
    "phikon": ["phikon", "phikon_v1"],
    "phikon_v2": ["phikon_v2", "phikon-v2"],
    "ctranspath": ["ctranspath", "chief-ctranspath"],
    "resnet50": ["resnet50", "resnet50_trunc"],
    "medsiglip_448": ["medsiglip_448", "MedSigLIP-448", "medsiglip"],
    "vit_b16": ["vit_b16", "ViT-B/16", "vitb16"],
    "vit_b16_torchvision": ["vit_b_16", "VIT_B_16", "vit_b16_torchvision"],
    "vit_b16_google": ["vit_b16_google", "google/vit-base-patch16-224"],
    "vit_b16_timm": ["vit_base_patch16_224", "vit_b16_timm"],
    "efficientnet_lite0": ["efficientnet_lite0", "tf_efficientnet_lite0"],
}


@pytest.mark.parametrize("name", SPELLINGS)
def test_every_tools_spelling_has_one_name(name):
    assert {canonical(spelling) for spelling in SPELLINGS[name]} == {name}


def test_an_unknown_name_is_tidied_and_not_guessed():
    assert canonical("  My Encoder-2 ") == "my_encoder_2"
    assert known_widths("my_encoder_2") == ()


@pytest.mark.parametrize(
    ("name", "width"),
    [
        ("uni_v2", 1536),
        ("vit_b16", 768),
        ("medsiglip_448", 1152),
        ("efficientnet_lite0", 1280),
        ("resnet50", 2048),
        ("uni", 1024),
    ],
)
def test_the_known_widths(name, width):
    assert width in known_widths(name)


def test_the_models_called_vit_b16_are_three_and_only_the_old_name_may_be_any_of_them():
    models = ("vit_b_16", "google/vit-base-patch16-224", "vit_base_patch16_224")
    assert len({canonical(name) for name in models}) == 3
    for name in models:
        assert may_be_same("vit_b16", name) and may_be_same(name, "vit_b16") and may_be_same(name, canonical(name))
        assert not any(may_be_same(name, other) for other in models if other != name)
    assert not may_be_same("vit_b16", "phikon") and not may_be_same("uni_v1", "uni_v2")


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("job/20x_256px_0px_overlap/features_uni_v2/s.h5", "uni_v2"),
        ("out/uni2-0a1b2c3d/sub/s.h5", "uni_v2"),
        ("x/extracted-resnet50_trunc/feats_h5/s.h5", "resnet50"),
        ("job/20x_256px_0px_overlap/features_mine/s.h5", "mine"),
        ("job/features_2024/s.h5", None),
        ("feats/h5_files/s.h5", None),
        ("s.h5", None),
    ],
)
def test_folders_name_encoders(path, name):
    assert encoder_of_folder(Path(path)) == name
