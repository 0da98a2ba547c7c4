"""What this machine can and cannot do, found out where a wrong guess would end the process."""

import ctypes
import functools
import os
import platform
import subprocess
import sys
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
    training: slides of all sizes would leave holes behind. Elsewhere this does nothing.
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
