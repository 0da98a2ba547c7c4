"""Published checkpoints: golden numbers where the founders' data is present, and the layout's rules on files written here."""

import re
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from gated_srp import PatchGraph, UserError, trace
from gated_srp.models import build_model, load_card, load_model, load_published, save_model

SIZES = {"dim": 24, "num_heads": 4, "num_landmarks": 8}
GATE = {"delta": 1.5, "hidden_dim": 8}


def theirs(name: str) -> str:
    """Our parameter name in the published layout."""
    name = re.sub(r"\.correction\.coefficient\.token_(hidden|out)\.", r".attn.gate.token_mlp_\1.", name)
    return name.replace(".correction.coefficient.", ".attn.gate.")


def write(path: Path, arm: str, args: dict, *, extra: dict | None = None, drop: str = "") -> torch.nn.Module:
    """A random model of ours as the published release would have saved it."""
    model = build_model(
        arm, in_dim=10, num_outputs=3, seed=1, **SIZES, **(GATE if arm.startswith("gated") else {})
    ).eval()
    draw = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.2 * torch.randn(p.shape, generator=draw))
    weights = {theirs(k): v for k, v in model.state_dict().items() if k != drop}
    if arm == "diff":
        weights = {k.replace(".attn.proj.", ".attn.out_proj."): v for k, v in weights.items()}
    weights |= {
        f"blocks.{i}.attn.{leaf}": torch.full((4,), float(arm == "xsa" and leaf != "beta_patch"))
        for i in range(4)
        for leaf in ("beta_patch", "alpha_cls", "alpha_patch")
    }
    full = {"in_dim": 10, "embed_dim": 24, "depth": 4, "num_heads": 4, "num_landmarks": 8, "num_classes": 3}
    if arm.startswith("gated"):
        full |= {"delta_scale": 1.5, "gate_hidden_dim": 8}
    torch.save({"epoch": 1, "model": weights | (extra or {}), "args": full | args, "val_metrics": {}}, path)
    return model


GATED = {"variant": "srp_patch_signed_gated"}


@pytest.mark.parametrize(
    ("arm", "args", "extra"),
    [
        ("na", {"variant": "nystrom_na"}, {}),
        ("na", {"variant": "baseline"}, {}),
        ("xsa", {"variant": "xsa_all_ref"}, {}),
        ("diff", {"variant": "diff_transformer"}, {}),
        ("gated_srp", GATED, {}),
        ("gated_srp_sigmoid", GATED | {"gate_activation": "sigmoid01"}, {}),
        ("gated_srp_range_free", GATED | {"gate_delta_mode": "direct_beta_softclip"}, {}),
        ("gated_srp_live", GATED | {"detach_gate_inputs": False}, {}),
        (
            "gated_srp_token_only",
            GATED | {"gate_factorization": "token_only"},
            {"blocks.0.attn.gate.head_weight": torch.zeros(4, 3)},
        ),
        ("gated_srp_head_only", GATED | {"gate_factorization": "head_only"}, {}),
        ("gated_srp_no_bias", GATED | {"gate_factorization": "no_bias"}, {}),
        (
            "fixed_beta_minus1",
            {"variant": "srp_patch_fixed_beta-1"},
            {f"blocks.{i}.attn.beta_patch": -torch.ones(4) for i in range(3)},
        ),
        (
            "fixed_beta_2",
            {"variant": "srp_patch_fixed_beta2"},
            {f"blocks.{i}.attn.beta_patch": 2 * torch.ones(4) for i in range(4)},
        ),
    ],
)
def test_a_checkpoint_of_each_variant_gives_the_same_logits(tmp_path, arm, args, extra):
    expected = write(tmp_path / "best.pt", arm, args, extra=extra)
    model = load_published(tmp_path / "best.pt")
    assert model.settings["arm"] == arm
    features = torch.randn(1, 30, 10)
    graph = PatchGraph.from_coords(torch.cartesian_prod(torch.arange(6), torch.arange(5)), features[0], stride=1)
    assert torch.equal(model(features, graph), expected(features, graph))


def test_an_unknown_key_is_named(tmp_path):
    write(tmp_path / "best.pt", "na", {"variant": "baseline"}, extra={"blocks.0.attn.rotary": torch.zeros(1)})
    with pytest.raises(UserError, match=r"'blocks.0.attn.rotary' does not fit"):
        load_published(tmp_path / "best.pt")


def test_a_missing_key_is_named(tmp_path):
    write(tmp_path / "best.pt", "na", {"variant": "baseline"}, drop="norm.weight")
    with pytest.raises(UserError, match=r"'norm.weight' is missing"):
        load_published(tmp_path / "best.pt")


def test_a_wrong_shape_is_named(tmp_path):
    write(tmp_path / "best.pt", "na", {"variant": "baseline"}, extra={"norm.weight": torch.zeros(7)})
    with pytest.raises(UserError, match=r"'norm.weight' has shape \(7,\), expected \(24,\)"):
        load_published(tmp_path / "best.pt")


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({"variant": "longnet"}, "'longnet', expected one of"),
        (GATED | {"gate_activation": "relu"}, r"args\['gate_activation'\] is 'relu'"),
        (GATED | {"gate_activation": "sigmoid01", "gate_factorization": "no_bias"}, "combines the ablations"),
        ({"variant": "srp_patch_fixed_beta7"}, None),
    ],
)
def test_unknown_variants_are_refused(tmp_path, args, message):
    extra = {f"blocks.{i}.attn.beta_patch": torch.full((4,), 7.0) for i in range(4)}
    write(tmp_path / "best.pt", "na", args, extra=extra)
    with pytest.raises(UserError, match=message or r"holds \[7.0\], expected one coefficient"):
        load_published(tmp_path / "best.pt")


class Malice:
    def __reduce__(self):
        return (Path.touch, (Path("ran"),))


def test_pickled_code_is_not_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.save({"model": {}, "args": Malice()}, tmp_path / "best.pt")
    with pytest.raises(UserError, match="would run their code"):
        load_published(tmp_path / "best.pt")
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("content", [b"", b"not a checkpoint", b"PK\x03\x04 truncated"])
def test_broken_files_are_refused(tmp_path, content):
    (tmp_path / "best.pt").write_bytes(content)
    with pytest.raises(UserError, match="cannot be read as tensors"):
        load_published(tmp_path / "best.pt")
    with pytest.raises(UserError, match="no such file"):
        load_published(tmp_path / "other.pt")
    torch.save([1, 2], tmp_path / "list.pt")
    with pytest.raises(UserError, match=r"expected a dictionary with .model. and .args., .* found: list"):
        load_published(tmp_path / "list.pt")
    torch.save({"model": {}, "args": ["variant"]}, tmp_path / "args.pt")
    with pytest.raises(UserError, match="dictionaries both, found: model, args"):
        load_published(tmp_path / "args.pt")


def test_a_model_file_of_ours_round_trips_with_its_card(tmp_path):
    write(tmp_path / "best.pt", "gated_srp", GATED)
    model = load_published(tmp_path / "best.pt")
    save_model(model, tmp_path / "model.safetensors", {"encoder": "uni_v2"})
    assert load_card(tmp_path / "model.safetensors")["encoder"] == "uni_v2"
    again = load_model(tmp_path / "model.safetensors")
    assert again.settings == model.settings
    assert all(torch.equal(a, b) for a, b in zip(again.state_dict().values(), model.state_dict().values(), strict=True))
    assert [p.name for p in tmp_path.iterdir() if p.name.startswith(".")] == []


def test_a_card_of_a_newer_format_and_foreign_files_are_refused_kindly(tmp_path):
    from safetensors.torch import save_file

    save_file({"a": torch.zeros(1)}, tmp_path / "m.safetensors", metadata={"card": '{"format": 99}'})
    with pytest.raises(UserError, match=r"format 99.*Update gated-srp"):
        load_model(tmp_path / "m.safetensors")
    save_file({"a": torch.zeros(1)}, tmp_path / "n.safetensors")
    with pytest.raises(UserError, match="no card of gated-srp"):
        load_model(tmp_path / "n.safetensors")
    (tmp_path / "t.safetensors").write_text("text")
    with pytest.raises(UserError, match="not a readable model file"):
        load_card(tmp_path / "t.safetensors")


def golden_names() -> list[str]:
    folder = Path(__file__).resolve().parents[3] / "shared" / "golden"
    return sorted(p.stem for p in folder.glob("*.npz")) or ["(absent)"]


@pytest.mark.shared
@pytest.mark.parametrize("name", golden_names())
def test_golden_numbers(shared, name):
    golden = np.load(shared / "golden" / f"{name}.npz")
    model = load_published(shared / "golden" / f"{name}.pt")
    features = torch.tensor(golden["features"], requires_grad=True)
    graph = PatchGraph.from_coords(
        torch.tensor(golden["coords"]), features.detach(), stride=int(golden["stride"]), window=int(golden["window"])
    )
    assert graph.neighbour_count.tolist() == golden["neighbour_count"].tolist()
    np.testing.assert_allclose(graph.homogeneity, golden["homogeneity"], atol=1e-5)
    with trace(model) as seen:
        logits = model(features[None], graph)
    np.testing.assert_allclose(logits.detach(), golden["logits"], atol=1e-4)
    for number, layer in enumerate(seen):
        np.testing.assert_allclose(layer.cls_attention, golden[f"cls_attention_block{number}"], atol=1e-4)
        if f"beta_block{number}" in golden:
            np.testing.assert_allclose(layer.beta, golden[f"beta_block{number}"], atol=1e-4)
    loss = F.cross_entropy(logits, torch.tensor([2]))
    np.testing.assert_allclose(loss.detach(), golden["loss"], atol=1e-4)
    loss.backward()
    np.testing.assert_allclose(features.grad, golden["grad_features"], rtol=1e-3, atol=1e-6)
    norms = dict(zip(golden["grad_norm_names"].tolist(), golden["grad_norm_values"].tolist(), strict=True))
    for ours, p in model.named_parameters():
        published = theirs(ours)
        published = published if published in norms else published.replace(".attn.proj.", ".attn.out_proj.")
        found = 0.0 if p.grad is None else float(p.grad.double().norm())
        assert found == pytest.approx(norms[published], rel=1e-3, abs=1e-6), published
