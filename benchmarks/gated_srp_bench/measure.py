"""Seconds in this process, peaks in fresh ones."""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from gated_srp_bench.subjects import (
    IN_DIM,
    MULTIPLY_OPERATIONS,
    Ours,
    Slide,
    make,
    make_coords,
    make_slide,
    predict_operations,
    run_phase,
)


@dataclass(frozen=True)
class Row:
    """One measurement. ``arm``: textbook, gated_srp, na, or machine (phase multiply: a bare matrix product).
    ``dtype``: float32, bfloat16, or what the features are stored in."""

    tokens: int
    phase: str
    arm: str
    dtype: str
    seconds: float | None = None
    peak_mb: float | None = None


def best_seconds(jobs: Mapping[Any, Callable[..., object]], repeats: int) -> dict[Any, float]:
    """Best of ``repeats`` for every job, the jobs taking turns so that a slow moment of the machine hits them alike.

    Every turn begins one job later: what a job leaves behind, memory above all, must not always meet the same successor.
    """
    best = dict.fromkeys(jobs, float("inf"))
    order = list(jobs)
    for job in jobs.values():
        job()
    for turn in range(repeats):
        start_at = turn % len(order)
        for name in order[start_at:] + order[:start_at]:
            start = time.perf_counter()
            jobs[name]()
            best[name] = min(best[name], time.perf_counter() - start)
    return best


def time_arms(tokens: int, repeats: int, *, phases: Iterable[str] = ("prepare", "predict", "train")) -> list[Row]:
    """Seconds of textbook, Gated SRP and NA, float32 and bf16, on one slide; bare matrix products take turns with them."""
    slide = make_slide(tokens)
    subjects = {arm: make(arm, slide) for arm in ("textbook", "gated_srp", "na")}
    for subject in subjects.values():
        subject.prepare()
    products = max(1, round(predict_operations(tokens) / MULTIPLY_OPERATIONS))  # as long as a prediction, so as exposed
    rows = []
    for phase in phases:
        jobs: dict[tuple[str, str], Callable[[], object]] = {}
        for arm, subject in subjects.items():
            for dtype in ("float32",) if arm == "textbook" or phase == "prepare" else ("float32", "bfloat16"):
                if (arm, phase) != ("na", "prepare"):
                    jobs[arm, dtype] = partial(run_phase, subject, phase, dtype)
        if phase == "predict":
            jobs["machine", "float32"] = _multiplications(products)
        often = 4 * repeats if phase == "prepare" else repeats  # milliseconds need more turns to meet a quiet moment
        for (arm, dtype), seconds in best_seconds(jobs, often).items():
            if arm == "machine":
                rows.append(Row(tokens, "multiply", arm, dtype, seconds=seconds / products))
            else:
                rows.append(Row(tokens, phase, arm, dtype, seconds=seconds))
    return rows


def _multiplications(number: int) -> Callable[[], object]:
    a, b, out = torch.randn(10_000, IN_DIM), torch.randn(IN_DIM, IN_DIM), torch.empty(10_000, IN_DIM)
    return lambda: [torch.mm(a, b, out=out) for _ in range(number)]


def peak(tokens: int, phase: str, arm: str, dtype: str) -> Row:
    """Peak memory of one phase in a fresh process."""
    arguments = [sys.executable, "-m", "gated_srp_bench", str(tokens), phase, arm, dtype, str(torch.get_num_threads())]
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
