"""`stats` on tables of predictions: DeLong against plain loops and hand-worked numbers, tables of other tools as they write them."""

import json
import math
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from scipy.stats import norm
from typer.testing import CliRunner

import gated_srp
from gated_srp.cli import app
from gated_srp.data.prediction_tables import read_any_predictions, stamp_table
from gated_srp.errors import UserError
from gated_srp.study.statistics import compare_areas, delong
from gated_srp.tasks import find_task

# DeLong --------------------------------------------------------------------------------------------------------------


def naive(positive, scores, clusters):
    """The areas and their covariance from the definition, one pair of rows at a time (Obuchowski's sums over clusters)."""
    pos, neg = np.flatnonzero(positive), np.flatnonzero(~positive)
    models = scores.shape[1]
    wins = np.zeros((len(pos), len(neg), models))
    for i, a in enumerate(pos):
        for j, b in enumerate(neg):
            wins[i, j] = (scores[a] > scores[b]) + (scores[a] == scores[b]) / 2
    areas = wins.mean((0, 1))
    names = sorted(set(clusters))
    x = {
        name: sum((wins[i].mean(0) - areas for i, a in enumerate(pos) if clusters[a] == name), np.zeros(models))
        for name in names
    }
    y = {
        name: sum((wins[:, j].mean(0) - areas for j, b in enumerate(neg) if clusters[b] == name), np.zeros(models))
        for name in names
    }
    i10, i01, i = len({clusters[a] for a in pos}), len({clusters[b] for b in neg}), len(names)
    m, n = len(pos), len(neg)
    s10 = i10 / ((i10 - 1) * m) * sum(np.outer(x[name], x[name]) for name in names)
    s01 = i01 / ((i01 - 1) * n) * sum(np.outer(y[name], y[name]) for name in names)
    s11 = i / (i - 1) * sum(np.outer(x[name], y[name]) for name in names)
    return areas, s10 / m + s01 / n + (s11 + s11.T) / (m * n)


@pytest.mark.parametrize("patients", [30, 12])
@pytest.mark.parametrize("digits", [1, 9])  # many ties, none
def test_delong_is_what_the_definition_gives(patients, digits):
    rng = np.random.default_rng(patients)
    positive = rng.random(30) < 0.4
    scores = (rng.normal(size=(30, 3)) + positive[:, None]).round(digits)
    clusters = np.arange(30) % patients
    areas, covariance = delong(positive, scores, clusters)
    expected = naive(positive, scores, clusters)
    np.testing.assert_allclose(areas, expected[0], rtol=1e-12)
    np.testing.assert_allclose(covariance, expected[1], rtol=1e-10, atol=1e-15)


def test_delong_of_numbers_worked_by_hand():
    """Positives 3, 5, 4 and negatives 1, 2, 4: seven and a half of nine pairs."""
    positive, score = [1, 1, 1, 0, 0, 0], [3.0, 5.0, 4.0, 1.0, 2.0, 4.0]
    areas, covariance = delong(positive, np.array(score)[:, None])
    # Of the positives 2/3, 1, 5/6 (mean 5/6), of the negatives 1, 1, 1/2: variances 1/36 and 1/12, each over 3.
    assert areas[0] == pytest.approx(5 / 6) and covariance[0, 0] == pytest.approx((1 / 36 + 1 / 12) / 3)
    other = [3.0, 5.0, 4.0, 4.0, 1.0, 2.0]  # the same areas, other negatives
    found = compare_areas(positive, score, other)
    assert found.difference == 0 and found.p == pytest.approx(1) and found.error > 0
    worse = compare_areas(positive, score, [1.0, 5.0, 4.0, 3.0, 2.0, 4.0])
    a, s = naive(np.array(positive, bool), np.column_stack([score, [1.0, 5.0, 4.0, 3.0, 2.0, 4.0]]), list(range(6)))
    error = math.sqrt(s[0, 0] + s[1, 1] - 2 * s[0, 1])
    assert worse.p == pytest.approx(2 * norm.sf((a[0] - a[1]) / error)) and worse.high - worse.low == pytest.approx(
        2 * 1.959964 * error
    )


def test_delong_without_spread_or_groups_makes_no_claim():
    same = compare_areas([0, 1, 1, 0], [0.1, 0.9, 0.8, 0.2], [0.1, 0.9, 0.8, 0.2])
    assert (same.difference, same.p) == (0, 1)
    assert math.isnan(compare_areas([1, 1, 1], [1, 2, 3], [3, 2, 1]).p)
    assert math.isnan(compare_areas([1, 0, 0], [1, 2, 3], [3, 2, 1]).p)  # one positive: its spread is not known


def test_two_copies_of_every_slide_of_a_patient_do_not_make_it_surer():
    rng = np.random.default_rng(1)
    positive = rng.random(40) < 0.5
    a, b = rng.normal(size=(2, 40)) + positive
    once = compare_areas(positive, a, b)
    twice = [np.repeat(one, 2) for one in (positive, a, b)]
    clustered = compare_areas(*twice, np.repeat(np.arange(40), 2))
    assert clustered.error == pytest.approx(once.error, rel=1e-9)
    assert compare_areas(*twice).error < 0.75 * once.error  # what ignoring it would claim


# Tables of other tools -----------------------------------------------------------------------------------------------


def cohort(seed: int = 0, slides: int = 2) -> pd.DataFrame:
    rng = np.random.default_rng(seed)
    rows = []
    for i in range(24):
        for part in range(1 + (i % 3 == 0) * (slides - 1)):
            p = 1 / (1 + math.exp(-(2 * (i % 2) - 1 + rng.normal())))
            rows.append((f"P{i:02d}", f"P{i:02d}_{part}", i % 2, p))
    return pd.DataFrame(rows, columns=["patient", "slide", "label", "p"])


def write_clam(path: Path, table: pd.DataFrame) -> Path:
    """eval.py's fold_0.csv."""
    lines = ["slide_id,Y,Y_hat,p_0,p_1"]
    lines += [f"{row.slide},{row.label:.1f},{int(row.p > 0.5)},{1 - row.p},{row.p}" for row in table.itertuples()]
    path.write_text("\n".join(lines) + "\n")
    return path


def write_stamp(path: Path, table: pd.DataFrame, target: str = "KRAS") -> Path:
    """patient-preds.csv: sorted by loss, one row per patient."""
    names = ("wild type", "mutated")
    lines = []
    for patient, own in table.groupby("patient"):
        p, label = own["p"].mean(), own["label"].iloc[0]
        loss = -math.log(p if label else 1 - p)
        lines.append((loss, f"{patient},{names[label]},{names[int(p > 0.5)]},{p},{1 - p},{loss}"))
    path.parent.mkdir(parents=True, exist_ok=True)
    head = f"PATIENT,{target},pred,{target}_mutated,{target}_wild type,loss"
    path.write_text("\n".join([head, *(line for _, line in sorted(lines))]) + "\n")
    return path


def test_a_clam_table_is_read_as_it_is_and_says_that_it_names_no_patients(tmp_path):
    table = cohort()
    found, notes = read_any_predictions(write_clam(tmp_path / "fold_0.csv", table))
    assert found["label"].tolist() == [str(label) for label in table["label"]]
    np.testing.assert_allclose(found["prob_1"], table["p"])
    assert found["predicted"].tolist() == [str(int(p > 0.5)) for p in table["p"]]
    assert any("no column of patients" in note.what and note.level == "warning" for note in notes)


def test_a_stamp_table_is_read_as_it_is_and_ours_written_in_its_form_comes_back(tmp_path):
    table = cohort()
    found, _ = read_any_predictions(write_stamp(tmp_path / "patient-preds.csv", table))
    expected = table.groupby("patient").agg(p=("p", "mean"), label=("label", "first"))
    rows = found.set_index("case").sort_index()
    np.testing.assert_allclose(rows["prob_mutated"], expected["p"])
    assert rows["label"].tolist() == [("wild type", "mutated")[one] for one in expected["label"]]
    stamp_table(found, "KRAS").to_csv(tmp_path / "ours.csv", index=False)
    assert (tmp_path / "ours.csv").read_text().splitlines()[0] == "PATIENT,KRAS,pred,KRAS_mutated,KRAS_wild type,loss"
    back, _ = read_any_predictions(tmp_path / "ours.csv")
    pd.testing.assert_frame_equal(back.set_index("case").sort_index()[list(rows)], rows)


def test_stamps_survival_table_gives_the_c_index(tmp_path):
    (tmp_path / "patient-preds.csv").write_text(
        "PATIENT,pred_score,time,event\nA,3.0,10.0,1\nB,2.0,20.0,1\nC,2.5,30.0,0\nD,,40.0,\n"
    )
    table, notes = read_any_predictions(tmp_path / "patient-preds.csv")
    found = gated_srp.stats({"stamp": table}, repeats=5)
    assert found.metrics.set_index("metric").loc["c_index", "value"] == pytest.approx(
        2 / 3
    )  # A-B, A-C right, B-C wrong
    assert any("larger means an earlier event" in note.what for note in notes)
    assert any("left out: 1 row without" in note.what for note in notes)


def test_a_single_probability_and_loose_names_are_found(tmp_path):
    table = cohort(slides=1)
    lines = ["Patient ID,y_true,y_score", *(f"{row.patient},{row.label},{row.p}" for row in table.itertuples())]
    (tmp_path / "sklearn.csv").write_text("\n".join(lines) + "\n")
    found, _ = read_any_predictions(tmp_path / "sklearn.csv")
    np.testing.assert_allclose(found["prob_1"], table["p"])
    assert found["predicted"].tolist() == [str(int(p > 0.5)) for p in table["p"]]


def test_the_deviation_between_members_of_an_ensemble_is_no_class(tmp_path):
    draw = np.random.default_rng(0).random(20)
    table = pd.DataFrame({"slide": [f"s{i}" for i in range(20)], "case": [f"p{i}" for i in range(20)]})
    table = table.assign(label=np.where(draw > 0.4, "b", "a"), predicted="a", prob_a=1 - draw, prob_b=draw)
    table.assign(prob_a_std=0.01, prob_b_std=0.02).to_csv(tmp_path / "ensemble.csv", index=False)
    found, _ = read_any_predictions(tmp_path / "ensemble.csv")
    assert [name for name in found if name.startswith("prob_")] == ["prob_a", "prob_b"]
    own = find_task("classification").metrics_of(table)
    assert own is not None
    assert find_task("classification").metrics_of(table.assign(prob_a_std=0.01, prob_b_std=0.02)) == own


def test_the_folds_of_stamps_crossval_are_pooled_and_said(tmp_path):
    table = cohort(slides=1)
    for fold in range(3):
        write_stamp(tmp_path / f"split-{fold}" / "patient-preds.csv", table[table.index % 3 == fold])
    found, notes = read_any_predictions(tmp_path)
    assert len(found) == 24 and found["fold"].nunique() == 3
    assert notes[0].what.startswith("3 folds of") and "ranked against each other" in notes[0].what


def test_two_models_are_paired_over_patients_by_bootstrap_and_delong(tmp_path):
    ours, theirs = cohort(0), cohort(1)
    frame = pd.DataFrame({"slide": ours["slide"], "case": ours["patient"], "label": ours["label"].astype(str)})
    for name, table in (("ours", ours), ("theirs", theirs)):
        rows = frame.assign(prob_0=1 - table["p"], prob_1=table["p"])
        rows = rows.sample(frac=1, random_state=0) if name == "theirs" else rows  # each tool has an order of its own
        rows.to_csv(tmp_path / f"{name}.csv", index=False)
    files = [str(tmp_path / f"{name}.csv") for name in ("theirs", "ours")]
    shown = CliRunner().invoke(app, ["stats", *files, "--repeats", "40", "--json", str(tmp_path / "all.json")])
    assert shown.exit_code == 0, shown.output
    assert (
        "DeLong's test" in shown.output
        and "32 rows of 24 patients; patients are resampled and clustered" in shown.output
    )
    said = json.loads((tmp_path / "all.json").read_text())
    assert said["reference"] == "theirs"
    expected = compare_areas(ours["label"] == 1, ours["p"], theirs["p"], ours["patient"])
    (row,) = said["areas"]
    assert (row["class"], row["p"], row["difference"]) == (
        "1",
        pytest.approx(expected.p),
        pytest.approx(expected.difference),
    )
    auc = next(row for row in said["table"] if row["metric"] == "macro_auc")
    assert (
        auc["difference"] == pytest.approx(expected.difference, abs=1e-6)
        and auc["low"] <= auc["difference"] <= auc["high"]
    )


def test_a_table_by_slide_and_one_by_patient_meet_at_the_patient(tmp_path):
    table = cohort()
    slides = pd.DataFrame({"slide": table["slide"], "case": table["patient"]})
    slides = slides.assign(label=[("wild type", "mutated")[one] for one in table["label"]])
    slides["prob_mutated"], slides["prob_wild type"] = table["p"], 1 - table["p"]
    slides.to_csv(tmp_path / "ours.csv", index=False)
    write_stamp(tmp_path / "stamp.csv", table)
    found = gated_srp.stats([tmp_path / "stamp.csv", tmp_path / "ours.csv"], repeats=5)
    assert found.areas["difference"].tolist() == [pytest.approx(0, abs=1e-12)]  # STAMP's were the means of ours
    assert any("averaged" in note for note in found.notes)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda rows: rows.assign(label=["1"] * len(rows)), "differ in the truth of slide P00_0"),
        (lambda rows: rows.assign(slide=[f"x{s}" for s in rows["slide"]], case=["x"] * len(rows)), "in common"),
        (lambda rows: pd.concat([rows, rows.head(1)]), "a second row for slide P00_0, case P00"),
    ],
)
def test_tables_that_cannot_be_paired_are_refused(change, said):
    table = cohort()
    rows = pd.DataFrame({"slide": table["slide"], "case": table["patient"], "label": table["label"].astype(str)})
    rows = rows.assign(predicted="1", prob_0=1 - table["p"], prob_1=table["p"])
    with pytest.raises(UserError, match=said):
        gated_srp.stats({"a": rows, "b": change(rows)}, repeats=2)


def test_a_table_without_probabilities_is_refused_with_its_columns(tmp_path):
    (tmp_path / "a.csv").write_text("patient,label,pred\np1,0,1\np2,1,1\n")
    with pytest.raises(UserError, match=r"no truth with probabilities of its classes.*Columns: patient, label, pred"):
        read_any_predictions(tmp_path / "a.csv")


@pytest.mark.parametrize("option", [{"margin": 0.05}, {"runs": "runs"}, {"lower_is_better": ["mae"]}, {"ratio": 0.3}])
def test_what_is_meant_for_metrics_by_seed_is_not_ignored(option):
    table = pd.DataFrame({"case": ["p1", "p2"], "label": ["a", "b"], "prob_a": [0.9, 0.2], "prob_b": [0.1, 0.8]})
    with pytest.raises(UserError, match=rf"stats: {next(iter(option)).split('_')[0]}: for a table of metrics by seed"):
        gated_srp.stats({"one": table, "two": table}, **option)
