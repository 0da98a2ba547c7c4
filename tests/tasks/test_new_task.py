"""A new kind of task is one class and one line: a share per slide, from the YAML to the report, without touching the package."""

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


class Fraction(Task):
    """Binary cross entropy of one share per slide; Pearson's correlation selects."""

    name = "fraction"
    subject = "a share"
    selects = ("pearson",)
    shown = ("pearson", "mae")
    usual = {"target": ("purity",)}  # noqa: RUF012
    real = ("share",)
    num_outputs = 1
    truth = ("share",)

    @classmethod
    def read(cls, frame, columns, *, classes, where):
        return Labels(pd.DataFrame({"share": read_numbers(frame[columns.target], where)}))

    @classmethod
    def describe(cls, frame, classes, columns):
        return [Note("note", "labels", f"{columns.target}: mean {frame['share'].mean():.3g}")]

    @classmethod
    def strata(cls, frame, classes):
        means = frame.groupby("case")["share"].mean()
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
        return torch.tensor(table["share"].to_numpy(np.float32))[:, None]

    def answers(self, table):
        return {"share": table["share"].to_numpy()}

    def loss(self, logits, target):
        return torch.nn.functional.binary_cross_entropy_with_logits(logits.float(), target.reshape(logits.shape))

    def predict(self, logits):
        return {"predicted_share": logits.detach().cpu().double().sigmoid().numpy()[:, 0]}

    def by_case(self, slides):
        return mean_by_case(slides, self.truth, ["predicted_share"])

    def metrics(self, predictions):
        truth, found = predictions["share"], predictions["predicted_share"]
        varied = truth.nunique() > 1 and found.nunique() > 1
        return {
            "pearson": float(np.corrcoef(truth, found)[0, 1]) if varied else math.nan,
            "mae": float((truth - found).abs().mean()),
        }

    @classmethod
    def metrics_of(cls, predictions):
        return cls().metrics(predictions) if {"share", "predicted_share"} <= set(predictions) else None


@pytest.fixture
def fraction(monkeypatch):
    monkeypatch.setitem(TASKS, "fraction", Fraction)  # the one line


def write_cohort(folder, slides):
    """The planted shift is the number to learn."""
    rows = ["slide,case,purity"]
    for i, value in enumerate(np.random.default_rng(slides).normal(size=slides)):
        write_trident(folder / "feats", f"s{i:03d}", planted(i, 2 * value))
        rows.append(f"s{i:03d},p{i:03d},{1 / (1 + np.exp(-2 * value)):.4f}")
    (folder / "table.csv").write_text("\n".join(rows) + "\n")
    return write_yaml(folder, task="fraction", out=str(folder / "runs"), train={"epochs": 6})


@pytest.mark.slow
def test_a_share_per_slide_from_the_yaml_to_the_report(tmp_path, fraction):
    inside, outside = (write_cohort(tmp_path / name, slides) for name, slides in (("in", 30), ("out", 12)))
    found = gated_srp.check(inside)
    assert found.ok and found.facts["labels"]["task"] == "fraction"

    runs = [gated_srp.train(inside, arm=arm, seed=42) for arm in ("na", "gated_srp")]
    assert runs[1].card["task"] == "fraction" and runs[1].card["select"] == "pearson"
    assert runs[1].metrics("val")["pearson"] > 0.9
    assert set(runs[1].history["metric"]) == {"loss", "pearson", "mae"}

    both = gated_srp.predict([run.path for run in runs], tmp_path / "out" / "feats", workers=0)
    assert len(both.table) == 12 and both.table["predicted_share_std"].notna().all()
    truth = pd.read_csv(tmp_path / "out" / "table.csv").set_index("slide")["purity"]
    assert np.corrcoef(both.table.set_index("slide")["predicted_share"], truth)[0, 1] > 0.8

    scored = gated_srp.evaluate(runs[1].path, outside, repeats=20, allow_overlap=True)  # the generated ids are the same
    values = scored.metrics.set_index("metric")
    assert values.loc["pearson", "low"] <= values.loc["pearson", "value"] <= values.loc["pearson", "high"]
    assert set(values.index) == {"pearson", "mae"}

    page = gated_srp.report(tmp_path / "in" / "runs", out=tmp_path / "report.html")
    text = page.path.read_text()
    assert "pearson" in text.lower() and "gated" in text.lower() and "Predicted share, over the seeds" in text


def test_its_table_and_its_metric_are_checked_like_those_of_others(tmp_path, fraction):
    yaml = write_cohort(tmp_path, 12)
    with pytest.raises(gated_srp.UserError, match="'mae' cannot select for fraction; expected 'pearson'"):
        gated_srp.train(yaml, settings={"metric": "mae"})
    table = tmp_path / "table.csv"
    table.write_text(table.read_text().replace(",p003,", ",p003,much"))
    with pytest.raises(gated_srp.UserError, match=r"column 'purity' holds 1 value that cannot be read \(row 5"):
        gated_srp.train(yaml)


def test_an_installed_package_brings_a_task_by_an_entry_point(monkeypatch):
    class Point:
        name = "fraction"

        def load(self):
            return Fraction

    def points(group, name="fraction"):
        return [Point()] if (group, name) == ("gated_srp.tasks", "fraction") else []

    monkeypatch.setattr("gated_srp.tasks.entry_points", points)
    try:
        assert find_task("fraction") is Fraction
    finally:
        TASKS.pop("fraction")
    with pytest.raises(gated_srp.UserError, match=r"no task is called 'fracton'.*survival.*regression.*fraction"):
        find_task("fracton")
