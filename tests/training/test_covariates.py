"""Clinical covariates: fitted on the training part alone, concatenated before the head, from the YAML to every command; against naive computations."""

import json
import math
import re

import numpy as np
import pandas as pd
import pytest
import torch
from factories import write_trident
from toy_cohorts import open_config, planted, train_interrupted, write_yaml

import gated_srp
from gated_srp.config.cohort import open_cohort
from gated_srp.data.covariates import Covariates, stored
from gated_srp.data.exported_splits import export_splits
from gated_srp.errors import UserError
from gated_srp.models import build_model
from gated_srp.training.inputs import load_inputs
from gated_srp.training.train import Job, _about, train
from gated_srp.training.trained import TrainedRun, open_slide

NAMED = {"numeric": ["age"], "categorical": ["sex", "stage"]}
STAGES = ("I", "II", "III")


def write_clinical(folder, *, patients=20, first=0, slides=1, gaps=True, **settings):
    """Ages tell the classes apart; some cells are empty; every patient has so many slides."""
    rows, rng = ["slide,case,label,age,sex,stage,months,dead,score"], np.random.default_rng(first)
    for i in range(first, first + patients):
        label = i % 2
        age, sex, stage = f"{50 + 20 * label + rng.normal():.2f}", "fm"[i // 3 % 2], STAGES[7 * i // 4 % 3]
        age, stage = ("" if gaps and i % 7 == 3 else age), ("" if gaps and i % 5 == 2 else stage)
        for part in range(slides):
            write_trident(folder / "feats", f"s{i:02d}_{part}", planted(3 * i + part, 0.1, columns=3, rows=3))
            about = f"{100 - 60 * label + i},{int(i % 4 > 0)},{i / 3 + label:.3f}"
            rows.append(f"s{i:02d}_{part},p{i:02d},{('benign', 'tumour')[label]},{age},{sex},{stage},{about}")
    (folder / "table.csv").write_text("\n".join(rows) + "\n")
    recipe = {"epochs": 2, "accumulation": 3} | settings.pop("train", {})
    what = {"target": "label"} if "time" not in settings and "target" not in settings else {}
    return write_yaml(folder, covariates=NAMED, train=recipe, **what, **settings)


@pytest.fixture(scope="module")
def cohort(tmp_path_factory):
    return write_clinical(tmp_path_factory.mktemp("clinical"))


@pytest.fixture(scope="module")
def finished(cohort):
    return train(open_config(cohort), arm="gated_srp", seed=42)


def changed_row(cohort, folder, slide, **cells):
    """The same cohort with other cells of one slide."""
    table = pd.read_csv(cohort.parent / "table.csv", dtype=str)
    for name, value in cells.items():
        table.loc[table["slide"] == slide, name] = value
    table.to_csv(folder / "table.csv", index=False)
    text = cohort.read_text().replace("features: feats", f"features: {cohort.parent / 'feats'}")
    (folder / "cohort.yaml").write_text(text)
    return folder / "cohort.yaml"


def naive(table, training):
    """(bags, F) as nested lists, by hand."""
    known = [float(row.age) for row in table.itertuples() if row.slide in training and row.age == row.age]
    mean = sum(known) / len(known)
    std = math.sqrt(sum((x - mean) ** 2 for x in known) / len(known))
    own = table[table["slide"].isin(training)]
    found = []
    for row in table.itertuples():
        places = [0.0 if row.age != row.age else (float(row.age) - mean) / std]
        places += [float(row.age != row.age)] if own["age"].isna().any() else []
        for name, value in (("sex", row.sex), ("stage", row.stage)):
            places += [float(value == one) for one in sorted(set(own[name].dropna()))]
            places += [float(value != value)] if own[name].isna().any() else []
        found.append(places)
    return found


def test_statistics_and_places_are_those_of_a_naive_loop_over_the_training_part(cohort):
    inputs = load_inputs(open_config(cohort), 42)
    table = pd.read_csv(cohort.parent / "table.csv")
    training = set(inputs.slides.loc[inputs.rows("train"), "slide"])
    expected = torch.tensor(naive(table, training))
    assert 0 < len(training) < len(table) and expected.shape[1] == inputs.covariates.width == 8
    found = torch.cat([inputs.bags[row].graph.covariates for row in range(len(table))])
    torch.testing.assert_close(found, expected)
    assert {note.kind for note in inputs.notes} >= {"covariates"}


def test_a_cell_of_a_test_slide_changes_no_statistic_and_no_weight(cohort, finished, tmp_path):
    inputs = load_inputs(open_config(cohort), 42)
    slide = inputs.slides.loc[inputs.rows("test")[0], "slide"]
    other = open_config(changed_row(cohort, tmp_path, slide, age="9999", stage="IV"))
    again = load_inputs(other, 42)
    assert again.covariates == inputs.covariates
    assert again.hash != inputs.hash  # a begun run does not go on with it
    assert any("category that training has not" in note.what for note in again.notes)
    run = train(other, arm="gated_srp", seed=42)
    ours, theirs = (gated_srp.load_model(one.path).state_dict() for one in (finished, run))
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    first, second = (one.predictions("test", "slide").set_index("slide") for one in (finished, run))
    moved = first.index[(first["prob_tumour"] != second["prob_tumour"])]
    assert list(moved) == [slide]


def test_a_cell_of_a_training_slide_changes_the_statistics(cohort, tmp_path):
    inputs = load_inputs(open_config(cohort), 42)
    rows = inputs.slides.loc[inputs.rows("train")]
    slide = rows.loc[rows[stored("age")].notna(), "slide"].iloc[0]
    again = load_inputs(open_config(changed_row(cohort, tmp_path, slide, age="9999")), 42)
    assert again.covariates != inputs.covariates


def test_the_head_sees_slide_and_covariates_concatenated(cohort, finished):
    """One linear layer over [z, c]: of the vectors that `embed` gives, which are of slides alone."""
    found = gated_srp.embed(finished.path, cohort.parent / "feats", table=cohort)
    model, run = gated_srp.load_model(finished.path), TrainedRun.open(finished.path)
    table = pd.read_csv(cohort.parent / "table.csv").rename(
        columns={name: stored(name) for name in ("age", "sex", "stage")}
    )
    beside = run.covariates.encode(table.set_index("slide").loc[found.slides["slide"]].reset_index())
    joint = torch.cat([torch.from_numpy(found.features), beside], 1)
    weight = torch.cat([model.head.weight, model.covariates.weight], 1)
    logits = joint @ weight.T + model.head.bias
    own = gated_srp.predict(finished.path, cohort.parent / "feats", table=cohort).table.set_index("slide")
    probabilities = own.loc[found.slides["slide"], "prob_tumour"].to_numpy()
    np.testing.assert_allclose(logits.softmax(1)[:, 1].detach().numpy(), probabilities, atol=1e-6)
    test = finished.predictions("test", "slide").set_index("slide")
    np.testing.assert_allclose(own.loc[test.index, "prob_tumour"], test["prob_tumour"], atol=1e-6)


def test_the_card_says_columns_means_scales_and_categories_and_those_without_say_nothing(cohort, finished):
    inputs = load_inputs(open_config(cohort), 42)
    card = finished.card["covariates"]
    assert [one["name"] for one in card] == ["age", "sex", "stage"]
    assert Covariates.from_card(json.loads(json.dumps(card))) == inputs.covariates
    assert card[1]["categories"] == ["f", "m"] and card[0]["std"] > 5
    plain = open_config(cohort, covariates=None)
    without = _about(Job(plain, "na", 42), load_inputs(plain, 42), "32")
    assert "covariates" not in without and "covariates" not in build_model("na", in_dim=8, num_outputs=2).settings


def test_arms_are_paired_and_without_covariates_nothing_is_drawn_otherwise():
    sizes = {"in_dim": 6, "num_outputs": 2, "dim": 12, "num_heads": 2, "num_landmarks": 4, "hidden_dim": 4, "seed": 7}
    models = {arm: build_model(arm, covariates=3, **sizes) for arm in ("na", "gated_srp", "abmil", "clinical")}
    weights = [model.state_dict()["covariates.weight"] for model in models.values()]
    assert all(torch.equal(weights[0], one) for one in weights) and weights[0].abs().sum() > 0
    plain = build_model("gated_srp", **sizes).state_dict()
    beside = models["gated_srp"].state_dict()
    assert set(beside) - set(plain) == {"covariates.weight"} and list(plain) == list(beside)[: len(plain)]
    assert all(torch.equal(plain[name], beside[name]) for name in plain)


def test_the_clinical_arm_learns_from_the_table_and_never_sees_a_patch(cohort, tmp_path):
    config = open_config(cohort, train__epochs=8, train__lr=0.3)
    run = train(config, arm="clinical", seed=42, out=tmp_path)
    found = gated_srp.predict(run.path, cohort.parent / "feats", table=cohort).table
    table = pd.read_csv(cohort.parent / "table.csv")
    old, young = (found["prob_tumour"][side].to_numpy() for side in (table["age"] > 60, table["age"] < 60))
    assert (old[:, None] > young).mean() > 0.95  # ages tell the classes apart
    model, bag = gated_srp.load_model(run.path), load_inputs(config, 42).bags[0]
    assert {name for name, _ in model.named_parameters()} == {"covariates.weight", "head.bias"}
    assert torch.equal(model(bag.features[None], bag.graph), model(torch.randn_like(bag.features)[None], bag.graph))
    with pytest.raises(UserError, match=r"arm 'clinical'.*covariates alone, and the cohort names none"):
        train(open_config(cohort, covariates=None), arm="clinical", seed=42, out=tmp_path / "none")
    with pytest.raises(UserError, match="looks at no patch, so it has no vector"):
        gated_srp.embed(run.path, cohort.parent / "feats", table=cohort)


def test_all_stands_for_the_clinical_arm_where_there_are_covariates(cohort, monkeypatch):
    planned = []

    def stop(config, rows, seeds):
        planned.append({row.arm for row in rows})
        raise KeyboardInterrupt

    monkeypatch.setattr("gated_srp.study.cells.plan", stop)
    for settings in ({}, {"covariates": None}):
        with pytest.raises(KeyboardInterrupt):
            gated_srp.compare(open_config(cohort, **settings), arms=["all"])
    assert planned[0] - planned[1] == {"clinical"}


@pytest.mark.parametrize(
    "settings",
    [
        {"time": "months", "event": "dead", "task": "survival", "bag": "patient", "slides": 2},
        {"time": "months", "event": "dead", "task": "cox"},
        {"target": "score", "task": "regression"},
    ],
    ids=["survival of patients", "cox", "regression"],
)
def test_every_task_and_bag_takes_them_and_a_run_goes_on_bit_for_bit(settings, tmp_path, monkeypatch):
    config = open_config(write_clinical(tmp_path, patients=16, **settings))
    whole = train(config, arm="na", seed=42, out=tmp_path / "whole")
    train_interrupted(config, "na", after=5, monkeypatch=monkeypatch)
    again = train(config, arm="na", seed=42)
    ours, theirs = (gated_srp.load_model(one.path).state_dict() for one in (whole, again))
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    start = build_model(seed=42, **whole.card["settings"]).state_dict()
    assert not torch.equal(ours["covariates.weight"], start["covariates.weight"])
    found = gated_srp.predict(whole.path, tmp_path / "feats", table=tmp_path / "table.csv").table.set_index("case")
    test = whole.predictions("test", "case").set_index("case")
    name = next(name for name in ("prob_tumour", "risk", "predicted_value") if name in test)
    np.testing.assert_allclose(found.loc[test.index, name], test[name], atol=1e-5)


def test_prediction_needs_the_table_and_says_what_it_cannot_use(cohort, finished, tmp_path):
    feats = cohort.parent / "feats"
    with pytest.raises(UserError, match=r"also needs age, sex, stage.*--table"):
        gated_srp.predict(finished.path, feats)
    table = pd.read_csv(cohort.parent / "table.csv", dtype=str)
    table.drop(columns="stage").to_csv(tmp_path / "short.csv", index=False)
    with pytest.raises(UserError, match=r"short.csv: no column 'stage'"):
        gated_srp.predict(finished.path, feats, table=tmp_path / "short.csv")
    table.loc[0, "sex"], table.loc[1, "sex"] = "female", None
    table.iloc[:-1].to_csv(tmp_path / "odd.csv", index=False)
    found = gated_srp.predict(finished.path, feats, table=tmp_path / "odd.csv")
    problems = dict(zip(found.skipped["slide"], found.skipped["problem"], strict=True))
    assert set(problems) == {"s00_0", "s19_0"}
    assert "sex is 'female', but f, m in the training part" in problems["s00_0"]
    assert "also needs age, sex, stage" in problems["s19_0"]
    said = [str(note) for note in found.notes if note.kind == "covariates"]
    assert len(said) == 1 and "missing; a number counts as the training mean" in said[0]
    whole = gated_srp.predict(finished.path, feats, table=cohort).table.set_index("slide")["prob_tumour"]
    some = found.table.set_index("slide")["prob_tumour"]
    changed = some.index[~np.isclose(some, whole[some.index], atol=1e-7)]
    assert list(changed) == ["s01_0"]


def test_an_ensemble_reads_each_member_in_its_own_units(cohort, finished):
    other = train(open_config(cohort), arm="gated_srp", seed=43)
    assert TrainedRun.open(other.path).covariates != TrainedRun.open(finished.path).covariates
    feats = cohort.parent / "feats"
    single = [gated_srp.predict(one.path, feats, table=cohort).table["prob_tumour"] for one in (finished, other)]
    both = gated_srp.predict([finished.path, other.path], feats, table=cohort).table["prob_tumour"]
    np.testing.assert_allclose(both, (single[0] + single[1]) / 2, atol=1e-7)


def test_another_cohort_is_evaluated_by_the_names_of_the_training_table(finished, tmp_path):
    other = write_clinical(tmp_path, first=40, patients=6, gaps=False)
    text = re.sub(r"covariates:\n(  .*\n|- .*\n)*", "", other.read_text())
    other.write_text(text)
    found = gated_srp.evaluate(finished.path, other, repeats=5)
    assert "covariates" not in text and len(found.slides) == 6
    expected = gated_srp.predict(finished.path, tmp_path / "feats", table=tmp_path / "table.csv").table
    np.testing.assert_allclose(found.slides["prob_tumour"], expected["prob_tumour"], atol=1e-7)
    table = pd.read_csv(tmp_path / "table.csv").drop(columns="age")
    table.to_csv(tmp_path / "table.csv", index=False)
    with pytest.raises(UserError, match="no column 'age'"):
        gated_srp.evaluate(finished.path, other, repeats=5)


def test_maps_of_a_slide_take_the_table_or_the_values(cohort, finished, tmp_path):
    file = next(cohort.parent.rglob("s00_0.h5"))
    row = pd.read_csv(cohort.parent / "table.csv").set_index("slide").loc["s00_0"]
    own = gated_srp.predict(finished.path, [file], table=cohort).table["prob_tumour"][0]
    given = {"age": float(row["age"]), "sex": row["sex"], "stage": row["stage"]}
    bag, model = open_slide(finished.path, file, covariates=given), gated_srp.load_model(finished.path)
    with torch.no_grad():
        assert model(bag.features[None], bag.graph).softmax(1)[0, 1].item() == pytest.approx(own, abs=1e-6)
    with pytest.raises(UserError, match="also needs age, sex, stage"):
        open_slide(finished.path, file, covariates={"age": 60})
    with pytest.raises(UserError, match=r"covariates: none, but the model's head needs \(1, 8\)"):
        model(bag.features[None], bag.graph.with_covariates(None))
    table = cohort.parent / "table.csv"
    assert gated_srp.heatmap(finished.path, file, table=table, out=tmp_path / "maps").written
    assert gated_srp.view(file, finished.path, table=table, export=tmp_path / "view").page.is_file()
    shown = gated_srp.explain(finished.path, file, table=table, out=tmp_path / "page").prediction
    assert shown.answers["probability of tumour"] == f"{100 * own:.1f} %"
    for refused in (gated_srp.heatmap, gated_srp.explain):
        with pytest.raises(UserError, match="also needs age, sex, stage"):
            refused(finished.path, file, out=tmp_path / "none")
    with pytest.raises(UserError, match="also needs age, sex, stage"):
        gated_srp.view(file, finished.path, export=tmp_path / "none")


@pytest.mark.parametrize(
    ("covariates", "said"),
    [
        ({"numeric": ["label"]}, "is a covariate, and also what is predicted"),
        ({"categorical": ["case"]}, "is a covariate, and also what is predicted, or an id"),
        ({"numeric": ["sex"]}, r"column 'sex' holds .* that cannot be read"),
        ({"numeric": ["agee"]}, "no column 'agee'.*Did you mean 'age'"),
        ({"numeric": ["age"], "categorical": ["age"]}, "at least one column, each once"),
        ({}, "at least one column"),
    ],
)
def test_columns_that_cannot_be_covariates_are_refused(cohort, covariates, said):
    with pytest.raises(UserError, match=said):
        load_inputs(open_config(cohort).model_copy(update={"covariates": Named(**covariates)}), 42)


class Named:
    def __init__(self, numeric=(), categorical=()):
        self.numeric, self.categorical = tuple(numeric), tuple(categorical)


def test_a_card_that_does_not_fit_its_weights_is_refused(finished):
    card = finished.card | {"covariates": finished.card["covariates"][:1]}
    with pytest.raises(UserError, match="its card does not describe its covariates"):
        _ = TrainedRun(finished.path, card).covariates


def test_splits_for_other_tools_leave_covariates_out(cohort, tmp_path):
    data = open_cohort(open_config(cohort))
    export_splits([data.split(42)], data.table, tmp_path, "patho-bench")
    assert list(pd.read_csv(tmp_path / "k=all.tsv", sep="\t")) == ["case_id", "slide_id", "label", "fold_0"]
