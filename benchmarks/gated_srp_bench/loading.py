"""How fast bags load: opened and prepared anew, from the cache, and as a raw read of the cache's bytes."""

import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pandas as pd
import torch

from gated_srp.data.cache import BagCache
from gated_srp.data.loader import SlideDataset
from gated_srp.data.prepared import Preparation


def measure_loading(
    folder: str | Path | None = None, *, bags: int = 8, patches: int = 10_000, width: int = 1536, repeats: int = 3
) -> list[dict[str, Any]]:
    """Rows of what, seconds (an epoch, best of ``repeats``) and ratio (to the cache's second epoch).

    Generated bags in TRIDENT's layout are written to a temporary folder inside ``folder`` and removed afterwards. The files are in
    the operating system's memory throughout, so a disk is not measured, and every byte is used once.
    """
    with tempfile.TemporaryDirectory(dir=folder, prefix="gated-srp-bench-") as place:
        home = Path(place)
        files = [write_bag(home / "feats" / f"slide{i}.h5", patches, width, seed=i) for i in range(bags)]
        slides = pd.DataFrame({"slide": [file.stem for file in files], "case": "generated", "file": files})
        anew = SlideDataset(slides, Preparation())
        kept = SlideDataset(slides, Preparation(), cache=BagCache(home / "cache"))
        first = _seconds(lambda: _through(kept))
        entries = sorted((home / "cache").glob("*.safetensors"))
        seconds = {
            "opened and prepared anew": min(_seconds(lambda: _through(anew)) for _ in range(repeats)),
            "first epoch with a cache": first,
            "second epoch from the cache": min(_seconds(lambda: _through(kept)) for _ in range(repeats)),
            "raw read of the same bytes": min(_seconds(lambda: _raw(entries)) for _ in range(repeats)),
        }
    warm = seconds["second epoch from the cache"]
    return [{"what": what, "seconds": spent, "ratio": spent / warm} for what, spent in seconds.items()]


def write_bag(
    path: Path, patches: int, width: int, *, seed: int, dtype: str = "float32", compression: str | None = None
) -> Path:
    """A file as TRIDENT writes it: chunks of one row, attributes on coords; patches of a square scanned by columns.

    With ``compression`` in chunks that h5py chooses, as tools that ask it for gzip leave it to.
    """
    rng = np.random.default_rng(seed)
    side = int(np.ceil(np.sqrt(patches)))
    cells = np.stack(np.meshgrid(np.arange(side), np.arange(side), indexing="ij"), -1).reshape(-1, 2)[:patches]
    path.parent.mkdir(parents=True, exist_ok=True)
    with h5py.File(path, "w") as file:
        values = rng.standard_normal((patches, width), dtype=np.float32)
        how: dict[str, Any] = {"compression": compression} if compression else {"chunks": (1, width)}
        file.create_dataset("features", data=values.astype(dtype), **how)
        coords = file.create_dataset("coords", data=cells * 512)
        coords.attrs.update({"patch_size": 256, "patch_size_level0": 512, "overlap": 0, "target_magnification": 20})
    return path


def _seconds(action: Callable[[], None]) -> float:
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def _through(dataset: SlideDataset) -> None:
    """Every bag, each of its features used once: mapped bytes come into memory when they are used."""
    for index in range(len(dataset)):
        dataset[index].features.sum()


def _raw(entries: list[Path]) -> None:
    for entry in entries:
        read = torch.from_numpy(np.fromfile(entry, dtype=np.uint8))
        read[: len(read) // 4 * 4].view(torch.float32).sum()
