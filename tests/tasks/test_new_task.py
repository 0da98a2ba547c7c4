"""A new kind of task is one class and one line: a number per slide, from the YAML to the report, without touching the package."""

import math

import numpy as np
import pandas as pd
import pytest
import torch
from factories import write_trident
from training.toy_cohorts import planted, write_yaml

import gated_srp
from gated_srp.errors import Note
from gated_srp.tasks import TASKS, Task, find_task
from gated_srp.tasks.task import Labels, mean_by_case, read_numbers


class Regression(Task):
    """Mean squared error of one number per slide; Pearson's correlation selects."""

    name = "regression"
    subject = "a number"
    selects = ("pearson",)
    shown = ("pearson", "mae")
    usual = {"target": ("expression",)}  # noqa: RUF012
    real = ("value",)
    num_outputs = 1
    truth = ("value",)

    @classmethod
    def read(cls, frame, columns, *, classes, where):
        return Labels(pd.DataFrame({"value": read_numbers(frame[columns.target], where)}))

    @classmethod
    def describe(cls, frame, classes, columns):
        return [Note("note", "labels", f"{columns.target}: mean {frame['value'].mean():.3g}")]

    @classmethod
    def strata(cls, frame, classes):
        means = frame.groupby("case")["value"].mean()
        return {str(case): str(value > means.median()) for case, value in means.items()}

    @classmethod
    def fit(cls, training, classes=(), metric=None):
        cls.checked_metric(metric)
        return cls()

    def card(self):
        return {}

    @classmethod
    def from_card(cls, card):
        return cls()

    def encode(self, table):
        return torch.tensor(table["value"].to_numpy(np.float32))[:, None]

    def answers(self, table):
        return {"value": table["value"].to_numpy()}

    def loss(self, logits, target):
        return torch.nn.functional.mse_loss(logits.float(), target.reshape(logits.shape))

    def predict(self, logits):
        return {"predicted_value": logits.detach().cpu().double().numpy()[:, 0]}

    def by_case(self, slides):
        return mean_by_case(slides, self.truth, ["predicted_value"])

    def metrics(self, predictions):
        truth, found = predictions["value"], predictions["predicted_value"]
        varied = truth.nunique() > 1 and found.nunique() > 1
        return {
            "pearson": float(np.corrcoef(truth, found)[0, 1]) if varied else math.nan,
            "mae": float((truth - found).abs().mean()),
        }

    @classmethod
    def metrics_of(cls, predictions):
        return cls().metrics(predictions) if {"value", "predicted_value"} <= set(predictions) else None


@pytest.fixture
def regression(monkeypatch):
    monkeypatch.setitem(TASKS, "regression", Regression)  # the one line


def write_cohort(folder, slides):
    """The planted shift is the number to learn."""
    rows = ["slide,case,expression"]
    for i, value in enumerate(np.random.default_rng(slides).normal(size=slides)):
        write_trident(folder / "feats", f"s{i:03d}", planted(i, 2 * value))
        rows.append(f"s{i:03d},p{i:03d},{value:.4f}")
    (folder / "table.csv").write_text("\n".join(rows) + "\n")
    return write_yaml(folder, task="regression", out=str(folder / "runs"), train={"epochs": 6})


@pytest.mark.slow
def test_a_number_per_slide_from_the_yaml_to_the_report(tmp_path, regression):
    inside, outside = (write_cohort(tmp_path / name, slides) for name, slides in (("in", 30), ("out", 12)))
    found = gated_srp.check(inside)
    assert found.ok and found.facts["labels"]["task"] == "regression"

    runs = [gated_srp.train(inside, arm=arm, seed=42) for arm in ("na", "gated_srp")]
    assert runs[1].card["task"] == "regression" and runs[1].card["select"] == "pearson"
    assert runs[1].metrics("val")["pearson"] > 0.9
    assert set(runs[1].history["metric"]) == {"loss", "pearson", "mae"}

    both = gated_srp.predict([run.path for run in runs], tmp_path / "out" / "feats", workers=0)
    assert len(both.table) == 12 and both.table["predicted_value_std"].notna().all()
    truth = pd.read_csv(tmp_path / "out" / "table.csv").set_index("slide")["expression"]
    assert np.corrcoef(both.table.set_index("slide")["predicted_value"], truth)[0, 1] > 0.8

    scored = gated_srp.evaluate(runs[1].path, outside, repeats=20, allow_overlap=True)  # the generated ids are the same
    values = scored.metrics.set_index("metric")
    assert values.loc["pearson", "low"] <= values.loc["pearson", "value"] <= values.loc["pearson", "high"]
    assert set(values.index) == {"pearson", "mae"}

    page = gated_srp.report(tmp_path / "in" / "runs", out=tmp_path / "report.html")
    text = page.path.read_text()
    assert "pearson" in text.lower() and "gated" in text.lower() and "Predicted value, over the seeds" in text


def test_its_table_and_its_metric_are_checked_like_those_of_others(tmp_path, regression):
    yaml = write_cohort(tmp_path, 12)
    with pytest.raises(gated_srp.UserError, match="'mae' cannot select for regression; expected 'pearson'"):
        gated_srp.train(yaml, settings={"metric": "mae"})
    table = tmp_path / "table.csv"
    table.write_text(table.read_text().replace(",p003,", ",p003,much"))
    with pytest.raises(gated_srp.UserError, match=r"column 'expression' holds 1 values that cannot be read \(row 5"):
        gated_srp.train(yaml)


def test_an_installed_package_brings_a_task_by_an_entry_point(monkeypatch):
    class Point:
        name = "regression"

        def load(self):
            return Regression

    def points(group, name="regression"):
        return [Point()] if (group, name) == ("gated_srp.tasks", "regression") else []

    monkeypatch.setattr("gated_srp.tasks.entry_points", points)
    try:
        assert find_task("regression") is Regression
    finally:
        TASKS.pop("regression")
    with pytest.raises(gated_srp.UserError, match=r"no task is called 'regresion'.*survival.*regression"):
        find_task("regresion")
