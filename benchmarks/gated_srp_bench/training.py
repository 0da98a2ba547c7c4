"""An epoch from disk: our training loop, its bare steps, and the same loop around the textbook that opens and prepares anew."""

import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F

from gated_srp.config.load import load_config
from gated_srp.data.files.formats import read_bag
from gated_srp.data.loader import BagLoader
from gated_srp.machine import has_bf16
from gated_srp.models import build_model
from gated_srp.training.callbacks import RunCallbacks
from gated_srp.training.folder import RunFolder
from gated_srp.training.inputs import TrainingData, load_inputs
from gated_srp.training.loop import Training, accumulate, train_epoch
from gated_srp.training.ranks import Ranks
from gated_srp_bench import textbook
from gated_srp_bench.loading import write_bag
from gated_srp_bench.measure import STRIDE

CLASSES, ACCUMULATION = 3, 16


@dataclass(frozen=True)
class Epoch:
    """Seconds of one epoch: the whole loop, its bare steps, and the textbook's loop."""

    dtype: str
    loop: float
    bare: float
    textbook: float


def measure_training(*, bags: int = 64, patches: int = 10_000, width: int = 1536, dtypes: Sequence[str]) -> list[Epoch]:
    """Epochs over generated bags in a temporary folder. Ours is the second epoch: the first fills the cache."""
    with tempfile.TemporaryDirectory(prefix="gated-srp-bench-") as place:
        inputs, config = _cohort(Path(place), bags, patches, width)
        rows = list(range(bags))
        plain = _textbook_epoch(inputs, rows, width)
        return [Epoch(dtype, *_our_epoch(inputs, config, rows, width, dtype), plain) for dtype in dtypes]


def _cohort(home: Path, bags: int, patches: int, width: int) -> tuple[TrainingData, Any]:
    lines = ["slide_id,label"]
    for number in range(bags):
        write_bag(home / "feats" / f"slide{number:03d}.h5", patches, width, seed=number)
        lines.append(f"slide{number:03d},class{number % CLASSES}")
    (home / "slides.csv").write_text("\n".join(lines) + "\n")
    settings = "name: bench\nfeatures: feats\ntable: slides.csv\ncache: cache\nout: runs\n"
    (home / "cohort.yaml").write_text(settings)
    config = load_config(home / "cohort.yaml", {"train.epochs": 3, "train.accumulation": ACCUMULATION})
    return load_inputs(config, 42, 0), config


def _our_epoch(inputs: TrainingData, config: Any, rows: list[int], width: int, dtype: str) -> tuple[float, float]:
    ranks = Ranks(torch.device("cpu"), "bf16" if dtype == "bfloat16" and has_bf16() else "32")
    model = build_model("gated_srp", in_dim=width, num_outputs=CLASSES, seed=42)
    with BagLoader(inputs.bags, workers=config.train.workers) as loader:
        training = Training(ranks, model, inputs.task, loader, config.train, 42)
        run = RunFolder(config.out / f"run-{dtype}")
        run.path.mkdir(parents=True)
        callbacks = RunCallbacks(run, ranks, save_every=60.0)
        callbacks.begin(training, inputs, {})
        try:
            train_epoch(training, rows, callbacks)
            training.progress.epoch, training.progress.bags = 1, 0
            loop = _seconds(lambda: train_epoch(training, rows, callbacks))
            bare = _seconds(lambda: _bare_epoch(training, [loader.dataset[0]] * len(rows)))
        finally:
            callbacks.close()
    return loop, bare


def _bare_epoch(training: Training, bags: list[Any]) -> None:
    """The steps alone: a bag in memory, no callbacks."""

    class NoCallbacks:
        def bag(self, bag: Any) -> None: ...
        def window(self, training: Training) -> None: ...
        def epoch(self, training: Training) -> None: ...

    for start in range(0, len(bags), ACCUMULATION):
        window = bags[start : start + ACCUMULATION]
        accumulate(training, list(range(len(window))), iter(window), NoCallbacks())
        training.gates.take()
        torch.nn.utils.clip_grad_norm_(training.model.parameters(), 1.0)
        training.optimiser.step()
        training.gradient.zero_()


def _textbook_epoch(inputs: TrainingData, rows: list[int], width: int) -> float:
    model = textbook.SlideModel(width, CLASSES)
    optimiser = torch.optim.AdamW(model.parameters(), lr=2e-4, weight_decay=0.05)

    def epoch() -> None:
        for start in range(0, len(rows), ACCUMULATION):
            window = rows[start : start + ACCUMULATION]
            for row in window:
                bag = read_bag(inputs.bags.files[row])
                index, mask = textbook.neighbour_table(bag.coords, STRIDE)
                logits = model(bag.features, (index, mask, textbook.homogeneity(bag.features, index, mask)))
                loss = F.cross_entropy(logits, torch.tensor(row % CLASSES)) / len(window)
                loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimiser.step()
            optimiser.zero_grad()

    return _seconds(epoch)


def _seconds(job: Callable[[], object]) -> float:
    start = time.perf_counter()
    job()
    return time.perf_counter() - start
