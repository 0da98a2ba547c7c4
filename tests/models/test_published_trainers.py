"""Checkpoints of the release's PANDA and ADP trainers: files written here from the layout, against a model in plain code."""

import os
from argparse import Namespace
from pathlib import Path

import numpy as np
import pytest
import torch
from reference import neighbour_lists
from reference_models import Plain, drawn, layout
from torch.nn import functional as F

from gated_srp import PatchGraph, UserError, trace
from gated_srp.models import build_model, convert, load_card, load_model, load_published
from gated_srp.tasks import task_from_card

GOLDEN = Path(__file__).resolve().parents[3] / "shared" / "golden"
HEADS, WIDTH, IN, OUT = 6, 24, 10, 6
SLIDES = {"width": WIDTH, "heads": HEADS, "outputs": OUT, "in_dim": IN, "depth": 4}
IMAGES = {"width": WIDTH, "heads": HEADS, "outputs": 5, "depth": 3, "patches": 9, "patch": 4}
GATE = {"gate_inputs": 3, "hidden": 8}
PANDA = {
    "embed_dim": WIDTH, "num_heads": HEADS, "num_landmarks": 8, "in_dim": IN, "beta": 2.0, "delta_scale": 1.5, "gate_hidden_dim": 8,
    "gate_activation": "tanh", "gate_activation_temperature": 1.0, "gate_delta_mode": "fixed", "gate_factorization": "full",
    "gate_count_features": "legacy", "no_detach_gate_inputs": False, "srp_r_target": "knn8", "neighbor_window": 3,
    "neighbor_shell": "cumulative", "neighbor_source": "real", "neighbor_weighting": "uniform", "pos_mode": "none",
    "ln_specialization": "shared",
}  # fmt: skip
ADP = {
    "image_size": 12, "patch_size": 4, "embed_dim": WIDTH, "depth": 3, "num_heads": HEADS, "use_srp": False, "beta_patch_mode": "some_fixed_mode",
    "alpha_cls_mode": "zero", "alpha_patch_mode": "zero", "diff_transformer": False, "delta_scale": 1.5, "gate_hidden_dim": 8,
    "gate_activation": "tanh", "gate_count_features": "legacy", "no_detach_gate_inputs": False,
}  # fmt: skip
NYSTROM = {"landmarks": 8}

PANDA_CASES = {  # name: arm, args, what the layout has, what the plain model is told, values of leftovers
    "baseline": ("na", {"arch": "transmil", "mode": "baseline"}, {"ppeg": True}, NYSTROM, {"beta_patch": 0.0}),
    "plain": ("na", {"arch": "transmil", "mode": "baseline"}, {"ppeg": True}, NYSTROM, {"alpha_cls": 0.0}),
    "xsa": (
        "xsa",
        {"arch": "transmil", "mode": "xsa_all_hard", "srp_r_target": "slide_mean"},
        {"ppeg": True},
        NYSTROM | {"xsa": True},
        {"alpha_cls": 1.0, "alpha_patch": 1.0},
    ),
    "diff": ("diff", {"arch": "transmil", "mode": "diff_transformer"}, {"ppeg": True, "diff": True}, NYSTROM, {}),
    "gated": (
        "gated_srp",
        {"arch": "transmil", "mode": "srp_signed_gated"},
        {"ppeg": True} | GATE,
        NYSTROM | {"delta": 1.5},
        {"beta_patch": 0.0},
    ),
    "beta2": (
        "fixed_beta_2",
        {"arch": "transmil", "mode": "some_fixed_mode"},  # told by its coefficient, not by its name
        {"ppeg": True},
        NYSTROM | {"beta": 2.0},
        {"beta_patch": 2.0},
    ),
    "amplified": (
        "fixed_beta_minus1",
        {"arch": "transmil", "mode": "another_fixed_mode", "beta": -1.0},
        {"ppeg": True},
        NYSTROM | {"beta": -1.0},
        {"beta_patch": -1.0},
    ),
    "vit4": ("vit4", {"arch": "vit4", "mode": "baseline", "srp_r_target": "slide_mean"}, {}, {}, {"beta": 2.0}),
    "vit4 xsa": ("vit4_xsa", {"arch": "vit4", "mode": "xsa_all_hard"}, {}, {"xsa": True}, {"beta": 2.0}),
    "vit4 gated": (
        "vit4_gated_srp_published",
        {"arch": "vit4", "mode": "srp_signed_gated"},
        {"gate_inputs": 4, "hidden": 8},
        {"delta": 1.5},
        {"beta": 2.0},
    ),
    "vit12 gated": (
        "vit4_gated_srp_published",
        {"arch": "vit12", "mode": "srp_signed_gated"},
        {"gate_inputs": 4, "hidden": 8, "depth": 12},
        {"delta": 1.5},
        {"beta": 2.0},
    ),
}
ADP_CASES = {
    "plain": ("vit_s16", {}, {}, {}, {"alpha_cls": 0.0, "alpha_patch": 0.0}),
    "xsa": (
        "vit_s16_xsa",
        {"alpha_cls_mode": "one", "alpha_patch_mode": "one"},
        {},
        {"xsa": True},
        {"alpha_cls": 1.0, "alpha_patch": 1.0},
    ),
    "xsa by switch": (
        "vit_s16_xsa",
        {"use_srp": True, "alpha_cls_mode": "one", "alpha_patch_mode": "one"},
        {},
        {"xsa": True},
        {"alpha_cls": 1.0, "alpha_patch": 1.0},
    ),
    "nothing by switch": ("vit_s16", {"use_srp": True, "beta_patch_mode": "zero"}, {}, {}, {"beta_patch": 0.0}),
    "diff": ("vit_s16_diff", {"diff_transformer": True}, {"diff": True}, {}, {}),
    "gated": (
        "vit_s16_gated_srp",
        {"use_srp": True, "beta_patch_mode": "signed_gated"},
        GATE,
        {"delta": 1.5},
        {"beta_patch": 0.0},
    ),
    "projected": (
        "vit_s16_fixed_beta_1",
        {"use_srp": True, "beta_patch_mode": "some_fixed_mode"},
        {},
        {"beta": 1.0},
        {"beta_patch": 1.0},
    ),
}


def written(path: Path, args: dict, shapes: dict, leftovers: dict[str, float] | None = None, **extra) -> dict:
    """A checkpoint of random weights in these shapes; the weights in double precision."""
    weights = drawn(shapes, seed=7, scale=0.15)  # the pseudo-inverse is float32: milder weights keep it within 1e-6
    for name, value in (leftovers or {}).items():
        weights |= {
            full: torch.full(shape, value).double() for full, shape in shapes.items() if full.endswith(f".{name}")
        }
    weights = {name: tensor.float().double() for name, tensor in weights.items()}  # as the file rounds them
    plain = {name: tensor.float() for name, tensor in (weights | extra).items()}
    torch.save({"epoch": 1, "model": plain, "args": args, "val_metrics": {}, "stage": "single"}, path)
    return weights


def slide() -> tuple[torch.Tensor, torch.Tensor]:
    """37 patches: a lattice with holes, a patch without neighbours, and no square number."""
    coords = 256 * torch.tensor([(x, y) for x in range(7) for y in range(6) if (x * y) % 5 != 4] + [(40, 40)])
    draw = np.random.RandomState(3).standard_normal((len(coords), IN))
    return coords, torch.from_numpy(draw).float()


@pytest.mark.parametrize("case", PANDA_CASES)
def test_a_checkpoint_of_the_panda_trainer_computes_what_its_layout_says(tmp_path, case):
    arm, args, has, told, leftovers = PANDA_CASES[case]
    shapes = layout(**{**SLIDES, **has}, leftovers=tuple(leftovers))
    weights = written(tmp_path / "best.pt", PANDA | args, shapes, leftovers)
    coords, features = slide()
    plain = Plain(HEADS, **told)
    leaf = features.double().requires_grad_()
    expected = plain.slide(weights, leaf, neighbour_lists(coords, 256))
    F.cross_entropy(expected[None], torch.tensor([2])).backward()

    model = load_published(tmp_path / "best.pt")
    assert model.settings["arm"] == arm
    ours = features.clone().requires_grad_()
    with trace(model, attention=False) as seen:
        logits = model(ours[None], PatchGraph.from_coords(coords, features, stride=256))
    torch.testing.assert_close(logits[0].double(), expected, atol=2e-5, rtol=1e-5)
    F.cross_entropy(logits, torch.tensor([2])).backward()
    torch.testing.assert_close(ours.grad.double(), leaf.grad, atol=1e-5, rtol=1e-3)
    for number, beta in plain.betas.items():
        torch.testing.assert_close(seen[number].beta.double(), beta, atol=1e-5, rtol=1e-5)
    assert len(plain.betas) == sum("gate.head_weight" in name for name in shapes)
    model.double()
    exact = model(features.double()[None], PatchGraph.from_coords(coords, features, stride=256))[0]
    torch.testing.assert_close(exact, expected, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("case", ADP_CASES)
def test_a_checkpoint_of_the_adp_trainer_computes_what_its_layout_says(tmp_path, case):
    arm, args, has, told, leftovers = ADP_CASES[case]
    weights = written(tmp_path / "best.pt", ADP | args, layout(**IMAGES, **has, leftovers=tuple(leftovers)), leftovers)
    images = torch.from_numpy(np.random.RandomState(4).standard_normal((2, 3, 12, 12)))
    lists = neighbour_lists(torch.tensor([(x, y) for y in range(3) for x in range(3)]), 1)
    expected = torch.stack([Plain(HEADS, **told).image(weights, image, lists) for image in images])
    model = load_published(tmp_path / "best.pt")
    assert model.settings["arm"] == arm
    rows = F.unfold(images, 4, stride=4).transpose(1, 2)
    graphs = PatchGraph.batch([PatchGraph.from_grid(3, 3)] * 2)
    torch.testing.assert_close(model(rows.float(), graphs).double(), expected, atol=2e-5, rtol=1e-5)
    torch.testing.assert_close(model.double()(rows, graphs), expected, atol=1e-6, rtol=1e-6)


def rewritten(path: Path, change) -> Path:
    content = torch.load(path, weights_only=True)
    torch.save(change(content), path.with_name("other.pt"))
    return path.with_name("other.pt")


@pytest.fixture
def gated(tmp_path) -> Path:
    _, args, has, _, leftovers = PANDA_CASES["gated"]
    written(tmp_path / "best.pt", PANDA | args, layout(**{**SLIDES, **has}, leftovers=tuple(leftovers)), leftovers)
    return tmp_path / "best.pt"


def logits_of(path: Path) -> torch.Tensor:
    coords, features = slide()
    return load_published(path)(features[None], PatchGraph.from_coords(coords, features, stride=256)).detach()


def prefixed(*prefixes: str):
    return lambda content: content | {"model": {"".join(prefixes) + name: t for name, t in content["model"].items()}}


def with_baggage(content: dict) -> dict:
    """What trainers keep beside the weights: states, and scores and settings as numpy, pathlib and argparse have them."""
    settings = Namespace(**content["args"], out=Path("runs/panda"), lr=np.float32(1e-4))
    optimizer = {"state": {0: {"step": torch.tensor(3.0)}}, "param_groups": [{"lr": 1e-4, "betas": (0.9, 0.999)}]}
    scores = {"kappa_quad": np.float64(0.25), "best": np.bool_(True), "epoch": np.int64(4)}
    return content | {
        "args": settings,
        "val_metrics": scores,
        "optimizer": optimizer,
        "scaler": {},
        "epoch": np.int64(7),
    }


@pytest.mark.parametrize(
    "change",
    [
        prefixed("module."),
        prefixed("_orig_mod."),
        prefixed("module.", "_orig_mod."),
        prefixed("_orig_mod.", "module."),
        with_baggage,
        lambda content: content | {"model": {n: t for n, t in content["model"].items() if "beta_patch" not in n}},
        lambda content: content | {"args": {k: v for k, v in content["args"].items() if k != "gate_hidden_dim"}},
    ],
    ids=[
        "parallel",
        "compiled",
        "parallel compiled",
        "compiled parallel",
        "baggage",
        "no leftovers",
        "width of the gate",
    ],
)
def test_what_lies_around_the_weights_changes_no_number(gated, change):
    assert torch.equal(logits_of(rewritten(gated, change)), logits_of(gated))


@pytest.mark.parametrize(
    ("dtype", "rounding"), [(torch.bfloat16, 2**-8), (torch.float16, 2**-11), (torch.float64, 0.0)]
)
def test_weights_of_another_precision_are_widened_and_not_rounded_again(gated, dtype, rounding):
    def change(content: dict) -> dict:
        return content | {"model": {name: tensor.to(dtype) for name, tensor in content["model"].items()}}

    other, model = (load_published(path) for path in (rewritten(gated, change), gated))
    for name, tensor in other.state_dict().items():
        assert tensor.dtype == torch.float32 and torch.equal(tensor, model.state_dict()[name].to(dtype).float()), name
    assert (logits_of(gated.with_name("other.pt")) - logits_of(gated)).abs().max() <= 8 * rounding


@pytest.mark.parametrize(
    ("args", "leftovers", "message"),
    [
        ({"mode": "xsa_all_hard"}, {"alpha_cls": 1.0, "alpha_patch": 0.5}, r"alpha_patch' holds 0\.5, but 1 in .*xsa"),
        ({"mode": "baseline"}, {"alpha_cls": 1.0}, r"alpha_cls' holds 1, but 0 in .*no correction"),
        ({"mode": "baseline"}, {"beta_patch": 2.0}, r"beta_patch' holds 2, but 0 in .*no correction"),
        ({"mode": "unknown_mode"}, {"beta_patch": 0.0}, r"args\['mode'\] is 'unknown_mode'"),
        ({"mode": ["baseline"]}, {"beta_patch": 0.0}, r"args\['mode'\] is \['baseline'\]"),
    ],
)
def test_coefficients_in_the_file_that_contradict_its_settings_are_refused(tmp_path, args, leftovers, message):
    shapes = layout(**SLIDES, ppeg=True, leftovers=tuple(leftovers))
    written(tmp_path / "best.pt", PANDA | {"arch": "transmil"} | args, shapes, leftovers)
    with pytest.raises(UserError, match=message):
        load_published(tmp_path / "best.pt")


def test_a_gate_whose_range_is_not_said_is_refused(gated):
    """No tensor tells it, and another range gives other logits."""
    path = rewritten(gated, lambda one: one | {"args": {k: v for k, v in one["args"].items() if k != "delta_scale"}})
    with pytest.raises(UserError, match="no 'delta_scale', the range of the gates"):
        load_published(path)


def test_numbers_and_paths_beside_the_weights_run_no_code(gated, tmp_path):
    class Bomb:
        def __reduce__(self):
            return (os.system, (f"touch {tmp_path / 'ran'}",))

    content = torch.load(gated, weights_only=True)
    torch.save(content | {"val_metrics": {"kappa": Bomb()}}, tmp_path / "bomb.pt")
    with pytest.raises(UserError, match="cannot be read as tensors and plain settings"):
        load_published(tmp_path / "bomb.pt")
    assert not (tmp_path / "ran").exists()


def test_vit4_with_its_four_input_gates_has_as_many_parameters_as_published():
    sizes = {"in_dim": 1536, "num_outputs": 6, "hidden_dim": 32}
    four, three = (build_model(arm, **sizes) for arm in ("vit4_gated_srp_published", "vit4_gated_srp"))
    assert sum(p.numel() for p in four.parameters()) == 7_692_195
    assert sum(p.numel() for p in three.parameters()) == 7_692_099


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (PANDA | {"arch": "vit4", "mode": "other_mode"}, r"args\['mode'\] is 'other_mode', expected one of .*srp_signed_gated"),
        (PANDA | {"arch": "resnet", "mode": "baseline"}, r"args\['arch'\] is 'resnet', expected one of transmil, vit4, vit12"),
        (
            PANDA | {"arch": "vit4", "mode": "srp_signed_gated", "gate_activation": "sigmoid01"},
            "no arm is 'vit4' with 'gated_srp_sigmoid'",
        ),
        (
            PANDA | {"arch": "vit4", "mode": "srp_signed_gated", "gate_activation_temperature": 2.0},
            r"args\['gate_activation_temperature'\] is 2.0, expected 1.0",
        ),
        (
            PANDA | {"arch": "transmil", "mode": "srp_signed_gated", "neighbor_weighting": "other"},
            r"args\['neighbor_weighting'\] is 'other', expected 'uniform'",
        ),
        (
            PANDA | {"arch": "vit4", "mode": "srp_signed_gated", "srp_r_target": "slide_mean"},
            r"args\['srp_r_target'\] is 'slide_mean', expected 'knn8'",
        ),
        (ADP | {"alpha_cls_mode": "other"}, r"args\['alpha_cls_mode'\] is 'other', expected one of zero, one"),
        (ADP | {"alpha_cls_mode": "one"}, "XSA on one kind of row alone"),
        (
            ADP | {"use_srp": True, "beta_patch_mode": "other"},
            r"args\['beta_patch_mode'\] is 'other', expected one of signed_gated",
        ),
        (PANDA | {"arch": "vit4", "mode": "diff_transformer"}, "dense and Nystrom attention alike"),
        (
            ADP | {"use_srp": True, "beta_patch_mode": "signed_gated", "alpha_cls_mode": "one", "alpha_patch_mode": "one"},
            "combines use_srp with XSA",
        ),
        ({"embed_dim": 24, "lr": 0.1}, "none of 'variant'.*'mode'.*'use_srp'.* found: embed_dim, lr"),
    ],
)  # fmt: skip
def test_what_is_not_known_is_named_with_what_is(tmp_path, args, message):
    shapes = layout(**SLIDES) if "image_size" not in args else layout(**IMAGES)
    written(tmp_path / "best.pt", args, shapes)
    with pytest.raises(UserError, match=message):
        load_published(tmp_path / "best.pt")


def test_a_converted_model_knows_its_classes_its_images_and_its_window(tmp_path):
    _, args, has, _, leftovers = ADP_CASES["gated"]
    written(tmp_path / "best.pt", ADP | args, layout(**IMAGES, **has, leftovers=tuple(leftovers)), leftovers)
    model = convert(tmp_path / "best.pt", tmp_path / "model.safetensors", classes=["A", "B", "C", "D", "E"])
    card = load_card(tmp_path / "model.safetensors")
    assert (card["task"], card["classes"]) == ("multilabel", ["A", "B", "C", "D", "E"])
    assert task_from_card(card).num_outputs == 5
    assert card["images"] == {"size": 12, "patch": 4}
    again = load_model(tmp_path / "model.safetensors")
    assert all(torch.equal(a, b) for a, b in zip(again.state_dict().values(), model.state_dict().values(), strict=True))
    with pytest.raises(UserError, match="4 classes named, but the model has 5 outputs"):
        convert(tmp_path / "best.pt", tmp_path / "other.safetensors", classes=list("ABCD"))
    assert not (tmp_path / "other.safetensors").exists()

    _, args, has, _, leftovers = PANDA_CASES["gated"]
    written(
        tmp_path / "panda.pt",
        PANDA | args | {"neighbor_window": 5},
        layout(**SLIDES, **has, leftovers=tuple(leftovers)),
        leftovers,
    )
    convert(tmp_path / "panda.pt", tmp_path / "panda.safetensors", classes=list("012345"))
    card = load_card(tmp_path / "panda.safetensors")
    assert (card["task"], card["window"]) == ("classification", 5) and "images" not in card
    convert(tmp_path / "panda.pt", tmp_path / "panda.safetensors")
    assert "task" not in load_card(tmp_path / "panda.safetensors")


def test_the_command_converts_and_names_the_outputs(tmp_path, capsys):
    from gated_srp.cli.runs import convert as command

    _, args, has, _, leftovers = PANDA_CASES["vit4 gated"]
    written(tmp_path / "best.pt", PANDA | args, layout(**SLIDES, **has, leftovers=tuple(leftovers)), leftovers)
    command(tmp_path / "best.pt", tmp_path / "m.safetensors", "benign, ISUP 1,ISUP 2,ISUP 3,ISUP 4,ISUP 5")
    said = " ".join(capsys.readouterr().out.split())
    assert "arm vit4_gated_srp_published" in said and "classes benign, ISUP 1, ISUP 2" in said
    assert load_card(tmp_path / "m.safetensors")["classes"][1] == "ISUP 1"


def other_names() -> list[str]:
    return sorted(path.stem for path in (GOLDEN / "other").glob("*.npz")) or ["(absent)"]


@pytest.mark.shared
@pytest.mark.parametrize("name", other_names())
def test_golden_numbers_of_the_other_trainers(shared, name):
    folder = shared / "golden" / "other"
    if not folder.is_dir():
        pytest.skip("the shared data folder has no golden/other")
    golden, model = np.load(folder / f"{name}.npz"), load_published(folder / f"{name}.pt")
    if "images" in golden:
        patch = int((model.settings["in_dim"] // 3) ** 0.5)
        images = torch.tensor(golden["images"])
        side = images.shape[-1] // patch
        graph = PatchGraph.batch([PatchGraph.from_grid(side, side)] * len(images))
        logits = model(F.unfold(images, patch, stride=patch).transpose(1, 2), graph)
        np.testing.assert_allclose(logits.detach(), golden["logits"], atol=1e-4)
        return
    features = torch.tensor(golden["features"], requires_grad=True)
    graph = PatchGraph.from_coords(
        torch.tensor(golden["coords"]), features.detach(), stride=int(golden["stride"]), window=int(golden["window"])
    )
    logits = model(features[None], graph)
    np.testing.assert_allclose(logits.detach(), golden["logits"], atol=1e-4)
    F.cross_entropy(logits, torch.tensor([2])).backward()
    np.testing.assert_allclose(features.grad, golden["grad_features"], rtol=1e-3, atol=1e-6)


@pytest.mark.shared
@pytest.mark.parametrize("path", sorted(GOLDEN.rglob("*.pt")) or [Path("(absent)")], ids=lambda path: path.stem)
def test_the_plain_models_that_judge_ours_compute_the_founders_numbers(shared, path):
    if not path.is_file():
        pytest.skip("the shared data folder has no golden numbers")
    golden, found = np.load(path.with_suffix(".npz")), torch.load(path, weights_only=True)
    args, weights = found["args"], {name: tensor.double() for name, tensor in found["model"].items()}
    dense = "images" in golden or args.get("arch") == "vit4"
    plain = Plain(
        args["num_heads"],
        landmarks=None if dense else args["num_landmarks"],
        xsa=any(bool((tensor == 1).all()) for name, tensor in weights.items() if name.endswith(".attn.alpha_patch")),
        delta=args.get("delta_scale"),
    )
    if "images" in golden:
        side = golden["images"].shape[-1] // args["patch_size"]
        lists = neighbour_lists(torch.tensor([(x, y) for y in range(side) for x in range(side)]), 1)
        logits = torch.stack([plain.image(weights, torch.tensor(image).double(), lists) for image in golden["images"]])
        np.testing.assert_allclose(logits, golden["logits"], atol=1e-6)
        return
    features = torch.tensor(golden["features"]).double().requires_grad_()
    lists = neighbour_lists(torch.tensor(golden["coords"]), int(golden["stride"]), int(golden["window"]))
    logits = plain.slide(weights, features, lists)
    np.testing.assert_allclose(logits.detach()[None], golden["logits"], atol=1e-6)
    F.cross_entropy(logits[None], torch.tensor([2])).backward()
    np.testing.assert_allclose(features.grad, golden["grad_features"], rtol=1e-4, atol=2e-8)
