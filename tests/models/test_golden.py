"""Our own golden numbers, in the repository: computed once in plain code (tests/golden/write.py), equalled by the models."""

import numpy as np
import pytest
import torch
from golden.write import CASES, CLASS, FOLDER, checkpoint, compute, inputs
from torch.nn import functional as F

from gated_srp import PatchGraph, trace
from gated_srp.models import load_published


def theirs(name: str, known: dict[str, float]) -> str:
    """Our parameter name in the published layout."""
    name = name.replace(".correction.coefficient.token_", ".attn.gate.token_mlp_")
    name = name.replace(".correction.coefficient.", ".attn.gate.")
    if name not in known and name.startswith("in_proj."):
        return name.replace("in_proj.", "patch_embed.proj.")
    return name if name in known else name.replace(".attn.proj.", ".attn.out_proj.")


@pytest.mark.parametrize("name", CASES)
def test_models_compute_the_golden_numbers(tmp_path, name):
    golden = np.load(FOLDER / f"{name}.npz")
    torch.save(checkpoint(name), tmp_path / "best.pt")
    model = load_published(tmp_path / "best.pt")
    assert model.settings["arm"] == CASES[name].arm
    if "image" in golden:
        entered = torch.tensor(golden["image"], requires_grad=True)
        features, graph = F.unfold(entered[None], 4, stride=4).transpose(1, 2), PatchGraph.from_grid(4, 4)
    else:
        entered = torch.tensor(golden["features"], requires_grad=True)
        features, coords = entered[None], torch.tensor(golden["coords"])
        graph = PatchGraph.from_coords(
            coords, entered.detach(), stride=float(golden["stride"]), window=int(golden["window"])
        )
    with trace(model, attention=False) as seen:
        logits = model(features, graph)
    np.testing.assert_allclose(logits[0].detach(), golden["logits"], atol=2e-5)
    betas = {f"beta_block{number}": layer.beta for number, layer in enumerate(seen) if layer.beta is not None}
    if "gated" in CASES[name].arm:
        assert set(betas) == {key for key in golden if key.startswith("beta_")} != set()
        for key, beta in betas.items():
            np.testing.assert_allclose(beta, golden[key], atol=1e-5)
    loss = F.cross_entropy(logits, torch.tensor([CLASS]))
    np.testing.assert_allclose(loss.detach(), golden["loss"], atol=2e-5)
    loss.backward()
    np.testing.assert_allclose(entered.grad, golden["grad_input"], rtol=1e-3, atol=1e-5)
    norms = dict(zip(golden["grad_norm_names"].tolist(), golden["grad_norm_values"].tolist(), strict=True))
    for ours, parameter in model.named_parameters():
        found = 0.0 if parameter.grad is None else float(parameter.grad.double().norm())
        assert found == pytest.approx(norms[theirs(ours, norms)], rel=1e-3, abs=1e-6), ours
    with torch.no_grad():  # the one-pass prediction
        np.testing.assert_allclose(model(features.detach(), graph)[0], golden["logits"], atol=2e-5)


@pytest.mark.parametrize("name", CASES)
def test_the_files_are_what_the_reference_computes(name):
    golden, again = np.load(FOLDER / f"{name}.npz"), {**inputs(name), **compute(name)}
    assert set(golden) == {*again, "window"}
    for key, value in again.items():
        if value.dtype.kind in "fi":
            np.testing.assert_allclose(golden[key], value, rtol=1e-9, atol=1e-12, err_msg=key)
        else:
            assert golden[key].tolist() == value.tolist()


def test_the_golden_set_is_small():
    assert sum(path.stat().st_size for path in FOLDER.glob("*.npz")) < 60_000
