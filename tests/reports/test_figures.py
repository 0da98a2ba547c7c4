"""Figures carry their labels and their numbers; what they look like was judged by eye."""

import re

import numpy as np
import pytest
from matplotlib.figure import Figure
from matplotlib.text import Annotation
from sklearn.metrics import roc_curve
from study.study_cells import cells, finish

from gated_srp.reports.figures import (
    macro_curve,
    precision_recall,
    roc,
    save,
)
from gated_srp.reports.gates import _draw_arrows, draw_regimes, draw_signed_gate, draw_trajectories, read_gates
from gated_srp.reports.tables import write_comparison
from gated_srp.study.comparison import collect, compare_cells


@pytest.fixture
def done(tmp_path):
    found = cells(tmp_path, seeds=(42, 43, 44))
    for place, cell in enumerate(found):
        finish(cell, gates=(0.1, 0.2 + place / 10) if cell.arm == "gated_srp" else (), macro_f1=0.5 + place / 50)
    return found


def test_a_comparison_is_one_folder_and_quick_is_said_everywhere(done, tmp_path):
    results = collect(done)
    comparison = compare_cells(done, results, "na", repeats=5, notes=("QUICK: 2 of 10 epochs",))
    folder = tmp_path / "comparison"
    written = write_comparison(folder, done, results, comparison, title="toy", mark="QUICK: 2 of 10 epochs")
    names = {path.relative_to(folder).as_posix() for path in written}
    assert {
        "results.csv",
        "comparison.json",
        "table.md",
        "table.tex",
        "table.csv",
        "table_std.tex",
        "README.md",
    } <= names
    figures = ("paired", "trajectories", "regimes", "roc_toy", "reliability_toy")
    assert {f"figures/{name}.{ending}" for name in figures for ending in ("svg", "png")} <= names
    for path in written:
        if path.suffix in (".svg", ".md", ".tex", ".json") or path.name == "results.csv":
            assert "QUICK" in path.read_text(), path
    assert all("gates.csv" not in name for name in names)


def test_each_figure_says_what_it_shows(done, tmp_path):
    write_comparison(
        tmp_path / "c", done, results := collect(done), compare_cells(done, results, "na", repeats=0), title="toy"
    )
    words = {
        "paired": ("toy, F1: every seed", "seed 42", "Gated SRP", "difference in F1", "difference to NA"),
        "trajectories": ("layer 1", "epoch", "effective β", "toy (3 seeds)"),
        "regimes": ("removes (0.5 to 1.5)", "share of heads and patches", "β +0.5", "β/δ +0.5", "30% below 0"),
        "roc_toy": ("false positive rate", "recall", "precision", "NA", "Gated SRP"),
        "reliability_toy": ("confidence", "accuracy"),
    }
    for name, labels in words.items():
        text = (tmp_path / "c" / "figures" / f"{name}.svg").read_text()
        assert [label for label in labels if label not in text] == [], name


def test_kaplan_meier_splits_the_test_cases_at_the_training_median(tmp_path):
    from lifelines.statistics import logrank_test

    from gated_srp.models import build_model
    from gated_srp.models.store import save_model
    from gated_srp.reports.figures import draw_kaplan_meier

    cell = cells(tmp_path, ("na",), (42,), task="survival", metric="c_index", score="case")[0]
    finish(cell, c_index=0.8)
    times, risks, events = (1, 2, 3, 4, 5, 6, 7, 8), (9, 8, 7, 2, 6, 1, 3, 0), (1, 1, 1, 1, 0, 1, 0, 1)
    rows = [f"p{i},{t},{e},{r}" for i, (t, e, r) in enumerate(zip(times, events, risks, strict=True))]
    (cell.key / "predictions_test_case.csv").write_text("case,time,event,risk\n" + "\n".join(rows) + "\n")
    model = build_model("na", in_dim=4, num_outputs=4, dim=12, num_heads=2, depth=2, num_landmarks=2)
    save_model(model, cell.key / "model.safetensors", {"median_risk": 5})
    text = draw_kaplan_meier({"na": [cell.run]}, tmp_path / "km", cohort="TCGA-KIRC")[0].read_text()
    p = logrank_test([1, 2, 3, 5], [4, 6, 7, 8], [1, 1, 1, 0], [1, 1, 0, 1]).p_value
    for word in (
        f"log-rank p {p:.3f}",
        "high predicted risk",
        "low predicted risk",
        "survival probability",
        "KIRC: Kaplan",
    ):
        assert word in text


def test_the_signed_gates_geometry_names_its_regimes(tmp_path):
    text = draw_signed_gate(tmp_path / "gate")[0].read_text()
    assert all(word in text for word in ("β = 1: projection", "β = 2: reflection", "−2c", "−δ", "tanh(ℓ)", "start"))


def test_names_with_dollars_are_drawn_as_they_are_and_formulas_as_formulas(tmp_path):
    figure = Figure()
    axis = figure.subplots()
    axis.plot([0, 1], label="cost $_{$ of ^")
    axis.set_xticks([0, 1], ["a$_$b", "c"])  # neither is a formula that could be drawn
    axis.legend()
    save(figure, tmp_path / "names", title="$\\cohort{ and $x$")
    drawn = (tmp_path / "names.svg").read_text(encoding="utf-8")
    assert all(name in drawn for name in ("cost $_{$ of ^", "a$_$b", "$\\cohort{ and $x$"))
    gate = draw_signed_gate(tmp_path / "gate")[0].read_text(encoding="utf-8")
    assert "mathrm" in gate and "mathrm" not in re.sub("<!--.*?-->", "", gate)  # its source stands in a comment alone


def test_the_arrows_end_where_the_projection_puts_them():
    """z = y - beta c: what lies along the neighbours' mean is scaled by 1 - beta, what lies across it stays."""
    axes = Figure().subplots()
    _draw_arrows(axes)
    arrows = [(note.xy, note.xyann) for note in axes.texts if isinstance(note, Annotation)]
    y = next(end for end, start in arrows if start == (0, 0) and end[1] > 0 and end[0] == 0.92)
    tips = sorted(end for end, start in arrows if start == (0, 0) and end[1] == y[1])
    assert np.allclose(tips, sorted((y[0] * (1 - beta), y[1]) for beta in (2, 1, 0, -1)))


def test_runs_without_gates_have_no_trajectories(tmp_path):
    cell = cells(tmp_path)[0]
    finish(cell)
    assert read_gates({"toy": [cell.run]}) == {}
    assert draw_trajectories({"toy": [cell.run]}, tmp_path / "t", title="NA") == []


def test_figures_of_gates_show_the_kept_epoch_and_not_the_last(tmp_path):
    (cell,) = cells(tmp_path, seeds=(42,), arms=("gated_srp",))
    finish(cell, gates=(0.1, 0.7, 0.3), best_epoch=2)
    text = draw_regimes({"toy": [cell.run]}, tmp_path / "r", title="x")[0].read_text()
    assert "β +0.70" in text and "+0.30" not in text and "kept epoch" in text
    assert "kept epoch" in draw_trajectories({"toy": [cell.run]}, tmp_path / "t", title="x")[0].read_text()


def test_the_same_runs_give_the_same_picture(done, tmp_path):
    runs = {"toy": [cell.run for cell in done if cell.arm == "gated_srp"]}
    first = draw_trajectories(runs, tmp_path / "a", title="x")[0].read_bytes()
    assert first == draw_trajectories(runs, tmp_path / "b", title="x")[0].read_bytes()


def test_roc_is_that_of_scikit_learn_with_ties():
    rng = np.random.default_rng(0)
    score, positive = rng.integers(0, 8, 60) / 8, rng.random(60) < 0.4
    false, true, _ = roc_curve(positive, score, drop_intermediate=False)
    np.testing.assert_allclose(roc(score, positive), np.interp(np.linspace(0, 1, 101), false, true))


def test_precision_at_each_recall_by_hand():
    curve = precision_recall(np.array([0.9, 0.8, 0.7, 0.6]), np.array([True, False, True, False]))
    assert curve[[10, 50, 51, 100]].round(4).tolist() == [1.0, 1.0, 0.6667, 0.6667]


def test_a_macro_curve_is_the_mean_over_classes(done):
    table = done[0].predictions()  # a: 0.9, 0.4 against 0.2, 0.3; b the mirror: both perfectly ordered
    assert macro_curve(table, roc).tolist() == [1.0] * 101
