"""`compare --arms all` on a generated cohort: every arm that fits trains, is scored, and has its row in the tables."""

import re

import pandas as pd
import pytest
from training.toy_cohorts import write_survival_cohort
from two_scale_cohorts import write_two_scale_cohort

import gated_srp
from gated_srp.models import ARMS, fitting_arms
from gated_srp.reports.figures import draw_pairs
from gated_srp.study.results import compare_results

TINY = {"dim": 12, "depth": 3, "num_heads": 2, "num_landmarks": 4, "hidden_dim": 4}


def test_every_arm_trains_two_epochs_in_one_comparison(tmp_path, monkeypatch):
    monkeypatch.setattr(
        "gated_srp.reports.figures.draw_comparison", lambda *_, **__: []
    )  # a panel per arm: half a minute
    cohort = write_two_scale_cohort(tmp_path, slides=6, model=TINY, train={"epochs": 2})
    found = gated_srp.compare(cohort, arms=["all"], seeds=[42], bootstrap=0, jobs=1, out=tmp_path / "runs")
    slides = {name for name, arm in ARMS.items() if not arm.images and not arm.needs_covariates}
    assert not found.failed
    assert set(found.results["arm"]) == slides
    assert (found.results.groupby("arm")["metric"].nunique() > 3).all()
    assert found.comparison.reference == "na"
    kept = {path.parent.parent.name for path in (tmp_path / "runs").rglob("model.safetensors")}
    assert kept == slides


def test_the_figure_of_differences_has_a_line_for_every_arm(tmp_path):
    arms = fitting_arms("classification")
    values = [("toy", arm, "42", "macro_f1", 0.5 + 0.001 * place) for place, arm in enumerate(arms)]
    results = pd.DataFrame(values, columns=["cohort", "arm", "seed", "metric", "value"])
    files = draw_pairs(results, compare_results(results, reference="na"), tmp_path / "all")
    drawn = next(path for path in files if path.suffix == ".svg").read_text(encoding="utf-8")
    assert float(re.search(r'height="([\d.]+)pt"', drawn)[1]) > 10 * len(arms)  # names have 8 points


def test_all_stands_for_the_arms_that_fit_task_and_files(tmp_path, monkeypatch):
    assert "clam_sb" in fitting_arms("classification") and "clam_sb" not in fitting_arms("survival")
    assert set(fitting_arms("multilabel", images=True)) == {name for name, arm in ARMS.items() if arm.images}
    planned = []

    def stop(config, rows, seeds):
        planned.extend(row.arm for row in rows)
        raise KeyboardInterrupt

    monkeypatch.setattr("gated_srp.study.cells.plan", stop)
    with pytest.raises(KeyboardInterrupt):
        gated_srp.compare(write_survival_cohort(tmp_path, slides=6), arms=["all"])
    assert tuple(planned) == fitting_arms("survival")
