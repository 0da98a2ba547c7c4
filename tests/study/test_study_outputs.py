"""What a study leaves behind for others: ratios of runtimes, the columns asked for, folders of its runs, colours that mean something."""

import json
import math

import numpy as np
import pandas as pd
import pytest
from study.study_cells import cells, finish
from study.test_reproduction import FOLDER

from gated_srp.errors import UserError
from gated_srp.reports.figures import precision_recall
from gated_srp.reports.page.contents import read_contents
from gated_srp.reports.tables import reproduction_grid, tone_colour, write_comparison
from gated_srp.study.comparison import collect, compare_cells
from gated_srp.study.paper import read_studies
from gated_srp.study.reproduction import beside_published, reproduce
from gated_srp.training.folder import read_predictions

COLUMNS = ["cohort", "arm", "seed", "metric", "value"]


def test_runtimes_of_two_machines_are_compared_by_their_ratios_and_never_judged():
    study = read_studies("runtime", FOLDER)[0].only(["KIRP"])
    rows = [("NA", 0.5, 20.0), ("NA", 0.5, 20.0), ("Gated SRP", 0.6, 15.0), ("Gated SRP", 0.6, 15.0)]
    results = [
        ("TCGA-KIRP", arm, str(42 + place % 2), metric, value)
        for place, (arm, *values) in enumerate(rows)
        for metric, value in zip(("peak_reserved_gib", "train_wsi_per_second"), values, strict=True)
    ]
    lines = beside_published(study, pd.DataFrame(results, columns=COLUMNS))
    assert set(lines["verdict"]) == {"not judged", "not run"}
    texts = [(name, [entry.text for entry in entries]) for name, entries in reproduction_grid(study, lines).rows]
    assert texts[-4][1] == ["0.6000 ± 0.0000", "15.0000 ± 0.0000"]
    # the authors': 5.2480 / 2.0410 GiB and 1.8773 / 1.9189 slides a second
    assert texts[-2:] == [("– ours / NA", ["1.20 ×", "0.75 ×"]), ("– published / NA", ["2.57 ×", "0.98 ×"])]
    assert [name for name, _ in texts[:3]] == ["NA", "– published", "XSA"]
    notes = reproduction_grid(study, lines).notes
    assert "not judged" in notes[-1] and not any(note.startswith("Rule") for note in notes)


def test_a_study_of_some_cohorts_has_their_columns_alone():
    study = read_studies("survival", FOLDER)[0]
    assert list(study.only(["UCEC", "kirc"]).columns) == ["TCGA-KIRC", "TCGA-UCEC"]
    assert study.only([]) is study


def test_a_cohort_that_a_study_does_not_have_is_said(tmp_path):
    with pytest.raises(UserError, match=r"survival has no such cohort\. Its cohorts: TCGA-KIRC, TCGA-KIRP"):
        reproduce("survival", out=tmp_path, cohorts=["BRACS"], dry_run=True)


def test_a_comparison_lists_the_folders_of_its_runs_and_the_page_finds_them_wherever_they_are_moved(tmp_path):
    found = cells(tmp_path / "old" / "runs", seeds=(42, 43))
    for place, cell in enumerate(found[:3]):
        finish(cell, macro_f1=0.5 + place / 10)
    results = collect(found)
    folder = tmp_path / "old" / "pages" / "comparison"
    write_comparison(folder, found, results, compare_cells(found, results, "na", repeats=0), title="toy")
    assert json.loads((folder / "comparison.json").read_text())["runs"] == {
        "toy na seed 42": "../../runs/toy/na/seed42",
        "toy gated_srp seed 42": "../../runs/toy/gated_srp/seed42",
        "toy na seed 43": "../../runs/toy/na/seed43",
    }
    (tmp_path / "old").rename(tmp_path / "new")
    runs = read_contents(tmp_path / "new" / "pages" / "comparison").runs
    assert [(run.path.parent.name, run.path.name) for run in runs] == [
        ("gated_srp", "seed42"),
        ("na", "seed42"),
        ("na", "seed43"),
    ]


def test_predictions_are_read_to_the_last_bit(tmp_path):
    values = np.random.default_rng(0).random(200)
    pd.DataFrame({"case": "c", "prob_a": values}).to_csv(tmp_path / "p.csv", index=False)
    assert read_predictions(tmp_path / "p.csv")["prob_a"].to_numpy().tobytes() == values.tobytes()


def test_precision_at_recall_zero_is_that_of_the_first_positive():
    # By score: a negative, then the two positives. Precision 1/2 up to recall 1/2, then 2/3.
    found = precision_recall(np.array([0.9, 0.8, 0.7]), np.array([False, True, True]))
    assert (found[0], found[50]) == (0.5, 0.5)
    assert math.isclose(found[51], 2 / 3, rel_tol=1e-6)  # single precision


def test_green_is_better_also_where_less_is_better():
    assert (tone_colour(0.1, "macro_f1"), tone_colour(-0.1, "macro_f1")) == ("#137333", "#B3261E")
    assert tone_colour(-0.1, "brier") == "#137333"


def test_the_forest_is_coloured_only_where_the_interval_excludes_zero(tmp_path):
    from gated_srp.reports.figures import draw_pairs
    from gated_srp.study.results import compare_results as compare

    base, clear, noise = (0.50, 0.51, 0.52), (0.70, 0.712, 0.721), (0.49, 0.53, 0.51)
    rows = [
        ("A", arm, str(seed), "macro_f1", value)
        for arm, values in (("na", base), ("clear", clear), ("noise", noise))
        for seed, value in enumerate(values)
    ]
    results = pd.DataFrame(rows, columns=COLUMNS)
    draw_pairs(results, compare(results, "na"), tmp_path / "p")
    both = (tmp_path / "p.svg").read_text().lower()
    assert "#137333" in both and "#b3261e" not in both
    few = results[results["arm"] != "clear"]
    draw_pairs(few, compare(few, "na"), tmp_path / "q")
    assert "#137333" not in (tmp_path / "q.svg").read_text()
