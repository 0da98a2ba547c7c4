"""A run that was ended in any way goes on, and ends with the bits of a run never ended."""

import errno
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from toy_cohorts import open_config, write_cohort

from gated_srp.errors import Interrupted, UserError
from gated_srp.training.callbacks import RunCallbacks
from gated_srp.training.folder import RunFolder
from gated_srp.training.state import load_checkpoint
from gated_srp.training.train import train

KILLS = int(os.environ.get("GATED_SRP_KILLS", "2"))
RESULTS = (
    *("metrics.json", "history.csv", "gates.csv", "split.csv", "model.safetensors"),
    *(f"predictions_{part}_{level}.csv" for part in ("val", "test") for level in ("slide", "case")),
)
FILES = {*RESULTS, "config.yaml", "environment.json", "features.csv", "log.txt", ".lock"}


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    """The YAML of a cohort and the results of a run on it that nobody disturbed."""
    folder = tmp_path_factory.mktemp("reference")
    yaml = write_cohort(folder, train={"epochs": 4, "accumulation": 3, "workers": 1}, cache="cache")
    return yaml, results(train(open_config(yaml), arm="gated_srp", seed=42).path)


def results(run: Path) -> dict[str, bytes]:
    return {name: (run / name).read_bytes() for name in RESULTS}


def start(yaml: Path, out: Path) -> subprocess.Popen:
    command = [sys.executable, str(Path(__file__).with_name("child_run.py")), str(yaml), str(out)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def wait_for_states(child: subprocess.Popen, state: Path, changes: int) -> None:
    """Until the state was written so many times, or the child ended."""
    seen, last, deadline = 0, None, time.monotonic() + 120
    while seen < changes and child.poll() is None and time.monotonic() < deadline:
        try:
            now = state.stat().st_mtime_ns
        except FileNotFoundError:
            now = None
        seen += now is not None and now != last
        last = now
        time.sleep(0.001)


def test_killed_at_random_moments_a_run_ends_with_the_same_bits(reference, tmp_path):
    yaml, expected = reference
    draw, killed, tries = random.Random(KILLS), 0, 0
    while killed < KILLS:
        tries += 1
        out, over = tmp_path / str(tries), False
        while killed < KILLS and not over:
            child = start(yaml, out)
            wait_for_states(child, out / "toy/gated_srp/seed42/state.pt", draw.randint(1, 6))
            time.sleep(draw.random() * 0.05)
            child.kill()
            said = child.communicate()[0]
            assert child.returncode in (-signal.SIGKILL, 0), said
            over = child.returncode == 0
            killed += not over
        run = train(open_config(yaml, out=str(out)), arm="gated_srp", seed=42).path
        assert results(run) == expected
        assert {path.name for path in run.iterdir()} == FILES


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM])
def test_a_run_asked_to_stop_saves_inside_an_epoch_and_says_how_to_go_on(reference, tmp_path, monkeypatch, how):
    yaml, expected = reference
    config, bags, bag = open_config(yaml, out=str(tmp_path)), [], RunCallbacks.bag

    def signalled(self, seen):
        bags.append(seen.slide)
        if len(bags) == 5:  # the second of a window of three
            os.kill(os.getpid(), how)
        bag(self, seen)

    before = signal.getsignal(how)
    with monkeypatch.context() as patch:
        patch.setattr(RunCallbacks, "bag", signalled)
        with pytest.raises(Interrupted, match=r"stopped and saved\. Start the same command again to go on\."):
            train(config, arm="gated_srp", seed=42)
    assert len(bags) <= 6 and signal.getsignal(how) is before
    progress = load_checkpoint(tmp_path / "toy/gated_srp/seed42/state.pt").progress
    assert (progress.step, progress.bags) == (1, 3)
    assert results(train(config, arm="gated_srp", seed=42).path) == expected


class Stopped(RuntimeError):
    pass


@pytest.mark.parametrize("moment", ["bag", "window", "epoch"])
def test_an_error_at_any_moment_keeps_what_was_learnt(reference, tmp_path, monkeypatch, moment):
    yaml, expected = reference
    calls = {"bag": 23, "window": 9, "epoch": 2}[moment]
    plain = getattr(RunCallbacks, moment)

    def fails(self, what):
        nonlocal calls
        calls -= 1
        if calls == 0:
            raise Stopped
        plain(self, what)

    config = open_config(yaml, out=str(tmp_path))
    with monkeypatch.context() as patch:
        patch.setattr(RunCallbacks, moment, fails)
        with pytest.raises(Stopped):
            train(config, arm="gated_srp", seed=42)
    progress = load_checkpoint(tmp_path / "toy/gated_srp/seed42/state.pt").progress
    assert (progress.epoch, progress.bags) == {"bag": (1, 0), "window": (1, 9), "epoch": (2, 0)}[moment]
    assert results(train(config, arm="gated_srp", seed=42).path) == expected


def test_a_run_that_stops_early_is_the_start_of_the_whole_one_and_resumes_bit_for_bit(reference, tmp_path, monkeypatch):
    yaml, whole = reference
    said, asked = [], {"train.patience": 1, "metric": "accuracy"}

    def run(out, **how):
        return train(open_config(yaml, out=str(tmp_path / out)), arm="gated_srp", seed=42, settings=asked, **how)

    straight = run("straight", progress=lambda event: said.append(event.text))
    scores = straight.history.query("split == 'val' and metric == 'accuracy'")["value"].tolist()
    trained = next((n for n in range(2, 5) if scores[n - 1] <= max(scores[: n - 1])), 4)
    assert len(scores) == trained < 4
    ends = {"trained": trained, "of": 4, "patience": 1}
    assert straight.results["epochs"] == straight.card["epochs"] == ends
    assert any(text.startswith("stopped early, 1 epoch without a better one (train.patience)") for text in said)
    rows = (straight.path / "history.csv").read_bytes()
    assert whole["history.csv"].startswith(rows)  # the learning rate falls as if all epochs were to come
    left, epoch = trained, RunCallbacks.epoch

    def fails(self, training):
        nonlocal left
        left -= 1
        epoch(self, training)
        if left in (0, 1):  # after the epoch before the last, and after the one that ends it
            raise Stopped

    with monkeypatch.context() as patch:
        patch.setattr(RunCallbacks, "epoch", fails)
        for _ in range(2):
            with pytest.raises(Stopped):
                run("stopped")
    assert results(run("stopped").path) == results(straight.path)


def test_a_full_disk_loses_nothing_that_was_saved(reference, tmp_path, monkeypatch):
    yaml, expected = reference
    config, writes = open_config(yaml, out=str(tmp_path)), 0

    def full(descriptor):
        nonlocal writes
        writes += 1
        if writes > 20:  # two per file
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(UserError, match=r"No space left on device.*free some space"):
            train(config, arm="gated_srp", seed=42, save_every=0)
    run = tmp_path / "toy/gated_srp/seed42"
    assert load_checkpoint(run / "state.pt").progress.step > 1
    assert not list(run.glob("*.part"))
    assert results(train(config, arm="gated_srp", seed=42).path) == expected


def test_a_changed_table_other_start_weights_or_another_precision_are_refused(
    reference, tmp_path, monkeypatch, finished
):
    yaml, _ = reference
    config = open_config(yaml, out=str(tmp_path))
    with monkeypatch.context() as patch:
        patch.setattr(RunCallbacks, "window", lambda self, training: (_ for _ in ()).throw(Interrupted("later")))
        with pytest.raises(Interrupted):
            train(config, arm="gated_srp", seed=42)
    with pytest.raises(UserError, match="was begun from fresh weights, not from"):
        train(config, arm="gated_srp", seed=42, init=finished / "model.safetensors")
    run = RunFolder(tmp_path / "toy" / "gated_srp" / "seed42")
    begun = {key: one for key, one in run.environment.items() if key != "checksum"}
    with monkeypatch.context() as patch:
        patch.setattr("gated_srp.machine.has_bf16", lambda: False)
        run.write_json("environment.json", begun | {"precision": "bf16"})
        with pytest.raises(UserError, match="seed42: was begun in bf16, which this machine lacks"):
            train(config, arm="gated_srp", seed=42)
        run.write_json("environment.json", begun)
    table = yaml.parent / "table.csv"
    text = table.read_text()
    try:
        for changed in ("\n".join(text.splitlines()[:-2]), text.replace("s001,p001,tumour", "s001,p001,benign")):
            table.write_text(changed + "\n")
            with pytest.raises(UserError, match="begun with other slides, labels or parts"):
                train(config, arm="gated_srp", seed=42)
    finally:
        table.write_text(text)


def test_a_state_that_cannot_be_read_is_told(tmp_path):
    (tmp_path / "state.pt").write_bytes(b"half a state")
    with pytest.raises(UserError, match="the saved state cannot be read"):
        load_checkpoint(tmp_path / "state.pt")
