"""Shared fixtures, and the state of the machine that the tests rely on."""

import importlib.util
import os
import shutil
from pathlib import Path

import pytest
import torch
from hypothesis import settings

from gated_srp.machine import bf16_environment

SHARED = Path(__file__).resolve().parents[2] / "shared"

if importlib.util.find_spec("torchvision") is not None:
    raise RuntimeError(
        "torchvision must not be in the test environment: its wheel does not import beside a CPU build of torch, and torchmetrics imports it."
    )
os.environ.update(bf16_environment())  # read by oneDNN at its first product
torch.set_num_threads(1)
os.environ.setdefault("OMP_NUM_THREADS", "1")  # of processes that tests start: two would wait for each other
settings.register_profile("quick", max_examples=25, deadline=None, derandomize=True)
settings.load_profile("quick")

MEMORY = Path("/dev/shm")  # files that are waited for until they are on the disk cost nothing there
ROOM = 8 * 2**30


def pytest_configure(config: pytest.Config) -> None:
    """Temporary folders lie in memory where there is plenty of it; PYTEST_DEBUG_TEMPROOT or --basetemp name another place."""
    if MEMORY.is_dir() and os.access(MEMORY, os.W_OK) and shutil.disk_usage(MEMORY).free > ROOM:
        os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", str(MEMORY))


@pytest.fixture(scope="session")
def shared() -> Path:
    """The founders' data beside the checkout; tests that use it are never the only ones of a thing."""
    if not SHARED.is_dir():
        pytest.skip("the shared data folder is not beside this checkout")
    return SHARED


@pytest.fixture
def generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)
