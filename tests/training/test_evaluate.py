import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import typer
import yaml
from factories import make_slide, write_trident
from scipy.special import softmax
from sklearn.metrics import accuracy_score, f1_score, roc_auc_score
from test_predict import SURVIVAL, logits_of, model_file
from toy_cohorts import open_config, planted, write_survival_cohort
from typer.testing import CliRunner

from gated_srp.cli.runs import evaluate
from gated_srp.config import CohortConfig
from gated_srp.data.prediction_tables import read_any_predictions, stamp_table
from gated_srp.errors import UserError
from gated_srp.models import load_card
from gated_srp.training.evaluate import bootstrap
from gated_srp.training.evaluate import evaluate as evaluate_run
from gated_srp.training.train import train


def three_classes(folder: Path, *, slides: int = 12, classes: str = "abc", **settings: object) -> CohortConfig:
    """Two slides a patient, classes in turn, labels that an untrained model cannot know."""
    rows = ["slide,case,label"]
    for i in range(slides):
        write_trident(folder / "feats", f"e{i:02d}", planted(100 + i, 1.0))
        rows.append(f"e{i:02d},q{i // 2},{classes[i // 2 % len(classes)]}")
    (folder / "table.csv").write_text("\n".join(rows) + "\n")
    plain = {"name": "ext", "features": "feats", "table": "table.csv", "target": "label", "train": {"workers": 0}}
    (folder / "ext.yaml").write_text(yaml.safe_dump(plain | settings))
    return open_config(folder / "ext.yaml")


def naive_interval(table: pd.DataFrame, metric, repeats: int, seed: int) -> tuple[float, float]:
    """A plain loop over patients."""
    rng, patients, drawn = np.random.default_rng(seed), sorted(set(table["case"])), []
    for _ in range(repeats):
        chosen = sorted(patients[i] for i in rng.integers(0, len(patients), len(patients)))
        value = metric(pd.concat([table[table["case"] == case] for case in chosen]))
        drawn += [] if np.isnan(value) else [value]
    return tuple(np.percentile(drawn, (2.5, 97.5)))


# Numbers -------------------------------------------------------------------------------------------------------------


def test_metrics_are_those_of_the_raw_probabilities_and_calibration_of_both(tmp_path):
    config = three_classes(tmp_path)
    model = model_file(tmp_path / "m.safetensors", temperature=2.0)
    found = evaluate_run(model, config, repeats=3)
    files = sorted(tmp_path.rglob("e*.h5"))
    expected, calibrated = (softmax(logits_of(model, files) / t, axis=1) for t in (1.0, 2.0))
    np.testing.assert_allclose(found.slides[["prob_a", "prob_b", "prob_c"]].to_numpy(), expected, rtol=1e-12)
    names = ["calibrated_a", "calibrated_b", "calibrated_c"]
    np.testing.assert_allclose(found.slides[names].to_numpy(), calibrated, rtol=1e-12)
    truth = found.slides["label"]
    assert truth.tolist() == list("aabbccaabbcc")
    values = found.metrics.set_index("metric")["value"]
    guess = np.array(list("abc"))[expected.argmax(1)]
    assert values["accuracy"] == pytest.approx(accuracy_score(truth, guess))
    assert values["macro_f1"] == pytest.approx(f1_score(truth, guess, average="macro", labels=list("abc")))
    assert values["macro_auc"] == pytest.approx(roc_auc_score(truth, expected, multi_class="ovr", average="macro"))
    hot = np.stack([truth == name for name in "abc"], 1)
    assert values["brier"] == pytest.approx(((expected - hot) ** 2).sum(1).mean())
    assert values["calibrated_brier"] == pytest.approx(((calibrated - hot) ** 2).sum(1).mean())


def test_intervals_are_those_of_a_plain_loop_over_patients(tmp_path):
    found = evaluate_run(model_file(tmp_path / "m.safetensors"), three_classes(tmp_path), repeats=40, seed=5)
    rows = found.metrics.set_index("metric")

    def accuracy(table: pd.DataFrame) -> float:
        return float((table["label"] == table["predicted"]).mean())

    def brier(table: pd.DataFrame) -> float:
        truth = np.stack([table["label"] == name for name in "abc"], 1)
        return float(((table[["prob_a", "prob_b", "prob_c"]].to_numpy() - truth) ** 2).sum(1).mean())

    for name, metric in (("accuracy", accuracy), ("brier", brier)):
        low, high = naive_interval(found.slides, metric, 40, 5)
        assert rows.loc[name, ["low", "high"]].tolist() == pytest.approx([low, high], abs=1e-12)
        assert rows.loc[name, "low"] <= rows.loc[name, "value"] <= rows.loc[name, "high"]
    assert rows.loc["accuracy", "resamples"] == 40 > rows.loc["macro_auc", "resamples"]  # a class may not be drawn


def test_patients_and_not_slides_are_resampled():
    table = pd.DataFrame({"case": ["p"] * 50 + ["q"] * 50, "value": [0.0] * 50 + [1.0] * 50})
    found = bootstrap(table, lambda rows: {"mean": float(rows["value"].mean())}, repeats=200)
    assert found[["value", "low", "high"]].iloc[0].tolist() == [0.5, 0.0, 1.0]  # slides alone would give 0.4 to 0.6


def test_a_metric_without_value_has_no_interval():
    table = pd.DataFrame({"case": ["p", "q"]})
    found = bootstrap(table, lambda rows: {"m": float("nan")}, repeats=5)
    assert found["resamples"].item() == 0 and found[["value", "low", "high"]].isna().all(None)


def test_the_same_seed_gives_the_same_intervals(tmp_path):
    config, model = three_classes(tmp_path), model_file(tmp_path / "m.safetensors")
    first, second, other = (evaluate_run(model, config, repeats=15, seed=seed).metrics for seed in (1, 1, 2))
    pd.testing.assert_frame_equal(first, second)
    assert not first.equals(other)


def test_cases_are_scored_by_their_slides_mean(tmp_path):
    config, model = three_classes(tmp_path), model_file(tmp_path / "m.safetensors", score="case")
    found = evaluate_run(model, config, repeats=3)
    assert found.score == "case" and len(found.cases) == 6
    mean = found.slides.groupby("case", sort=False)["prob_a"].mean()
    assert found.cases.set_index("case")["prob_a"].to_dict() == pytest.approx(mean.to_dict())
    guess = found.cases["predicted"] == found.cases["label"]
    assert found.metrics.set_index("metric")["value"]["accuracy"] == pytest.approx(guess.mean())
    assert evaluate_run(model, config, repeats=3, score="slide").score == "slide"


def test_a_run_on_its_own_cohort_warns_and_test_slides_keep_their_predictions(finished, cohort):
    found = evaluate_run(finished, open_config(cohort), repeats=3, allow_overlap=True)
    split = pd.read_csv(finished / "split.csv")
    used = int(split["split"].isin(["train", "val"]).sum())
    assert any(f"{used} of 24 slides are known to the model" in str(note) for note in found.notes)
    written = pd.read_csv(finished / "predictions_test_slide.csv").set_index("slide")
    columns = ["prob_benign", "prob_tumour"]
    mine = found.slides.set_index("slide").loc[written.index, columns].to_numpy()
    np.testing.assert_allclose(mine, written[columns].to_numpy(), rtol=1e-9)


# Survival ------------------------------------------------------------------------------------------------------------


def test_survival_uses_the_cards_edges_and_median_risk(tmp_path):
    inside = open_config(write_survival_cohort(tmp_path / "in"), train__epochs=2)
    run = train(inside, arm="na", seed=42).path
    outside = open_config(write_survival_cohort(tmp_path / "out", slides=18))
    found = evaluate_run(run, outside, repeats=10, allow_overlap=True)  # the generated ids are the same
    card = load_card(run / "model.safetensors")
    assert found.score == "case" and len(found.cases) == 18 < len(found.slides)
    high = found.cases["risk"] > card["median_risk"]
    assert (found.cases["risk_group"] == np.where(high, "high", "low")).all()
    curves = found.findings.tables["kaplan_meier"]
    assert curves.query("group == 'high'")["at_risk"].iloc[0] == high.sum()
    values = found.metrics.set_index("metric")
    assert values.loc["c_index", "value"] == pytest.approx(_c_index(found.cases))
    assert set(values.index) == {"c_index", "uno_c", "integrated_brier", "time_auc"}
    assert found.as_json()["risk_groups"]["cases"]["high"] == high.sum()


def _c_index(cases: pd.DataFrame) -> float:
    pairs = [
        (a.risk > b.risk) + 0.5 * (a.risk == b.risk)
        for a in cases.itertuples()
        for b in cases.itertuples()
        if a.event and a.time < b.time
    ]
    return float(np.mean(pairs))


def test_times_in_another_unit_are_doubted(tmp_path):
    config = open_config(write_survival_cohort(tmp_path, slides=6))
    seen = {"time": [900.0, 1000.0, 1100.0], "event": [1, 0, 1]}
    model = model_file(tmp_path / "m.safetensors", **SURVIVAL | {"follow_up": seen, "score": "case"})
    found = evaluate_run(model, config, repeats=2)
    assert any("was 1000 in training. Are both in the same unit?" in str(note) for note in found.notes)
    assert found.findings is None  # the card has no median risk


# What does not fit ---------------------------------------------------------------------------------------------------


def test_classes_are_matched_by_name_in_the_cards_order(tmp_path):
    config = three_classes(tmp_path, slides=6, classes="cab")
    model = model_file(tmp_path / "m.safetensors", classes=["c", "a", "b"])
    found = evaluate_run(model, config, repeats=2)
    assert found.slides["label"].tolist() == list("ccaabb")
    assert [name for name in found.slides if name.startswith("prob_")] == ["prob_c", "prob_a", "prob_b"]


def test_an_unknown_class_is_refused_by_name(tmp_path):
    model = model_file(tmp_path / "m.safetensors")
    with pytest.raises(UserError, match=r"ext: class d in the table, but the model knows a, b, c\. Rename"):
        evaluate_run(model, three_classes(tmp_path, classes="abd"))


def test_classes_that_are_left_out_in_the_yaml_are_left_out(tmp_path):
    three_classes(tmp_path, classes="abd")
    config = open_config(tmp_path / "ext.yaml", classes=["a", "b"])
    found = evaluate_run(model_file(tmp_path / "m.safetensors"), config, repeats=2)
    assert set(found.slides["label"]) == {"a", "b"}
    assert any("no slide of class c here: macro F1 counts it as 0" in str(note) for note in found.notes)
    assert np.isnan(found.metrics.set_index("metric")["value"]["macro_auc"])


def test_an_absent_class_is_said_beside_macro_f1(tmp_path):
    three_classes(tmp_path, classes="ab")
    result = command(
        model_file(tmp_path / "m.safetensors"), tmp_path / "ext.yaml", "-o", tmp_path / "out", "--repeats", 5
    )
    line = next(line for line in result.output.splitlines() if line.startswith("  macro_f1"))
    assert line.endswith("(class c is absent and counts as 0)")
    found = json.loads((tmp_path / "out/evaluation.json").read_text())["remarks"]
    assert found == {"macro_f1": "class c is absent and counts as 0"}


def test_labels_of_several_kinds_must_all_be_there(tmp_path):
    three_classes(tmp_path)
    table = pd.read_csv(tmp_path / "table.csv").assign(x=[0, 1] * 6, y=[1, 0, 0] * 4, z=1)
    table.to_csv(tmp_path / "table.csv", index=False)
    model = model_file(tmp_path / "m.safetensors", task="multilabel", classes=["y", "x"])
    with pytest.raises(UserError, match=r"no label y in `target`; the model knows y, x"):
        evaluate_run(model, open_config(tmp_path / "ext.yaml", target=["x", "z"]))
    found = evaluate_run(model, open_config(tmp_path / "ext.yaml", target=["x", "y", "z"]), repeats=2)
    assert found.slides["y"].tolist() == [1, 0, 0] * 4
    assert "labels that the model does not know are left out: z" in [note.what for note in found.notes]


def test_another_task_or_encoder_is_refused_before_files_are_read(tmp_path):
    config = three_classes(tmp_path)
    with pytest.raises(UserError, match=r"a table for classification, but .* was trained for survival"):
        evaluate_run(model_file(tmp_path / "m.safetensors", **SURVIVAL), config)
    with pytest.raises(UserError, match=r"encoder gigapath, but .* was trained on uni_v2"):
        evaluate_run(model_file(tmp_path / "m.safetensors"), open_config(tmp_path / "ext.yaml", encoder="gigapath"))


def test_mixed_cases_are_refused_by_case_and_shown_without_truth_by_slide(tmp_path):
    config = three_classes(tmp_path)
    table = pd.read_csv(tmp_path / "table.csv")
    table["case"] = "one"
    table.to_csv(tmp_path / "table.csv", index=False)
    model = model_file(tmp_path / "m.safetensors")
    found = evaluate_run(model, config, repeats=2)
    assert "label" not in found.cases and found.patients == 1
    with pytest.raises(UserError, match=r"case 'one': its slides differ in 'label'"):
        evaluate_run(model, config, repeats=2, score="case")


def test_bad_files_are_skipped_and_listed(tmp_path):
    config = three_classes(tmp_path)
    write_trident(tmp_path / "feats", "e03", make_slide(width=20))
    found = evaluate_run(model_file(tmp_path / "m.safetensors"), config, repeats=2)
    assert found.skipped["slide"].tolist() == ["e03"] and len(found.slides) == 11
    assert found.slides["label"].tolist() == list("aabccaabbcc")


# The command ---------------------------------------------------------------------------------------------------------


def command(*arguments: object) -> object:
    app = typer.Typer()
    app.command()(evaluate)
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def test_the_command_prints_intervals_and_writes_everything(tmp_path):
    three_classes(tmp_path)
    model, out = model_file(tmp_path / "m.safetensors"), tmp_path / "out"
    result = command(model, tmp_path / "ext.yaml", "-o", out, "--repeats", 20)
    assert result.exit_code == 0, result.output
    assert "12 slides of 6 patients, scored by slide" in result.output and " to " in result.output
    names = {"metrics.csv", "predictions_slide.csv", "predictions_case.csv", "skipped.csv", "evaluation.json"}
    assert {path.name for path in out.iterdir()} == names
    written = json.loads((out / "evaluation.json").read_text())
    rows = pd.read_csv(out / "metrics.csv", float_precision="round_trip").set_index("metric")
    assert written["metrics"]["accuracy"]["low"] == rows.loc["accuracy", "low"]
    assert written["bootstrap"] == {"resampled": "patients", "repeats": 20, "seed": 0, "interval": 0.95}
    assert written["slides"] == 12 and written["patients"] == 6 and written["skipped"] == 0
    assert "--score" in str(command(model, tmp_path / "ext.yaml", "--score", "patch").exception)


def test_patients_are_written_in_stamps_form_and_read_again_as_they_were(tmp_path):
    """Its columns and its order: PATIENT, the truth, pred, TARGET_<class>, cross-entropy as loss, sorted by it."""
    config = three_classes(tmp_path)
    model = model_file(tmp_path / "m.safetensors")
    app = typer.Typer()
    app.command()(evaluate)
    arguments = [str(model), str(tmp_path / "ext.yaml"), "-o", str(tmp_path / "out"), "--repeats", "2"]
    assert CliRunner().invoke(app, [*arguments, "--format", "stamp"]).exit_code == 0
    stored = pd.read_csv(tmp_path / "out" / "patient-preds.csv")
    assert list(stored) == ["PATIENT", "label", "pred", "label_a", "label_b", "label_c", "loss"]
    cases = evaluate_run(model, config, repeats=2).cases.set_index("case")
    for row in stored.itertuples():
        own = cases.loc[row.PATIENT]
        assert (row.label, row.pred) == (own["label"], own["predicted"])
        assert row.label_b == pytest.approx(own["prob_b"]) and row.loss == pytest.approx(
            -np.log(own[f"prob_{row.label}"])
        )
    assert len(stored) == len(cases) and stored["loss"].is_monotonic_increasing
    again, _ = read_any_predictions(tmp_path / "out" / "patient-preds.csv")
    np.testing.assert_allclose(again.set_index("case").loc[cases.index, "prob_c"], cases["prob_c"])
    (tmp_path / "out" / "patient-preds.csv").write_text("of an earlier model")
    assert CliRunner().invoke(app, arguments).exit_code == 0
    assert pd.read_csv(tmp_path / "out" / "patient-preds.csv").equals(stored)


def test_numbers_have_their_absolute_difference_as_loss():
    cases = pd.DataFrame({"case": ["p1", "p2"], "value": [1.0, 2.0], "predicted_value": [4.0, 1.5]})
    found = stamp_table(cases, "score")
    assert found.to_dict("list") == {"PATIENT": ["p2", "p1"], "score": [2, 1], "pred": [1.5, 4], "loss": [0.5, 3]}
