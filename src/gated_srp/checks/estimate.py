"""How long a run will take and how much memory its largest slide needs: rough, from counted products and one measurement.

The factors were measured once on the paper's model (384 channels, 4 blocks, 1,536 features; 4,096 to 10,000 patches):
training takes 1.3 times the time of its matrix products alone, and keeps about 18 numbers per patch, channel and block.
"""

import os
import time
from dataclasses import dataclass

import torch

_OVERHEAD = 1.3
_KEPT = 18
_BASE = 0.5e9  # bytes of the libraries, the model and its optimiser
_SIDE = 1024  # of the square matrices that are multiplied to measure the machine


@dataclass(frozen=True)
class Trunk:
    """Sizes of the model that would be trained; ``dense``: attention over all pairs of patches."""

    in_dim: int
    dim: int = 384
    depth: int = 4
    dense: bool = False

    def operations(self, patches: int) -> float:
        """Floating-point operations of one forward pass over a slide."""
        linear = 2 * (12 * self.dim**2 * self.depth + self.in_dim * self.dim)
        pairs = 4 * patches * self.dim * (self.depth - 1) if self.dense else 0
        return _OVERHEAD * patches * (linear + pairs)

    def memory(self, patches: int) -> float:
        """Bytes that a training step on a slide needs, in single precision."""
        return _BASE + 4.0 * patches * (_KEPT * self.dim * self.depth + self.in_dim)


@dataclass(frozen=True)
class Machine:
    """Where a run would take place: operations per second as measured, bytes of memory."""

    name: str
    rate: float
    memory: float


def this_machine() -> Machine:
    """The first GPU if there is one, else the processor; takes about a tenth of a second."""
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
    memory = float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    threads = torch.get_num_threads()
    return Machine(f"{threads} processor thread{'s' if threads > 1 else ''}", rate, memory)


def run_seconds(trunk: Trunk, patches: dict[str, list[int]], *, epochs: int, rate: float) -> float:
    """Of one run: each epoch trains on train (forward and backward: three times forward) and looks at val; test once.

    ``patches``: of each slide by part.

    >>> trunk = Trunk(in_dim=1536)
    >>> run_seconds(trunk, {"train": [100], "val": [100], "test": [100]}, epochs=2, rate=trunk.operations(100))
    9.0
    """
    forward = {part: sum(map(trunk.operations, counts)) for part, counts in patches.items()}
    total = epochs * (3 * forward.get("train", 0.0) + forward.get("val", 0.0)) + forward.get("test", 0.0)
    return total / rate
