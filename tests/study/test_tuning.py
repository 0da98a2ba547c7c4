"""Tuning: chosen on validation alone, within each seed, and honest about what it is worth."""

import pytest
from study.study_cells import config, finish
from training.toy_cohorts import open_config, write_cohort

import gated_srp
from gated_srp.cli.screen import cell_table
from gated_srp.config.cohort import open_cohort
from gated_srp.errors import UserError
from gated_srp.study.cells import plan
from gated_srp.study.tuning import (
    Choice,
    choose,
    freeze,
    frozen_path,
    optimism,
    read_frozen,
    tuned_rows,
    tuning_cells,
    tuning_table,
)


def tuned(tmp_path, best):
    """A finished grid in which ``best[seed]`` has the highest validation score, and the highest test scores lie elsewhere."""
    found = tuning_cells(config(tmp_path), "gated_srp", list(best))
    for place, cell in enumerate(found):
        gate = cell.config.gate()
        score = 0.9 if (gate.delta, gate.hidden_dim) == best[cell.seed] else 0.8
        finish(cell, val=score, macro_f1=0.6 + place % 16 / 100)
        path = cell.key / "metrics.json"
        path.write_text(path.read_text()[:-1] + f', "val": {{"slide": {{"macro_f1": {score}}}}}}}')
    return found


def test_the_grid_is_sixteen_settings_a_seed_and_the_cohorts_own_is_no_variant(tmp_path):
    found = tuning_cells(config(tmp_path), "gated_srp", [42, 43])
    assert len(found) == 32
    assert len({cell.key for cell in found}) == 32
    assert [c.key for c in found if "variants" not in c.key.parts] == [
        tmp_path / "toy" / "gated_srp" / "seed42",
        tmp_path / "toy" / "gated_srp" / "seed43",
    ]


def test_each_seed_chooses_for_itself_by_validation(tmp_path):
    choices = choose(tuning_table(tuned(tmp_path, {42: (2.0, 32), 43: (0.5, 16)})))
    assert [(c.unit, c.delta, c.hidden_dim, c.validation) for c in choices] == [
        ("42", 2.0, 32, 0.9),
        ("43", 0.5, 16, 0.9),
    ]
    # place of (2, 32) in the grid is 7, of (0.5, 16) 0, of (1, 64) 9; the best test score is the last's
    assert [(round(c.test, 4), c.start_test, c.best_test) for c in choices] == [(0.67, 0.69, 0.75), (0.6, 0.69, 0.75)]
    found = optimism(choices, 0.25)
    assert round(found.chosen, 4) == round((0.23 + 0.30) / 2, 4)
    assert round(found.start, 4) == 0.11
    assert round(found.by_choosing, 4) == 0.155
    assert round(found.gain.mean, 4) == -0.055
    assert round(found.peeking, 4) == 0.115


@pytest.mark.parametrize(
    ("validation", "words"),
    [
        (
            0.9,
            "optimism: validation minus test is +0.3000 for the chosen settings, +0.1000 untuned; +0.2000 is the optimism of choosing",
        ),
        (
            0.1,
            "optimism: validation minus test is -0.5000 for the chosen settings, +0.1000 untuned; choosing added no optimism",
        ),
    ],
)
def test_the_optimism_is_said_with_its_sign(validation, words):
    one = Choice("42", 1.0, 16, validation, 0.6, start_validation=0.8, start_test=0.7, best_test=0.75)
    assert str(optimism([one], 0.25)).startswith(words)


def test_an_undefined_validation_metric_leaves_the_optimism_undefined():
    one = Choice("42", 1.0, 16, float("nan"), 0.6, start_validation=0.8, start_test=0.7, best_test=0.75)
    assert str(optimism([one], 0.25)).startswith("optimism: not defined, as the metric is not on validation.\ngain of")


def test_no_test_score_is_shown_before_the_choice(tmp_path, monkeypatch):
    cohort = open_config(write_cohort(tmp_path, slides=16))
    split = open_cohort(cohort).split(42, 0).hash

    def run(board, slots):
        for cell in board.of("waiting"):
            finish(cell, split=split, val=0.8, macro_f1=0.6123)
            path = cell.key / "metrics.json"
            path.write_text(path.read_text()[:-1] + ', "val": {"slide": {"macro_f1": 0.8456}}}')
            board.set(cell, "finished")
            shown.append(_text(cell_table(board)))

    shown: list[str] = []
    monkeypatch.setattr("gated_srp.study.engine.run_local", run)
    gated_srp.tune(cohort, seeds=[42], progress=lambda event: shown.append(event.text))
    assert sum("macro_f1 0.8456 on validation" in text for text in shown) >= 16
    assert not any("0.6123" in text for text in shown)


def _text(table) -> str:
    from rich.console import Console

    with (page := Console(width=300)).capture() as found:
        page.print(table)
    return found.get()


def test_tune_chooses_freezes_and_says_what_it_is_worth(tmp_path):
    cohort = open_config(write_cohort(tmp_path, slides=16))
    split = open_cohort(cohort).split(42, 0).hash
    for place, cell in enumerate(tuning_cells(cohort, "gated_srp", [42])):
        finish(cell, split=split, val=0.8 + (place == 7) / 10, macro_f1=0.6 + place / 100)
    found = gated_srp.tune(cohort, seeds=[42])
    assert [(one.delta, one.hidden_dim) for one in found.choices] == [(2.0, 32)]
    assert len(found.grid) == 16 and list(found.table["unit"]) == ["42"]
    assert found.verdict.startswith("seed 42: delta 2, h 32; macro_f1") and "optimism: " in found.verdict
    assert found.files == (frozen_path(cohort), frozen_path(cohort).with_name("tuning.csv"))
    assert read_frozen(cohort)["chosen"] == {"42": {"delta": 2.0, "hidden_dim": 32}}


def test_ties_go_to_the_smaller_gate(tmp_path):
    assert [(c.delta, c.hidden_dim) for c in choose(tuning_table(tuned(tmp_path, {42: (9.0, 9)})))] == [(0.5, 16)]


def test_nothing_is_chosen_from_an_unfinished_grid(tmp_path):
    found = tuned(tmp_path, {42: (2.0, 32)})
    (found[3].key / "metrics.json").unlink()
    with pytest.raises(UserError, match="seed 42: only 15 of 16"):
        choose(tuning_table(found))


def test_a_seed_that_failed_wholly_is_refused_and_nothing_is_frozen(tmp_path, monkeypatch):
    cohort = open_config(write_cohort(tmp_path, slides=16))
    split = open_cohort(cohort).split(42, 0).hash
    for cell in tuning_cells(cohort, "gated_srp", [42]):
        finish(cell, split=split)

    def fails(board, slots):
        for cell in board.of("waiting"):
            board.set(cell, "failed", UserError("no luck"))

    monkeypatch.setattr("gated_srp.study.engine.run_local", fails)
    with pytest.raises(UserError, match=r"seed 43: no setting is finished.*no luck"):
        gated_srp.tune(cohort, seeds=[42, 43])
    assert not frozen_path(cohort).exists()
    with pytest.raises(UserError, match="na has no gate"):
        gated_srp.tune(cohort, arm="na", seeds=[42])


def test_compare_finds_what_was_frozen_and_runs_the_very_same_cells(tmp_path):
    cohort = config(tmp_path)
    grid = tuned(tmp_path, {42: (2.0, 32), 43: (1.0, 64)})
    assert tuned_rows(cohort, ["gated_srp"], [42]) == ([], [])
    assert freeze(cohort, "gated_srp", choose(tuning_table(grid))) == frozen_path(cohort)
    rows, notes = tuned_rows(cohort, ["na", "gated_srp"], [42, 43])
    assert notes == []
    cells = plan(cohort, rows, [42, 43])
    assert [cell.row for cell in cells] == ["gated_srp_tuned"] * 2
    assert all(cell.run.finished for cell in cells)
    assert [(cell.config.gate().delta, cell.config.gate().hidden_dim) for cell in cells] == [(2.0, 32), (1.0, 64)]


def test_a_seed_that_was_not_tuned_is_not_passed_off_as_tuned(tmp_path):
    cohort = config(tmp_path)
    freeze(cohort, "gated_srp", choose(tuning_table(tuned(tmp_path, {42: (2.0, 32)}))))
    rows, notes = tuned_rows(cohort, ["gated_srp"], [42, 44])
    assert rows == []
    assert "no setting for seed 44" in notes[0]
    assert tuned_rows(cohort, ["na"], [42]) == ([], [])


def test_a_broken_file_is_the_users_error(tmp_path):
    cohort = config(tmp_path)
    frozen_path(cohort).parent.mkdir(parents=True)
    frozen_path(cohort).write_text("chosen: [1]")
    with pytest.raises(UserError, match=r"tuned\.yaml: cannot be read"):
        read_frozen(cohort)


def test_the_gates_learning_rate_is_tuned_where_it_is_asked_for(tmp_path):
    cohort = config(tmp_path)
    grid = tuning_cells(cohort, "gated_srp", [42], gate_lr=(1.0, 10.0))
    assert len(grid) == 32 and len({cell.key for cell in grid}) == 32
    for cell in grid:
        gate, factor = cell.config.gate(), cell.config.train.gate_lr
        best = (gate.delta, gate.hidden_dim, factor) == (2.0, 32, 10.0)
        finish(cell, val=0.9 if best else 0.8, macro_f1=0.7)
    table = tuning_table(grid)
    (choice,) = choose(table, rates=2)
    assert (choice.delta, choice.hidden_dim, choice.gate_lr) == (2.0, 32, 10.0)
    freeze(cohort, "gated_srp", [choice])
    (row,), _ = tuned_rows(cohort, ["gated_srp"], [42])
    (cell,) = plan(cohort, [row], [42])
    assert cell.run.finished and cell.config.train.gate_lr == 10.0
    (tie,) = choose(table.assign(score=0.8), rates=2)
    assert tie.gate_lr == 1.0
