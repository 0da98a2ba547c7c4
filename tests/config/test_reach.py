"""How far gates can move: the formula against trajectories of a real gate under the real optimiser and schedule."""

import math
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from study.study_cells import config
from training.toy_cohorts import write_cohort

import gated_srp
from gated_srp.config import load_config
from gated_srp.config.cohort import TrainConfig
from gated_srp.config.reach import REMOVAL, Reach, gate_reach, gates_moved, unnamed_encoder
from gated_srp.models import arm_settings, find_arm
from gated_srp.simulation import KEY, points_of, read_plan, read_table
from gated_srp.srp import PatchGraph, SignedGate
from gated_srp.training.optim import learning_rate, make_optimiser


def trajectory(steps, *, trained=None, flips=False, lr=1e-3, warmup=0.05, hidden_dim=16):
    """Beta of one interior patch after a training whose every step wants it larger (``flips``: larger or smaller, at random)."""
    torch.manual_seed(0)
    gate = SignedGate(1, hidden_dim=hidden_dim)
    if trained:
        for name, parameter in gate.named_parameters():
            parameter.requires_grad_(name in trained)
    graph = PatchGraph.from_grid(3, 3)
    graph = graph.with_features(torch.ones(9, 4))
    norm = torch.full((9, 1), math.e - 1)  # log(1 + |y|) = 1, cos = 1
    optimiser = make_optimiser(gate, lr=lr, weight_decay=0.0)
    draw = torch.Generator().manual_seed(1)
    for step in range(steps):
        for group in optimiser.param_groups:
            group["lr"] = learning_rate(step, steps, lr=lr, warmup=warmup)
        optimiser.zero_grad()
        sign = float(torch.randint(0, 2, (), generator=draw)) * 2 - 1 if flips else 1.0
        (-sign * gate(norm, norm, graph)[4]).sum().backward()
        optimiser.step()
    return float(gate(norm, norm, graph)[4].detach())


@pytest.mark.parametrize(("steps", "warmup"), [(2, 0.05), (40, 0.05), (200, 0.05), (200, 0.5)])
def test_a_weight_travels_half_the_steps_times_the_learning_rate_whatever_the_warm_up(steps, warmup):
    travelled = sum(learning_rate(step, steps, lr=1e-3, warmup=warmup) for step in range(steps))
    assert Reach(steps, 1e-3, 1.0, 1.0, 16).path == pytest.approx(travelled, rel=1e-9)


def test_beta_is_where_two_biases_carry_it_and_the_limit_where_all_weights_do():
    steps = 60
    reach = Reach(steps, 1e-3, 1.0, 1.0, 16)
    assert trajectory(steps, trained=("head_bias", "layer_head_bias")) == pytest.approx(reach.beta, rel=0.01)
    assert trajectory(steps) == pytest.approx(reach.limit, rel=0.25)  # this gate's hidden units, and what they learn
    assert abs(trajectory(steps, flips=True)) < reach.limit / 2


def test_the_factor_that_is_advised_is_enough_and_the_one_before_is_not():
    reach = Reach(130, 2e-4, 1.0, 1.0, 64)
    assert reach.short and round(reach.beta, 3) == 0.026 and reach.factor == 30
    assert not Reach(130, 2e-4, 30.0, 1.0, 64).short and Reach(130, 2e-4, 20.0, 1.0, 64).short
    assert Reach(3, 1e-6, 1.0, 1.0, 64).factor is None
    assert (
        "That need not help: on real tissue" in reach.note("gated_srp").cure
        and reach.note("gated_srp").level == "warning"
    )
    far = Reach(9300, 2e-4, 1.0, 1.0, 64).note("gated_srp")
    assert far.level == "note" and far.cure.startswith("Gates that open need not help: on real tissue gate_lr 10")


def test_only_gates_that_start_shut_and_move_by_biases_have_a_reach(tmp_path):
    cohort = config(tmp_path)  # 10 epochs, accumulation 1, lr 1e-4
    assert gate_reach(cohort, 20, "gated_srp").steps == gate_reach(cohort, 20, "axis_random").steps == 200
    assert gate_reach(cohort, 20, "gated_srp_nonnegative").steps == 200
    other = ("na", "adapter", "gated_srp_sigmoid", "gated_srp_xavier", "gated_srp_range_free", "gated_srp_no_bias")
    assert [gate_reach(cohort, 20, arm) for arm in other] == [None] * len(other)
    started = cohort.model_copy(update={"train": cohort.train.model_copy(update={"init": "pretrained"})})
    assert gate_reach(started, 20, "gated_srp") is None  # its gates have learned before


def test_no_committed_run_went_further_than_what_is_said_to_be_hardly_passed():
    folder = Path(__file__).resolve().parents[2] / "docs" / "evidence"
    tables = [pd.read_csv(path, dtype={"seed": str}) for path in sorted(folder.glob("breakhis*_gates.csv"))]
    last = pd.concat(tables).query("epoch == 10")
    last = last[[_starts_shut(arm) for arm in last["arm"]]]
    assert len(last) > 300
    beyond, logits = [], []
    for arm, part in last.groupby("arm"):
        # About 400 steps: 600 to 650 fields, 16 per step.
        reach = Reach(400, 2e-4, float(arm.partition("gate_lr=")[2] or 1), 1.0, 64)
        beyond += [(arm, one) for one in part["mean"] if abs(one) > reach.furthest]
        if arm == "gated_srp":
            logits = (np.arctanh(part["mean"].abs()) / np.arctanh(reach.beta)).tolist()
    seen = 0
    for name in ("simulation", "place"):
        plan, results = read_plan(folder / f"{name}.yaml"), read_table(folder / f"{name}.csv")
        found = results[results["metric"] == "mean_beta"].set_index(KEY)["value"].astype(float)
        for point in points_of(plan):
            for arm in filter(_starts_shut, point.arms):
                if point.key(arm) not in found.index:
                    continue
                train, patients = TrainConfig(**point.settings["train"]), point.parts[0]
                # Every fifth patient has two slides.
                bags = patients if point.settings["task"] == "survival" else patients + patients // 5
                reach = Reach(train.steps(bags), train.lr, float(arm.partition("gate_lr=")[2] or 1), 1.0, 16)
                value, seen = found[point.key(arm)], seen + 1
                beyond += [point.key(arm)] if abs(value) > reach.furthest else []
    assert seen > 250 and beyond == []
    assert 0.5 < np.median(logits) < 1.5  # what is called typical is


def _starts_shut(arm):
    return find_arm(arm_settings(arm)[0]).moved_by_biases


def test_what_gates_did_is_told_of_the_last_epoch():
    rows = [(1, 0, 0.9, 0.0), (2, 0, -0.25, 0.9), (2, 1, 0.0, 0.7)]
    gates = pd.DataFrame(rows, columns=["epoch", "layer", "mean", "share_identity"])
    assert gates_moved(gates) == (
        "mean beta by layer -0.25, +0.00; 20 % of coefficients are outside the identity (|beta| >= 0.5)"
    )
    assert gates_moved(gates.assign(share_identity=1.0)).endswith("; none is outside the identity (|beta| >= 0.5)")
    assert "layer +0.00, +0.00;" in gates_moved(gates.assign(mean=-0.004))  # no -0.00


@pytest.mark.slow
def test_check_train_and_compare_say_before_how_far_gates_can_move_and_after_how_far_they_did(tmp_path):
    yaml = write_cohort(tmp_path, slides=16, train={"epochs": 1, "accumulation": 8})
    (note,), (advice,) = (
        [one for one in gated_srp.check(yaml).notes if one.kind == kind] for kind in ("reach", "evidence")
    )
    assert (
        advice.level == "note"
        and advice.what == REMOVAL
        and "features_gated_srp_from_1` asks it of your slides" in advice.cure
    )
    assert (
        note.level == "warning"
        and "2 steps at lr 0.001, gate_lr 1: the mean of beta typically goes to about ±0.00, hardly beyond ±0.02, of ±1"
        in note.what
    )
    said = []
    arms = ["na", "gated_srp", "gated_srp@train.gate_lr=1000"]
    found = gated_srp.compare(
        yaml, arms=arms, seeds=[42], bootstrap=0, out=tmp_path / "runs", progress=lambda event: said.append(event.text)
    )
    warned = [text for text in said if text.startswith("warning: train: gated_srp: 2 steps")]
    assert len(warned) == 1 and not any("gate_lr=1000: 2 steps" in text for text in said)
    assert "expect most gates to stay at the identity" in found.verdict
    assert "gates of gated_srp in the last epoch: mean beta by layer" in found.verdict
    log = (tmp_path / "runs" / "toy" / "gated_srp" / "seed42" / "log.txt").read_text()
    assert "the mean of beta typically goes to about" in log and "gates in the last epoch: mean beta by layer" in log


@pytest.mark.parametrize(
    ("more", "encoders", "said"),
    [
        ("", ["uni_v2"], 0),
        ("", ["vit_b16"], 1),
        ("", ["an encoder that the paper has not"], 0),
        ("encoder: vit_b16", ["vit_b16"], 0),
        ("model: {delta: 1, hidden_dim: 8}", ["vit_b16"], 0),
    ],
)
def test_a_preset_whose_files_are_of_another_encoder_than_its_gate_is_warned_of(tmp_path, more, encoders, said):
    (tmp_path / "c.yaml").write_text(f"cohort: BRACS\nlabels: .\nfeatures: .\n{more}\n")
    notes = list(unnamed_encoder(load_config(tmp_path / "c.yaml"), encoders))
    assert len(notes) == said
    for note in notes:
        assert note.level == "warning" and "UNI-v2's gate is used (delta 0.5," in note.what
        assert note.cure == "`encoder: vit_b16` takes the paper's for it: delta 2, hidden_dim 128."
