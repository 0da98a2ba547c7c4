"""Where a model computes: one process on one device, or several (ranks) that share the bags of each window.

Plain `torch.distributed`: ranks are started by `launch`, which brings their errors, and what they report, back to the caller.
"""

from __future__ import annotations

import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from gated_srp.errors import Interrupted, UserError
from gated_srp.progress import Progress

Precision = Literal["32", "bf16"]


def accelerator() -> str:
    """The kind of device that trains: cuda, mps or cpu."""
    if torch.cuda.is_available():
        return "cuda"
    return "mps" if torch.backends.mps.is_available() else "cpu"


def choose_precision(wanted: str, kind: str) -> Precision:
    """``auto`` is bf16 on accelerators that have it, and 32 on a CPU; so is bf16 on a CPU that would emulate it.

    A model that was trained in bf16 on an accelerator thus predicts on any processor at its full speed.
    """
    if wanted == "auto":
        return "bf16" if kind == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False) else "32"
    if wanted == "bf16" and kind == "cpu":
        from gated_srp.machine import bf16_environment, has_bf16

        if not has_bf16():
            return "32"
        os.environ.update(bf16_environment())  # oneDNN reads it at the first bf16 product of this process
    return "bf16" if wanted == "bf16" else "32"


@dataclass(frozen=True)
class Ranks:
    """This process among ``count`` that train together, its device and precision."""

    device: torch.device
    precision: Precision = "32"
    rank: int = 0
    count: int = 1

    @classmethod
    def one(cls, precision: str = "32", kind: str | None = None) -> Ranks:
        """A process by itself, on the accelerator if there is one; ``precision`` as `choose_precision` takes it."""
        kind = kind or accelerator()
        device = torch.device("cpu") if kind == "cpu" else torch.device(kind, 0)
        return cls(device, choose_precision(precision, kind))

    @property
    def first(self) -> bool:
        """Whether this process writes what there is to write."""
        return self.rank == 0

    def autocast(self) -> AbstractContextManager[Any]:
        """For forward passes: products in bf16 where that is the precision."""
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.precision == "bf16")

    def sum(self, *tensors: Tensor) -> None:
        """Add up tensors over all ranks, in place."""
        if self.count > 1:
            for tensor in tensors:
                torch.distributed.all_reduce(tensor)

    def agree(self, flag: bool) -> bool:
        """What the first rank says."""
        if self.count == 1:
            return flag
        said = torch.tensor(int(flag), device=self.device)
        torch.distributed.broadcast(said, src=0)
        return bool(said.item())

    def wait(self) -> None:
        """Until all ranks are here."""
        if self.count > 1:
            torch.distributed.barrier()


def launch(work: Callable[[Ranks, Progress], None], count: int, precision: Precision, progress: Progress) -> None:
    """Run ``work`` (picklable) in this process, or in ``count`` new ones; their errors are raised here, signals reach them."""
    if count == 1:
        work(Ranks.one(precision), progress)
        return
    import torch.multiprocessing as mp
    from torch.multiprocessing.spawn import spawn

    context = mp.get_context("spawn")
    reports, errors = context.SimpleQueue(), context.SimpleQueue()

    def forward(number: int, frame: object) -> None:
        for child in mp.active_children():
            child.terminate()

    with handlers({signal.SIGINT: lambda number, frame: None, signal.SIGTERM: forward}):
        given = (work, count, precision, _free_port(), reports, errors)
        children = spawn(_rank, args=given, nprocs=count, join=False)
        try:
            while not children.join(timeout=0.2):
                _pass_on(reports, progress)
            _pass_on(reports, progress)
        except Exception:
            _pass_on(reports, progress)
            if errors.empty():
                raise
            raise errors.get() from None


def _rank(number: int, work: Any, count: int, precision: Precision, port: int, reports: Any, errors: Any) -> None:
    """One of several processes."""
    kind = accelerator()
    device = torch.device("cpu") if kind == "cpu" else torch.device(kind, number)
    if kind == "cuda":
        torch.cuda.set_device(device)
    if "OMP_NUM_THREADS" not in os.environ:  # ranks on one machine share its cores
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // count))
    torch.distributed.init_process_group(
        "nccl" if kind == "cuda" else "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=number, world_size=count
    )
    try:
        work(Ranks(device, choose_precision(precision, kind), number, count), reports.put)
    except (UserError, Interrupted) as error:
        errors.put(error)
        raise
    finally:
        torch.distributed.destroy_process_group()


def _pass_on(reports: Any, progress: Progress) -> None:
    while not reports.empty():
        progress(reports.get())


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


@contextmanager
def handlers(wanted: dict[signal.Signals, Any]) -> Iterator[None]:
    """Signal handlers for a while; only the main thread may set them."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, handler) for number, handler in wanted.items()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
