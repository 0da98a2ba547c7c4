"""Slides to feature files: processes read tiles while the encoder works on those read before.

Shapes: N patches, S side of a tile, D width of the features.
"""

import os
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import nullcontext
from dataclasses import dataclass, field
from itertools import islice
from multiprocessing import get_context
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from gated_srp.errors import UserError
from gated_srp.slides.encoders import Encoder, PatchEncoder
from gated_srp.slides.reader import SlideError
from gated_srp.slides.store import Job, Layout
from gated_srp.slides.tiles import TilePlan, Tiling, begin_reading, plan_slide, read_tiles

_AHEAD = 3  # batches in flight for each reading process


def best_device() -> torch.device:
    found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return found or torch.device("cpu")


def best_batch() -> int:
    return 32 if best_device().type == "cpu" else 64


def best_workers() -> int:
    return min(8, os.cpu_count() or 1)


@dataclass(frozen=True, kw_only=True)
class Extraction:
    """Settings of one extraction. ``mpp``: microns a pixel by slide name, over what slides say; ``every_mpp``: for all."""

    encoder: Encoder
    tiling: Tiling
    layout: Layout
    weights: Path | None = None
    mpp: Mapping[str, float] = field(default_factory=dict)
    every_mpp: float | None = None
    batch: int = field(default_factory=best_batch)
    workers: int = field(default_factory=best_workers)

    @property
    def read_ahead(self) -> int:
        """Batches that are read or being read while the encoder works."""
        return _AHEAD * max(1, self.workers)

    def job(self, slide: Path) -> Job:
        mpp = self.mpp.get(slide.name, self.mpp.get(slide.stem, self.every_mpp))
        weights = None if self.weights is None else self.weights.name
        return Job(slide, self.tiling, self.encoder.name, self.encoder.width, mpp, weights)


@dataclass
class Outcome:
    """What became of each slide."""

    done: list[Path] = field(default_factory=list)
    there: list[Path] = field(default_factory=list)  # extracted before
    empty: list[Path] = field(default_factory=list)  # no tissue found; a file without rows is written
    failed: list[SlideError] = field(default_factory=list)


class Watch(Protocol):
    """Who is told how it goes."""

    def slide(self, path: Path, patches: int) -> None:
        """A slide begins."""

    def patches(self, number: int) -> None:
        """So many more patches of it are done."""

    def finished(self, path: Path, how: str) -> None:
        """A slide is done with, and how."""


def extract_slides(slides: Sequence[Path], settings: Extraction, watch: Watch) -> Outcome:
    """Extract every slide that is not there yet; one that cannot be read is listed and the others go on."""
    _refuse_same_names(slides)
    outcome, todo = Outcome(), []
    for slide in slides:
        if _there(settings, slide):
            outcome.there.append(slide)
            watch.finished(slide, "there already")
        else:
            todo.append(slide)
    if not todo:
        return outcome
    device = best_device()
    encoder = settings.encoder.load(settings.weights).to(device)
    pool = _pool(settings.workers)
    try:
        for slide, plan in _plans(pool, todo, settings):
            _one(pool, slide, plan, settings=settings, encoder=encoder, outcome=outcome, watch=watch)
    except BrokenProcessPool as error:
        raise UserError(
            "a reading process was ended from outside, most likely for lack of memory. Slides finished before are kept; start the "
            "same command again with fewer --workers."
        ) from error
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
    return outcome


def encode(encoder: PatchEncoder, tiles: np.ndarray) -> np.ndarray:
    """Features (N, D) of tiles (N, S, S, 3), in bf16 on accelerators."""
    device = encoder.mean.device
    bf16 = torch.autocast(device.type, torch.bfloat16) if device.type != "cpu" else nullcontext()
    with torch.inference_mode(), bf16:
        features: Tensor = encoder(torch.from_numpy(tiles).to(device, non_blocking=True))
    return features.cpu().numpy()


def _one(
    pool: Executor,
    slide: Path,
    plan: "Future[TilePlan]",
    *,
    settings: Extraction,
    encoder: PatchEncoder,
    outcome: Outcome,
    watch: Watch,
) -> None:
    try:
        tiles = plan.result()
        watch.slide(slide, len(tiles.coords))
        with settings.layout.writing(settings.job(slide), tiles) as rows:
            for start, batch in _batches(pool, slide, tiles, settings):
                rows[start : start + len(batch)] = encode(encoder, batch)
                watch.patches(len(batch))
    except SlideError as error:
        outcome.failed.append(error)
        watch.finished(slide, f"left out: {error.message}")
        return
    if not len(tiles.coords):
        outcome.empty.append(slide)
        watch.finished(slide, "no tissue found")
    else:
        outcome.done.append(slide)
        watch.finished(slide, f"{len(tiles.coords):,} patches")


def _plans(pool: Executor, slides: Sequence[Path], settings: Extraction) -> Iterator[tuple[Path, "Future[TilePlan]"]]:
    """Each slide with its plan; the tissue of the next one is found while this one is encoded."""

    def submit(slide: Path) -> "Future[TilePlan]":
        job = settings.job(slide)
        return pool.submit(plan_slide, slide, settings.tiling, mpp=job.mpp, picture=settings.layout.picture(job))

    ahead = submit(slides[0])
    for number, slide in enumerate(slides):
        plan = ahead
        if number + 1 < len(slides):
            plan.exception()  # wait: reading this slide's tiles must not queue behind planning the next
            ahead = submit(slides[number + 1])
        yield slide, plan


def _batches(pool: Executor, slide: Path, plan: TilePlan, settings: Extraction) -> Iterator[tuple[int, np.ndarray]]:
    """(number of the first row, tiles) in order, with a few batches read ahead."""
    flying: deque[tuple[int, Future[np.ndarray]]] = deque()
    todo = iter(range(0, len(plan.coords), settings.batch))
    group = max(1, settings.workers)
    try:
        while True:
            # One batch for every reader at a time: on a processor that encodes as well, one reader alone would hold up one of the
            # encoder's threads and make the others wait for it.
            if len(flying) <= settings.read_ahead - group:
                for start in islice(todo, group):
                    part = plan.coords[start : start + settings.batch]
                    flying.append((start, pool.submit(read_tiles, slide, plan.footprint, plan.tiling.size, part)))
            if not flying:
                return
            first, future = flying.popleft()
            yield first, future.result()
    finally:
        for _, future in flying:
            future.cancel()


def _pool(workers: int) -> Executor:
    if workers == 0:
        return ThreadPoolExecutor(1)
    # Not forked: a fork of a process with threads or an accelerator may hang. The readers import no torch and start fast.
    return ProcessPoolExecutor(workers, mp_context=get_context("spawn"), initializer=begin_reading)


def _there(settings: Extraction, slide: Path) -> bool:
    job = settings.job(slide)
    made = settings.layout.made_with(job)
    if made is None:
        return False
    wanted = job.settings()
    different = [f"{key} {made.get(key)}, asked {value}" for key, value in wanted.items() if made.get(key) != value]
    if different:
        raise UserError(
            f"{settings.layout.path(job)}: was extracted with other settings ({'; '.join(different)}). Choose another -o, or "
            "remove the file to have it made again."
        )
    return True


def _refuse_same_names(slides: Sequence[Path]) -> None:
    seen: dict[str, Path] = {}
    for slide in slides:
        if slide.stem in seen:
            raise UserError(
                f"{seen[slide.stem]} and {slide}: two slides of one name would write one file. Rename one, or extract into two folders."
            )
        seen[slide.stem] = slide


def read_mpp(given: str | None) -> tuple[float | None, dict[str, float]]:
    """``--mpp``: a number for every slide, or a CSV with the columns wsi and mpp.

    >>> read_mpp("0.25"), read_mpp(None)
    ((0.25, {}), (None, {}))
    """
    if given is None:
        return None, {}
    try:
        numbers: dict[str, str] = {"": str(float(given))}
    except ValueError:
        numbers = _read_mpp_table(Path(given))
    found = {}
    for name, text in numbers.items():
        try:
            value = float(text)
        except ValueError:
            value = -1.0
        if not 0.01 < value < 100:
            raise UserError(f"--mpp {given}: {name or 'the number'} is {text!r}, expected microns a pixel, e.g. 0.25.")
        found[name] = value
    return found.pop("", None), found


def _read_mpp_table(path: Path) -> dict[str, str]:
    import csv

    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            rows = list(csv.DictReader(file))
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"--mpp {path}: neither a number nor a readable CSV ({error}).") from None
    if not rows or not {"wsi", "mpp"} <= set(rows[0]):
        raise UserError(
            f"--mpp {path}: expected a CSV with the columns wsi and mpp (found: {', '.join(rows[0]) if rows else 'nothing'})."
        )
    return {row["wsi"]: row["mpp"] for row in rows}
