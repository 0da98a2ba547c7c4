"""What this machine can do, found out where a wrong guess would end the process, and what a run takes on it: time and memory."""

import ctypes
import functools
import math
import os
import platform
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

_PROBE = "import torch; torch.ones(64, 64, dtype=torch.bfloat16) @ torch.ones(64, 64, dtype=torch.bfloat16)"
_WITHOUT_AMX = {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16"}


@functools.cache
def bf16_environment() -> dict[str, str]:
    """Environment variables under which bf16 products run on this processor: none, or those that keep oneDNN off AMX.

    Some virtual machines announce AMX but hide the processor leaf that describes its tiles; oneDNN then configures none and the
    first bf16 product ends the process with an illegal instruction. The probe runs in a process of its own, once.
    """
    if "ONEDNN_MAX_CPU_ISA" in os.environ:  # somebody has decided already
        return {}
    for extra in ({}, _WITHOUT_AMX):
        probe = subprocess.run(
            [sys.executable, "-c", _PROBE], env={**os.environ, **extra}, capture_output=True, check=False
        )
        if probe.returncode == 0:
            return extra
    return _WITHOUT_AMX


@functools.cache
def has_bf16() -> bool:
    """Whether bf16 products have instructions on this processor. Without, they are emulated: measured on one with AVX2 alone, a
    prediction takes 8 times and a training step 27 times as long as in float32."""
    import torch

    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def keep_freed_memory() -> None:
    """For a command that makes and frees the same few hundred megabytes over and over: what is freed stays with the process.

    The C library of Linux returns every large block to the system, which clears it page by page when it is wanted again. Not for
    training steps: slides of all sizes would leave holes behind. Elsewhere this does nothing.
    """
    trim_threshold, mmap_threshold = -1, -3  # the numbers of mallopt(3)
    adjust = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if adjust is not None:
        adjust(mmap_threshold, 256 << 20)
        adjust(trim_threshold, 1 << 30)


def processor() -> str:
    """The processor's name, as the system tells it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())


# The cost of a run: rough, from counted products and one measurement. The factors were measured once on the paper's model (384
# channels, 4 blocks, 1,536 features; 25 to 10,000 patches): training takes 1.3 times the time of its matrix products alone,
# and keeps about 18 numbers per patch, channel and block. On small slides other things count: the inverse of the landmarks, which costs
# as much as 15 patches, calling the blocks, and the start of the process.
_OVERHEAD = 1.3
_INVERSE = 6 * 4  # products of its iterations
_BLOCK = 0.005  # seconds in which a block is called, forward, however little it computes
_START = 5.0  # seconds in which a process imports its libraries and reads its table
_KEPT = 18
_BASE = 0.5e9  # bytes of the libraries, the model and its optimiser
_SIDE = 1024  # of the square matrices that are multiplied to measure the machine


@dataclass(frozen=True)
class Trunk:
    """Sizes of the model that would be trained; ``dense``: attention over all pairs of patches; ``landmarks`` of Nystrom's, or 0."""

    in_dim: int
    dim: int = 384
    depth: int = 4
    dense: bool = False
    heads: int = 6
    landmarks: int = 0

    def operations(self, patches: int) -> float:
        """Floating-point operations of one forward pass over a slide."""
        linear = 2 * (12 * self.dim**2 * self.depth + self.in_dim * self.dim)
        pairs = 4 * patches * self.dim * (self.depth - 1) if self.dense else 0
        inverse = 2 * self.landmarks**3 * self.heads * _INVERSE * self.depth
        return _OVERHEAD * patches * (linear + pairs) + inverse

    def memory(self, patches: int) -> float:
        """Bytes that a training step on a slide needs, in single precision."""
        return _BASE + 4.0 * patches * (_KEPT * self.dim * self.depth + self.in_dim)


@dataclass(frozen=True)
class Machine:
    """Where a run would take place: operations per second as measured, bytes of memory."""

    name: str
    rate: float
    memory: float


def total_memory() -> float:
    """Bytes that this machine has."""
    if hasattr(os, "sysconf"):
        return float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    status = (ctypes.c_ulonglong * 8)(
        64
    )  # Windows' MEMORYSTATUSEX: length and load in the first, then total, free, ...
    ctypes.windll.kernel32.GlobalMemoryStatusEx(ctypes.byref(status))  # type: ignore[attr-defined, unused-ignore]
    return float(status[1])


def peak_memory() -> float | None:
    """The most bytes that this process ever held; None where the system does not say it (Windows)."""
    try:
        import resource
    except ImportError:
        return None
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return float(most if sys.platform == "darwin" else most * 1024)


def precision_name(value: object) -> object:
    """Numbers of training by the names of Lightning too; those that mean something else than our two are refused.

    >>> precision_name("bf16-mixed"), precision_name(32), precision_name("32-true"), precision_name("auto")
    ('bf16', '32', '32', 'auto')
    """
    name = str(value) if isinstance(value, int) and not isinstance(value, bool) else value
    if name in ("16", "16-mixed", "16-true", "bf16-true", "64", "64-true", "transformer-engine"):
        here = "weights and sums stay in float32, products are in float32 (32, 32-true) or bfloat16 (bf16, bf16-mixed)"
        raise ValueError(f"this precision of Lightning does not exist here: {here}")
    return {"32-true": "32", "bf16-mixed": "bf16"}.get(str(name), name)


def this_machine() -> Machine:
    """The first GPU if there is one, else the processor; takes about a tenth of a second."""
    import torch

    gpu = torch.cuda.is_available()
    device = torch.device("cuda" if gpu else "cpu")
    a = torch.ones(_SIDE, _SIDE, device=device)
    _ = float((a @ a)[0, 0])  # the first product also starts the library
    start, count = time.perf_counter(), 0
    while time.perf_counter() - start < 0.1:
        _ = float((a @ a)[0, 0])
        count += 1
    rate = 2.0 * _SIDE**3 * count / (time.perf_counter() - start)
    if gpu:
        about = torch.cuda.get_device_properties(0)
        return Machine(about.name, rate, float(about.total_memory))
    threads = torch.get_num_threads()
    return Machine(f"{threads} processor thread{'s' if threads > 1 else ''}", rate, total_memory())


def run_seconds(trunk: Trunk, patches: dict[str, list[int]], *, epochs: int, rate: float, at_once: int = 1) -> float:
    """Of one run: its start; each epoch trains on train (forward and backward: three times forward) and looks at val; val and test once.

    ``patches``: of each slide by part; ``at_once``: how many go through the model together.

    >>> trunk = Trunk(in_dim=1536)
    >>> round(run_seconds(trunk, {"train": [100], "val": [100], "test": [100]}, epochs=2, rate=trunk.operations(100)), 2)
    15.2
    """
    forward = dict.fromkeys(("train", "val", "test"), 0.0)
    for part, counts in patches.items():
        called = math.ceil(len(counts) / at_once) * trunk.depth * _BLOCK
        forward[part] = sum(map(trunk.operations, counts)) / rate + called
    return _START + epochs * (3 * forward["train"] + forward["val"]) + forward["val"] + forward["test"]
