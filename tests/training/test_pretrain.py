"""Pretraining without labels: which slides it sees, that it resumes bit for bit, and what `train --init` takes of it or refuses."""

import hashlib
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
import yaml
from factories import write_trident
from test_training_resume import wait_for_states
from toy_cohorts import SMALL, open_config, planted, write_cohort, write_yaml

from gated_srp.config.cohort import open_cohort
from gated_srp.errors import UserError
from gated_srp.files import read_tensors, write_tensors
from gated_srp.models import build_model, load_model
from gated_srp.reports.localize import find_runs
from gated_srp.study.cells import Row, plan, refuse_mismatches
from gated_srp.training.callbacks import RunCallbacks
from gated_srp.training.inputs import load_inputs
from gated_srp.training.optim import start_weights
from gated_srp.training.predict import predict
from gated_srp.training.pretrain import pretrain, pretraining_slides
from gated_srp.training.seen import read_seen
from gated_srp.training.train import train

QUICK = {"epochs": 2, "accumulation": 4}
FILES = ("model.safetensors", "metrics.json", "history.csv", "gates.csv", "split.csv", "predictions_val_slide.csv")


@pytest.fixture(scope="module")
def home(tmp_path_factory) -> Path:
    """A cohort with two slides that have no label, one of a training and one of a test patient of seed 42."""
    path = write_cohort(tmp_path_factory.mktemp("pretraining"), slides=16, train=QUICK)
    slides = load_inputs(open_config(path), 42).slides
    with (path.parent / "table.csv").open("a") as table:
        for part in ("train", "test"):
            write_trident(path.parent / "feats", f"extra_{part}", planted(len(part), 1.0))
            table.write(f"extra_{part},{slides.loc[slides['part'] == part, 'case'].iloc[0]},\n")
    return path


@pytest.fixture(scope="module")
def done(home):
    """A finished pretraining."""
    return pretrain(home, arm="gated_srp", seed=42)


def bytes_of(run: Path, names: tuple[str, ...] = FILES) -> dict[str, bytes]:
    return {name: (run / name).read_bytes() for name in names}


def test_it_sees_training_and_validation_and_slides_without_a_label_and_opens_nothing_of_test_patients(
    home, done, tmp_path
):
    slides = load_inputs(open_config(home), 42).slides
    by_part = {part: set(slides.loc[slides["part"] == part, "slide"]) for part in ("train", "val", "test")}
    assert set(done.features["slide"]) == by_part["train"] | by_part["val"] | {"extra_train"}
    assert set(done.predictions("val")["slide"]) == by_part["val"]
    assert done.metrics("val")["r2"] == pytest.approx(1 - done.predictions("val")["error"].mean())
    assert "copying, the mean of visible neighbours" in (done.path / "log.txt").read_text()
    assert done.card["task"] == "pretraining" and done.card["masking"] == {"share": 0.5, "block": 3}
    seen = read_seen(done.card, done.path)
    assert seen.of("extra_train") == "training slide" and not any(seen.of(one) for one in by_part["test"])
    shutil.copytree(home.parent, tmp_path / "copy", ignore=shutil.ignore_patterns("runs"))
    for slide in (*by_part["test"], "extra_test"):
        (file,) = (tmp_path / "copy" / "feats").rglob(f"{slide}.h5")
        file.write_bytes(b"nobody reads this")
    again = pretrain(tmp_path / "copy" / "cohort.yaml", arm="gated_srp", seed=42)
    assert again.predictions("val").equals(done.predictions("val"))


def test_files_of_a_folder_are_used_unless_they_may_be_of_validation_or_test(home, tmp_path):
    slides = load_inputs(open_config(home), 42).slides
    case = {part: slides.loc[slides["part"] == part, "case"].iloc[0] for part in ("train", "val", "test")}
    taken = slides.loc[slides["part"] == "test", "slide"].iloc[0]
    names = ["new", "TCGA-AA-0001-01Z-00-DX1", f"{case['val']}_2", f"{case['test']}-b", f"{taken}_patches"]
    for number, name in enumerate(names):
        write_trident(tmp_path / "more", name, planted(50 + number, 0.0))
    write_trident(tmp_path / "none", f"{case['test']}_3", planted(60, 0.0))
    (tmp_path / "empty").mkdir()
    said = []
    how = {"settings": {"train.epochs": 1}, "out": tmp_path / "runs", "progress": lambda event: said.append(event.text)}
    run = pretrain(home, arm="na", seed=42, unlabelled=[tmp_path / "more", tmp_path / "none"], **how)
    assert {"new", "TCGA-AA-0001-01Z-00-DX1", "extra_train"} == set(run.features["slide"]) - set(slides["slide"])
    assert any("trains on 2 slides without a row, 3 left out" in line and "1 of their names" in line for line in said)
    assert any("trains on 0 slides without a row, 1 left out" in line for line in said)
    with pytest.raises(UserError, match="empty: no feature file in it"):
        pretrain(home, arm="na", seed=42, unlabelled=[tmp_path / "empty"], out=tmp_path / "other")
    with pytest.raises(UserError, match=r"holds a run with other settings: pretraining\.unlabelled"):
        pretrain(home, arm="na", seed=42, **how)


def test_a_barcode_tells_the_patient_whatever_the_table_calls_them(tmp_path):
    rows = ["slide,case,label"]
    for i in range(12):
        for folder, section in (("feats", "DX1"), ("more", "DX2"), ("feats", "DX3")):
            write_trident(tmp_path / folder, f"TCGA-AA-{i:04d}-01Z-00-{section}", planted(i, 1.0))
        rows += [f"TCGA-AA-{i:04d}-01Z-00-DX1,pat{i},{'ab'[i % 2]}", f"TCGA-AA-{i:04d}-01Z-00-DX3,other{i},"]
    (tmp_path / "table.csv").write_text("\n".join(rows) + "\n")
    data = open_cohort(open_config(write_yaml(tmp_path, target="label")))
    slides = data.slides(42).set_index("slide")["part"].rename(lambda slide: slide[:12])
    found, _ = pretraining_slides(data, data.split(42), [tmp_path / "more"])
    for section in ("DX2", "DX3"):
        added = [slide[:12] for slide in found["slide"] if slide.endswith(section)]
        assert added == [patient for patient in slides.index if slides[patient] == "train"]


def test_without_a_table_all_files_are_used_and_nobody_may_be_tested(home, tmp_path):
    write_trident(tmp_path / "more", "TCGA-AA-0001-01Z-00-DX1", planted(1, 1.0))
    write_trident(tmp_path / "more", "TCGA-AA-0001-01Z-00-DX2", planted(2, 1.0))
    plain = {key: one for key, one in yaml.safe_load(home.read_text()).items() if key not in ("table", "target")}
    alone = tmp_path / "alone.yaml"
    alone.write_text(yaml.safe_dump(plain | {"features": str(home.parent / "feats"), "train": {**QUICK, "epochs": 1}}))
    run = pretrain(alone, arm="na", seed=7, unlabelled=[tmp_path / "more"])
    names = sorted([*(file.stem for file in (home.parent / "feats").rglob("*.h5")), "TCGA-AA-0001"])
    drawn = [
        names[i] for i in np.random.default_rng(7).permutation(19)[:2]
    ]  # a tenth of 16 + 2 slides and a patient of two
    parts = {name: "val" if name in drawn else "train" for name in names}
    assert dict(run.split.to_numpy().tolist()) == parts and len(run.features) == 20
    assert "warning: no table: pretraining on" in (run.path / "log.txt").read_text()
    assert (
        "The names of 18 files tell no patient" in (run.path / "log.txt").read_text()
    )  # all but the two with a barcode
    with pytest.raises(UserError, match="slides are known to these weights"):
        train(home, arm="na", seed=42, init=run.path, out=tmp_path / "runs")
    with pytest.raises(UserError, match="`folds` and `split` are of a table"):
        pretrain(alone, arm="na", seed=8, settings={"folds": 3})
    (tmp_path / "table.csv").write_text("slide,case,grade\ns000,p0,\ns001,p1,\n")
    for target in ({}, {"target": "grade"}):
        with pytest.raises(UserError, match=r"The split needs labels\. Leave `table` out to pretrain on all files"):
            pretrain(alone, arm="na", seed=8, settings={"table": str(tmp_path / "table.csv"), **target})


def test_killed_it_goes_on_bit_for_bit_with_workers_and_a_cache_or_without(home, done, tmp_path):
    config = tmp_path / "cohort.yaml"
    shutil.copytree(home.parent / "feats", tmp_path / "feats")
    shutil.copy(home.parent / "table.csv", tmp_path)
    config.write_text(home.read_text().replace("workers: 0", "workers: 1") + "cache: cache\n")
    command = [sys.executable, str(Path(__file__).with_name("child_run.py")), str(config), str(tmp_path / "runs")]
    child = subprocess.Popen([*command, "pretrain"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    wait_for_states(child, tmp_path / "runs/pretrained/toy/gated_srp/seed42/state.pt", 3)
    child.kill()
    said = child.communicate()[0]
    run = tmp_path / "runs/pretrained/toy/gated_srp/seed42"
    assert child.returncode != 0 and (run / "state.pt").is_file() and not (run / "metrics.json").is_file(), said
    resumed = pretrain(config, arm="gated_srp", seed=42, out=tmp_path / "runs")
    assert "goes on at epoch" in (run / "log.txt").read_text() and resumed.path == run
    assert bytes_of(run) == bytes_of(done.path)


def test_start_weights_are_those_of_the_pretraining_and_nothing_else_differs(home, done):
    source = load_model(done.path).state_dict()
    fresh, model = (build_model("gated_srp", in_dim=8, num_outputs=8, seed=42, **SMALL).eval() for _ in range(2))
    notes = start_weights(model, done.model, all_of_trunk=False)
    own, before = model.state_dict(), fresh.state_dict()
    assert set(own) - set(source) == set() and set(source) - set(own) == {"mask_token"}
    heads = {"head.weight", "head.bias"}  # of the same shape here, by chance
    assert all(torch.equal(own[name], source[name]) for name in set(own) - heads)
    assert all(torch.equal(own[name], before[name]) for name in heads)
    changed = {name for name in own if not torch.equal(own[name], before[name])}
    assert "in_proj.weight" in changed and any("correction" in name for name in changed)
    assert notes[0].endswith(f"{len(own) - 2} of {len(own)} tensors") and notes[1].endswith(": head.weight, head.bias")
    fresh.load_state_dict({name: before[name] if name in heads else source[name] for name in own})
    bag = load_inputs(open_config(home), 42).bags[0]
    with torch.no_grad():
        assert torch.equal(model(bag.features[None], bag.graph), fresh(bag.features[None], bag.graph))


def test_a_run_from_it_is_recorded_resumes_bit_for_bit_and_knows_what_its_start_has_seen(
    home, done, tmp_path, monkeypatch
):
    how = {"arm": "gated_srp", "seed": 42, "init": done.path}
    whole = train(open_config(home, out=str(tmp_path / "a")), **how)
    digest = hashlib.sha256(done.model.read_bytes()).hexdigest()
    assert whole.environment["init"]["sha256"] == whole.card["init"]["sha256"] == digest
    assert whole.card["init"]["masking"] == {"share": 0.5, "block": 3} and "path" not in whole.card["init"]
    assert read_seen(whole.card, whole.path).of("extra_train") == "training slide"
    assert (
        "the mean of beta typically" not in (whole.path / "log.txt").read_text()
    )  # from where they are, not from zero
    left, bag = [7], RunCallbacks.bag

    def fails(self, one):
        left[0] -= 1
        if not left[0]:
            raise RuntimeError("stopped")
        bag(self, one)

    config = open_config(home, out=str(tmp_path / "b"))
    with monkeypatch.context() as patch:
        patch.setattr(RunCallbacks, "bag", fails)
        with pytest.raises(RuntimeError, match="stopped"):
            train(config, **how)
    assert bytes_of(train(config, arm="gated_srp", seed=42).path) == bytes_of(whole.path)
    with pytest.raises(UserError, match="was begun from"):  # finished, and asked for from other weights
        train(config, arm="gated_srp", seed=42, init=whole.path)


def test_a_row_of_a_study_starts_from_the_pretraining_of_its_arm_and_seed(home, done):
    row = Row.of("gated_srp@train.init=pretrained")
    (cell,) = plan(open_config(home, train__epochs=1), [row], [42])
    run = train(cell.config, arm=cell.arm, seed=cell.seed)
    assert run.card["init"]["sha256"] == hashlib.sha256(done.model.read_bytes()).hexdigest()
    assert "pretrained on masked patches" in (run.path / "log.txt").read_text()
    assert find_runs(home.parent / "runs" / "pretrained") and done.path not in find_runs(home.parent / "runs")
    refuse_mismatches([cell], {})
    later = plan(open_config(home, train__epochs=1), [row], [43])
    for refused in (lambda: train(later[0].config, arm="gated_srp", seed=43), lambda: refuse_mismatches(later, {})):
        with pytest.raises(UserError, match=r"Run `gated-srp pretrain COHORT --arm gated_srp --seed 43` first"):
            refused()
    card, tensors = read_tensors(done.model, called="", cure="")
    whole = done.model.read_bytes()
    try:
        write_tensors(done.model, tensors, {**card, "cohort": "another"})
        with pytest.raises(UserError, match="was begun from"):
            refuse_mismatches([cell], {})
    finally:
        done.model.write_bytes(whole)


def test_weights_of_na_start_a_gated_model_and_that_is_said(home, tmp_path):
    base = pretrain(home, arm="na", seed=42, out=tmp_path, settings={"train.epochs": 1})
    run = train(home, arm="gated_srp", seed=42, init=base.path, out=tmp_path, settings={"train.epochs": 1})
    said = (run.path / "log.txt").read_text()
    assert "pretrained as na, trained as gated_srp; its gates start as an identity" in said
    assert "the mean of beta typically goes" in said
    later = train(home, arm="na", seed=43, init=run.path, out=tmp_path, settings={"train.epochs": 1})
    assert "warning: of the slides that this run validates and tests on" in (later.path / "log.txt").read_text()
    assert "started anew, since the file has none that fit: blocks.0.correction" in said


def test_what_does_not_fit_is_refused(home, done, tmp_path):
    def refused(match: str, *, arm: str = "gated_srp", seed: int = 42, init: Path = done.model, **changes: object):
        with pytest.raises(UserError, match=match):
            train(open_config(home, out=str(tmp_path / "runs"), **changes), arm=arm, seed=seed, init=init)

    refused("pretrained as gated_srp, whose blocks are not those of diff", arm="diff")
    refused("pretrained as gated_srp, whose blocks are not those of vit4", arm="vit4")
    refused("pretrained as gated_srp, whose blocks are not those of abmil", arm="abmil")
    refused("a pretraining has no head for labels", train__only="gate", model__num_heads=4)
    with pytest.raises(UserError, match=r"train\.init: a pretraining has no head for labels"):
        train(open_config(home, train__only="gate", train__init="pretrained"), arm="gated_srp", seed=42)
    refused("other sizes: num_heads 2, here 4", model__num_heads=4)
    refused("other sizes: delta 1.0, here 2.0", model__delta=2.0)
    refused(
        r"of the slides that this run validates and tests on, \d+ of \d+ slides are known to these weights", seed=43
    )
    card, tensors = read_tensors(done.model, called="", cure="")
    write_tensors(tmp_path / "other.safetensors", tensors, {**card, "encoder": "resnet50"})
    refused("features of resnet50; those of this cohort are of uni_v2", init=tmp_path / "other.safetensors")
    with pytest.raises(UserError, match=r"it predicts features of masked patches, and no label.*--init"):
        predict(done.path, home.parent / "feats")
    with pytest.raises(UserError, match="arm 'clam_sb': cannot be pretrained"):
        pretrain(open_config(home, features=str(tmp_path / "none")), arm="clam_sb", seed=42)  # before anything is read
    assert not list((tmp_path / "runs").rglob("config.yaml"))


def test_packed_slides_give_the_same_errors_but_for_rounding(home, done, tmp_path):
    run = pretrain(home, arm="gated_srp", seed=42, out=tmp_path, settings={"train.pack": 4096})
    assert pd.Series(run.predictions("val")["error"]).tolist() == pytest.approx(
        done.predictions("val")["error"].tolist(), rel=1e-4
    )
