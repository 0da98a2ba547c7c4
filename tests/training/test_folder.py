"""A run's folder is read in one place, and what is not there yet reads as empty."""

import math

import pandas as pd
import pytest
from toy_cohorts import open_config

import gated_srp
from gated_srp.errors import UserError
from gated_srp.training.folder import RunFolder, differences


def test_a_finished_run_reads_back_what_was_written(finished):
    run = RunFolder(finished)
    assert run.finished and not run.begun
    assert run.settings["arms"] == ["gated_srp"] and run.environment["precision"] == "32"
    assert run.results["score"] == "slide" and run.metrics("test") == run.metrics("test", "slide")
    assert run.metrics("val")["macro_f1"] == run.results["val"]["slide"]["macro_f1"]
    assert list(run.history.columns) == ["epoch", "split", "metric", "value"] and run.history["epoch"].max() == 3
    assert set(run.gates["layer"]) == {0} and set(run.split["split"]) == {"train", "val", "test"}
    assert {"slide", "case", "label", "predicted"} <= set(run.predictions("test", "slide"))
    assert run.card["task"] == "classification" and run.card["gate_lr"] == 1.0
    page = run._repr_html_()
    assert "macro_f1" in page and "best epoch" in page


def test_a_folder_without_a_run_reads_as_empty(tmp_path):
    run = RunFolder(tmp_path / "nothing")
    assert not run.finished and not run.begun and run.settings == run.environment == run.results == {}
    assert run.metrics("test") == {} and run.split is None
    assert run.history.empty and run.gates.empty and "not begun" in run._repr_html_()
    with pytest.raises(UserError, match="cannot be read"):
        run.predictions("test", "slide")


def test_a_notebook_shows_names_as_text(tmp_path):
    name = "<script>alert(1)</script>"
    run = RunFolder(tmp_path / "<b>")
    assert "&lt;b&gt;" in run._repr_html_()
    run.path.mkdir()
    run.write_json("metrics.json", {"arm": name, "score": "slide"})
    rows = [("A", arm, seed, "auc", 0.7 + seed / 100) for arm in (name, "b") for seed in (1, 2)]
    metrics = gated_srp.stats(pd.DataFrame(rows, columns=["cohort", "arm", "seed", "metric", "value"]), reference=name)
    table = pd.DataFrame(
        {"case": list("pqrs"), "label": list("abab"), "predicted": list("abaa"), "prob_a": [0.9, 0.2, 0.6, 0.7]}
    )
    table["prob_b"] = 1 - table["prob_a"]
    predictions = gated_srp.stats({name: table, "b": table}, reference=name, repeats=5)
    for shown in (run, metrics, predictions):
        assert "&lt;script&gt;" in shown._repr_html_() and "<script>" not in shown._repr_html_()


def test_an_undefined_metric_is_not_a_number_and_a_broken_file_says_so(tmp_path):
    (tmp_path / "metrics.json").write_text('{"score": "slide", "test": {"slide": {"macro_auc": null}}}')
    assert math.isnan(RunFolder(tmp_path).metrics("test")["macro_auc"])
    (tmp_path / "metrics.json").write_text("{")
    with pytest.raises(UserError, match=r"metrics.json: cannot be read"):
        RunFolder(tmp_path).metrics("test")


def test_train_takes_a_yaml_or_a_config_and_changed_settings(cohort, tmp_path):
    few = {"train.epochs": 1}
    events = []
    by_file = gated_srp.train(cohort, arm="na", out=tmp_path / "a", settings=few, progress=events.append)
    by_config = gated_srp.train(open_config(cohort), arm="na", out=tmp_path / "b", settings=few)
    pd.testing.assert_frame_equal(by_file.history, by_config.history)
    assert by_file.path == tmp_path / "a" / "toy" / "na" / "seed42"
    assert {event.stage for event in events} == {"files", "bags", "train"} and events[-1].text.endswith(
        by_last(by_file)
    )
    with pytest.raises(
        UserError, match=r"beside toy.*: train\.epochs: input should be greater than or equal to 1, found 0"
    ):
        gated_srp.train(open_config(cohort), settings={"train.epochs": 0})


def by_last(run: RunFolder) -> str:
    return ", ".join(f"{name} {value:.4f}" for name, value in run.metrics("test").items())


def test_a_run_of_a_version_without_gate_lr_was_computed_with_1():
    assert differences({"train": {"lr": 1.0}}, {"train": {"lr": 1.0, "gate_lr": 1.0}}) == []
    assert differences({"train": {"lr": 1.0}}, {"train": {"lr": 1.0, "gate_lr": 10.0}}) == [
        "train.gate_lr 1.0, asked 10.0"
    ]
