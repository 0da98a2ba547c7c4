"""A stranger's day on the command line: train, a kill, train again, predict, evaluate."""

import csv
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import yaml
from factories import Slide, make_slide, write_trident
from toy_cohorts import SMALL, WIDTH

from gated_srp.cli import main

RUN_FILES = {
    *("config.yaml", "split.csv", "history.csv", "gates.csv", "metrics.json", "model.safetensors", "environment.json"),
    *(f"predictions_{part}_{level}.csv" for part in ("val", "test") for level in ("slide", "case")),
    *("features.csv", "log.txt", ".lock"),
}
AXES = np.linalg.qr(np.random.default_rng(7).standard_normal((WIDTH, 3)))[0].T.astype(np.float32)  # three directions


def shifted(seed: int, shift: np.ndarray) -> Slide:
    """A third of the patches carry the signal."""
    slide = make_slide(seed, columns=6, rows=5, width=WIDTH)
    slide.features[: len(slide.features) // 3] += shift
    return slide


def write_classes(folder: Path, slides: int, first: int) -> Path:
    """Three classes, two slides a patient."""
    rows = [["slide", "case", "label"]]
    for i in range(slides):
        kind = i // 2 % 3
        write_trident(folder / "feats", f"s{first + i}", shifted(first + i, 6 * AXES[kind]))
        rows.append([f"s{first + i}", f"p{first + i // 2}", ("adenoma", "carcinoma", "normal")[kind]])
    return write_cohort(folder, rows, target="label")


def write_survival(folder: Path, slides: int, first: int) -> Path:
    """The signal shortens life; 40 % are censored."""
    rng, rows = np.random.default_rng(first), [["slide", "case", "months", "event"]]
    for i in range(slides):
        risk = rng.normal()
        write_trident(folder / "feats", f"s{first + i}", shifted(first + i, np.float32(6 * risk) * AXES[0]))
        rows.append([f"s{first + i}", f"p{first + i}", f"{np.exp(3 - risk):.3f}", int(i % 5 > 1)])
    return write_cohort(folder, rows, time="months", event="event")


def write_cohort(folder: Path, rows: list[list[object]], **columns: str) -> Path:
    with (folder / "table.csv").open("w", newline="") as file:
        csv.writer(file).writerows(rows)
    train = {"epochs": 8, "accumulation": 2, "lr": 2e-3, "workers": 0}
    settings = {"features": "feats", "table": "table.csv", "model": SMALL, "train": train, **columns}
    path = folder / f"{folder.name}.yaml"
    path.write_text(yaml.safe_dump(settings))
    return path


def gated_srp(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> int:
    """The command as the shell calls it; its exit status."""
    monkeypatch.setattr(sys, "argv", ["gated-srp", *map(str, arguments)])
    with pytest.raises(SystemExit) as ended:
        main()
    return int(ended.value.code or 0)


def train_and_kill(cohort: Path, run: Path) -> None:
    """SIGKILL as soon as a first epoch is written down."""
    asked = [sys.executable, "-c", "from gated_srp.cli import main; main()", "train", str(cohort)]
    child = subprocess.Popen(asked, stdout=subprocess.DEVNULL, env=os.environ | {"OMP_NUM_THREADS": "1"})
    limit = time.monotonic() + 240
    while not (run / "history.csv").exists() and child.poll() is None and time.monotonic() < limit:
        time.sleep(0.01)
    child.send_signal(signal.SIGKILL)
    assert child.wait() == -signal.SIGKILL
    assert (run / "state.pt").is_file() and not (run / "metrics.json").exists()


@pytest.fixture
def folders(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("lab", "clinic"):
        (tmp_path / name).mkdir()
    return tmp_path


def test_classes_from_training_to_external_validation(folders, monkeypatch, capfd):
    cohort = write_classes(folders / "lab", 40, 0)
    outside = write_classes(folders / "clinic", 18, 500)
    run = folders / "lab/runs/lab/gated_srp/seed42"

    train_and_kill(cohort, run)
    assert gated_srp(monkeypatch, "train", cohort) == 0
    assert "goes on at epoch" in capfd.readouterr().out
    assert {path.name for path in run.iterdir()} == RUN_FILES
    assert pd.read_csv(run / "history.csv")["epoch"].max() == 8

    broken = next((folders / "clinic").rglob("s503.h5"))
    whole = broken.read_bytes()
    broken.write_bytes(whole[:2000])
    assert gated_srp(monkeypatch, "predict", run, "clinic/feats", "-o", "found/p.csv", "--workers", 0) == 0
    said = capfd.readouterr()
    assert "17 slides predicted by 1 run, 1 skipped" in said.out and "s503.h5: cut short" in said.err
    table, truth = pd.read_csv("found/p.csv"), pd.read_csv("clinic/table.csv").set_index("slide")["label"]
    assert (table["predicted"] == table["slide"].map(truth)).mean() > 0.8
    assert pd.read_csv("found/p_skipped.csv")["slide"].tolist() == ["s503"]

    broken.write_bytes(whole)
    assert gated_srp(monkeypatch, "evaluate", run, outside, "-o", "valid", "--repeats", 50) == 0
    said = capfd.readouterr()
    assert "18 slides of 9 patients, scored by slide" in said.out
    found = json.loads(Path("valid/evaluation.json").read_text())["metrics"]["macro_auc"]
    assert found["value"] > 0.9 and found["low"] <= found["value"] <= found["high"]

    assert gated_srp(monkeypatch, "predict", run, "lab/table.csv", "-o", "none.csv") == 2
    assert "no slide of 1 can be predicted; nothing was written" in capfd.readouterr().err
    assert not Path("none.csv").exists()


def test_survival_from_training_to_external_validation(folders, monkeypatch, capfd):
    cohort = write_survival(folders / "lab", 40, 0)
    outside = write_survival(folders / "clinic", 20, 500)
    run = folders / "lab/runs/lab/gated_srp/seed42"

    train_and_kill(cohort, run)
    assert gated_srp(monkeypatch, "train", cohort) == 0
    assert {path.name for path in run.iterdir()} == RUN_FILES

    assert gated_srp(monkeypatch, "predict", run, "clinic/feats", "-o", "p.csv", "--workers", 0) == 0
    assert "20 slides predicted" in capfd.readouterr().out
    table = pd.read_csv("p.csv")
    curve = table[[name for name in table if name.startswith("survival_at_")]].to_numpy()
    assert curve.shape == (20, 3) and (np.diff(curve, axis=1) <= 0).all()

    assert gated_srp(monkeypatch, "evaluate", run, outside, "-o", "valid", "--repeats", 50) == 0
    assert "log-rank p" in capfd.readouterr().out
    found = json.loads(Path("valid/evaluation.json").read_text())
    assert found["score"] == "case" and found["metrics"]["c_index"]["value"] > 0.8
    assert set(pd.read_csv("valid/kaplan_meier.csv")["group"]) == {"low", "high"}
