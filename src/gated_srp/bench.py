"""`gated-srp bench`: ours against the textbook on one generated slide, in one process run, alternating, best of several.

Each memory figure comes from a fresh subprocess: peak resident size above the input and the model. Seconds are this machine's;
what counts are the ratios of one run.
"""

import importlib.util
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from gated_srp.errors import UserError
from gated_srp.machine import bf16_environment
from gated_srp.models import build_model
from gated_srp.srp import PatchGraph

IN_DIM, STRIDE = 1536, 512


@dataclass(frozen=True)
class Row:
    """One measurement. ``arm``: textbook, gated_srp or na; ``dtype``: float32, bfloat16, or what the features are stored in."""

    tokens: int
    phase: str
    arm: str
    dtype: str
    seconds: float | None = None
    peak_mb: float | None = None


@dataclass(frozen=True)
class Slide:
    """A generated slide: 70 % of the cells of a square, in the column order that tools write."""

    coords: Tensor
    features: Tensor


def make_coords(tokens: int) -> Tensor:
    side = int((tokens / 0.7) ** 0.5) + 1
    kept = torch.randperm(side * side, generator=torch.Generator().manual_seed(tokens))[:tokens].sort().values
    return torch.stack([kept // side, kept % side], dim=1) * STRIDE


def make_slide(tokens: int) -> Slide:
    return Slide(make_coords(tokens), torch.randn(tokens, IN_DIM, generator=torch.Generator().manual_seed(tokens)))


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
        self.slide, self.code = slide, load_textbook()
        self.model = self.code.SlideModel(IN_DIM, 4)
        self.model.load_state_dict(build_model("gated_srp", in_dim=IN_DIM, num_outputs=4, seed=0).state_dict())
        self.prepared: tuple[Tensor, Tensor, Tensor] | None = None

    def prepare(self) -> None:
        index, mask = self.code.neighbour_table(self.slide.coords, STRIDE)
        self.prepared = index, mask, self.code.homogeneity(self.slide.features, index, mask)

    def forward(self) -> Tensor:
        logits: Tensor = self.model(self.slide.features, self.prepared)
        return logits


def load_textbook() -> ModuleType:
    """benchmarks/textbook.py of the checkout; an installed package does not carry it."""
    path = Path(__file__).resolve().parents[2] / "benchmarks" / "textbook.py"
    if not path.is_file():
        raise UserError(
            "bench compares with benchmarks/textbook.py of a checkout, which is not here. Clone the repository and run: make bench"
        )
    spec = importlib.util.spec_from_file_location("textbook", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


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


def _precision(dtype: str) -> AbstractContextManager[Any]:
    return torch.autocast("cpu", torch.bfloat16) if dtype == "bfloat16" else nullcontext()


def best_seconds(jobs: Mapping[Any, Callable[..., object]], repeats: int) -> dict[Any, float]:
    """Best of ``repeats`` for every job, the jobs taking turns so that a slow moment of the machine hits them alike."""
    best = dict.fromkeys(jobs, float("inf"))
    for job in jobs.values():
        job()
    for _ in range(repeats):
        for name, job in jobs.items():
            start = time.perf_counter()
            job()
            best[name] = min(best[name], time.perf_counter() - start)
    return best


def time_arms(tokens: int, repeats: int, *, phases: Iterable[str] = ("prepare", "predict", "train")) -> list[Row]:
    """Seconds of textbook, Gated SRP and NA, float32 and bf16, on one slide."""
    slide = make_slide(tokens)
    subjects = {arm: make(arm, slide) for arm in ("textbook", "gated_srp", "na")}
    for subject in subjects.values():
        subject.prepare()
    rows = []
    for phase in phases:
        jobs = {}
        for arm, subject in subjects.items():
            for dtype in ("float32",) if arm == "textbook" or phase == "prepare" else ("float32", "bfloat16"):
                if (arm, phase) != ("na", "prepare"):
                    jobs[arm, dtype] = lambda s=subject, p=phase, d=dtype: run_phase(s, p, d)
        rows += [Row(tokens, phase, arm, dtype, seconds=s) for (arm, dtype), s in best_seconds(jobs, repeats).items()]
    return rows


def peak(tokens: int, phase: str, arm: str, dtype: str) -> Row:
    """Peak memory of one phase in a fresh process."""
    arguments = [sys.executable, "-m", "gated_srp.bench", str(tokens), phase, arm, dtype, str(torch.get_num_threads())]
    # Tensors are given back to the system when they are freed, so that the peak counts what lives and not what malloc keeps.
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536"}
    done = subprocess.run(arguments, capture_output=True, text=True, check=False, env=environment)
    if done.returncode:
        raise RuntimeError(f"bench: measuring {phase} of {arm} at {tokens} patches failed:\n{done.stderr[-2000:]}")
    answer = json.loads(done.stdout.splitlines()[-1])
    return Row(tokens, phase, arm, dtype, seconds=answer["seconds"], peak_mb=answer["peak_mb"])


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
    return [Row(int(n), "growth", "gated_srp", "float32", seconds=s) for (n,), s in best_seconds(jobs, 3).items()]


def measure_peak(tokens: int, phase: str, arm: str, dtype: str) -> dict[str, float]:
    """In the subprocess: run the phase once, and answer with the highest resident size above what was there before."""
    if phase == "stream":
        return _measure_stream(tokens, arm)
    subject = make(arm, make_slide(tokens))
    subject.prepare()
    return _watched(lambda: run_phase(subject, phase, dtype))


def _measure_stream(tokens: int, arm: str) -> dict[str, float]:
    """A slide whose features lie on disk in half precision: prepare and predict; the peak counts everything, the mapped file too."""
    with tempfile.TemporaryDirectory() as folder:
        mapped = torch.from_file(f"{folder}/features", shared=True, size=tokens * IN_DIM, dtype=torch.float16)
        features = mapped.view(tokens, IN_DIM)
        draw = torch.Generator().manual_seed(0)
        for part in torch.split(features, 65_536):
            part.copy_(torch.randn(part.shape, generator=draw))
        subject = Ours(arm, Slide(make_coords(tokens), features))

        def both() -> None:
            subject.prepare()
            run_phase(subject, "predict", "float32")

        seconds = _watched(both)["seconds"]
        return {"seconds": seconds, "peak_mb": _status("VmHWM") / 1024}


def _watched(job: Callable[[], None]) -> dict[str, float]:
    before = _status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # forget the highest value so far
    start = time.perf_counter()
    job()
    return {"seconds": time.perf_counter() - start, "peak_mb": (_status("VmHWM") - before) / 1024}


def _status(name: str) -> int:
    """A line of /proc/self/status, in kB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(name)).split()[1])


def predict_operations(tokens: int, dim: int = 384, depth: int = 4, landmarks: int = 64) -> float:
    """Multiplications and additions of our own forward: what the matrix products of the fast path cost."""
    rows = math.ceil(math.sqrt(tokens)) ** 2 + 1
    block = 2 * rows * dim * (3 * dim + dim + 8 * dim) + 2 * 4 * rows * landmarks * dim
    last = 2 * rows * dim * 2 * dim + 2 * 2 * rows * landmarks * dim
    return 2 * tokens * IN_DIM * dim + (depth - 1) * block + last


def multiply_rate(repeats: int = 5) -> float:
    """Operations a second of a float32 matrix product of the model's largest kind, best of several."""
    a, b, out = torch.randn(10_000, IN_DIM), torch.randn(IN_DIM, IN_DIM), torch.empty(10_000, IN_DIM)
    (seconds,) = best_seconds({("mm",): lambda: torch.mm(a, b, out=out)}, repeats).values()
    return 2 * 10_000 * IN_DIM * IN_DIM / seconds


@dataclass(frozen=True)
class Figure:
    """A ratio that we promise, and what this run gave."""

    tokens: int
    name: str
    value: float
    bound: float
    at_least: bool = True

    @property
    def holds(self) -> bool:
        return self.value >= self.bound if self.at_least else self.value <= self.bound


def figures(rows: list[Row], rate: float) -> list[Figure]:
    """The promised ratios, for every size that was measured."""
    seconds = {(r.tokens, r.phase, r.arm, r.dtype): r.seconds for r in rows if r.peak_mb is None and r.seconds}
    peaks = {(r.tokens, r.phase, r.arm): r.peak_mb for r in rows if r.peak_mb is not None}
    found = []
    for tokens in sorted({r.tokens for r in rows if r.phase == "train" and r.peak_mb is None}):

        def took(phase: str, arm: str, dtype: str = "float32", n: int = tokens) -> float:
            return seconds[n, phase, arm, dtype]

        def ratio(phase: str, dtype: str) -> float:
            ours = took("prepare", "gated_srp") + took(phase, "gated_srp", dtype)
            return (took("prepare", "textbook") + took(phase, "textbook")) / ours

        wanted = 20 if tokens < 49_152 else 25
        found += [
            Figure(
                tokens, "prepare, textbook / ours", took("prepare", "textbook") / took("prepare", "gated_srp"), wanted
            ),
            Figure(tokens, "prepare + predict, float32", ratio("predict", "float32"), 2.5),
            Figure(tokens, "prepare + predict, ours bf16", ratio("predict", "bfloat16"), 5),
            Figure(tokens, "prepare + train, float32", ratio("train", "float32"), 1.7),
            Figure(tokens, "prepare + train, ours bf16", ratio("train", "bfloat16"), 3),
            Figure(
                tokens, "Gated SRP / NA, predict", took("predict", "gated_srp") / took("predict", "na"), 1.05, False
            ),
            Figure(tokens, "Gated SRP / NA, train", took("train", "gated_srp") / took("train", "na"), 1.05, False),
            Figure(
                tokens,
                "predict, share of the multiply rate",
                predict_operations(tokens) / took("predict", "gated_srp") / rate,
                0.8,
            ),
        ]
        if (tokens, "train", "na") in peaks:
            found += _memory_figures(tokens, {key[1:]: mb for key, mb in peaks.items() if key[0] == tokens})
    return found


def _memory_figures(tokens: int, peaks: dict[tuple[str, str], float]) -> list[Figure]:
    added = (peaks["train", "gated_srp"] - peaks["train", "na"]) / 3  # gated blocks
    tensor = tokens * 384 * 4 / 2**20
    return [
        Figure(
            tokens,
            "peak of train, ours / textbook",
            peaks["train", "gated_srp"] / peaks["train", "textbook"],
            0.6,
            False,
        ),
        Figure(
            tokens,
            "peak of predict, ours / textbook",
            peaks["predict", "gated_srp"] / peaks["predict", "textbook"],
            0.6,
            False,
        ),
        Figure(tokens, "a gated block adds to train, of an (L x C)", added / tensor, 0.3, False),
    ]


def full_figures(rows: list[Row]) -> list[Figure]:
    """What only the long benchmark measures: growth of time per patch, the very long slide, the biopsy."""
    grown = {row.tokens: row.seconds / row.tokens for row in rows if row.phase == "growth" and row.seconds}
    small, large = min(grown), max(grown)
    stream = next(row for row in rows if row.phase == "stream")
    assert stream.peak_mb is not None
    step = {row.arm: row.seconds for row in rows if (row.tokens, row.phase, row.dtype) == (512, "train", "float32")}
    return [
        Figure(large, f"time a patch, against {small:,} patches", grown[large] / grown[small], 1.15, False),
        Figure(stream.tokens, "peak of prepare + predict, GB", stream.peak_mb / 1024, 20, False),
        Figure(
            512, "training steps a second, ours / textbook", (step["textbook"] or 0) / (step["gated_srp"] or 1), 1.3
        ),
    ]


def main() -> None:
    """The subprocess of `peak`."""
    tokens, phase, arm, dtype, threads = sys.argv[1:]
    torch.set_num_threads(int(threads))
    os.environ.update(bf16_environment() if dtype == "bfloat16" else {})
    print(json.dumps(measure_peak(int(tokens), phase, arm, dtype)))


if __name__ == "__main__":
    main()
