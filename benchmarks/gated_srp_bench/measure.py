"""What is measured and how: the textbook and our arms on one generated slide; seconds in this process, peaks in fresh ones."""

import json
import math
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

from gated_srp.machine import bf16_environment, has_bf16
from gated_srp.models import build_model
from gated_srp.srp import PatchGraph
from gated_srp_bench import textbook

IN_DIM, STRIDE = 1536, 512
MULTIPLY_OPERATIONS = 2 * 10_000 * IN_DIM * IN_DIM  # of the product that shows what the machine can do


@dataclass(frozen=True)
class Slide:
    """A generated slide: 70 % of the cells of a square, in the column order that tools write."""

    coords: Tensor
    features: Tensor


def make_coords(tokens: int, seed: int = 0) -> Tensor:
    side = int((tokens / 0.7) ** 0.5) + 1
    kept = torch.randperm(side * side, generator=torch.Generator().manual_seed(tokens + seed))[:tokens].sort().values
    return torch.stack([kept // side, kept % side], dim=1) * STRIDE


def make_slide(tokens: int, seed: int = 0) -> Slide:
    draw = torch.Generator().manual_seed(tokens + seed)
    return Slide(make_coords(tokens, seed), torch.randn(tokens, IN_DIM, generator=draw))


class Ours:
    """Our model of an arm and what it prepares."""

    def __init__(self, arm: str, slide: Slide) -> None:
        self.slide = slide
        self.model = build_model(arm, in_dim=IN_DIM, num_outputs=4, drop_path=0.0, seed=0)
        self.prepared: PatchGraph | None = None

    def prepare(self) -> None:
        self.prepared = PatchGraph.from_coords(self.slide.coords, self.slide.features, stride=STRIDE)

    def forward(self) -> Tensor:
        assert self.prepared is not None
        logits: Tensor = self.model(self.slide.features[None], self.prepared)[0]
        return logits


class Textbook:
    """The plain model with the same weights."""

    def __init__(self, slide: Slide) -> None:
        self.slide = slide
        self.model = textbook.SlideModel(IN_DIM, 4)
        self.model.load_state_dict(build_model("gated_srp", in_dim=IN_DIM, num_outputs=4, seed=0).state_dict())
        self.prepared: tuple[Tensor, Tensor, Tensor] | None = None

    def prepare(self) -> None:
        index, mask = textbook.neighbour_table(self.slide.coords, STRIDE)
        self.prepared = index, mask, textbook.homogeneity(self.slide.features, index, mask)

    def forward(self) -> Tensor:
        logits: Tensor = self.model(self.slide.features, self.prepared)
        return logits


def make(arm: str, slide: Slide) -> Ours | Textbook:
    return Textbook(slide) if arm == "textbook" else Ours(arm, slide)


def run_phase(subject: Ours | Textbook, phase: str, dtype: str) -> None:
    """prepare: graph and homogeneity; predict: forward; train: forward and backward."""
    if phase == "prepare":
        subject.prepare()
        return
    with torch.set_grad_enabled(phase == "train"), _precision(dtype):
        logits = subject.forward()
    if phase == "train":
        subject.model.zero_grad()
        torch.nn.functional.cross_entropy(logits.float(), torch.tensor(2)).backward()


def predict_operations(tokens: int, dim: int = 384, depth: int = 4, landmarks: int = 64) -> float:
    """Multiplications and additions of our own forward: what the matrix products of the fast path cost."""
    rows = math.ceil(math.sqrt(tokens)) ** 2 + 1
    # Logits of queries and of keys take the place of both, so attention's own products are B v and F u alone.
    block = 2 * rows * dim * (3 * dim + dim + 8 * dim) + 2 * 2 * rows * landmarks * dim
    last = 2 * rows * dim * 2 * dim + 2 * rows * landmarks * dim
    return 2 * tokens * IN_DIM * dim + (depth - 1) * block + last


def _precision(dtype: str) -> AbstractContextManager[Any]:
    """As a run: bf16 where the processor has instructions for it, else float32 (`training.ranks.choose_precision`)."""
    return torch.autocast("cpu", torch.bfloat16) if dtype == "bfloat16" and has_bf16() else nullcontext()


@dataclass(frozen=True)
class Row:
    """One measurement. ``arm``: textbook, gated_srp, na, machine (phase multiply: a bare matrix product), or how the bags of a
    window were computed (phase window: seconds per bag).
    ``dtype``: float32, bfloat16, or what the features are stored in. ``turns``: the seconds of each turn, of which ``seconds`` is the
    median; jobs of one phase took turns, so the same place in two rows is the same moment."""

    tokens: int
    phase: str
    arm: str
    dtype: str
    seconds: float | None = None
    peak_mb: float | None = None
    turns: tuple[float, ...] = ()
    own_mb: float | None = (
        None  # of the peak without the pages of mapped files, which the system takes back when it needs them
    )

    @classmethod
    def of(cls, tokens: int, phase: str, arm: str, dtype: str, turns: Sequence[float]) -> "Row":
        return cls(tokens, phase, arm, dtype, seconds=median(turns), turns=tuple(turns))


def turns_of(
    jobs: Mapping[Any, Callable[..., object]],
    repeats: int,
    clock: Callable[[], float] = time.perf_counter,
    *,
    warm_up: bool = True,
) -> dict[Any, list[float]]:
    """Seconds of every job in each of ``repeats`` turns, after one to warm up; a slow moment of the machine hits them alike.

    Every turn begins one job later: what a job leaves behind, memory above all, must not always meet the same successor.
    """
    took: dict[Any, list[float]] = {name: [] for name in jobs}
    order = list(jobs)
    for job in jobs.values() if warm_up else ():
        job()
    for turn in range(repeats):
        start_at = turn % len(order)
        for name in order[start_at:] + order[:start_at]:
            start = clock()
            jobs[name]()
            took[name].append(clock() - start)
    return took


def time_arms(
    tokens: int, repeats: int, *, phases: Iterable[str] = ("prepare", "predict", "train"), warm_up: bool = True
) -> list[Row]:
    """Seconds of textbook, Gated SRP and NA, ours in bf16 too, on one slide; bare matrix products take turns with them."""
    slide = make_slide(tokens)
    subjects = {arm: make(arm, slide) for arm in ("textbook", "gated_srp", "na")}
    for subject in subjects.values():
        subject.prepare()
    products = max(1, round(predict_operations(tokens) / MULTIPLY_OPERATIONS))  # as long as a prediction, so as exposed
    rows = []
    for phase in phases:
        jobs: dict[tuple[str, str], Callable[[], object]] = {}
        for arm, subject in subjects.items():
            for dtype in ("float32", "bfloat16") if arm == "gated_srp" and phase != "prepare" else ("float32",):
                if (arm, phase) != ("na", "prepare"):
                    jobs[arm, dtype] = partial(run_phase, subject, phase, dtype)
        if phase == "predict":
            jobs["machine", "float32"] = _multiplications(products)
        short = phase == "prepare" and tokens <= 20_000
        often = 4 * repeats if short else repeats  # milliseconds need more turns to meet a quiet moment
        for (arm, dtype), turns in turns_of(jobs, often, warm_up=warm_up).items():
            if arm == "machine":
                rows.append(Row.of(tokens, "multiply", arm, dtype, [seconds / products for seconds in turns]))
            else:
                rows.append(Row.of(tokens, phase, arm, dtype, turns))
    return rows


def _multiplications(number: int) -> Callable[[], object]:
    a, b, out = torch.randn(10_000, IN_DIM), torch.randn(IN_DIM, IN_DIM), torch.empty(10_000, IN_DIM)
    return lambda: [torch.mm(a, b, out=out) for _ in range(number)]


def peak(tokens: int, phase: str, arm: str, dtype: str) -> Row:
    """Peak memory of one phase in a fresh process."""
    arguments = [
        sys.executable,
        "-m",
        "gated_srp_bench.measure",
        str(tokens),
        phase,
        arm,
        dtype,
        str(torch.get_num_threads()),
    ]
    # Tensors are given back to the system when they are freed, so that the peak counts what lives and not what malloc keeps.
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536"}
    done = subprocess.run(arguments, capture_output=True, text=True, check=False, env=environment)
    if done.returncode:
        raise RuntimeError(f"bench: measuring {phase} of {arm} at {tokens} patches failed:\n{done.stderr[-2000:]}")
    answer = json.loads(done.stdout.splitlines()[-1])
    return Row(tokens, phase, arm, dtype, **answer)


def memory_arms(tokens: int) -> list[Row]:
    return [
        peak(tokens, phase, arm, "float32") for phase in ("predict", "train") for arm in ("textbook", "gated_srp", "na")
    ]


def growth(sizes: Iterable[int]) -> list[Row]:
    """Seconds of our prediction at growing sizes, taking turns."""
    subjects = {tokens: Ours("gated_srp", make_slide(tokens)) for tokens in sizes}
    for subject in subjects.values():
        subject.prepare()
    jobs = {(str(n),): lambda s=s: run_phase(s, "predict", "float32") for n, s in subjects.items()}
    return [
        Row.of(int(n), "growth", "gated_srp", "float32", turns)
        for (n,), turns in turns_of(jobs, 3, warm_up=False).items()
    ]


def windows(sizes: Iterable[int], *, bags: int = 8, repeats: int = 9) -> list[Row]:
    """Seconds per training bag of a window of small slides, one by one and packed (`train.pack`), taking turns."""
    from gated_srp.models.fast.packed import packed_logits
    from gated_srp.training.optim import flat_gradients

    model = build_model("gated_srp", in_dim=IN_DIM, num_outputs=4, seed=0).train()
    flat_gradients(model)  # as in training: gradients are added where they lie
    keep = model.draw_keep(bags, generator=torch.Generator().manual_seed(0))
    target = torch.arange(bags) % 4
    loss = torch.nn.functional.cross_entropy
    rows = []
    for tokens in sizes:
        slides = [make_slide(tokens, seed) for seed in range(bags)]
        window = [(s.features, PatchGraph.from_coords(s.coords, s.features, stride=STRIDE)) for s in slides]

        def one_by_one(window: Any = window) -> None:
            for bag, (features, graph) in enumerate(window):
                some = slice(bag, bag + 1)
                (loss(model(features[None], graph, keep[..., some]), target[some]) / bags).backward()

        def packed(window: Any = window) -> None:
            loss(packed_logits(model, window, keep), target).backward()

        for name, turns in turns_of({"one by one": one_by_one, "packed": packed}, repeats).items():
            rows.append(Row.of(tokens, "window", name, "float32", [seconds / bags for seconds in turns]))
    return rows


def measure_peak(tokens: int, phase: str, arm: str, dtype: str) -> dict[str, float]:
    """In the subprocess: run the phase once, and answer with the highest resident size above what was there before."""
    if phase in ("stream", "checkpointed"):
        return _measure_long(tokens, arm, phase)
    subject = make(arm, make_slide(tokens))
    subject.prepare()
    return _watched(lambda: run_phase(subject, phase, dtype))


def _measure_long(tokens: int, arm: str, phase: str) -> dict[str, float]:
    """A slide whose features lie on disk in half precision, computed in bf16 where the processor has it; the peak counts everything, the
    mapped file too. ``stream``: prepare and predict; ``checkpointed``: prepare and a training step that recomputes each block."""
    with tempfile.TemporaryDirectory() as folder:
        mapped = torch.from_file(f"{folder}/features", shared=True, size=tokens * IN_DIM, dtype=torch.float16)
        features = mapped.view(tokens, IN_DIM)
        draw = torch.Generator().manual_seed(0)
        for part in torch.split(features, 65_536):
            part.copy_(torch.randn(part.shape, generator=draw))
        subject = Ours(arm, Slide(make_coords(tokens), features))
        subject.model.checkpointing = phase == "checkpointed"

        def both() -> None:
            subject.prepare()
            run_phase(subject, "predict" if phase == "stream" else "train", "bfloat16")

        found = _watched(both)
        return {**found, "peak_mb": _status("VmHWM") / 1024}


def _watched(job: Callable[[], None]) -> dict[str, float]:
    before, own, done = _status("VmRSS"), [_status("RssAnon")], threading.Event()

    def look() -> None:  # the system keeps no highest value of it
        while not done.wait(0.02):
            own.append(_status("RssAnon"))

    Path("/proc/self/clear_refs").write_text("5")  # forget the highest value so far
    watcher = threading.Thread(target=look)
    watcher.start()
    start = time.perf_counter()
    try:
        job()
    finally:
        done.set()
        watcher.join()
    seconds = time.perf_counter() - start
    return {"seconds": seconds, "peak_mb": (_status("VmHWM") - before) / 1024, "own_mb": max(own) / 1024}


def _status(name: str) -> int:
    """A line of /proc/self/status, in kB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(name)).split()[1])


def main() -> None:
    """The subprocess of `peak`: measure one phase and print the answer as JSON."""
    tokens, phase, arm, dtype, threads = sys.argv[1:]
    torch.set_num_threads(int(threads))
    os.environ.update({} if dtype == "float32" else bf16_environment())
    print(json.dumps(measure_peak(int(tokens), phase, arm, dtype)))


if __name__ == "__main__":
    main()
