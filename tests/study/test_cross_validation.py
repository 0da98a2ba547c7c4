"""`crossval`: every fold trained, one pooled out-of-fold table, metrics pooled and by fold, against plain computations."""

import json
import math

import numpy as np
import pandas as pd
import pytest
import typer
from study_cells import finish
from training.toy_cohorts import open_config, write_cohort
from typer.testing import CliRunner

import gated_srp
from gated_srp.cli import studies
from gated_srp.config.cohort import open_cohort
from gated_srp.errors import UserError
from gated_srp.study.cells import Row, plan


def naive_auc(score, positive):
    pairs = [(a > b) + (a == b) / 2 for a in score[positive] for b in score[~positive]]
    return sum(pairs) / len(pairs) if pairs else math.nan


@pytest.fixture(scope="module")
def cohort(tmp_path_factory):
    return write_cohort(tmp_path_factory.mktemp("cohort"), slides=12, train={"epochs": 1})


def finish_all(yaml, out, *, shift: float, arms=("na", "gated_srp"), skip=()):
    """Folders as three folds would leave them: a score that ranks each fold well, moved by ``shift`` from fold to fold."""
    config = open_config(yaml, folds=3, out=str(out))
    data, tables = open_cohort(config), {}
    for cell in plan(config, [Row.of(arm) for arm in arms], [42]):
        if (cell.arm, cell.fold) in skip:
            continue
        split = data.split(42, cell.fold)
        rows = data.with_parts(split).query("part == 'test'")
        draw = np.random.default_rng([arms.index(cell.arm), cell.fold])
        positive = rows["label"].to_numpy() == 1
        score = 1 / (1 + np.exp(-(positive + draw.normal(0, 0.9, len(rows)) + shift * (cell.fold - 1))))
        names = np.array(["benign", "tumour"])
        table = pd.DataFrame({"slide": rows["slide"], "case": rows["case"], "label": names[positive * 1]})
        table = table.assign(predicted=names[(score > 0.5) * 1], prob_benign=1 - score, prob_tumour=score)
        finish(cell, split=split.hash, accuracy=float((table["label"] == table["predicted"]).mean()))
        table.to_csv(cell.run.path / "predictions_test_slide.csv", index=False)
        tables[cell.arm, cell.fold] = table.reset_index(drop=True)
    return tables


def test_pooled_and_mean_are_those_of_plain_loops_and_arms_are_paired(cohort, tmp_path):
    tables = finish_all(cohort, tmp_path, shift=3.0)
    found = gated_srp.crossval(cohort, folds=3, arms=["na", "gated_srp"], out=tmp_path, bootstrap=40)
    each = {key: naive_auc(t["prob_tumour"].to_numpy(), t["label"].to_numpy() == "tumour") for key, t in tables.items()}
    row = found.metrics.set_index(["arm", "metric"])
    for arm in ("na", "gated_srp"):
        whole = pd.concat([tables[arm, fold] for fold in range(3)])
        auc = naive_auc(whole["prob_tumour"].to_numpy(), whole["label"].to_numpy() == "tumour")
        own = [each[arm, fold] for fold in range(3)]
        assert row.loc[(arm, "macro_auc"), "pooled"] == pytest.approx(auc, abs=1e-6)
        assert row.loc[(arm, "macro_auc"), "mean"] == pytest.approx(np.mean(own), abs=1e-6)
        assert row.loc[(arm, "macro_auc"), "std"] == pytest.approx(np.std(own, ddof=1), abs=1e-6)
        assert np.mean(own) - auc > 0.05  # scores of the folds are on different scales
    # The interval is that of patients drawn together for both arms, by hand.
    draws, rng = [], np.random.default_rng(0)
    both = [pd.concat([tables[arm, f] for f in range(3)]).reset_index(drop=True) for arm in ("gated_srp", "na")]
    cases = sorted(both[0]["case"])
    for _ in range(40):
        drawn = [cases[i] for i in rng.integers(0, len(cases), len(cases))]
        rows = [next(iter(both[0].index[both[0]["case"] == case])) for case in drawn]
        aucs = [naive_auc(t["prob_tumour"].to_numpy()[rows], t["label"].to_numpy()[rows] == "tumour") for t in both]
        draws.append(aucs[0] - aucs[1])
    difference = found.differences.set_index("metric").loc["macro_auc"]
    low, high = np.nanquantile(draws, (0.025, 0.975))
    assert difference[["low", "high"]].tolist() == pytest.approx([low, high], abs=1e-6)
    assert difference["pooled"] == pytest.approx(
        row["pooled"]["gated_srp", "macro_auc"] - row["pooled"]["na", "macro_auc"]
    )


def test_the_pooled_table_has_every_slide_once_and_the_files_say_the_same(cohort, tmp_path):
    tables = finish_all(cohort, tmp_path, shift=0.0, arms=("na",))
    found = gated_srp.crossval(open_config(cohort, out=str(tmp_path)), folds=3, arms=["na"], bootstrap=5)
    assert found.predictions["slide"].is_unique and len(found.predictions) == 12
    for fold, part in found.predictions.groupby("fold"):
        expected = tables["na", fold].set_index("slide")["prob_tumour"]
        pd.testing.assert_series_equal(part.set_index("slide")["prob_tumour"].sort_index(), expected.sort_index())
    assert found.comparison is None and found.differences.empty
    names = {path.name for path in found.files}
    assert names == {"README.md", "metrics.csv", "folds.csv", "predictions_slide.csv", "crossval.json"}
    said = json.loads((found.folder / "crossval.json").read_text())
    assert (said["folds"], said["patients"], said["reference"]) == (3, 12, "na")
    assert said["metrics"][0]["pooled"] == pytest.approx(found.metrics["pooled"][0])
    assert "whose scores come from different models" in found.verdict and "12 patients" in found.verdict
    assert set(found.folds["fold"]) == {0, 1, 2} and set(found.folds["metric"]) == {"accuracy"}


def test_a_fold_that_failed_is_left_out_of_all_arms_and_said(cohort, tmp_path, monkeypatch):
    finish_all(cohort, tmp_path, shift=0.0, skip=[("gated_srp", 1)])
    failed = {"toy gated_srp seed 42_fold1": UserError("no luck")}
    monkeypatch.setattr("gated_srp.study.engine.run_cells", lambda *_: gated_srp.study.engine.Ran(failed))
    found = gated_srp.crossval(cohort, folds=3, arms=["na", "gated_srp"], out=tmp_path, bootstrap=5)
    assert set(found.predictions["fold"]) == {0, 2} and found.failed == failed
    assert found.notes[0].startswith("INCOMPLETE: fold 1 of 3 not finished and left out")
    assert found.notes[1] == "4 of 12 slides are in the test part of no fold and therefore not scored"


def test_folds_come_from_the_split_where_nobody_says_how_many(cohort, tmp_path, monkeypatch):
    for fold in range(2):  # as CLAM draws them: s000 is tested in both
        parts = [("s000" if i == 0 else f"s{6 * fold + i:03d}", "test") for i in range(3)]
        parts += [(f"s{i:03d}", "train") for i in range(12) if f"s{i:03d}" not in dict(parts)]
        (tmp_path / f"splits_{fold}.csv").write_text("slide,split\n" + "".join(f"{a},{b}\n" for a, b in parts))
    planned = []

    def stop(cells, *_):
        planned.extend(cells)
        raise UserError("enough")

    monkeypatch.setattr("gated_srp.study.engine.run_cells", stop)
    for settings, expected in (({"split": str(tmp_path / "splits_{fold}.csv")}, 2), ({}, 5)):
        planned.clear()
        with pytest.raises(UserError, match="enough"):
            gated_srp.crossval(cohort, settings=settings, out=tmp_path)
        assert [(cell.arm, cell.fold) for cell in planned] == [("gated_srp", fold) for fold in range(expected)]


def test_the_command_trains_what_is_missing_and_prints_the_table(cohort, tmp_path):
    app = typer.Typer()
    app.command()(studies.crossval)
    config = open_config(cohort, folds=2, out=str(tmp_path))
    gated_srp.train(config, arm="na", seed=42, fold=0)
    asked = [str(cohort), "--folds", "2", "--arms", "na", "--out", str(tmp_path), "--bootstrap", "5"]
    shown = CliRunner().invoke(app, asked)
    assert shown.exit_code == 0, shown.output
    assert "2 cells, 1 finished before, 1 to run" in shown.output
    assert "2 folds by patient, seed 42, scored by slide; 95 % intervals over 5 draws of 12 patients." in shown.output
    table = pd.read_csv(tmp_path / "toy" / "crossval" / "predictions_case.csv")
    assert sorted(table["case"]) == [f"p{i:03d}" for i in range(12)]
    for fold in range(2):  # as STAMP's crossval leaves its own
        stamp = pd.read_csv(tmp_path / "toy" / "crossval" / "stamp" / "na" / f"split-{fold}" / "patient-preds.csv")
        own = table[table["fold"] == fold].set_index("case")
        assert stamp.columns.tolist() == ["PATIENT", "label", "pred", "label_benign", "label_tumour", "loss"]
        assert stamp["label_tumour"].tolist() == own.loc[stamp["PATIENT"], "prob_tumour"].tolist()
        assert stamp["loss"].tolist() == pytest.approx(
            [-math.log(row[f"label_{row['label']}"]) for row in stamp.to_dict("records")]
        )
    found = gated_srp.predict(tmp_path / "toy" / "na" / "seed42_fold0", cohort.parent / "feats", workers=0)
    found.write(tmp_path / "patient-preds.csv", "stamp")  # patients are not known here: a slide is one
    said = pd.read_csv(tmp_path / "patient-preds.csv").set_index("PATIENT")
    assert said["label_tumour"].to_dict() == pytest.approx(found.table.set_index("slide")["prob_tumour"].to_dict())
