"""What is wrong with files, folds and classes is said before a run begins, and then nothing of the run is left behind."""

import h5py
import pandas as pd
import pytest
from factories import make_slide, write_trident
from toy_cohorts import WIDTH, open_config, write_cohort

from gated_srp.checks.check import check
from gated_srp.errors import UserError
from gated_srp.training import inputs as inputs_module
from gated_srp.training.inputs import load_inputs
from gated_srp.training.train import train


def slide_of(config, part, seed=42):
    """The first slide of a part, and its file."""
    found = load_inputs(config, seed).slides
    row = found[found["part"] == part].iloc[0]
    return row["slide"], row["file"]


@pytest.fixture
def config(tmp_path):
    return open_config(write_cohort(tmp_path, slides=16, train={"epochs": 1}))


def test_a_fold_that_is_not_there_leaves_no_folder_behind(config):
    with pytest.raises(UserError, match="fold 1: this cohort has 1 fold, counted from 0"):
        train(config, fold=1)
    assert not config.out.exists()


def test_a_run_that_is_refused_after_its_folder_was_made_leaves_none_either(config):
    with pytest.raises(UserError, match="is for images"):
        train(config, arm="vit_s16")
    assert not (config.out / config.name).exists()


def test_a_folder_that_held_something_before_keeps_it(config):
    kept = config.out / config.name / "vit_s16" / "seed42" / "mine.txt"
    kept.parent.mkdir(parents=True)
    kept.write_text("mine")
    with pytest.raises(UserError, match="is for images"):
        train(config, arm="vit_s16")
    assert kept.read_text() == "mine"


@pytest.mark.parametrize("part", ["train", "val", "test"])
def test_a_file_that_cannot_be_used_is_found_before_the_first_epoch_in_every_part(part, config):
    slide, file = slide_of(config, part)
    file.write_bytes(b"")
    lines = []
    with pytest.raises(UserError, match=rf"{file.name} \(slide '{slide}', in {part}\): the file has 0 bytes") as caught:
        train(config, progress=lambda event: lines.append(event.text))
    assert "`exclude`" in caught.value.cure and not any("epoch" in line for line in lines)
    assert not config.out.exists()


def test_two_files_that_cannot_be_used_are_counted(config):
    for part in ("val", "test"):
        with h5py.File(slide_of(config, part)[1], "a") as file:
            del file["coords"]
    for patches in (config.features[0]).rglob("*_patches.h5"):
        patches.unlink()
    with pytest.raises(UserError, match=r"no 'coords'.*; 1 more file of 16 cannot be used"):
        train(config)


def test_where_no_file_can_be_used_nothing_is_advised_to_be_left_out(config):
    for file in config.features[0].rglob("*.h5"):
        file.write_bytes(b"")
    with pytest.raises(UserError, match="15 more files of 16 cannot be used") as caught:
        train(config)
    assert "exclude" not in str(caught.value)


def test_a_test_file_of_another_width_is_refused_before_training(config):
    slide, file = slide_of(config, "test")
    write_trident(config.features[0], slide, make_slide(3, width=WIDTH + 1))
    with pytest.raises(UserError, match=r"several widths: 8 \(15 files\), 9 \(1 file\)") as caught:
        train(config)
    assert file.name in caught.value.where


def test_a_test_file_of_another_encoder_is_refused_before_training(config):
    _, file = slide_of(config, "test")
    with h5py.File(file, "a") as content:
        content["features"].attrs["encoder"] = "gigapath"
    with pytest.raises(UserError, match=r"several encoders: uni_v2 \(15 files\), gigapath \(1 file\)"):
        train(config)


def test_a_file_of_another_magnification_is_warned_of_before_training(config):
    inputs = inputs_module.load_inputs(config, 42)
    assert inputs_module.check_files(inputs, config) == ()
    _, file = slide_of(config, "test")
    with h5py.File(file, "a") as content:
        content["coords"][...] = content["coords"][...] * 2
        content["coords"].attrs.update({"patch_size_level0": 1024, "target_magnification": 10.0})
    (said,) = inputs_module.check_files(inputs, config)
    assert said.level == "warning" and "128 um (15 files), 256 um (1 file)" in said.what and said.where == (str(file),)


def test_headers_are_read_once_per_process_and_again_where_a_file_has_changed(config, monkeypatch):
    seen = []
    real = inputs_module.open_header
    monkeypatch.setattr(inputs_module, "open_header", lambda path, settings: seen.append(path) or real(path, settings))
    train(config)
    assert len(seen) == 16
    train(config, seed=43)
    assert len(seen) == 16
    slide, file = slide_of(config, "test")
    write_trident(config.features[0], slide, make_slide(77, width=WIDTH))
    train(config, seed=44)
    assert seen[16:] == [file]


def test_a_cohort_of_one_class_is_refused_in_the_words_of_check(tmp_path):
    path = write_cohort(tmp_path, slides=16)
    (tmp_path / "table.csv").write_text((tmp_path / "table.csv").read_text().replace("tumour", "benign"))
    (error,) = [note for note in check(path).errors if note.kind == "one_class"]
    with pytest.raises(UserError) as caught:
        train(path)
    assert (caught.value.what, caught.value.cure) == (error.what, error.cure) and "of one class, benign" in error.what


def test_a_training_part_of_one_class_is_refused_and_one_that_lacks_a_class_is_said(tmp_path):
    path = write_cohort(tmp_path, slides=16, train={"epochs": 1}, split="split.csv")
    parts = {i: ("train", "val", "test")[(i % 2 and 1 + i % 4 // 2) or (i > 11) * 2] for i in range(16)}
    rows = [(f"s{i:03d}", part) for i, part in parts.items()]
    pd.DataFrame(rows, columns=["slide_id", "split"]).to_csv(tmp_path / "split.csv", index=False)
    with pytest.raises(UserError, match="no usable slide of class tumour in train: there is nothing to learn"):
        train(path)
    table = pd.read_csv(tmp_path / "table.csv")
    table.loc[[0, 2, 4], "label"] = "atypical"
    table.to_csv(tmp_path / "table.csv", index=False)
    said = []
    train(path, progress=lambda event: said.append(event.text))
    assert "warning: no usable slide of class tumour in train: it cannot be learnt" in said


def test_a_split_of_several_folds_says_which_is_used_and_how_to_use_the_others(tmp_path):
    path = write_cohort(tmp_path, slides=16, train={"epochs": 1}, split="k=all.tsv")
    slides = [f"s{i:03d}" for i in range(16)]
    folds = {f"fold_{k}": [("test", "val", "train", "train")[(i // 2 + k) % 4] for i in range(16)] for k in range(3)}
    pd.DataFrame({"slide_id": slides, **folds}).to_csv(tmp_path / "k=all.tsv", sep="\t", index=False)
    said = []
    train(path, progress=lambda event: said.append(event.text))
    assert "fold 0 of the 3 folds of k=all.tsv is used; `folds: 3` uses all" in said
    with pytest.raises(UserError, match="fold 1: this cohort has 1 fold, counted from 0; its split has 3") as caught:
        train(path, fold=1)
    assert caught.value.cure == "Set `folds: 3`, then choose with --fold."
    assert [one.name for one in (tmp_path / "runs" / "toy" / "gated_srp").iterdir()] == ["seed42"]
    more = open_config(path, folds=3)
    found = load_inputs(more, 42, 2)
    assert "fold 2 of the 3 folds of k=all.tsv is used" in [note.what for note in found.notes]
    assert dict(zip(found.slides["slide"], found.slides["part"], strict=True)) == dict(
        zip(slides, folds["fold_2"], strict=True)
    )
    with pytest.raises(UserError, match="`folds: 5`, but the split has 3 folds"):
        load_inputs(open_config(path, folds=5), 42, 0)
