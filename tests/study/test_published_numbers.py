"""The printed numbers, and the paper's claims recomputed from them."""

import re
from pathlib import Path

import pytest

from gated_srp.errors import UserError
from gated_srp.models import ARMS
from gated_srp.study.paper import read_published
from gated_srp.study.results import compare_results as compare

ROOT = Path(__file__).resolve().parents[2]
SHARED = ROOT.parent / "shared"
TABLES = read_published(ROOT / "studies" / "published.yaml")


def results(name):
    """A table in the form of results: each printed number is one "seed"."""
    return TABLES[name].frame.assign(seed="printed")[["cohort", "arm", "seed", "metric", "value"]]


def differences(name, arm="gated_srp", reference="na"):
    """Arm minus reference for each column of a table."""
    cells = compare(results(name), reference).cohorts
    return {(cell.cohort, cell.metric): cell.means[0] - cell.means[1] for cell in cells if cell.arm == arm}


def values(name):
    return TABLES[name].frame.pivot(index=["cohort", "metric"], columns="arm", values="value")


def test_every_table_is_there():
    assert set(TABLES) == {
        "survival",
        "survival-std",
        "classification",
        "classification-std",
        "fixed-beta",
        "gate-range",
        "gate-gradient",
        "patch-encoder",
        "gate-factorization",
        "gate-initialization",
        "architecture",
        "mil-models",
        "neighbourhood",
        "neighbourhood-std",
        "coefficient",
        "coefficient-std",
        "slide-backbones",
        "slide-backbones-std",
        "runtime",
    }


def test_gated_srp_is_best_in_all_five_survival_cohorts():
    table = values("survival")
    assert len(table) == 5
    assert (table.idxmax(axis=1) == "gated_srp").all()


def test_the_survival_gain_across_cohorts():
    found = {cell.arm: cell.test for cell in compare(results("survival"), "na").across}["gated_srp"]
    assert (round(found.mean, 4), round(found.low, 4), round(found.high, 4)) == (0.0269, 0.0149, 0.0389)
    assert (round(found.t, 2), found.df, round(found.p, 4)) == (6.21, 4, 0.0034)


def test_twelve_of_sixteen_classification_metrics_improve():
    gains = differences("classification")
    assert (len(gains), sum(gain > 0 for gain in gains.values())) == (16, 12)


def test_the_best_auc_on_three_of_five_and_the_best_f1_and_accuracy_on_kgh_and_bracs():
    best = values("classification").idxmax(axis=1) == "gated_srp"
    assert best.xs("macro_auc", level="metric").sum() == 3
    for cohort in ("KGH", "BRACS"):
        assert best[cohort, "macro_f1"]
        assert best[cohort, "accuracy"]


def test_nine_of_sixteen_classification_deviations_are_lower_and_two_of_five_survival_ones_the_lowest():
    gains = differences("classification-std")
    assert (len(gains), sum(gain < 0 for gain in gains.values())) == (16, 9)
    lowest = values("survival-std").idxmin(axis=1)
    assert lowest[lowest == "gated_srp"].index.get_level_values("cohort").tolist() == ["TCGA-KIRP", "TCGA-STAD"]


def test_the_dense_architecture_gains_on_all_metrics():
    assert all(gain > 0 for gain in differences("architecture", "vit4_gated_srp", "vit4").values())


def test_the_token_only_gate_is_never_the_best():
    assert (values("gate-factorization").idxmax(axis=1) != "gated_srp_token_only").all()


def test_rows_that_appear_in_several_tables_agree():
    main = TABLES["survival"].frame, TABLES["classification"].frame
    known = {(r.arm, r.cohort, r.metric): r.value for part in main for r in part.itertuples()}
    compared = 0
    for name in (
        "fixed-beta",
        "gate-range",
        "gate-gradient",
        "gate-factorization",
        "gate-initialization",
        "mil-models",
    ):
        for row in TABLES[name].frame.itertuples():
            if (row.arm, row.cohort, row.metric) in known:
                assert row.value == known[row.arm, row.cohort, row.metric]
                compared += 1
    for name in ("neighbourhood", "coefficient"):
        for row in TABLES[name].frame.itertuples():
            if row.arm == "gated_srp" and getattr(row, "window", 3) == 3:
                assert row.value == pytest.approx(known["gated_srp", row.cohort, row.metric], abs=5.1e-5)
                compared += 1
    assert compared == 13 * 6 + 4 + 12


def test_arms_are_ours():
    named = {arm for table in TABLES.values() for arm in table.frame["arm"]}
    assert named <= set(ARMS)


def test_every_number_is_the_one_that_the_paper_prints():
    tex = SHARED / "paper" / "gated_srp.tex"
    if not tex.is_file():
        pytest.skip("the paper's source is not beside the checkout")
    text, checked = tex.read_text(), 0
    for table in TABLES.values():
        if not table.source.startswith("paper, "):
            continue
        start = text.index("\\label{" + table.source.removeprefix("paper, ") + "}")
        body = text[start : text.index("\\end{tabular}", start)]
        printed = [float(number) for number in re.findall(r"\d\.\d{4}", body)]
        assert printed == table.frame["value"].tolist(), table.name
        checked += len(printed)
    assert checked == 5 * 4 * 2 + 16 * 4 * 2 + 13 * (5 + 2 + 2 + 6 + 4 + 3) + 16


def test_every_number_of_the_authors_tables_is_there():
    folder = SHARED / "results"
    if not folder.is_dir():
        pytest.skip("the authors' tables are not beside the checkout")
    for path in sorted(folder.glob("*.tsv")):
        lines = [line for line in path.read_text().splitlines() if not line.startswith("TCGA-5 mean")]
        theirs = sorted(float(x) for line in lines for x in re.findall(r"(?<=\t)\d+\.\d+", line))
        ours = [table.frame["value"] for table in TABLES.values() if path.name in table.source]
        assert sorted(value for part in ours for value in part) == theirs, path.name


def test_a_broken_file_is_refused(tmp_path):
    (tmp_path / "p.yaml").write_text("tables: {a: {columns: {X: [m]}, rows: [{arm: na, values: [1, 2]}]}}")
    with pytest.raises(UserError, match="not a file of published tables"):
        read_published(tmp_path / "p.yaml")
