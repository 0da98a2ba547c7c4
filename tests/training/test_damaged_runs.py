"""Damaged folders of runs and cards of models: what cannot be read is named, with what is wrong in it; nothing ends in a traceback."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gated_srp.errors import UserError
from gated_srp.models import build_model, load_model
from gated_srp.models.store import save_model
from gated_srp.training.folder import RunFolder
from gated_srp.training.trained import TrainedRun


@pytest.fixture
def damaged(tmp_path) -> RunFolder:
    """A run of version 0.1, whose files have no checksums that would show the damage first."""
    source = (
        Path(__file__).parents[1] / "fixtures" / "v0_1" / "classification" / "runs" / "toy" / "gated_srp" / "seed42"
    )
    shutil.copytree(source, tmp_path / "seed42")
    config = tmp_path / "seed42" / "config.yaml"
    config.write_text(config.read_text().replace("@HERE@@@@@@@@", "here"))
    return RunFolder(tmp_path / "seed42")


def _uses(run: RunFolder) -> dict[str, Callable[[], Any]]:
    return {
        "config.yaml": lambda: run.settings,
        "environment.json": lambda: run.environment,
        "metrics.json": lambda: run.metrics("test"),
        "history.csv": lambda: run.history,
        "gates.csv": lambda: run.gates,
        "split.csv": lambda: run.split,
        "predictions_test_slide.csv": lambda: run.predictions("test", "slide"),
    }


@pytest.mark.parametrize(
    ("name", "old", "new", "says"),
    [
        ("environment.json", '"threads": 1', '"threads": 100000', "threads: input should be less"),
        ("environment.json", '"threads": 1', '"threads": "1"', "threads: input should be a valid integer"),
        ("environment.json", '"precision": "32"', '"precision": [32]', "precision"),
        ("metrics.json", '"macro_f1": 1.0', '"macro_f1": "high"', "val.slide.macro_f1"),
        ("metrics.json", '"score": "slide"', '"score": ["slide"]', "score"),
        ("metrics.json", '"seed": 42', '"seed": 42.5', "seed"),
        ("config.yaml", "score: slide", "score: [slide]", "score"),
        ("config.yaml", "task: classification", "task: {a: 1}", "task"),
        ("history.csv", "1,train,loss,", "1,train,loss,x", "row 2: value is 'x0"),
        ("history.csv", "epoch,split", "epoche,split", "no column 'epoch'"),
        ("gates.csv", "epoch,layer,mean", "epoch,layer,layer", "twice"),
        ("split.csv", "case_id,split", "case_id,part", "no column 'split'"),
        ("predictions_test_slide.csv", "s001,p001", "s001,p001,p002", "line 2 has 7 cells"),
        ("predictions_test_slide.csv", "tumour,tumour,0.38", "tumour,tumour,?0.38", "row 2: prob_benign"),
    ],
)
def test_a_damaged_file_of_a_run_is_named_with_what_is_wrong_in_it(damaged, name, old, new, says):
    path = damaged.path / name
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))
    with pytest.raises(UserError) as caught:
        _uses(damaged)[name]()
    assert says in str(caught.value) and str(path) in str(caught.value) and caught.value.cure


@pytest.mark.parametrize(
    "name", ["history.csv", "gates.csv", "split.csv", "predictions_test_slide.csv", "metrics.json"]
)
def test_a_file_of_a_run_that_was_cut_anywhere_is_refused(damaged, name):
    path = damaged.path / name
    whole = path.read_bytes()
    for length in range(3, len(whole) - 1, max(1, len(whole) // 23)):
        path.write_bytes(whole[:length])
        if whole[length - 1 : length] != b"\n":
            with pytest.raises(UserError, match=name.replace(".", r"\.")):
                _uses(damaged)[name]()


def test_json_that_is_nested_beyond_measure_is_refused(damaged):
    (damaged.path / "metrics.json").write_text("[" * 100_000)
    with pytest.raises(UserError, match=r"metrics\.json"):
        damaged.results  # noqa: B018


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"settings": 3}, "settings"),
        ({"classes": "benign"}, "classes"),
        ({"classes": [1, 2]}, "classes.0"),
        ({"window": 10**9 + 1}, "window"),
        ({"stride": [{"value": 0, "unit": "px"}]}, "stride.0.value"),
        ({"format": {"a": 1}}, "format"),
        ({"temperature": 0}, "temperature"),
        ({"task": "no such task"}, "no task is called"),
        ({"classes": None}, "classification"),
    ],
)
def test_a_card_that_is_damaged_is_refused_with_what_is_wrong_in_it(tmp_path, changes, says):
    model, path = (
        build_model("gated_srp", in_dim=4, num_outputs=2, dim=12, num_heads=3, depth=1),
        tmp_path / "m.safetensors",
    )
    save_model(model, path, {"task": "classification", "classes": ["a", "b"]} | changes)
    with pytest.raises(UserError) as caught:
        TrainedRun.open(path).task  # noqa: B018
    assert says in str(caught.value) and str(path) in str(caught.value)


@pytest.mark.parametrize(
    "changes", [{"dim": 30_000}, {"depth": 10**6}, {"in_dim": "4"}, {"arm": ["na"]}, {"more": 1}, {"num_heads": 0}]
)
def test_a_card_cannot_ask_for_a_model_that_its_weights_are_not(tmp_path, changes):
    model, path = (
        build_model("gated_srp", in_dim=4, num_outputs=2, dim=12, num_heads=3, depth=1),
        tmp_path / "m.safetensors",
    )
    model.settings |= changes
    save_model(model, path)
    with pytest.raises(UserError, match=r"m\.safetensors"):
        load_model(path)


@pytest.mark.parametrize("arm", ["abmil", "transmil", "na"])
def test_a_small_model_that_keeps_the_defaults_of_parts_it_lacks_is_read(tmp_path, arm):
    model, path = build_model(arm, in_dim=4, num_outputs=2, dim=12, num_heads=3, depth=1), tmp_path / "m.safetensors"
    save_model(model, path)
    assert load_model(path).state_dict().keys() == model.state_dict().keys()


def test_a_run_whose_metrics_lack_entries_is_shown_in_a_notebook(damaged):
    content = {"test": {"slide": {"macro_f1": 0.5}}, "score": "slide"}
    (damaged.path / "metrics.json").write_text(json.dumps(content))
    assert "?, seed ?" in damaged._repr_html_()
