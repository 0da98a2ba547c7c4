"""Tables against hand-worked numbers."""

import pandas as pd
import pytest

from gated_srp.reports.tables import Entry, Grid, as_csv, comparison_grid, latex, markdown, std_grid
from gated_srp.study.results import compare_results as compare

VALUES = {  # one cohort, two metrics, three seeds; b is better by far on the first, worse by nothing certain on the second
    ("na", "macro_f1"): (0.50, 0.60, 0.70),
    ("b", "macro_f1"): (0.60, 0.71, 0.80),
    ("c", "macro_f1"): (0.40, 0.51, 0.60),
    ("na", "accuracy"): (0.50, 0.50, 0.50),
    ("b", "accuracy"): (0.40, 0.55, 0.50),
    ("c", "accuracy"): (0.50, 0.60, 0.40),
}


@pytest.fixture
def results():
    rows = [("TCGA-KIRC", arm, str(42 + i), m, v) for (arm, m), values in VALUES.items() for i, v in enumerate(values)]
    return pd.DataFrame(rows, columns=["cohort", "arm", "seed", "metric", "value"])


def entries(grid, arm):
    return dict(grid.rows)[arm]


def test_means_and_stds_over_seeds_the_best_is_bold_and_colour_needs_an_interval_off_zero(results):
    grid = comparison_grid(results, compare(results, "na"), title="T")
    assert grid.columns == (("TCGA-KIRC", "macro_f1"), ("TCGA-KIRC", "accuracy"))
    assert entries(grid, "na") == (Entry("0.6000 ± 0.1000"), Entry("0.5000 ± 0.0000", bold=True))
    assert entries(grid, "b") == (Entry("0.7033 ± 0.1002", bold=True, tone="better"), Entry("0.4833 ± 0.0764"))
    assert entries(grid, "c") == (Entry("0.5033 ± 0.1002", tone="worse"), Entry("0.5000 ± 0.1000", bold=True))


def test_less_is_better_where_it_is(results):
    loss = results.assign(metric=results["metric"].replace({"macro_f1": "brier"}))
    grid = comparison_grid(loss, compare(loss, "na"), title="T")
    assert entries(grid, "b")[0] == Entry("0.7033 ± 0.1002", tone="worse")
    assert entries(grid, "c")[0] == Entry("0.5033 ± 0.1002", bold=True, tone="better")


def test_a_difference_that_does_not_survive_holm_has_no_colour():
    """p 0.025 by itself, 0.074 among three; the paired test of `b` alone is marked."""
    values = {"na": (0.5, 0.6, 0.7), "b": (0.6, 0.74, 0.8), "c": (0.4, 0.65, 0.7), "d": (0.55, 0.6, 0.65)}
    rows = [("K", arm, str(42 + i), "macro_f1", v) for arm, found in values.items() for i, v in enumerate(found)]
    results = pd.DataFrame(rows, columns=["cohort", "arm", "seed", "metric", "value"])
    alone = results[results["arm"].isin(["na", "b"])]
    among, single = (comparison_grid(frame, compare(frame, "na"), title="T") for frame in (results, alone))
    assert entries(among, "b") == (Entry("0.7133 ± 0.1026", bold=True),)
    assert entries(single, "b") == (Entry("0.7133 ± 0.1026", bold=True, tone="better"),)


def test_the_lowest_standard_deviation_is_bold(results):
    grid = std_grid(results, compare(results, "na"), title="T")
    assert entries(grid, "na") == (Entry("0.1000", bold=True), Entry("0.0000", bold=True))
    assert entries(grid, "b") == (Entry("0.1002"), Entry("0.0764"))


def test_a_missing_seed_is_counted_and_an_arm_without_results_is_a_dash(results):
    fewer = results[~((results["arm"] == "b") & (results["seed"] == "44") & (results["metric"] == "macro_f1"))]
    fewer = fewer[~((fewer["arm"] == "c") & (fewer["metric"] == "accuracy"))]
    grid = comparison_grid(fewer, compare(fewer, "na"), title="T")
    assert entries(grid, "b")[0].text == "0.6550 ± 0.0778 (n=2)"
    assert entries(grid, "c")[1] == Entry("–")


def test_one_seed_has_no_spread_and_no_colour(results):
    one = results[results["seed"] == "42"]
    grid = comparison_grid(one, compare(one, "na"), title="T")
    assert entries(grid, "b")[0] == Entry("0.6000", bold=True)


GRID = Grid(
    "A_title",
    (("TCGA-KIRC", "c_index"), ("PANDA", "quadratic_kappa"), ("PANDA", "macro_f1")),
    (
        ("na", (Entry("0.1 ± 0.2"), Entry("0.5", bold=True), Entry("–"))),
        ("gated_srp", (Entry("0.3", True, "better"), Entry("0.4", tone="worse"), Entry("0.2", True))),
    ),
    ("5 % of all",),
)


def test_markdown_is_a_table_that_reads_as_text():
    assert markdown(GRID).splitlines() == [
        "**A_title**",
        "",
        "|           | KIRC C    | PANDA κq | PANDA F1 |",
        "|-----------|----------:|---------:|---------:|",
        "| NA        | 0.1 ± 0.2 | **0.5**  | –        |",
        "| Gated SRP | **0.3** ↑ | 0.4 ↓    | **0.2**  |",
        "",
        "5 % of all",
    ]


def test_latex_has_the_papers_form_and_colours():
    text = latex(GRID)
    assert r"\textbf{Method} & \multicolumn{1}{c}{\textbf{KIRC}} & \multicolumn{2}{c}{\textbf{PANDA}} \\" in text
    assert r"\cmidrule(lr){2-2}\cmidrule(lr){3-4}" in text
    assert r"& \textit{C} & \textit{$\kappa_q$} & \textit{F1} \\" in text
    assert r"NA & 0.1 $\pm$ 0.2 & \textbf{0.5} & – \\" in text
    assert (
        r"Gated SRP & \textcolor[HTML]{137333}{\textbf{0.3}} & \textcolor[HTML]{B3261E}{0.4} & \textbf{0.2} \\" in text
    )
    assert r"\caption{\textbf{A\_title.} 5 \% of all}" in text


def test_csv_keeps_full_names():
    assert as_csv(GRID).splitlines()[:2] == [
        "arm,TCGA-KIRC c_index,PANDA quadratic_kappa,PANDA macro_f1",
        "na,0.1 ± 0.2,0.5,–",
    ]
