import json
import multiprocessing
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest
import torch
import yaml
from factories import make_slide, write_trident
from toy_cohorts import SMALL, open_config, planted, write_cohort, write_survival_cohort
from typer.testing import CliRunner

from gated_srp.config import load_config
from gated_srp.data import read_bag
from gated_srp.data.loader import BagLoader
from gated_srp.errors import UserError
from gated_srp.models import build_model, load_card, load_model, save_model
from gated_srp.study.cells import Row, plan, refuse_mismatches
from gated_srp.tasks import task_from_card
from gated_srp.training.folder import RunFolder, differences
from gated_srp.training.inputs import FeatureStatistics, load_inputs
from gated_srp.training.loop import COLUMNS
from gated_srp.training.train import train

FILES = {
    *("config.yaml", "split.csv", "history.csv", "gates.csv", "metrics.json", "model.safetensors", "environment.json"),
    *(f"predictions_{part}_{level}.csv" for part in ("val", "test") for level in ("slide", "case")),
    *("features.csv", "log.txt", ".lock"),
}


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_a_finished_run_has_every_file_and_no_other(finished):
    assert finished.parts[-3:] == ("toy", "gated_srp", "seed42")
    assert {path.name for path in finished.iterdir()} == FILES


def test_the_tables_of_a_run_have_their_columns(finished):
    columns = {path.name: list(pd.read_csv(path).columns) for path in finished.glob("*.csv")}
    probabilities = ["prob_benign", "prob_tumour"]
    assert columns["history.csv"] == ["epoch", "split", "metric", "value"]
    assert columns["gates.csv"] == list(COLUMNS)
    assert columns["split.csv"] == ["case_id", "split"]
    for part in ("val", "test"):
        assert columns[f"predictions_{part}_slide.csv"] == ["slide", "case", "label", "predicted", *probabilities]
        assert columns[f"predictions_{part}_case.csv"] == ["case", "label", "slides", *probabilities, "predicted"]


def test_the_history_tells_each_epochs_loss_and_validation(finished):
    history = pd.read_csv(finished / "history.csv")
    assert sorted(history["epoch"].unique()) == [1, 2, 3]
    loss = history.query("split == 'train' and metric == 'loss'")["value"].tolist()
    assert len(loss) == 3 and loss[2] < loss[0]
    assert set(history.query("epoch == 3 and split == 'val'")["metric"]) >= {"loss", "macro_f1", "macro_auc", "brier"}


def test_a_planted_signal_is_found(finished):
    metrics = json.loads((finished / "metrics.json").read_text())
    assert metrics["test"]["slide"]["macro_auc"] > 0.9
    assert metrics["cohort"] == "toy" and metrics["arm"] == "gated_srp" and metrics["seed"] == 42
    assert set(metrics["val"]["case"]) == set(metrics["test"]["slide"])


def test_the_settings_in_the_folder_can_be_read_again(finished, cohort):
    again = load_config(finished / "config.yaml")
    assert again.train == open_config(cohort).train
    assert again.arms == ("gated_srp",) and again.seeds == (42,)


def test_the_card_says_what_prediction_must_know(finished):
    card = load_card(finished / "model.safetensors")
    metrics = json.loads((finished / "metrics.json").read_text())
    assert card["classes"] == ["benign", "tumour"] and card["task"] == "classification"
    assert (card["encoder"], card["settings"]["in_dim"], card["stride"]) == (
        "uni_v2",
        8,
        [{"value": 512, "unit": "px", "um": 128.0}],
    )
    assert (card["order"], card["window"], card["lattice"], card["cap"]) == ("file", 3, "floor", None)
    assert card["split_hash"] == metrics["split_hash"] and card["precision"] == "32" and card["temperature"] > 0
    assert {"torch", "gated_srp"} <= set(card["versions"])
    assert task_from_card(card).num_outputs == 2


def test_the_saved_model_predicts_what_the_run_wrote(finished, cohort):
    model = load_model(finished / "model.safetensors")
    written = pd.read_csv(finished / "predictions_test_slide.csv", float_precision="round_trip")
    material = load_inputs(open_config(cohort), 42)
    rows = material.rows("test")
    with torch.no_grad():
        logits = torch.cat(
            [model(bag.features[None], bag.graph) for bag in BagLoader(material.bags, workers=0).epoch(rows)]
        )
    pd.testing.assert_frame_equal(material.predictions(rows, logits), written, check_exact=True, check_dtype=False)


def test_a_slide_unlike_the_training_set_is_told_apart(finished, cohort):
    statistics = FeatureStatistics(**load_card(finished / "model.safetensors")["features"])
    bag = read_bag(next(cohort.parent.rglob("s003.h5")))
    assert not statistics.unlike(bag.features)
    assert statistics.unlike(bag.features * 10 + 5)
    assert statistics.unlike(torch.from_numpy(planted(99, 40.0).features))


def test_a_finished_run_is_left_alone(finished):
    before, events = contents(finished), []
    train(load_config(finished / "config.yaml"), arm="gated_srp", seed=42, progress=events.append)
    assert "finished before; nothing to do" in events[0].text
    assert contents(finished) == before


def test_other_settings_are_refused_with_what_differs(finished):
    config = load_config(finished / "config.yaml", {"train.lr": 0.5, "train.workers": 3})
    with pytest.raises(UserError, match=r"other settings: train\.lr 0\.001, asked 0\.5\. Choose another `out`"):
        train(config, arm="gated_srp", seed=42)


def test_two_processes_cannot_take_one_folder(cohort, tmp_path):
    config = open_config(cohort, out=str(tmp_path))
    run = RunFolder.of(config, arm="na", seed=42)
    code = f"""
from pathlib import Path
from gated_srp.training.folder import RunFolder
with RunFolder(Path({str(run.path)!r})).lock():
    print("held", flush=True)
    input()
"""
    other = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert other.stdout.readline() == "held\n"
    with pytest.raises(UserError, match="another process is training this run"):
        train(config, arm="na", seed=42)
    other.communicate("\n")
    assert not (run.path / "config.yaml").exists()
    assert other.returncode == 0


def _wait(started, release):
    started.set()
    release.wait(20)


def test_a_forked_child_does_not_keep_the_lock(tmp_path):
    context = multiprocessing.get_context("fork")  # as the loader's workers are made
    started, release = context.Event(), context.Event()
    child = context.Process(target=_wait, args=(started, release), daemon=True)
    with RunFolder(tmp_path).lock():
        child.start()
        assert started.wait(20)
    with RunFolder(tmp_path).lock():
        pass
    release.set()
    child.join(20)


def test_survival_runs_score_cases_and_keep_what_their_curves_need(tmp_path):
    config = open_config(write_survival_cohort(tmp_path), train__epochs=2)
    run = train(config, arm="na", seed=42).path
    card, metrics = load_card(run / "model.safetensors"), json.loads((run / "metrics.json").read_text())
    assert len(card["bin_edges"]) == 3 and card["median_risk"] < 0
    assert metrics["score"] == "case" and 0 <= metrics["test"]["case"]["c_index"] <= 1
    cases, slides = (pd.read_csv(run / f"predictions_test_{level}.csv") for level in ("case", "slide"))
    assert list(cases.columns[:5]) == ["case", "time", "event", "slides", "risk"]
    assert cases["slides"].sum() == len(slides) > len(cases)
    training = pd.read_csv(run / "split.csv").query("split == 'train'")
    assert len(card["follow_up"]["time"]) == len(training)
    assert pd.read_csv(run / "gates.csv").empty


def test_mixed_patients_are_scored_by_slide_and_refused_by_case(tmp_path):
    path = write_cohort(tmp_path, train={"epochs": 1})
    table = pd.read_csv(tmp_path / "table.csv")
    table.loc[0, "case"] = table.loc[1, "case"] = "both"  # one patient, a slide of each class
    table.to_csv(tmp_path / "table.csv", index=False)
    split = pd.DataFrame({"slide_id": table["slide"], "split": (["test"] * 4 + ["val"] * 4 + ["train"] * 16)})
    split.to_csv(tmp_path / "split.csv", index=False)
    config = open_config(path, split=str(tmp_path / "split.csv"))
    run = train(config, arm="na", seed=42).path
    metrics = json.loads((run / "metrics.json").read_text())
    assert metrics["test"]["case"] is None and metrics["test"]["slide"]["accuracy"] is not None
    assert "label" not in pd.read_csv(run / "predictions_test_case.csv")
    with pytest.raises(UserError, match=r"score: case, but the slides of some patients differ in label"):
        train(open_config(path, score="case", out=str(tmp_path / "b")), arm="na", seed=42)


def test_gates_are_fitted_alone_on_a_trained_base(cohort, tmp_path):
    base = train(open_config(cohort, out=str(tmp_path / "base"), train__epochs=1), arm="na", seed=42).path
    config = open_config(cohort, out=str(tmp_path / "gate"), train__only="gate", train__epochs=2)
    with pytest.raises(UserError, match="Name the base with --init"):
        train(config, arm="gated_srp", seed=42)
    with pytest.raises(UserError, match="arm 'na' has no gate to fit"):
        train(config, arm="na", seed=42, init=base / "model.safetensors")
    run = train(config, arm="gated_srp", seed=42, init=base / "model.safetensors").path
    before, after = (load_model(folder / "model.safetensors").state_dict() for folder in (base, run))
    assert all(torch.equal(after[name], before[name]) for name in before)
    assert any(after[name].any() for name in set(after) - set(before) if name.endswith("token_out.weight"))
    assert "blocks.0.correction" in (run / "log.txt").read_text()
    recorded = json.loads((run / "environment.json").read_text())["init"]
    assert recorded["path"] == str(base / "model.safetensors") and len(recorded["sha256"]) == 64
    cells = plan(config, [Row.of("gated_srp")], [42, 43])
    refuse_mismatches(cells[:1], {})
    told = f"which a study cannot name.*train COHORT --init MODEL --arm gated_srp --seed 43 .*--out '{config.out}'"
    with pytest.raises(UserError, match=told):
        refuse_mismatches(cells, {})


def test_start_weights_that_do_not_fit_are_refused(cohort, tmp_path):
    save_model(build_model("na", in_dim=9, num_outputs=2, **SMALL), tmp_path / "other.safetensors")
    config = open_config(cohort, out=str(tmp_path / "runs"))
    with pytest.raises(UserError, match=r"in_proj\.weight is \(24, 9\), expected \(24, 8\)"):
        train(config, arm="na", seed=42, init=tmp_path / "other.safetensors")
    with pytest.raises(UserError, match=r"missing\.safetensors"):
        train(config, arm="na", seed=42, init=tmp_path / "missing.safetensors")


def test_a_head_of_other_outputs_starts_anew(cohort, tmp_path):
    save_model(build_model("na", in_dim=8, num_outputs=5, **SMALL, seed=7), tmp_path / "five.safetensors")
    config = open_config(cohort, out=str(tmp_path / "runs"), train__epochs=1)
    run = train(config, arm="na", seed=42, init=tmp_path / "five.safetensors").path
    assert "started anew, since the file has none that fit: head.weight, head.bias" in (run / "log.txt").read_text()


def test_a_split_without_validation_is_refused_before_anything_is_written(tmp_path):
    path = write_cohort(tmp_path, slides=2)
    with pytest.raises(UserError, match="left in val"):
        train(open_config(path), arm="na", seed=42)
    assert not list((tmp_path / "runs").rglob("config.yaml"))


def test_a_cohort_too_small_for_a_test_set_still_trains(tmp_path):
    run = train(open_config(write_cohort(tmp_path, slides=4), train__epochs=1), arm="na", seed=42).path
    assert json.loads((run / "metrics.json").read_text())["test"] == {"slide": None, "case": None}
    assert pd.read_csv(run / "predictions_test_slide.csv").empty


def test_an_unknown_arm_is_refused_before_anything_is_written(cohort, tmp_path):
    with pytest.raises(UserError, match="Did you mean 'gated_srp'"):
        train(open_config(cohort, out=str(tmp_path / "x")), arm="gatedsrp", seed=42)
    assert not (tmp_path / "x").exists()


def test_the_command_trains_with_settings_of_the_moment(cohort, tmp_path):
    import typer

    from gated_srp.cli.runs import train

    app = typer.Typer()
    app.command()(train)
    asked = [str(cohort), "--arm", "na", "--out", str(tmp_path), "--set", "train.epochs=1", "--seed", "43"]
    result = CliRunner().invoke(app, asked, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    assert "finished. Best epoch 1" in result.output
    assert yaml.safe_load((tmp_path / "toy/na/seed43/config.yaml").read_text())["train"]["epochs"] == 1


def test_a_slide_of_another_width_is_named(tmp_path):
    path = write_cohort(tmp_path, train={"epochs": 1})
    write_trident(tmp_path / "feats", "s004", make_slide(1, width=5))
    with pytest.raises(UserError, match=r"s004\.h5: features have several widths: 8 \(23 files\), 5 \(1 file\)"):
        train(open_config(path), arm="na", seed=42)


def test_an_error_is_said_once_and_kept_in_the_log(tmp_path):
    config = open_config(write_cohort(tmp_path), train__epochs=1)
    slide = planted(1, 2.0)
    slide.features[0] = float("nan")
    write_trident(tmp_path / "feats", "s001", slide)
    said = []
    with pytest.raises(UserError) as error:
        train(config, arm="na", seed=42, progress=lambda event: said.append(event.text))
    assert not any(error.value.what in text for text in said)
    assert f"stopped: {error.value}" in (tmp_path / "runs/toy/na/seed42/log.txt").read_text()


def test_epochs_that_validation_cannot_tell_apart_are_said_with_their_number(tmp_path):
    config = open_config(write_cohort(tmp_path, strength=20.0), train__epochs=4, train__lr=1e-2)
    said = []
    first = train(config, arm="na", seed=42, progress=lambda event: said.append(event.text))
    history = first.history.query("split == 'val' and metric == 'macro_f1'")["value"]
    tied, few = int((history == history.max()).sum()), len(first.predictions("val", "slide"))
    assert tied > 1
    kept = int(history.to_numpy().argmax()) + 1
    words = f"warning: {tied} of 4 epochs have the best macro_f1, {history.max():.4f}, on {few} validation slides; "
    assert any(text.startswith(f"{words}the first of them, epoch {kept}, is kept") for text in said)
    assert first.card["ties"] == {"rule": "first", "epochs": tied} == first.results["ties"]

    other = train(config, arm="na", seed=42, out=tmp_path / "other", settings={"select.ties": "loss"})
    loss = other.history.query("split == 'val' and metric == 'loss'")["value"].to_numpy()
    best = [i for i, value in enumerate(history) if value == history.max()]
    assert other.results["best_epoch"] == 1 + min(best, key=lambda i: loss[i])
    assert other.card["ties"]["rule"] == "loss"
    with pytest.raises(UserError, match=r"select\.ties first, asked loss"):
        train(config, arm="na", seed=42, settings={"select.ties": "loss"})


def test_a_run_of_before_ties_had_a_rule_is_gone_on_with(finished):
    settings = RunFolder(finished).settings
    del settings["select"]
    assert differences(settings, RunFolder(finished).settings) == []
    assert differences(settings, RunFolder(finished).settings | {"select": {"ties": "loss"}}) == [
        "select.ties first, asked loss"
    ]


# A class that the test part lacks ------------------------------------------------------------------------------------


def test_a_class_that_the_test_part_lacks_is_said_beside_its_macro_f1(tmp_path):
    config = open_config(write_cohort(tmp_path), train__epochs=1)
    parts = [
        ("train", "val", "train", "val", "test")[i % 5] if i % 2 else ("train", "val")[i % 4 // 2] for i in range(24)
    ]
    (tmp_path / "split.csv").write_text("slide_id,split\n" + "".join(f"s{i:03d},{p}\n" for i, p in enumerate(parts)))
    said = []
    run = train(
        config.model_copy(update={"split": tmp_path / "split.csv"}), arm="na", progress=lambda e: said.append(e.text)
    )
    assert set(run.predictions("test", "slide")["label"]) == {"tumour"}
    value = run.metrics("test")["macro_f1"]
    assert f"test: macro_f1 {value:.4f} (class benign is absent and counts as 0)," in said[-1]
    assert run.results["remarks"] == {"val": {}, "test": {"macro_f1": "class benign is absent and counts as 0"}}
