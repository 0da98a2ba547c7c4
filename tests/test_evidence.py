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
