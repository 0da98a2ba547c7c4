"""The page of evidence says what its committed tables say, and reads a stage only when it is complete."""

import importlib.util
from pathlib import Path

import pandas as pd
import pytest
import yaml

DOCS = Path(__file__).resolve().parents[1] / "docs"


@pytest.fixture(scope="module")
def page():
    spec = importlib.util.spec_from_file_location("evidence_page", DOCS / "evidence" / "page.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_number_and_statement_of_the_page_is_recomputed_from_the_tables(page):
    assert (DOCS / "evidence.md").read_text(encoding="utf-8") == page.render(), "python docs/evidence/page.py writes it"


def test_readme_and_check_say_what_the_tables_say(page):
    from gated_srp.config.reach import EVIDENCE

    plan = yaml.safe_load((DOCS / "evidence" / "breakhis.yaml").read_text())
    results = pd.read_csv(DOCS / "evidence" / "breakhis.csv", dtype={"seed": str})
    assert page.advice(plan, results) == EVIDENCE
    readme = " ".join((DOCS.parent / "README.md").read_text(encoding="utf-8").split())
    assert page._primary(plan, results).replace("On real tissue", "on real tissue") in readme
    simulation = page.read_plan(DOCS / "evidence" / "simulation.yaml")
    results = page.read_table(DOCS / "evidence" / "simulation.csv")
    found = page.differences(results, simulation)
    found = found[found["diagram"].isin(page.complete_diagrams(simulation, results))]
    marked = int(((found["low"] > 0) | (found["high"] < 0)).sum())
    shown = "no interval excludes zero" if not marked else f"{marked} intervals exclude zero"
    assert f"In {len(found)} contrasts on generated cohorts {shown}" in readme


def test_the_tables_hold_runs_of_the_plan_alone_and_each_once():
    plan = yaml.safe_load((DOCS / "evidence" / "breakhis.yaml").read_text())
    planned = {(stage["cohort"], arm) for stage in plan["stages"] for arm in stage["arms"]}
    found = pd.read_csv(DOCS / "evidence" / "breakhis.csv", dtype=str)
    assert set(zip(found["cohort"], found["arm"], strict=True)) <= planned
    assert not found.duplicated(["cohort", "arm", "seed", "metric"]).any()


def test_a_stage_is_read_when_all_its_runs_are_finished_and_not_before(page):
    plan = {
        "margin": 0.01,
        "cohorts": {"toy": {"primary": "auc", "settings": {}}},
        "stages": [{"name": "first", "cohort": "toy", "seeds": [1, 2], "arms": ["na", "x"]}],
    }
    rows = [("toy", arm, seed, "auc", value) for arm, value in (("na", 0.7), ("x", 0.8)) for seed in "12"]
    table = pd.DataFrame(rows, columns=["cohort", "arm", "seed", "metric", "value"])
    whole = "\n".join(page.stage_lines(plan, table))
    assert "first: toy, auc, 4 of 4 runs" in whole and "| x | 0.8000 | 0.7000 | +0.1000" in whole
    partly = "\n".join(page.stage_lines(plan, table[:3]))
    assert "3 of 4 runs" in partly and "not read" in partly and "0.8000" not in partly
    assert page._primary(plan, table[:3]).endswith("3 of 4 runs of the primary contrast are finished.")


def test_the_driver_computes_in_the_order_of_the_plan_and_leaves_alone_what_the_table_has(tmp_path, monkeypatch):
    spec = importlib.util.spec_from_file_location("evidence_run", DOCS / "evidence" / "run.py")
    run = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(run)
    plan = {
        "repeats": 1,
        "fields": 1,
        "settings": {"task": "classification", "target": "label", "train": {"epochs": 1}},
        "cohorts": {"toy": {"settings": {"train": {"lr": 1e-3}}}, "folded": {"settings": {"folds": 2}}},
        "stages": [
            {"cohort": "toy", "seeds": [1, 2], "arms": ["na", "gated_srp@train.gate_lr=10"]},
            {"cohort": "folded", "seeds": [1], "arms": ["na"]},
        ],
    }
    (tmp_path / "data" / "features").mkdir(parents=True)
    (tmp_path / "data" / "slides.csv").write_text("slide_id,case_id,label\ns1,p1,a\ns2,p2,b\n")
    cells = list(run.cells_of(plan, tmp_path / "data", tmp_path / "runs"))
    keys = [run.key_of(cell) for cell in cells]
    assert keys == [
        ("toy", "na", "1"),
        ("toy", "gated_srp@train.gate_lr=10", "1"),
        ("toy", "na", "2"),
        ("toy", "gated_srp@train.gate_lr=10", "2"),
        ("folded", "na", "1_fold0"),
        ("folded", "na", "1_fold1"),
    ]
    assert (cells[0].config.train.lr, cells[1].config.train.gate_lr, cells[4].config.train.epochs) == (1e-3, 10.0, 1)
    table = run.Table(tmp_path / "plan.csv")
    for key in (*keys, keys[0]):  # the first twice, as after an interruption
        table.add(pd.DataFrame([(*key, "auc", 0.5)], columns=[*run.KEY, "metric", "value"]))
    assert len(table.frame) == len(keys)
    (tmp_path / "plan.yaml").write_text(yaml.safe_dump(plan))
    monkeypatch.setattr(run.gated_srp, "train", None)  # would fail
    given = ["run.py", str(tmp_path / "plan.yaml"), "--data", str(tmp_path / "data"), "--out", str(tmp_path / "runs")]
    monkeypatch.setattr("sys.argv", given)
    run.main()
    assert run.Table(tmp_path / "plan.csv").runs == set(keys)
    table.frame = table.frame[:-1]
    table.write()  # the first, added last, is missing, and another process is at it
    with run.only_one(tmp_path / "runs" / "locks" / "-".join(keys[0])) as mine:
        assert mine
        run.main()
    with pytest.raises(TypeError):  # nobody is: train, here None, is called
        run.main()


def test_stages_that_repeat_the_contrast_are_summed_up_when_they_are_complete(page):
    arms = ["na", "gated_srp"]
    plan = {
        "margin": 0.01,
        "cohorts": {"a": {"primary": "auc", "settings": {}}, "b": {"primary": "auc", "settings": {"folds": 2}}},
        "stages": [
            {"name": n, "cohort": c, "seeds": s, "arms": arms} for n, c, s in (("p", "a", [1, 2]), ("q", "b", [7]))
        ],
    }
    units = {"a": ("1", "2"), "b": ("7_fold0", "7_fold1")}
    rows = [
        (c, arm, unit, "auc", 0.5 + 0.1 * (arm != "na") * (unit[-1] == "1"))
        for c in "ab"
        for unit in units[c]
        for arm in arms
    ]
    table = pd.DataFrame(rows, columns=["cohort", "arm", "seed", "metric", "value"])
    assert (
        page.secondary(plan, table)
        == "Repeated otherwise, as hints: q (auc: Gated SRP +0.0500; 0 of 1 distinguishable from NA, "
        "0 shown to be no worse by more than 0.01)."
    )
    assert page.secondary(plan, table[:-1]) == "No stage that repeats it otherwise is complete."


def test_a_reference_close_to_chance_is_said(page):
    points = pd.DataFrame({"x": [1, 1, 2], "y": [1, 1, 1], "reference": [0.54, 0.54, 0.7]})
    assert " At 1 of 2 points NA itself is below 0.55" in page._weak(points) and page._weak(points[2:]) == ""
