"""Small generated cohorts on disk for the tests of training: feature files, a table, a YAML."""

import os
import signal
from pathlib import Path

import numpy as np
import pytest
import yaml
from factories import Slide, make_slide, write_trident

from gated_srp.config import CohortConfig, load_config
from gated_srp.data.loader import SlideBag
from gated_srp.errors import Interrupted
from gated_srp.training.callbacks import RunCallbacks
from gated_srp.training.train import train

SMALL = {"dim": 24, "depth": 2, "num_heads": 2, "num_landmarks": 4, "hidden_dim": 4}
WIDTH = 8


def planted(seed: int, strength: float, *, columns: int = 6, rows: int = 5) -> Slide:
    """A slide whose patches are shifted along one direction by ``strength``."""
    slide = make_slide(seed, columns=columns, rows=rows, width=WIDTH)
    direction = np.linspace(-1, 1, WIDTH, dtype=np.float32)
    return Slide(slide.cells, slide.features + np.float32(strength) * direction)


def write_cohort(folder: Path, *, slides: int = 24, strength: float = 2.0, **settings: object) -> Path:
    """Two classes, one slide a patient; returns the YAML. ``settings`` are put into it as they are."""
    rows = ["slide,case,label"]
    for i in range(slides):
        label = i % 2
        write_trident(folder / "feats", f"s{i:03d}", planted(i, strength * (2 * label - 1)))
        rows.append(f"s{i:03d},p{i:03d},{('benign', 'tumour')[label]}")
    (folder / "table.csv").write_text("\n".join(rows) + "\n")
    return write_yaml(folder, target="label", **settings)


def write_survival_cohort(folder: Path, *, slides: int = 30, **settings: object) -> Path:
    """The planted shift shortens life; two of five are censored; every third patient has two slides."""
    rows, rng = ["slide,case,time,event"], np.random.default_rng(0)
    for i in range(slides):
        risk = rng.normal()
        time = float(np.exp(3 - risk + 0.1 * rng.normal()))
        for part in range(1 + (i % 3 == 0)):
            write_trident(folder / "feats", f"s{i:03d}_{part}", planted(2 * i + part, 2 * risk))
            rows.append(f"s{i:03d}_{part},p{i:03d},{time:.3f},{int(i % 5 > 1)}")
    (folder / "table.csv").write_text("\n".join(rows) + "\n")
    return write_yaml(folder, time="time", event="event", **settings)


def write_yaml(folder: Path, **settings: object) -> Path:
    train = {"epochs": 3, "accumulation": 4, "lr": 1e-3, "workers": 0, **settings.pop("train", {})}
    plain = {"name": "toy", "features": "feats", "table": "table.csv", "model": SMALL, "train": train, **settings}
    path = folder / "cohort.yaml"
    path.write_text(yaml.safe_dump(plain))
    return path


def train_interrupted(config: CohortConfig, arm: str, *, after: int, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A run of seed 42 that a signal ends at so many bags; gives the bags that were seen."""
    seen: list[str] = []
    bag = RunCallbacks.bag

    def signalled(self: RunCallbacks, one: SlideBag) -> None:
        seen.append(one.slide)
        if len(seen) == after:
            os.kill(os.getpid(), signal.SIGINT)
        bag(self, one)

    with monkeypatch.context() as patch:
        patch.setattr(RunCallbacks, "bag", signalled)
        with pytest.raises(Interrupted):
            train(config, arm=arm, seed=42)
    return seen


def open_config(path: Path, **overrides: object) -> CohortConfig:
    return load_config(path, {key.replace("__", "."): value for key, value in overrides.items()})
