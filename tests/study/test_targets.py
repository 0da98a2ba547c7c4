"""Several targets of one table: a study for each, one table over them, Holm over all of it."""

import json
import math
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import typer
from factories import write_trident
from training.toy_cohorts import planted, write_yaml
from typer.testing import CliRunner

import gated_srp
from gated_srp.cli import studies
from gated_srp.errors import UserError
from gated_srp.study import targets as module
from gated_srp.study.comparison import CompareResult
from gated_srp.study.results import compare_results
from gated_srp.training.train import train


@pytest.fixture(scope="module")
def cohort(tmp_path_factory):
    """Two labels, a number, and a label that half of the slides lack."""
    folder, rows = tmp_path_factory.mktemp("targets"), ["slide,case,er,her 2,score,rare"]
    for i in range(16):
        value = np.random.default_rng(i).normal()
        write_trident(folder / "feats", f"s{i:02d}", planted(i, 2 * value, columns=4, rows=3))
        labels = "pos" if value > 0 else "neg", "ab"[i % 2], f"{value:.3f}", "xy"[i % 4 > 1] if i % 2 else ""
        rows.append(f"s{i:02d},p{i:02d},{','.join(labels)}")
    (folder / "table.csv").write_text("\n".join(rows) + "\n")
    return write_yaml(folder, train={"epochs": 1}, arms=["na", "gated_srp"], seeds=[42])


def test_each_target_is_a_study_and_one_table_has_them_all(cohort):
    for target, task, name in (("er", "classification", "toy_er"), ("score", "regression", "toy_score")):
        for arm in ("na", "gated_srp"):
            train(cohort, arm=arm, seed=42, settings={"target": target, "task": task, "name": name})
    found = gated_srp.compare_targets(cohort, ["er:classification", "score:regression"], bootstrap=0)
    table = found.table.set_index("target")
    assert list(table.index) == ["er", "score"] and list(table["task"]) == ["classification", "regression"]
    assert list(table["metric"]) == ["macro_f1", "pearson"] and table["slides"].tolist() == [16, 16]
    for target, study in found.studies.items():
        own = study.results[study.results["metric"] == table["metric"][target]]
        values = own.set_index("arm")["value"]
        assert table["difference"][target] == pytest.approx(values["gated_srp"] - values["na"], abs=1e-12)
    assert found.folder == cohort.parent / "runs" / "toy_targets"
    assert (
        "Holm's correction over the 0 differences of this table (2 targets, 1 arm" in found.verdict
    )  # one seed has no p
    assert pd.read_csv(found.folder / "summary.csv")["target"].tolist() == ["er", "score"]
    assert (cohort.parent / "runs" / "toy_er" / "comparison" / "README.md").is_file()


def test_holm_is_over_all_rows_and_a_verdict_needs_it(cohort, monkeypatch):
    shifts = {"er": 0.05, "her 2": 0.02, "rare": 0.0}

    def compared(config, **options):
        rng = np.random.default_rng(len(config.target))
        rows = []
        for seed in range(5):
            base = 0.6 + 0.05 * rng.normal()
            rows.append((config.name, "na", seed, "macro_f1", base))
            rows.append(
                (config.name, "gated_srp", seed, "macro_f1", base + shifts[config.target] + 0.01 * rng.normal())
            )
        results = pd.DataFrame(rows, columns=["cohort", "arm", "seed", "metric", "value"])
        return CompareResult(results, compare_results(results, "na"), config.out)

    monkeypatch.setattr(module, "compare", compared)
    found = gated_srp.compare_targets(cohort, list(shifts), out=cohort.parent / "elsewhere")
    p = found.table["p"].tolist()
    order = sorted(range(3), key=lambda i: p[i])
    naive, highest = [0.0] * 3, 0.0
    for place, i in enumerate(order):  # Holm, written out
        highest = max(highest, min(1.0, (3 - place) * p[i]))
        naive[i] = highest
    assert found.table["p_holm"].tolist() == pytest.approx(naive)
    assert (
        found.table["verdict"].tolist()[0] == "better" and found.table["verdict"].tolist()[2] == "not distinguishable"
    )
    assert found.table["slides"].tolist() == [16, 16, 8]  # those without the label are left out
    assert [study.results["cohort"][0] for study in found.studies.values()] == ["toy_er", "toy_her_2", "toy_rare"]
    assert not math.isnan(found.table["low"][0])


@pytest.mark.parametrize(
    ("targets", "said"),
    [
        ([], "targets: none is named"),
        (["er", "er"], "'er' is named twice"),
        (["er", "pr"], r"target 'pr': .*no column 'pr'"),
        (["score:regresion"], r"no column 'score:regresion'"),
        (["her 2", "her_2"], r"no column|both written as"),
    ],
)
def test_targets_that_cannot_be_studied_are_refused_before_anything_is_trained(cohort, tmp_path, targets, said):
    with pytest.raises(UserError, match=said):
        gated_srp.compare_targets(cohort, targets, out=tmp_path)
    assert not list(tmp_path.iterdir())


def test_every_target_has_a_slurm_script_of_its_own_and_a_later_study_changes_none(cohort, tmp_path):
    app = typer.Typer()
    app.command()(studies.compare)
    asked = [str(cohort), "--engine", "slurm", "--out", str(tmp_path), "--targets", "er,her 2"]
    shown = CliRunner().invoke(app, asked)
    assert shown.exit_code == 0, shown.output
    scripts = [line.removeprefix("written: ") for line in shown.output.splitlines() if line.startswith("written: ")]
    files = [Path(script).with_name("cells.jsonl") for script in scripts]
    cells = [json.loads(line) for file in files for line in file.read_text().splitlines()]
    wanted = [(name, arm) for name in ("toy_er", "toy_her_2") for arm in ("na", "gated_srp")]
    assert [(cell["config"]["name"], cell["arm"]) for cell in cells] == wanted
    before = [file.read_text() for file in files]
    assert CliRunner().invoke(app, [*asked, "--seeds", "43"]).exit_code == 0  # while the first arrays wait in the queue
    assert [file.read_text() for file in files] == before and len(list(tmp_path.rglob("job.sh"))) == 4
