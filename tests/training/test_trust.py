"""The wrong data is never taken for the right data: files that changed, were damaged, or belong to another run."""

import errno
import json
import os
import random
import shutil
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save
from toy_cohorts import open_config, write_cohort

from gated_srp.errors import Interrupted, UserError
from gated_srp.files import write_tensors
from gated_srp.models import load_card, load_model
from gated_srp.training.callbacks import RunCallbacks
from gated_srp.training.folder import RunFolder
from gated_srp.training.state import load_checkpoint
from gated_srp.training.train import train
from gated_srp.training.trained import TrainedRun

FEATURES = "feats/20x_256px_0px_overlap/features_uni_v2"


def begin(config, windows: int = 3, **options) -> Path:
    """Start a run and leave it after some windows, each of which is saved."""
    left, window = windows, RunCallbacks.window

    def leave(self, training):
        nonlocal left
        left -= 1
        window(self, training)
        if not left:
            raise Interrupted("later")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RunCallbacks, "window", leave)
        with pytest.raises(Interrupted):
            train(config, arm="gated_srp", seed=42, save_every=0.0, **options)
    return Path(config.out) / "toy/gated_srp/seed42"


@pytest.fixture
def own(tmp_path):
    """The config of a cohort whose files a test may change."""
    return open_config(write_cohort(tmp_path, slides=16, train={"epochs": 2}), out=str(tmp_path / "runs"))


def results(run: Path) -> dict[str, bytes]:
    return {
        path.name: path.read_bytes()
        for path in run.iterdir()
        if path.name[:4] in ("hist", "gate", "pred", "mode", "metr")
    }


# The files that a run was begun with ----------------------------------------------------------------------------------


def test_a_run_goes_on_with_the_files_it_began_with_and_refuses_a_changed_one_by_name(own, tmp_path):
    begin(own)
    file, other = tmp_path / FEATURES / "s003.h5", tmp_path / FEATURES / "s004.h5"
    content = file.read_bytes()
    shutil.copyfile(other, file)
    with pytest.raises(UserError, match=r"slide 's003'.*s003\.h5.*has changed since.*Restore.*remove the folder"):
        train(own, arm="gated_srp", seed=42)
    file.write_bytes(content)  # another time, the same content
    assert train(own, arm="gated_srp", seed=42).finished


def test_a_place_that_no_sample_sees_is_seen_by_deep(own, tmp_path):
    file = tmp_path / FEATURES / "s003.h5"
    file.write_bytes(file.read_bytes() + bytes(2_000_000))  # HDF5 does not mind
    begin(own, deep=True)
    with file.open("r+b") as stream:
        stream.seek(-100_001, os.SEEK_END)
        stream.write(b"\1")
    with pytest.raises(UserError, match=r"slide 's003'.*has changed since"):
        train(own, arm="gated_srp", seed=42)  # its time has changed, and the run knows the whole content


def test_a_run_of_an_older_version_goes_on_and_says_once_that_its_files_could_not_be_compared(own):
    run = begin(own)
    (run / "features.csv").unlink()
    begin(own)
    assert (run / "features.csv").is_file()
    train(own, arm="gated_srp", seed=42)
    assert (run / "log.txt").read_text().count("begun by a version that kept no fingerprints") == 1


@pytest.mark.parametrize(("seconds", "saved"), [(0.0, True), (1e9, False)])
def test_save_every_says_how_often_a_state_is_saved_within_an_epoch(own, monkeypatch, seconds, saved):
    window, bags = RunCallbacks.window, []

    def look(self, training):
        window(self, training)
        bags.append(load_checkpoint(self.run.state).progress.bags)

    monkeypatch.setattr(RunCallbacks, "window", look)
    train(own, arm="gated_srp", seed=42, save_every=seconds)
    assert (bags[0] > 0) is saved


# Two at once ----------------------------------------------------------------------------------------------------------


def test_settings_are_compared_when_the_folder_is_held_and_not_before(own, monkeypatch):
    """Another process begins the run between the first look at the folder and the lock."""
    lock = RunFolder.lock

    @contextmanager
    def late(self):
        monkeypatch.setattr(RunFolder, "lock", lock)
        begin(open_config(own.features[0].parent / "cohort.yaml", out=str(own.out), train__lr=0.5))
        with lock(self):
            yield

    monkeypatch.setattr(RunFolder, "lock", late)
    with pytest.raises(UserError, match=r"other settings: train\.lr 0\.5, asked 0\.001"):
        train(own, arm="gated_srp", seed=42)


# Damage ---------------------------------------------------------------------------------------------------------------


def mutations(content: bytes, count: int):
    draw = random.Random(0)
    for _ in range(count):
        place = draw.randrange(len(content))
        yield content[:place] + bytes([content[place] ^ (1 << draw.randrange(8))]) + content[place + 1 :]


def test_no_mutated_model_file_loads_with_other_values(finished, tmp_path):
    path, refused = tmp_path / "model.safetensors", 0
    content = (finished / "model.safetensors").read_bytes()
    truth, card = load_model(finished).state_dict(), load_card(finished / "model.safetensors")
    known = {key: value for key, value in card.items() if "sha256" not in key}
    for mutated in mutations(content, 300):
        path.write_bytes(mutated)
        try:
            found, there = load_model(path).state_dict(), load_card(path)
        except UserError:
            refused += 1
            continue
        assert all(torch.equal(found[name], truth[name]) for name in truth)
        assert {key: there[key] for key in known} == known
    assert refused > 290


def test_no_mutated_state_loads_with_other_values(own, tmp_path):
    state, path, refused = begin(own) / "state.pt", tmp_path / "mutated.pt", 0
    truth = flat(load_checkpoint(state))
    for mutated in mutations(state.read_bytes(), 300):
        path.write_bytes(mutated)
        try:
            found = flat(load_checkpoint(path))
        except UserError:
            refused += 1
            continue
        assert found == truth
    assert refused > 290


def flat(found) -> str:
    torch.set_printoptions(profile="full", precision=10)
    try:
        return repr(found)
    finally:
        torch.set_printoptions(profile="default")  # doctests print tensors too


def test_no_mutated_metrics_are_read_as_other_numbers(finished, tmp_path):
    content = (finished / "metrics.json").read_bytes()
    truth = RunFolder(finished).results
    for mutated in mutations(content, 400):
        (tmp_path / "metrics.json").write_bytes(mutated)
        try:
            found = RunFolder(tmp_path).results
        except UserError:
            continue
        assert {key: found.get(key) for key in truth if key != "sha256"} == {
            k: v for k, v in truth.items() if k != "sha256"
        }


def test_a_damaged_state_is_replaced_by_the_one_before_it_with_a_note(own, tmp_path):
    expected = results(train(own, arm="gated_srp", seed=42).path)
    again = own.model_copy(update={"out": tmp_path / "again"})
    run = begin(again, windows=4)
    content = bytearray((run / "state.pt").read_bytes())
    content[len(content) // 2] ^= 1
    (run / "state.pt").write_bytes(content)
    assert results(train(again, arm="gated_srp", seed=42).path) == expected
    assert "state.pt: the saved state cannot be read" in (run / "log.txt").read_text()
    assert "goes on with the state before it" in (run / "log.txt").read_text()
    assert not list(run.glob("state*"))


def test_with_both_states_damaged_the_advice_names_both_and_leads_to_the_same_results(own, tmp_path):
    expected = results(train(own, arm="gated_srp", seed=42).path)
    again = own.model_copy(update={"out": tmp_path / "again"})
    run = begin(again)
    for name in ("state.pt", "state_before.pt"):
        (run / name).write_bytes(b"half a state")
    with pytest.raises(UserError, match=r"Remove state\.pt and state_before\.pt to train from the start") as error:
        train(again, arm="gated_srp", seed=42)
    assert "state.pt" in error.value.where
    for name in ("state.pt", "state_before.pt"):
        (run / name).unlink()
    assert results(train(again, arm="gated_srp", seed=42).path) == expected


def test_a_cut_metrics_file_is_told_and_mended_by_the_advice(own):
    run = train(own, arm="gated_srp", seed=42).path
    expected = results(run)
    (run / "metrics.json").write_bytes(expected["metrics.json"][:100])
    with pytest.raises(UserError, match=r"metrics\.json: .*Remove this file and start the same command again"):
        train(own, arm="gated_srp", seed=42)
    (run / "metrics.json").unlink()
    assert results(train(own, arm="gated_srp", seed=42).path) == expected


def test_what_a_killed_process_left_in_a_finished_run_goes_at_the_next_start(own):
    run = train(own, arm="gated_srp", seed=42).path
    whole = {path.name for path in run.iterdir()}
    for name in ("state.pt", "state_before.pt", ".history.csv.0.part"):
        (run / name).write_bytes(b"left")
    train(own, arm="gated_srp", seed=42)
    assert {path.name for path in run.iterdir()} == whole


def test_a_state_that_cannot_be_removed_does_not_spoil_a_finished_run(own, monkeypatch):
    def full(self, missing_ok=False):
        if self.name.startswith("state"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        os.unlink(self)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", full)
        run = train(own, arm="gated_srp", seed=42)
        assert run.finished and run.state.is_file()
        train(own, arm="gated_srp", seed=42)
    train(own, arm="gated_srp", seed=42)
    assert not run.state.exists()


@pytest.mark.parametrize("temperature", [0, -1.5, float("nan"), float("inf"), "hot", True])
def test_a_temperature_that_is_none_is_refused(finished, tmp_path, temperature):
    model, path = load_model(finished), tmp_path / "model.safetensors"
    card = {key: value for key, value in load_card(finished / "model.safetensors").items() if "sha256" not in key}
    write_tensors(path, model.state_dict(), card | {"temperature": temperature})
    with pytest.raises(UserError, match=r"model\.safetensors: cannot be read \(temperature: input should be"):
        TrainedRun.open(path)


def test_a_model_file_without_checksums_is_read_as_before(finished, tmp_path):
    card = {key: value for key, value in load_card(finished / "model.safetensors").items() if "sha256" not in key}
    (tmp_path / "model.safetensors").write_bytes(save(load_model(finished).state_dict(), {"card": json.dumps(card)}))
    assert TrainedRun.open(tmp_path).task.outputs == TrainedRun.open(finished).task.outputs


# Memory ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("failure", [MemoryError(), RuntimeError("DefaultCPUAllocator: can't allocate memory")])
def test_running_out_of_memory_keeps_its_message_where_saving_runs_out_of_it_too(own, monkeypatch, failure):
    run = begin(own, windows=2)
    before = (run / "state.pt").read_bytes()

    def fails(*args, **options):
        raise failure

    with monkeypatch.context() as patch:
        patch.setattr("gated_srp.training.loop.training_step", fails)
        patch.setattr(torch, "save", fails)
        with pytest.raises(UserError, match=r"out of memory at slide .*The state before it is kept"):
            train(own, arm="gated_srp", seed=42)
    assert (run / "state.pt").read_bytes() == before
    assert train(own, arm="gated_srp", seed=42).finished


@pytest.mark.parametrize(
    "place", ["gated_srp.data.loader.prepare", "gated_srp.training.loop.learning_rate", "torch.save"]
)
def test_running_out_of_memory_elsewhere_than_in_a_forward_says_so(own, monkeypatch, place):
    def fails(*args, **options):
        return np.empty(2**60, np.float32)

    begin(own, windows=2)
    with monkeypatch.context() as patch:
        patch.setattr(place, fails)
        with pytest.raises(
            UserError, match=r"out of memory (while slide 's\d+' was read|\(Unable to allocate 4\.00 EiB)"
        ):
            train(own, arm="gated_srp", seed=42)
    assert train(own, arm="gated_srp", seed=42).finished
