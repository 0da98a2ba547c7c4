"""The demo's cohort is what its words say, and its steps are commands that a user can repeat."""

import json
import re

import numpy as np
import pandas as pd
import pytest
from typer.testing import CliRunner

from gated_srp import demo
from gated_srp.checks.check import check
from gated_srp.cli import app
from gated_srp.config import load_config, open_cohort
from gated_srp.data import Preparation, prepare, read_bag
from gated_srp.demo import Recipe, generate, heatmap_slide, make_slide, steps
from gated_srp.errors import UserError

SMALL = Recipe(patients=20, columns=12, rows=10)


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    home = tmp_path_factory.mktemp("demo") / "cohort"
    assert generate(home, SMALL)
    return home


def truth_of(home, slide):
    return pd.read_csv(home / "truth" / f"{slide}.csv")


def test_the_label_is_whether_a_slide_has_foci(home):
    table = pd.read_csv(home / "slides.csv")
    assert len(table) == 24 and table["patient"].nunique() == 20
    for slide, label in zip(table["slide_id"], table["label"], strict=True):
        assert (truth_of(home, slide)["true_focus"].sum() > 0) == (label == "foci")


def test_both_tables_pass_the_check_without_a_remark_on_the_data(home):
    for name, task in (("cohort", "classification"), ("survival", "survival")):
        config = load_config(home / f"{name}.yaml")
        found = check(config)
        assert config.task == task and found.ok
        assert found.facts["slides"]["found"] == 24 and found.facts["encoders"] == {"demo64": 24}


def test_files_are_in_tridents_layout(home):
    bag = read_bag(home / "features" / "20x_256px_0px_overlap" / "features_demo64" / "P001_a.h5")
    assert (bag.stride, bag.unit, bag.encoder, bag.features.shape[1]) == (512, "px", "demo64", 64)
    assert bag.stride_source.startswith("declared on coords (patch_size_level0), agrees")
    assert bag.coords.tolist() == truth_of(home, "P001_a")[["x", "y"]].to_numpy().tolist()


def test_neighbours_are_alike_and_foci_deviate_from_theirs(home):
    inside, outside = [], []
    for slide, path in open_cohort(load_config(home / "cohort.yaml")).matches.found.items():
        alike = prepare(path, Preparation()).graph.homogeneity.numpy()
        focal = truth_of(home, slide)["true_focus"].to_numpy(bool)
        inside += list(alike[focal])
        outside += list(alike[~focal])
    assert np.median(outside) > 0.5 and np.median(inside) < np.median(outside) - 0.1


def test_the_background_varies_along_the_axis_of_the_foci_too():
    recipe = Recipe(noise=0.0)
    axes = np.eye(recipe.directions, recipe.width)
    slide = make_slide(np.random.default_rng(3), recipe, axes, 5)
    along = slide.features[:, 0]
    assert along[~slide.focal].std() > 0.5
    shifted = np.sort(slide.features[:, 1 : recipe.directions].std(0))
    assert shifted[0] > 0.5  # like every other direction of the background
    assert along[slide.focal].mean() - along[~slide.focal].mean() > recipe.strength / 2
    assert slide.focal.sum() == slide.foci == 5


def test_survival_is_driven_by_the_foci():
    rng = np.random.default_rng(0)
    few, many = ([float(demo._fate(rng, foci)[0]) for _ in range(400)] for foci in (0, 16))
    assert np.median(few) > 3 * np.median(many)


def test_the_same_recipe_gives_the_same_cohort_and_is_not_written_again(home, tmp_path):
    assert not generate(home, SMALL)
    assert generate(tmp_path / "again", SMALL)
    for name in ("slides.csv", "survival.csv", "truth/P004_a.csv"):
        assert (home / name).read_bytes() == (tmp_path / "again" / name).read_bytes()
    path = "features/20x_256px_0px_overlap/features_demo64/P004_a.h5"
    assert read_bag(home / path).features.equal(read_bag(tmp_path / "again" / path).features)


def test_a_stopped_generation_goes_on_and_a_users_folder_is_left_alone(home, tmp_path):
    generate(tmp_path / "cut", SMALL)
    (tmp_path / "cut" / "generated.json").unlink()
    assert generate(tmp_path / "cut", SMALL)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("precious")
    with pytest.raises(UserError, match="no demo's folder"):
        generate(tmp_path / "mine", SMALL)
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["thesis.txt"]


def test_the_words_name_what_the_recipe_does():
    words = Recipe().words()
    assert "These data are generated" in words and "no other arm was run" in words
    assert (
        "240 slides of 200 patients" in words
        and "8 to 20 small foci" in words
        and "by 3.5 standard deviations" in words
    )


def test_a_difference_is_told_by_its_sign_and_only_where_it_is_claimed():
    row = {"mean": 0.9, "difference": 0.2, "claimed": True, "n": 2, "corrected": {"interval": [0.1, 0.3]}}
    row["bootstrap"] = {"low": 0.15, "high": 0.25}
    spans = "95 % interval over 2 seeds +0.1000 to +0.3000, over resampled patients +0.1500 to +0.2500"
    assert demo._against(row, "x") == f"0.90 by x, which is measurably better (+0.2000; {spans})"
    assert "which is measurably worse (-0.2000" in demo._against({**row, "difference": -0.2}, "x")
    hint = "which is better over resampled patients, a hint: 2 seeds cannot show it (+0.2000"
    assert hint in demo._against({**row, "claimed": False}, "x")
    undecided = {**row, "claimed": False, "bootstrap": {"low": -0.1, "high": 0.3}}
    assert "is not distinguishable from plain attention here (+0.2" in demo._against(undecided, "x")
    alone = {**undecided, "n": 1, "corrected": {"interval": [None, None]}}
    assert "95 % interval over 1 seed no interval, over" in demo._against(alone, "x")


def test_the_heatmap_shows_the_first_test_slide_with_foci(tmp_path):
    (tmp_path / "predictions_test_slide.csv").write_text("slide,label\nP003_a,no foci\nP010_a,foci\nP004_a,foci\n")
    assert heatmap_slide(tmp_path) == "P004_a"


def test_every_step_is_a_command_with_options_that_exist(tmp_path):
    run = tmp_path / "runs" / "demo" / "gated_srp" / "seed42"
    run.mkdir(parents=True)
    (run / "predictions_test_slide.csv").write_text("slide,label\nP004_a,foci\n")
    found = list(steps(tmp_path))
    assert [step.command[0] for step in found] == ["check", "redundancy", "compare", *["heatmap"] * 6, "report"]
    known = CliRunner().invoke(app, ["--help"]).output
    assert all(f" {step.command[0]} " in known for step in found)


def test_the_whole_demo_runs_in_small_and_goes_on_where_it_was(tmp_path, monkeypatch):
    small = demo._YAML.replace("epochs: 6", "epochs: 1").replace("[na, xsa, diff, gated_srp, ", "[na, gated_srp, ")
    monkeypatch.setattr(demo, "_YAML", small.replace("[42, 43]", "[42]"))
    monkeypatch.setattr(demo, "generate", lambda home: generate(home, SMALL))
    home = tmp_path / "d"
    said = CliRunner().invoke(app, ["demo", "-o", str(home)])
    assert said.exit_code == 0, said.output
    assert said.output.splitlines()[-1] == f"The report: {home / 'report.html'}"
    assert "Planted: small foci in the slides of half of the patients" in said.output
    assert (
        "by plain attention (NA)" in said.output and "is not distinguishable from plain attention here" in said.output
    )
    assert re.search(
        r"plain attention here \([+-]0\.\d{4}; 95 % interval over 1 seed no interval, over resampled", said.output
    )
    early = r"Removed before the first layer instead, what neighbours share: an AUC of [01]\.\d\d by features_gated_srp_from_1, which is "
    assert re.search(early, said.output)
    assert "The gates, in the last epoch: mean beta by layer" in said.output
    assert "this puts the focus first: low homogeneity " in said.output
    page = (home / "report.html").read_text()
    assert "These data are generated" in page and "Heatmap: true focus" in page and "Heatmap: beta, layer 1" in page
    assert f"$ gated-srp compare {home / 'cohort.yaml'}" in said.output
    assert json.loads((home / "check.json").read_text())["must_fix"] is False
    again = CliRunner().invoke(app, ["demo", "-o", str(home)])
    assert again.exit_code == 0 and "3 finished before, 0 to run" in again.output
