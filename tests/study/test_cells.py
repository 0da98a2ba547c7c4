"""Cells: where they live, what they share, and when they are no pair."""

import json

import pytest
from study.study_cells import cells, config, finish
from training.toy_cohorts import open_config, write_cohort

import gated_srp
from gated_srp.config.cohort import open_cohort
from gated_srp.data.splits import Split, write_split
from gated_srp.errors import UserError
from gated_srp.study.cells import (
    Cell,
    Row,
    distinct,
    plan,
    quick_version,
    refuse_mismatches,
    refuse_unpaired,
    run_notes,
)
from gated_srp.training.train import train


def test_a_cell_lives_where_train_writes(tmp_path):
    assert [cell.key.relative_to(tmp_path).as_posix() for cell in cells(tmp_path)] == [
        "toy/na/seed42",
        "toy/gated_srp/seed42",
        "toy/na/seed43",
        "toy/gated_srp/seed43",
    ]


def test_folds_are_cells_of_their_own(tmp_path):
    found = cells(tmp_path, ("na",), (42,), folds={"number": 3})
    assert [cell.unit for cell in found] == ["42_fold0", "42_fold1", "42_fold2"]
    assert found[2].key == tmp_path / "toy" / "na" / "seed42_fold2"


def test_only_settings_that_differ_make_a_variant(tmp_path):
    untuned = {"model.delta": 1.0, "model.hidden_dim": 64}  # what a cohort without a preset has anyway
    rows = [
        Row.of("gated_srp"),
        Row("untuned", "gated_srp", untuned),
        Row("wide", "gated_srp", untuned | {"window": 5}),
    ]
    found = plan(config(tmp_path), rows, [42])
    assert found[0].key == found[1].key
    assert found[2].key == tmp_path / "variants" / "window=5" / "toy" / "gated_srp" / "seed42"
    assert found[2].config.window == 5
    assert [cell.row for cell in distinct(found)] == ["gated_srp", "wide"]


def test_a_row_may_change_single_seeds(tmp_path):
    row = Row("tuned", "gated_srp", by_unit={"43": {"model.delta": 2.0}})
    first, second = plan(config(tmp_path), [row], [42, 43])
    assert (first.config.gate().delta, second.config.gate().delta) == (1.0, 2.0)
    assert second.key.relative_to(tmp_path).parts[:2] == ("variants", "model.delta=2.0")


def test_a_cell_survives_the_way_to_another_process(tmp_path):
    cell = cells(tmp_path, window=5, features=["feats"])[0]
    again = Cell.from_spec(json.loads(json.dumps(cell.spec())))
    assert again == cell
    assert again.settings == cell.settings


def test_an_unknown_arm_is_refused_with_the_nearest(tmp_path):
    with pytest.raises(UserError, match=r"'gated_spr' is not known.*'gated_srp'"):
        cells(tmp_path, ("gated_spr",))


def test_quick_is_the_same_cut_for_all_in_a_folder_of_its_own(tmp_path):
    small, seeds, mark = quick_version(config(tmp_path), (1, 2, 3, 4, 5))
    assert (small.train.epochs, seeds, small.out) == (2, (1, 2, 3), tmp_path / "quick")
    assert mark.startswith("QUICK: 2 of 10 epochs, 3 of 5 seeds")


def test_cells_of_one_seed_on_different_splits_are_refused(tmp_path):
    found = cells(tmp_path)
    for cell, split in zip(found, ("one", "one", "two", "other"), strict=True):
        finish(cell, split=split)
    with pytest.raises(UserError, match=r"seed43 and .*different splits \(other, two\)"):
        refuse_unpaired(found)
    refuse_unpaired(found[:2])


def test_a_cell_of_another_split_than_the_table_now_gives_is_refused(tmp_path):
    class Data:
        def split(self, seed, fold):
            return type("Split", (), {"hash": f"split of {seed}"})

    found = cells(tmp_path)
    finish(found[0], split="split of 42")
    refuse_mismatches(found, {"toy": Data()})
    finish(found[3], split="split of 42")
    with pytest.raises(UserError, match="seed43: was trained on another split"):
        refuse_mismatches(found, {"toy": Data()})


def begin(cell, split: Split) -> None:
    """What training has written when it was interrupted: settings, split and state."""
    cell.key.mkdir(parents=True)
    cell.run.write_settings(cell.settings)
    write_split(split, cell.key / "split.csv")
    (cell.key / "environment.json").write_text('{"slides_hash": "of slides"}')
    cell.run.state.write_bytes(b"weights")


def test_an_unfinished_cell_on_another_split_is_no_pair_either(tmp_path):
    one, other = (Split("case_id", {"p1": "train", "p,2": part, "NA": "test"}, "s") for part in ("train", "val"))
    found = cells(tmp_path, seeds=(42,))
    finish(found[0], split=one.hash)
    begin(found[1], other)
    with pytest.raises(UserError, match=rf"different splits \({other.hash[:12]}, {one.hash[:12]}\)"):
        refuse_unpaired(found)
    again = cells(tmp_path / "again", seeds=(42,))
    finish(again[0], split=one.hash)
    begin(again[1], one)
    refuse_unpaired(again)


def test_an_unfinished_cell_of_another_split_than_the_table_now_gives_is_refused(tmp_path):
    now = Split("slide", {"s1": "train"}, "s")
    data = type("Data", (), {"split": lambda self, seed, fold: now})()
    begun = cells(tmp_path, seeds=(42,))
    begin(begun[0], Split("slide", {"s1": "test"}, "s"))
    with pytest.raises(UserError, match="seed42: was begun on another split than the table gives now"):
        refuse_mismatches(begun, {"toy": data})


def test_a_cell_of_other_settings_is_refused(tmp_path):
    finish(cells(tmp_path)[0])
    with pytest.raises(UserError, match=r"train\.epochs 10, asked 3"):
        refuse_mismatches(cells(tmp_path, train={"epochs": 3, "lr": 1e-4, "weight_decay": 0.0, "accumulation": 1}), {})


def test_an_arm_may_be_named_with_settings_of_its_own(tmp_path):
    names = (
        "gated_srp",
        "gated_srp@train.gate_lr=10",
        "gated_srp@model.delta=2@window=5",
        "gated_srp@train.gate_lr=1.0",
    )
    found = plan(config(tmp_path), [Row.of(name) for name in names], [42])
    assert [cell.row for cell in found] == list(names)
    assert {cell.arm for cell in found} == {"gated_srp"}
    assert (found[1].config.train.gate_lr, found[2].config.window, found[2].config.gate().delta) == (10.0, 5, 2.0)
    assert found[1].key == tmp_path / "variants" / "train.gate_lr=10" / "toy" / "gated_srp" / "seed42"
    assert found[3].key == found[0].key  # the cohort's own setting, spelled otherwise, is no variant


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("gated_srp@train.gate_rl=10", "train.gate_rl"),
        ("gated_srp@train.gate_lr=fast", "train.gate_lr"),
        ("gated_srp@train.gate_lr", "expected ARM@SETTING=VALUE"),
        ("gated_srp@features=a/b", "expected ARM@SETTING=VALUE"),
        ("gated_spr@train.gate_lr=10", "'gated_spr' is not known"),
    ],
)
def test_a_setting_of_an_arm_that_cannot_be_used_is_refused_before_anything_runs(tmp_path, name, words):
    with pytest.raises(UserError, match=words):
        plan(config(tmp_path), [Row.of(name)], [42])


def test_what_runs_say_beside_their_numbers_reaches_the_study(tmp_path):
    found = cells(tmp_path)
    remark = "class b is absent and counts as 0"
    for cell, ties in zip(found[:3], (4, 1, 2), strict=True):
        finish(cell)
        more = {
            "ties": {"rule": "first", "epochs": ties},
            "remarks": {"test": {"macro_f1": remark} if cell.seed == 42 else {}},
        }
        (cell.key / "metrics.json").write_text(json.dumps(cell.run.results | more))
    assert run_notes(found) == (
        "in 2 of 3 runs the kept epoch tied with others on validation, e.g. toy na seed 42 with 4 epochs in all (select.ties: first)",
        "toy, seed 42, macro_f1: class b is absent and counts as 0",
    )
    finish(found[3])
    assert run_notes(found[3:]) == ()


def test_a_finished_cell_of_other_feature_files_is_no_pair(tmp_path):
    toy = open_config(write_cohort(tmp_path, slides=10, train={"epochs": 1}), out=str(tmp_path / "runs"))
    train(toy, arm="na", seed=42)
    found, data = plan(toy, [Row.of("na"), Row.of("gated_srp")], [42]), {"toy": open_cohort(toy)}
    refuse_mismatches(found, data)
    files = sorted((tmp_path / "feats").rglob("*.h5"))
    files[3].write_bytes(files[4].read_bytes())
    with pytest.raises(UserError, match=r"na/seed42: the feature file of 's003' has changed since the run was begun"):
        refuse_mismatches(found, data)


def test_a_finished_cell_of_other_labels_is_no_pair_and_train_refuses_it_too(tmp_path):
    toy = open_config(write_cohort(tmp_path, slides=10, train={"epochs": 1}), out=str(tmp_path / "runs"))
    with_parts = open_cohort(toy).slides(42)
    with_parts[["slide", "part"]].rename(columns={"part": "split"}).to_csv(tmp_path / "split.csv", index=False)
    toy = toy.model_copy(update={"split": tmp_path / "split.csv"})
    run = train(toy, arm="na", seed=42)
    found = plan(toy, [Row.of("na"), Row.of("gated_srp")], [42])
    assert refuse_mismatches(found, {"toy": open_cohort(toy)}) == ()
    tested = with_parts["slide"][with_parts["part"] == "test"].iloc[0]
    file, said = next((tmp_path / "feats").rglob(f"{tested}.h5")), []
    file.rename(tmp_path / "away.h5")
    (note,) = refuse_mismatches(found, {"toy": open_cohort(toy)})  # runs may outlive some features
    assert f"1 of 10 slides have no feature file any more, e.g. {tested!r}" in note
    train(toy, arm="na", seed=42, progress=lambda event: said.append(event.text))
    assert f"1 of its slides have no label or no file now, e.g. {tested!r}" in said[0] and "nothing to do" in said[1]
    (tmp_path / "feats").rename(tmp_path / "gone")
    train(toy, arm="na", seed=42, progress=lambda event: said.append(event.text))
    assert "whether its slides and labels are those of now cannot be told" in said[2] and "nothing to do" in said[3]
    (tmp_path / "gone").rename(tmp_path / "feats")
    (tmp_path / "away.h5").rename(file)
    table = (tmp_path / "table.csv").read_text().splitlines()
    other = {"benign": "tumour", "tumour": "benign"}
    rows = [row.rpartition(",") for row in table]
    flipped = [f"{start},{other[label] if start.startswith(tested) else label}" for start, _, label in rows]
    (tmp_path / "table.csv").write_text("\n".join(flipped) + "\n")
    for refused in (
        lambda: gated_srp.compare(toy, arms=["na", "gated_srp"], seeds=[42], bootstrap=0),
        lambda: train(toy, arm="na", seed=42),
    ):
        with pytest.raises(UserError, match="na/seed42: was begun with other slides, labels or parts"):
            refused()
    environment = run.environment
    run.write_json("environment.json", {k: v for k, v in environment.items() if k not in ("slides_hash", "checksum")})
    assert train(toy, arm="na", seed=42).path == run.path  # of an old version, which does not say


def test_a_cell_begun_from_named_weights_does_not_pass_for_one_from_fresh_ones(tmp_path):
    toy = open_config(write_cohort(tmp_path, slides=10, train={"epochs": 1}), out=str(tmp_path / "runs"))
    base = train(toy, arm="na", seed=43)
    train(toy, arm="gated_srp", seed=42, init=base.path)
    for refused in (
        lambda: gated_srp.compare(toy, arms=["na", "gated_srp"], seeds=[42], bootstrap=0),
        lambda: train(toy, arm="gated_srp", seed=42),
    ):
        with pytest.raises(UserError, match=r"gated_srp/seed42: was begun from .*seed43.*, not from fresh weights"):
            refused()


def test_an_arm_may_set_a_section_that_the_cohort_lacks(tmp_path):
    (cell,) = cells(tmp_path, ("gated_srp@covariates.numeric=age",), (42,), table=tmp_path / "table.csv")
    assert cell.config.covariates.numeric == ("age",) and "covariates.numeric=age" in cell.key.parts[-4]
