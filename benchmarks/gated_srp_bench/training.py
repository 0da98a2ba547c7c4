"""From disk to step: epochs of our training loop over feature files, and the same steps on bags that are in memory already.

Slides of 2,000 to 20,000 patches in float16, as HDF5 files that are stored plainly (TRIDENT's layout) or with gzip, read cold (the system's
memory of them is dropped before) or warm, without `cache` and from it. An epoch of each takes turns with the bare steps.
"""

import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from gated_srp.config.load import load_config
from gated_srp.data.loader import BagLoader, SlideBag
from gated_srp.machine import has_bf16
from gated_srp.models import build_model
from gated_srp.training.callbacks import RunCallbacks
from gated_srp.training.folder import RunFolder
from gated_srp.training.inputs import TrainingData, load_inputs
from gated_srp.training.loop import Training, accumulate, train_epoch
from gated_srp.training.ranks import Ranks
from gated_srp_bench.loading import write_bag
from gated_srp_bench.measure import IN_DIM, Row

CLASSES, ACCUMULATION = 3, 16
BARE = "bare steps"
FILES = ("plain files, cold", "plain files, warm", "gzip files, cold", "gzip files, warm")
CACHED = "cache, warm"  # what `cache:` makes of either kind
PARTS = {"": "seconds", " processor": "processor", " waiting": "waiting"}  # of an epoch, by the end of a row's name


@dataclass(frozen=True)
class Epoch:
    """One epoch: its seconds, the processor time of this process and its readers, and how long steps waited for a bag."""

    seconds: float
    processor: float
    waiting: float = 0.0


def measure_training(
    *, slides: int = 64, patches: tuple[int, int] = (2_000, 20_000), width: int = IN_DIM, turns: int = 1,
    dtype: str = "float32", kinds: Sequence[str] = (*FILES, CACHED), **sizes: Any,
) -> list[Row]:  # fmt: skip
    """Rows of phase ``epoch``; ``tokens``: patches of the epoch. ``sizes``: of the model, other than the paper's."""
    low, high = patches
    counts = [low + (high - low) * number // max(slides - 1, 1) for number in range(slides)]
    took: dict[str, list[Epoch]] = {kind: [] for kind in (BARE, *kinds)}
    with TemporaryDirectory(prefix="gated-srp-bench-") as place:
        cohorts = {kind: _cohort(Path(place), kind, counts, width) for kind in kinds}
        model = build_model("gated_srp", in_dim=width, num_outputs=CLASSES, seed=42, **sizes)
        loops = {kind: _Loop(kind, *cohort, model, dtype) for kind, cohort in cohorts.items()}
        first = next(iter(loops.values()))
        bags = [first.inputs.bags[row] for row in range(slides)]
        jobs: dict[str, Callable[[], Epoch]] = {BARE: lambda: first.bare(bags)}
        jobs |= {kind: loop.epoch for kind, loop in loops.items()}
        try:
            first.bare(bags[:1])  # to warm up
            order = list(jobs)
            for turn in range(turns):
                for kind in order[turn % len(order) :] + order[: turn % len(order)]:
                    took[kind].append(jobs[kind]())
        finally:
            for loop in loops.values():
                loop.close()
    return [
        Row.of(sum(counts), "epoch", f"{kind}{ending}", dtype, [getattr(epoch, part) for epoch in epochs])
        for kind, epochs in took.items()
        for ending, part in PARTS.items()
    ]


def _cohort(home: Path, kind: str, counts: Sequence[int], width: int) -> tuple[TrainingData, Any]:
    """The slides as files of this kind, those of an earlier kind where they are the same, and the settings of a run over them."""
    stored = "gzip" if kind.startswith("gzip") else "plain"
    table, split = ["slide_id,label"], ["slide_id,split"]  # epochs go over all slides, whatever their part
    for number, count in enumerate(counts):
        path = home / stored / f"slide{number:03d}.h5"
        if not path.exists():
            write_bag(
                path, count, width, seed=number, dtype="float16", compression="gzip" if stored == "gzip" else None
            )
        table.append(f"slide{number:03d},class{number % CLASSES}")
        split.append(f"slide{number:03d},{'train' if number < len(counts) - 1 else 'val'}")
    for name, lines in (("slides.csv", table), ("split.csv", split)):
        (home / name).write_text("\n".join(lines) + "\n")
    cache = "cache: cache\n" if kind == CACHED else ""
    yaml = home / f"{kind}.yaml"
    yaml.write_text(f"name: bench\nfeatures: {stored}\ntable: slides.csv\nout: runs\nsplit: split.csv\n{cache}")
    config = load_config(yaml, {"train.epochs": 10_000, "train.accumulation": ACCUMULATION})
    return load_inputs(config, 42, 0), config


class _Loop:
    """The training loop over one kind of files, epoch after epoch."""

    def __init__(self, kind: str, inputs: TrainingData, config: Any, model: Any, dtype: str) -> None:
        self.inputs, self.cold = inputs, kind.endswith("cold")
        ranks = Ranks(torch.device("cpu"), "bf16" if dtype == "bfloat16" and has_bf16() else "32")
        self.loader = BagLoader(inputs.bags, workers=config.train.workers)
        self.training = Training(ranks, model, inputs.task, self.loader, config.train, 42)
        run = RunFolder(config.out / kind)
        run.path.mkdir(parents=True)
        self.callbacks = RunCallbacks(run, ranks, save_every=60.0)
        self.callbacks.begin(self.training, inputs, {})
        if inputs.bags.cache is not None:
            for row in range(len(inputs.bags)):
                inputs.bags[row]
        for _ in self.loader.epoch([0]):  # starts the readers, which live as long as a run
            pass

    def close(self) -> None:
        self.callbacks.close()
        self.loader.close()
        self.training.gates.close()

    def epoch(self) -> Epoch:
        (forget if self.cold else _read)(self.inputs.bags.files)
        waited, bags_of = 0.0, self.loader.epoch

        def watched(*order: Any) -> Iterator[SlideBag]:
            nonlocal waited
            bags = bags_of(*order)
            while True:
                start = time.perf_counter()
                bag = next(bags, None)
                waited += time.perf_counter() - start
                if bag is None:
                    return
                yield bag

        self.loader.epoch = watched  # type: ignore[method-assign,assignment]
        try:
            found = _timed(lambda: train_epoch(self.training, range(len(self.inputs.bags)), self.callbacks))
        finally:
            self.loader.epoch = bags_of  # type: ignore[method-assign]
        self.training.progress.epoch, self.training.progress.bags = self.training.progress.epoch + 1, 0
        return replace(found, waiting=waited)

    def bare(self, bags: Sequence[SlideBag]) -> Epoch:
        """The steps alone: bags in memory, no callbacks."""
        training = self.training

        class NoCallbacks:
            def bag(self, bag: Any) -> None: ...
            def window(self, training: Training) -> None: ...
            def epoch(self, training: Training) -> None: ...

        def steps() -> None:
            for start in range(0, len(bags), ACCUMULATION):
                window = bags[start : start + ACCUMULATION]
                accumulate(training, list(range(len(window))), iter(window), NoCallbacks())
                training.gates.take()
                torch.nn.utils.clip_grad_norm_(training.model.parameters(), 1.0)
                training.optimiser.step()
                training.gradient.zero_()

        training.model.train()
        return _timed(steps)


def forget(files: Sequence[Path]) -> None:
    """Drop the system's memory of these files, so that they come from the disk."""
    for file in files:
        with file.open("rb") as stream:
            os.fsync(stream.fileno())  # what is not yet on the disk cannot be dropped
            os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _read(files: Sequence[Path]) -> None:
    for file in files:
        file.read_bytes()


def _timed(job: Callable[[], object]) -> Epoch:
    start, used = time.perf_counter(), _processor()
    job()
    return Epoch(time.perf_counter() - start, _processor() - used)


def _processor() -> float:
    """Processor seconds of this process and all that it started, and they in turn."""
    parents, used = dict[int, int](), dict[int, float]()
    for entry in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = entry.read_text().rsplit(")", 1)[1].split()
        except OSError:  # it has just ended
            continue
        parents[int(entry.parent.name)] = int(fields[1])
        used[int(entry.parent.name)] = sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")
    family = {os.getpid()}
    while grown := {child for child, parent in parents.items() if parent in family} - family:
        family |= grown
    return sum(used[one] for one in family)
