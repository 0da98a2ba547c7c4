"""A number per slide: reading, standardisation, losses, metrics against naive loops and scipy, and the way from the YAML to the report."""

import math

import numpy as np
import pandas as pd
import pytest
import torch
from factories import write_trident
from scipy import stats
from training.toy_cohorts import planted, write_yaml

import gated_srp
from gated_srp.data.covariates import Numeric
from gated_srp.errors import UserError
from gated_srp.tasks import find_task
from gated_srp.tasks.regression import Regression


def table_of(*values, cases=None):
    names = [f"s{i}" for i in range(len(values))]
    return pd.DataFrame({"slide": names, "case": cases or names, "value": [float(v) for v in values]})


def write_cohort(folder, slides=20, *, unit=1.0, **settings):
    """The planted shift is the number to learn; every fourth patient has two slides."""
    rows, rng = ["slide,case,expression"], np.random.default_rng(slides)
    for i in range(slides):
        value = rng.normal()
        for part in range(1 + (i % 4 == 0)):
            write_trident(folder / "feats", f"s{i:03d}_{part}", planted(2 * i + part, 2 * value))
            rows.append(f"s{i:03d}_{part},{folder.name}{i:03d},{50 + unit * value:.4f}")
    (folder / "table.csv").write_text("\n".join(rows) + "\n")
    plain = {"task": "regression", "target": "expression", "out": str(folder / "runs")} | settings
    return write_yaml(folder, **plain | {"train": {"epochs": 4, "lr": 3e-3} | plain.pop("train", {})})


def test_values_are_standardised_by_the_training_slides_alone():
    task = Regression.fit(table_of(1, 2, 3, 6))
    assert (task.mean, task.std) == (3.0, math.sqrt(3.5))  # n, not n - 1
    assert task.encode(table_of(10))[0, 0].item() == pytest.approx(7 / math.sqrt(3.5), rel=1e-6)
    assert task.predict(torch.tensor([[0.0], [2.0]]))["predicted_value"].tolist() == [3.0, 3.0 + 2 * math.sqrt(3.5)]
    assert find_task("regression").from_card(task.card() | {"select": "r2"}) == Regression(
        3.0, math.sqrt(3.5), select="r2"
    )


def test_the_losses_are_those_of_a_naive_loop():
    logits, target = torch.tensor([[0.5], [-3.0], [2.0]]), torch.tensor([[0.0], [1.0], [1.5]])
    gaps = [0.5, 4.0, 0.5]
    squared = sum(gap**2 for gap in gaps) / 3
    huber = sum(gap**2 / 2 if gap < 1 else gap - 0.5 for gap in gaps) / 3
    task = Regression.fit(table_of(0, 1))
    assert task.loss(logits, target).item() == pytest.approx(squared)
    assert task.with_loss(table_of(0, 1), loss="huber").loss(logits, target).item() == pytest.approx(huber)
    assert task.loss(logits[1], target[1]).item() == pytest.approx(16)  # one bag without its batch dimension


def test_metrics_are_those_of_scipy_and_of_naive_sums():
    rng = np.random.default_rng(0)
    truth, found = rng.normal(size=17), rng.normal(size=17)
    metrics = Regression().metrics(pd.DataFrame({"value": truth, "predicted_value": found}))
    assert metrics["pearson"] == pytest.approx(stats.pearsonr(truth, found).statistic, abs=1e-12)
    error = sum((t - f) ** 2 for t, f in zip(truth, found, strict=True))
    assert metrics["r2"] == pytest.approx(1 - error / sum((t - truth.mean()) ** 2 for t in truth), abs=1e-12)
    assert metrics["mae"] == pytest.approx(sum(abs(t - f) for t, f in zip(truth, found, strict=True)) / 17, abs=1e-12)


def test_what_is_not_defined_is_not_a_number():
    same = pd.DataFrame({"value": [2.0, 2.0], "predicted_value": [1.0, 2.0]})
    assert np.isnan([Regression().metrics(same)[name] for name in ("pearson", "r2")]).all()
    flat = Regression().metrics(pd.DataFrame({"value": [1.0, 3.0], "predicted_value": [2.0, 2.0]}))
    assert math.isnan(flat["pearson"]) and flat["r2"] == 0 and flat["mae"] == 1
    assert np.isnan(list(Regression().metrics(same[:0]).values())).all()


def test_a_patients_value_is_the_mean_of_the_slides_predictions():
    slides = table_of(1, 1, 4, cases=["p", "p", "q"]).assign(predicted_value=[0.0, 3.0, 5.0])
    cases = Regression().by_case(slides)
    assert cases[["case", "value", "slides", "predicted_value"]].values.tolist() == [["p", 1, 2, 1.5], ["q", 4, 1, 5]]


def test_patients_are_stratified_by_quarters_and_few_of_them_by_halves():
    many = Regression.strata(table_of(*range(20)), ())
    assert [many[f"s{i}"] for i in (0, 5, 10, 19)] == ["quantile0", "quantile1", "quantile2", "quantile3"]
    few = Regression.strata(table_of(*range(12)), ())
    assert set(few.values()) == {"quantile0", "quantile1"} and sum(v == "quantile0" for v in few.values()) == 6


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"metric": "mae"}, "'mae' cannot select for regression; expected 'pearson' or 'r2'"),
        ({"train.loss": "absolute"}, "train.loss: 'absolute'; expected squared or huber"),
        ({"classes": ["a", "b"]}, "`classes` are set, but regression has none"),
        ({"target": ["expression", "case"]}, "regression predicts one number"),
    ],
)
def test_settings_that_it_has_not_are_refused(tmp_path, changes, said):
    with pytest.raises(gated_srp.UserError, match=said):
        gated_srp.train(write_cohort(tmp_path, 4), settings=changes)


def test_other_tasks_have_one_loss(cohort_of_classes):
    with pytest.raises(gated_srp.UserError, match=r"train.loss: 'huber'; classification has one loss"):
        gated_srp.train(cohort_of_classes, settings={"train.loss": "huber"})


@pytest.fixture
def cohort_of_classes(tmp_path):
    from training.toy_cohorts import write_cohort as write_classes

    return write_classes(tmp_path, slides=12)


def test_a_cell_that_is_no_number_is_refused_with_its_row(tmp_path):
    yaml = write_cohort(tmp_path, 4)
    table = tmp_path / "table.csv"
    lines = table.read_text().splitlines()
    lines[2] = lines[2].rsplit(",", 1)[0] + ",high"
    table.write_text("\n".join(lines) + "\n")
    with pytest.raises(gated_srp.UserError, match=r"column 'expression' holds 1 value that cannot be read \(row 3"):
        gated_srp.train(yaml)


def test_init_takes_many_numbers_for_regression_and_says_so(tmp_path):
    write_cohort(tmp_path)
    draft = gated_srp.init(tmp_path / "feats", tmp_path / "table.csv", out=tmp_path / "new.yaml", target="expression")
    assert "task: regression" in draft.text and "target: expression" in draft.text
    assert any("task: regression" in note.what and "classification" in note.what for note in draft.notes)
    assert gated_srp.check(tmp_path / "new.yaml").facts["labels"]["task"] == "regression"


def test_init_offers_numbers_where_no_target_is_named(tmp_path):
    write_cohort(tmp_path)
    text = gated_srp.init(tmp_path / "feats", tmp_path / "table.csv", out=tmp_path / "new.yaml").text
    assert "# task: regression\n# target: expression" in text and any("CHOOSE" in line for line in text.splitlines())


def test_numbers_that_are_read_as_classes_are_told(tmp_path):
    yaml = write_cohort(tmp_path, 24, task="classification")
    with pytest.raises(gated_srp.UserError, match="for a number per slide write `task: regression`"):
        gated_srp.train(yaml)
    rows = [f"s{i:03d}_0,p{i},{i % 14}.5" for i in range(20) for _ in range(2)]
    (tmp_path / "table.csv").write_text("\n".join(["slide,case,expression", *rows]) + "\n")
    notes = [note for note in gated_srp.check(yaml).notes if note.kind == "numbers"]
    assert notes[0].what == "14 different numbers in 'expression' are taken for classes"


@pytest.mark.slow
def test_a_number_per_slide_from_the_yaml_to_the_report(tmp_path):
    inside, outside = write_cohort(tmp_path / "in", 24), write_cohort(tmp_path / "out", 8)
    found = gated_srp.check(inside)
    assert found.ok and found.facts["labels"]["values"]["mean"] == pytest.approx(50, abs=1)

    _, run = (gated_srp.train(inside, arm=arm, seed=42) for arm in ("na", "gated_srp"))
    table = pd.read_csv(tmp_path / "in" / "table.csv")
    parts = run.split.set_index(run.split.columns[0])["split"]
    training = table.loc[table["case"].map(parts) == "train", "expression"]
    assert run.card["mean"] == pytest.approx(training.mean()) and run.card["std"] == pytest.approx(training.std(ddof=0))
    assert (run.card["task"], run.card["loss"], run.card["select"]) == ("regression", "squared", "pearson")
    assert run.metrics("val")["pearson"] > 0.8
    assert set(run.metrics("test", "case")) == {"pearson", "r2", "mae"} == set(run.metrics("test", "slide"))
    study = gated_srp.compare(inside, arms=["na", "gated_srp"], seeds=[42], bootstrap=20)  # of the finished runs
    assert "MAE" in (study.folder / "README.md").read_text()
    drawn = [path.name for path in study.files]
    assert "scatter_toy.svg" in drawn

    both = gated_srp.predict(run.path, tmp_path / "out" / "feats", workers=0)
    truth = pd.read_csv(tmp_path / "out" / "table.csv").set_index("slide")["expression"]
    assert np.corrcoef(both.table.set_index("slide")["predicted_value"], truth)[0, 1] > 0.8
    assert both.summary()[0].startswith("predicted value: median ")

    scored = gated_srp.evaluate(run.path, outside, repeats=20, allow_overlap=True, score="case")
    values = scored.metrics.set_index("metric")
    assert values.loc["pearson", "low"] <= values.loc["pearson", "value"] <= values.loc["pearson", "high"]

    file = next((tmp_path / "out" / "feats").rglob("s001_0.h5"))
    gated_srp.heatmap(run.path, file, out=tmp_path / "maps")
    assert any((tmp_path / "maps").rglob("*.png"))
    page = gated_srp.report(tmp_path / "in" / "runs", out=tmp_path / "report.html").path.read_text()
    assert "Predicted and true values of the test part" in page and "pearson" in page.lower()


def test_another_unit_is_doubted():
    task = Regression.fit(table_of(0, 1, 2))
    _, notes = task.matched(table_of(1000, 2000), (), where="out")
    assert "Are both in the same unit?" in notes[0].what
    assert task.matched(table_of(0, 2), (), where="out")[1] == ()


@pytest.mark.parametrize("value", [0.1, 12.3, 1e6 + 0.1])
def test_values_that_never_vary_are_known_in_spite_of_rounding(value):
    same = np.full(37, value)
    assert np.ptp(same) == 0
    varied = np.random.default_rng(0).normal(size=37)
    found = Regression().metrics(pd.DataFrame({"value": varied, "predicted_value": same}))
    assert math.isnan(found["pearson"]) and math.isfinite(found["r2"])
    found = Regression().metrics(pd.DataFrame({"value": same, "predicted_value": varied}))
    assert math.isnan(found["pearson"]) and math.isnan(found["r2"])
    with pytest.raises(UserError, match="one value only"):
        Regression.fit(table_of(*same))
    column = Numeric.fit("age", pd.Series(same))
    assert column.std == 0.0 and column.places(value + 1) == [0.0]
