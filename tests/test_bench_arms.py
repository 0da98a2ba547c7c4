"""What `bench --arms` measures of an arm; nothing here asserts a time."""

import json

import pytest
import torch
from gated_srp_bench import arms as bench
from typer.testing import CliRunner

from gated_srp.cli import app
from gated_srp.errors import UserError
from gated_srp.models import ARMS, find_arm

TINY = {"tokens": 30, "turns": 1, "dim": 12, "num_heads": 2, "depth": 2, "num_landmarks": 4, "hidden_dim": 4}


def test_slides_are_measured_beside_na_and_images_beside_their_base():
    found = {cost.arm: cost for cost in bench.measure_arms(["abmil", "two_scales", "vit_s16_gated_srp"], **TINY)}
    assert {name: (cost.against, cost.patches) for name, cost in found.items()} == {
        "abmil": ("na", 30),
        "two_scales": ("na", 30),
        "vit_s16_gated_srp": ("vit_s16", 289),
    }
    for cost in found.values():
        assert cost.predict_us > 0 and cost.train_us > 0
        assert cost.predict[0] == cost.predict[1] == cost.predict[2] > 0  # one turn


@pytest.mark.parametrize("name", ARMS)
def test_every_arm_predicts_and_learns_on_the_slide_that_it_is_measured_on(name):
    sizes = {"dim": 12, "num_heads": 2, "depth": 3, "num_landmarks": 4, "hidden_dim": 4}
    run = bench._runner(name, 16, sizes)
    model = run.__closure__[[*run.__code__.co_freevars].index("model")].cell_contents
    run("predict")
    assert not any(p.grad is not None for p in model.parameters()) and not model.training
    run("train")
    assert all(torch.isfinite(p.grad).all() for p in model.parameters() if p.grad is not None)
    assert any(p.grad is not None and p.grad.any() for p in model.parameters()) and model.training


def test_a_ratio_is_the_median_of_turns_that_both_took():
    took = {"arm": [3.0, 8.0, 30.0], "base": [1.0, 2.0, 15.0]}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bench, "turns_of", lambda jobs, repeats, clock: took)
        assert bench._paired(print, print, "predict", 3) == (8.0, (2.0, 3.0, 4.0))


def test_costs_are_microseconds_per_patch(monkeypatch):
    took = {"predict": (3.0, (1.0, 2.0, 3.0)), "train": (6.0, (4.0, 5.0, 6.0))}
    monkeypatch.setattr(bench, "_paired", lambda arm, base, phase, turns: took[phase])
    (cost,) = bench.measure_arms(["xsa"], **TINY)
    assert (cost.predict_us, cost.train_us) == (1e5, 2e5) and (cost.predict[1], cost.train[1]) == (2.0, 5.0)


def test_the_file_keeps_other_arms_in_the_order_of_the_table(tmp_path, monkeypatch):
    file = tmp_path / "arms.json"
    cost = bench.Cost("xsa", "na", 30, 1.0, 2.0, (1.0, 1.1, 1.2), (1.0, 1.3, 1.5))
    file.write_text(json.dumps([{"arm": "gated_srp", "machine": "old"}, {"arm": "xsa", "machine": "old"}]))
    monkeypatch.setattr(bench, "measure_arms", lambda names: [cost])
    done = CliRunner().invoke(app, ["bench", "--arms", "xsa", "--json", str(file)])
    assert done.exit_code == 0 and "1.10 (1.00 to 1.20)" in done.output
    rows = json.loads(file.read_text())
    assert [row["arm"] for row in rows] == ["xsa", "gated_srp"] and rows[1]["machine"] == "old"
    assert rows[0]["train"] == [1.0, 1.3, 1.5] and "torch" in rows[0]["machine"]


def test_all_means_every_arm_and_an_unknown_one_is_refused():
    assert bench.chosen("all") == list(ARMS) and bench.chosen("na, xsa") == ["na", "xsa"]
    with pytest.raises(UserError, match="Did you mean 'xsa'"):
        bench.chosen("na,xsb")
    assert find_arm("xsa").base == "na"
