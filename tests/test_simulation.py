"""Generated cohorts over two dials: what the dials do, that nothing is computed twice, and what the differences are."""

from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import yaml

import gated_srp
from gated_srp import simulation
from gated_srp.demo import Recipe, make_slide
from gated_srp.errors import UserError
from gated_srp.simulation import differences, points_of, read_plan

PLAN = {
    "seeds": [1, 2],
    "reference": "na",
    "recipe": {"columns": 6, "rows": 5, "width": 8, "directions": 3, "foci": [4, 6]},
    "patients": [6, 4, 6],
    "settings": {
        "model": {"dim": 16, "depth": 2, "num_heads": 2, "num_landmarks": 4, "hidden_dim": 4},
        "train": {"epochs": 1, "lr": 1e-3, "weight_decay": 0.0, "accumulation": 2, "workers": 0},
    },
    "diagrams": {
        "toy": {
            "task": {"task": "classification", "target": "label"},
            "metric": "macro_auc",
            "x": {"dial": "smooth", "values": [0.5, 2]},
            "y": {"dial": "train.accumulation", "values": [2]},
            "arms": ["na", "gated_srp@train.gate_lr=10"],
        }
    },
}


def write_plan(tmp_path, **changes):
    path = tmp_path / "plan.yaml"
    path.write_text(yaml.safe_dump(PLAN | changes))
    return path


def slide_of(**dials):
    recipe = Recipe(noise=0.0, shift=0.0, **dials)
    return make_slide(np.random.default_rng(3), recipe, np.eye(recipe.directions, recipe.width), 13)


def test_a_larger_radius_gives_fewer_and_larger_foci_of_about_as_many_patches():
    single, large = slide_of(radius=0), slide_of(radius=2)
    assert single.focal.sum() == 13 and 5 <= large.focal.sum() <= 13  # one disc, less what is outside the tissue
    places = large.cells[large.focal]
    assert np.ptp(places, axis=0).max() <= 4  # within one disc of radius 2


def test_contrast_against_the_slide_means_a_background_that_does_not_vary_along_the_foci():
    near, far = slide_of(contrast="neighbourhood"), slide_of(contrast="slide")
    assert near.features[~near.focal, 0].std() > 0.5
    assert far.features[~far.focal, 0].std() == 0 and far.features[far.focal, 0].tolist() == [3.5] * 13


def test_a_short_outline_length_makes_ragged_tissue():
    def lone(slide):
        cells = {tuple(cell) for cell in slide.cells.tolist()}
        beside = [sum((x + i, y + j) in cells for i in (-1, 0, 1) for j in (-1, 0, 1)) - 1 for x, y in cells]
        return np.mean(beside)

    assert lone(slide_of(outline=0.3)) < lone(slide_of(outline=3.0)) - 1


def test_simulate_computes_each_run_once_and_goes_on_from_its_table(tmp_path, monkeypatch):
    study, table = write_plan(tmp_path), tmp_path / "committed.csv"
    found = gated_srp.simulate(study, out=tmp_path / "out", table=table)
    runs = found.results[simulation.KEY].drop_duplicates()
    assert len(runs) == 2 * 2 * 2 and list((tmp_path / "out" / "cohorts").iterdir()) == []
    moved = found.results[found.results["metric"] == "mean_beta"]
    assert set(moved["arm"]) == {"gated_srp@train.gate_lr=10"} and (moved["value"].astype(float) != 0).all()
    assert {path.name for path in found.files} == {"committed.csv", "diagram_toy.svg", "diagram_toy.png"}
    before = table.read_bytes()
    monkeypatch.setattr(simulation, "_run", None)  # would fail
    again = gated_srp.simulate(study, out=tmp_path / "other", table=table)
    assert table.read_bytes() == before
    pd.testing.assert_frame_equal(again.differences, found.differences, rtol=1e-4)


@pytest.fixture
def fake_runs(monkeypatch):
    """Runs of no time; the list of what ran."""
    ran = []

    def run(cell, point):
        ran.append(point.key(cell.row))
        return pd.DataFrame([(*ran[-1], "macro_auc", 0.5)], columns=[*simulation.KEY, "metric", "value"])

    def cells(point, arms, home):
        home.mkdir(parents=True)
        return tuple(SimpleNamespace(row=arm) for arm in arms)

    for name, stub in (("_run", run), ("_cells", cells), ("draw_diagram", lambda *_: [])):
        monkeypatch.setattr(simulation, name, stub)
    return ran


CHANGES = {
    "recipe": {"recipe": PLAN["recipe"] | {"strength": 9.0}},
    "patients": {"patients": [7, 4, 6]},
    "settings": {"settings": PLAN["settings"] | {"train": {"epochs": 99}}},
    "dials": {"diagrams": {"toy": PLAN["diagrams"]["toy"] | {"x": {"dial": "noise", "values": [0.5, 2]}}}},
}


@pytest.mark.parametrize("part", CHANGES)
def test_a_plan_that_was_edited_takes_over_no_results_of_before(part, tmp_path, fake_runs):
    gated_srp.simulate(write_plan(tmp_path), out=tmp_path)
    fake_runs.clear()
    before = {path: path.read_bytes() for path in tmp_path.glob("results*")}
    edited = write_plan(tmp_path, **CHANGES[part])
    with pytest.raises(UserError, match=f"results.csv: diagram 'toy' was computed with other {part}.*another --out"):
        gated_srp.simulate(edited, out=tmp_path)
    assert {path: path.read_bytes() for path in tmp_path.glob("results*")} == before and not fake_runs
    gated_srp.simulate(edited, out=tmp_path / "other")
    assert len(fake_runs) == 8
    more = PLAN["diagrams"] | {"more": PLAN["diagrams"]["toy"] | {"seeds": [3]}}
    fake_runs.clear()
    gated_srp.simulate(write_plan(tmp_path, seeds=[1, 2, 3], diagrams=more), out=tmp_path)
    assert len(fake_runs) == 4 + 4  # another seed and another diagram of one seed: results of before stay


def test_a_table_from_before_plans_were_kept_goes_on_unchanged(tmp_path, fake_runs):
    plan = write_plan(tmp_path)
    gated_srp.simulate(plan, out=tmp_path)
    (tmp_path / "results.plan.json").unlink()
    fake_runs.clear()
    before = (tmp_path / "results.csv").read_bytes()
    gated_srp.simulate(write_plan(tmp_path, **CHANGES["recipe"]), out=tmp_path)
    assert not fake_runs and (tmp_path / "results.csv").read_bytes() == before
    assert not (tmp_path / "results.plan.json").exists()  # nobody knows with what it was computed


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"reference": "naa"}, "reference 'naa' is not among the arms of toy"),
        ({"metric": None}, "missing or unknown: metric of toy"),
    ],
)
def test_a_plan_that_could_not_be_read_at_its_end_is_refused_before_anything_runs(changes, words, tmp_path):
    toy = {name: value for name, value in PLAN["diagrams"]["toy"].items() if name not in changes}
    with pytest.raises(UserError, match=words):
        read_plan(write_plan(tmp_path, diagrams={"toy": toy}, reference=changes.get("reference", "na")))


@pytest.mark.parametrize("patients", [[6, 4], [6, 4, 0], [6, 4, 2.5]])
def test_patients_are_three_whole_numbers(patients, tmp_path):
    with pytest.raises(UserError, match="patients: three numbers of at least 1"):
        read_plan(write_plan(tmp_path, patients=patients))


def test_a_metric_that_the_task_has_not_ends_a_study_after_its_first_run(tmp_path, fake_runs):
    toy = PLAN["diagrams"]["toy"] | {"metric": "macro_acu"}
    with pytest.raises(UserError, match="no metric 'macro_acu'") as caught:
        gated_srp.simulate(write_plan(tmp_path, diagrams={"toy": toy}), out=tmp_path)
    assert len(fake_runs) == 1 and "macro_auc" in caught.value.cure


def test_differences_are_paired_by_seed_with_the_plain_t_interval():
    rows = [
        ("toy", x, "2", arm, seed, "macro_auc", value)
        for x in ("0.5", "2")
        for arm, values in (("na", (0.6, 0.7)), ("gated_srp@train.gate_lr=10", (0.7, 0.9)))
        for seed, value in zip("12", values, strict=True)
    ]
    found = differences(pd.DataFrame(rows, columns=[*simulation.KEY, "metric", "value"]), PLAN)
    # differences 0.1 and 0.2: mean 0.15, standard error 0.05, t of one degree of freedom 12.706
    assert (
        found[["n", "reference", "difference", "low", "high", "p"]].round(4).to_numpy().tolist()
        == [[2, 0.65, 0.15, -0.4853, 0.7853, 0.2048]] * 2
    )


def test_a_long_label_of_the_vertical_axis_is_wrapped_to_the_axis(tmp_path, monkeypatch):
    toy = PLAN["diagrams"]["toy"] | {
        "y": {"dial": "strength", "values": [1.5, 3], "words": "strength of the foci (standard deviations)"}
    }
    columns = ["diagram", "x", "y", "arm", "difference", "low", "high", "n"]
    rows = [("toy", "0.5", y, toy["arms"][1], 0.1, 0.05, 0.15, 2) for y in ("1.5", "3")]
    drawn = []
    monkeypatch.setattr(
        "gated_srp.reports.figures.save", lambda figure, stem, title: drawn.append((figure.axes, title)) or []
    )
    simulation.draw_diagram(
        pd.DataFrame(rows, columns=columns), PLAN | {"diagrams": {"toy": toy}}, "toy", tmp_path / "toy"
    )
    (axis,), title = drawn[0]
    assert axis.get_ylabel() == "strength of the foci\n(standard deviations)"
    assert axis.texts[0].get_text() == "+0.100\n(+0.050 to\n+0.150)" and "difference to NA, macro_auc" in title


def test_a_diagram_may_have_a_reference_of_its_own():
    toy = PLAN["diagrams"]["toy"]
    plan = PLAN | {"diagrams": {"toy": toy | {"reference": toy["arms"][1]}}}
    rows = [("toy", "2", "2", arm, "1", "macro_auc", value) for arm, value in zip(toy["arms"], (0.6, 0.7), strict=True)]
    found = differences(pd.DataFrame(rows, columns=[*simulation.KEY, "metric", "value"]), plan)
    assert found[["arm", "reference"]].to_numpy().tolist() == [["na", 0.7]]
    assert found["difference"].tolist() == pytest.approx([-0.1])


def test_every_seed_draws_a_cohort_of_its_own_and_dials_reach_recipe_or_settings():
    first, *_, last = points_of(PLAN)
    assert (first.recipe.seed, last.recipe.seed, first.recipe.smooth, last.recipe.smooth) == (1, 2, 0.5, 2)
    assert first.recipe.patients == 16 and first.settings["train"]["accumulation"] == 2


def test_an_unknown_dial_is_refused_before_anything_runs(tmp_path):
    toy = PLAN["diagrams"]["toy"] | {"x": {"dial": "smoothness", "values": [1]}}
    with pytest.raises(UserError, match="unknown: smoothness"):
        read_plan(write_plan(tmp_path, diagrams={"toy": toy}))
