"""`gated-srp bench --attach` compares a model with itself. Nothing here asserts a time."""

import json

import pytest
import torch
from gated_srp_bench import attach as bench
from typer.testing import CliRunner

from gated_srp.cli import app
from gated_srp.foreign import handle_of

SMALL = bench.Size(image=32, patch=8, dim=24, depth=3, num_heads=2, batch=2)


@pytest.mark.parametrize("family", bench.FAMILIES)
def test_both_arms_are_the_same_model_but_for_the_gates(family):
    if family == "huggingface":
        pytest.importorskip("transformers", reason="transformers is not installed (extra: encoders)")
    models = bench.pair(bench.FAMILIES[family], SMALL)
    assert len(handle_of(models["attached"]).gates()) == 2  # of three layers: the head reads CLS alone
    images = torch.randn(2, 3, 32, 32)
    logits = [model.train()(images) for model in models.values()]  # training takes PyTorch's slow path in both
    assert logits[0].shape == (2, bench.CLASSES) and torch.equal(*logits)


def test_the_paper_sizes_are_those_of_a_small_vit():
    pytest.importorskip("transformers", reason="transformers is not installed (extra: encoders)")
    with torch.device("meta"):
        models = [make(bench.Size()) for make in bench.FAMILIES.values()]
    counts = {sum(p.numel() for p in model.parameters()) for model in models}
    embed, block = 3 * 16 * 16 * 384 + 384, 12 * 384**2 + 13 * 384
    assert counts == {embed + 384 + 290 * 384 + 12 * block + 2 * 384 + 384 * 4 + 4}


def test_the_command_prints_ratios_and_writes_rows(tmp_path, monkeypatch):
    measure = bench.measure_attach
    monkeypatch.setattr(bench, "measure_attach", lambda: measure(["torch"], size=SMALL, repeats=1))
    done = CliRunner().invoke(app, ["bench", "--attach", "--json", str(tmp_path / "rows.json")])
    assert done.exit_code == 0, done.output
    rows = json.loads((tmp_path / "rows.json").read_text())
    assert [(row["family"], row["phase"]) for row in rows] == [("torch", "predict"), ("torch", "train")]
    assert all(row["ratio"] == row["attached"] / row["untouched"] > 0 for row in rows)
    assert done.output.count("promised <= 1.08") == 2
