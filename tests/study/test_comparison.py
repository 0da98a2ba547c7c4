"""From finished folders to a comparison."""

import pandas as pd
import pytest
from study.study_cells import CURVE, cells, finish

from gated_srp.errors import UserError
from gated_srp.study.cells import moved_gates
from gated_srp.study.comparison import collect, compare_cells, shown_metrics, split_ratio, stats
from gated_srp.training.folder import RunFolder


def test_results_are_the_test_metrics_of_finished_cells(tmp_path):
    found = cells(tmp_path)
    finish(found[0], macro_f1=0.5, macro_auc=None)
    finish(found[3], macro_f1=0.75)
    rows = collect(found)
    assert rows.fillna("?").to_numpy().tolist() == [
        ["toy", "na", "42", "macro_f1", 0.5],
        ["toy", "na", "42", "macro_auc", "?"],
        ["toy", "gated_srp", "43", "macro_f1", 0.75],
    ]


def test_only_what_the_paper_shows_is_compared_and_an_undefined_value_is_left_out(tmp_path):
    found = cells(tmp_path)
    for place, cell in enumerate(found):
        finish(cell, macro_f1=0.5 + place / 10, brier=0.1, macro_auc=None)
    compared = compare_cells(found, collect(found), "na", repeats=3)
    assert [(cell.metric, round(cell.test.mean, 4)) for cell in compared.cohorts] == [("macro_f1", 0.1)]
    assert compared.cohorts[0].bootstrap is not None
    assert compared.cohorts[0].bootstrap.difference == 0.0  # the predictions are the same


def test_the_selecting_metric_is_shown_too(tmp_path):
    assert shown_metrics(cells(tmp_path, metric="quadratic_kappa")[0])[0] == "quadratic_kappa"
    assert shown_metrics(cells(tmp_path, task="survival", metric="c_index")[0]) == ("c_index",)


def test_the_ratio_of_test_to_training_comes_from_the_splits(tmp_path):
    found = cells(tmp_path)
    assert round(split_ratio(found), 4) == 0.2857
    finish(found[0])
    assert round(split_ratio(found), 4) == round(2 / 7, 4)


def test_folds_are_called_folds(tmp_path):
    found = cells(tmp_path, seeds=(42,), folds=2)
    for place, cell in enumerate(found):
        finish(cell, macro_f1=0.5 + place / 10)
    (one,) = compare_cells(found, collect(found), "na", repeats=0).cohorts
    assert "fold" in one.verdict and "seed" not in one.verdict


def test_what_gates_did_is_told_of_each_runs_own_last_epoch(tmp_path):
    found = cells(tmp_path, arms=("gated_srp",), seeds=(42, 43))
    for cell, epochs, beta in zip(found, (3, 5), (0.9, 0.1), strict=True):  # the first stopped early
        finish(cell, macro_f1=0.5)
        rows = [f"{epoch},0,{beta * epoch / epochs},0.0,{0.5}" for epoch in range(1, epochs + 1)]
        (cell.run.path / "gates.csv").write_text("epoch,layer,mean,std,share_identity\n" + "\n".join(rows) + "\n")
    (said,) = moved_gates(found)
    assert said.startswith("gates of gated_srp in the last epoch: mean beta by layer +0.50; 50 % of")


def test_nothing_finished_is_said(tmp_path):
    found = cells(tmp_path)
    with pytest.raises(UserError, match="no cell is finished"):
        compare_cells(found, collect(found), "na")


def test_unpaired_splits_stop_the_collection(tmp_path):
    found = cells(tmp_path)
    finish(found[0], split="one")
    finish(found[1], split="two")
    with pytest.raises(UserError, match="different splits"):
        collect(found)


def test_patients_of_run_folders_are_resampled_at_the_level_that_scored(tmp_path):
    rows = []
    for arm, right in (("na", 1), ("gated_srp", 3)):  # of four patients; the first has five slides
        for seed in (1, 2):
            folder = tmp_path / "A" / arm / f"seed{seed}"
            folder.mkdir(parents=True)
            said = [("ab" if i < right else "ba")[i % 2] for i in range(4)]
            cases = [f"p{i},{'ab'[i % 2]},{said[i]},{0.9 if said[i] == 'a' else 0.1}" for i in range(4)]
            cases = [f"{row},{0.1 if said[i] == 'a' else 0.9}" for i, row in enumerate(cases)]
            slides = [f"s{i}_{n},{cases[i]}" for i in range(4) for n in range(5 if i == 0 else 1)]
            for level, table, head in (("case", cases, CURVE.partition(",")[2]), ("slide", slides, CURVE)):
                (folder / f"predictions_test_{level}.csv").write_text(head + "\n".join(table) + "\n")
            RunFolder(folder).write_json("metrics.json", {"cohort": "A", "arm": arm, "seed": seed, "score": "case"})
            rows.append(("A", arm, seed, "accuracy", right / 4))
    found = stats(pd.DataFrame(rows, columns=["cohort", "arm", "seed", "metric", "value"]), runs=tmp_path, repeats=5)
    (one,) = found.cohorts
    assert one.bootstrap.difference == pytest.approx(one.test.mean) == pytest.approx(0.5)
