"""Slides to feature files: processes read tiles while the encoder works on those read before.

Shapes: N patches, S side of a tile, D width of the features.
"""

import os
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from itertools import islice
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from torch import Tensor

from gated_srp.errors import Note, UserError, counted, joined
from gated_srp.files import remove_drafts
from gated_srp.machine import keep_freed_memory
from gated_srp.progress import Event, Progress, silent
from gated_srp.slides.encoders import Encoder, PatchEncoder, find_encoder
from gated_srp.slides.lists import chosen_slides, read_mpp, refuse_same_names
from gated_srp.slides.reader import SlideError, SlideImage, slide_name
from gated_srp.slides.store import LAYOUTS, Job, Trident, refuse_other, write_patches
from gated_srp.slides.tiles import TilePlan, Tiling, begin_reading, plan_slide, read_tiles

if TYPE_CHECKING:
    from gated_srp.data.regions import Regions

_AHEAD = 3  # batches in flight per reading process


def best_device() -> torch.device:
    found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return found or torch.device("cpu")


def best_batch() -> int:
    return 32 if best_device().type == "cpu" else 64


def best_workers() -> int:
    return min(8, os.cpu_count() or 1)


@dataclass(frozen=True, kw_only=True)
class Extraction:
    """Settings of one extraction. ``mpp``: microns per pixel by slide name, over what slides say; ``every_mpp``: for all."""

    encoder: Encoder
    tiling: Tiling
    layout: Trident
    weights: Path | None = None
    mpp: Mapping[str, float] = field(default_factory=dict)
    every_mpp: float | None = None
    batch: int = field(default_factory=best_batch)
    workers: int = field(default_factory=best_workers)
    save_patches: bool = False
    device: torch.device | None = None  # None: the best there is
    regions: "Regions | None" = None  # None: all tissue

    @property
    def read_ahead(self) -> int:
        """Batches that are read or being read while the encoder works."""
        return _AHEAD * max(1, self.workers)

    def job(self, slide: Path) -> Job:
        mpp = self.mpp.get(slide.name, self.mpp.get(slide_name(slide), self.every_mpp))
        weights = None if self.weights is None else self.weights.name
        spec = self.encoder
        seen = f"mean {spec.normalisation[0]}, std {spec.normalisation[1]}, middle {spec.crop or spec.resize}"
        resampling = spec.resampling(self.tiling.size)
        return Job(slide, self.tiling, spec.name, spec.width, mpp, weights, resampling, seen, self.regions)


@dataclass
class Outcome:
    """What became of each slide; ``folder`` has the feature files (SLIDE.h5), ``previews`` the pictures (SLIDE.jpg)."""

    folder: Path
    previews: Path
    done: list[Path] = field(default_factory=list)
    there: list[Path] = field(default_factory=list)  # extracted before
    empty: list[Path] = field(default_factory=list)  # no tissue found; a file without rows is written
    failed: list[SlideError] = field(default_factory=list)
    notes: list[Note] = field(default_factory=list)  # what could not be compared of files that were there

    def join(self, other: "Outcome") -> None:
        """Add what another process did."""
        for name in ("done", "there", "empty", "failed", "notes"):
            getattr(self, name).extend(getattr(other, name))

    def __str__(self) -> str:
        parts = {"extracted": self.done, "there already": self.there, "without tissue": self.empty}
        counts = [f"{len(slides)} {name}" for name, slides in parts.items() if slides]
        return f"{self.folder}: {', '.join(counts + ([f'{len(self.failed)} left out'] if self.failed else []))}"


def extract(
    slides: str | Path | Sequence[str | Path],
    out: str | Path,
    *,
    encoder: str | Encoder = "efficientnet_lite0",
    weights: str | Path | None = None,
    size: int | None = None,
    magnification: float = 20.0,
    overlap: int = 0,
    tissue: float = 0.25,
    exclude_pen: bool = False,
    mpp: float | str | Path | Mapping[str, float] | None = None,
    layout: Literal["trident", "atlaspatch"] = "trident",
    regions: "Regions | Mapping[str, Any] | None" = None,
    only: str | Path | None = None,
    save_patches: bool = False,
    devices: int = 1,
    batch: int | None = None,
    workers: int | None = None,
    progress: Progress = silent,
) -> Outcome:
    """Find the tissue of slides and write the features of its patches, with a preview of each slide.

    Slides that were finished before are kept; one that cannot be read is listed and the others go on.

    Args:
        slides: a slide, a folder of slides, or a list of slides.
        out: folder of the feature files.
        encoder: its name, ``package.module:function`` for one of your own, or an `Encoder`.
        weights: file or folder of the encoder's weights, without internet.
        size: pixels of a patch; the encoder's own if not set.
        magnification: of the patches.
        overlap: pixels that neighbouring patches share.
        tissue: least share of tissue in a patch that is kept.
        exclude_pen: leave out patches with blue, green or black ink of a marker (H&E alone; see docs/annotations.md).
        mpp: microns per pixel of every slide, or by slide name, or a CSV with the columns wsi and mpp.
        layout: whose files to write: TRIDENT's or AtlasPatch's.
        regions: patches inside or outside drawn regions alone, as in a cohort's YAML: ``{"annotations": "drawn/", "only": "tumour"}``.
        only: a file that lists the slides to take: one per line, or a CSV with the column wsi, relative to the folder ``slides``.
        save_patches: also write each patch as SLIDE/X_Y.png, X and Y in level-0 pixels.
        devices: processes that share the slides, each with an accelerator of its own.
        batch: patches that the encoder gets at once; 32, or 64 on an accelerator.
        workers: processes that read patches; 0 reads in a thread of this one.
        progress: called with the stages ``slides`` and ``patches``.

    Returns:
        Which slides are done, were there before, have no tissue, or failed.

    Example:
        >>> gated_srp.extract("slides/", "features/", encoder="uni_v2").failed  # doctest: +SKIP
        []
    """
    found, noted = chosen_slides(slides, only)
    mpp = noted if mpp is None else mpp
    cut: dict[str, Any] = {"overlap": overlap, "tissue": tissue, "exclude_pen": exclude_pen}
    spec = find_encoder(encoder) if isinstance(encoder, str) else encoder
    every, each = read_mpp(mpp)
    settings = Extraction(
        encoder=spec,
        tiling=Tiling(size=size or spec.tile, magnification=magnification, **cut),
        layout=LAYOUTS[layout](Path(out)),
        weights=None if weights is None else Path(weights),
        mpp=each,
        every_mpp=every,
        batch=batch or best_batch(),
        workers=best_workers() if workers is None else workers,
        save_patches=save_patches,
        regions=_regions(regions, found),
    )
    if devices > 1 and len(found) > 1:
        from gated_srp.slides.devices import extract_on_devices

        return extract_on_devices(found, settings, encoder, min(devices, len(found)), progress)
    return extract_slides(found, settings, progress)


def _regions(given: "Regions | Mapping[str, Any] | None", slides: Sequence[Path]) -> "Regions | None":
    """As the YAML of a cohort writes them; a class that is drawn on none of the slides is refused before the first is read."""
    if given is None:
        return None
    from gated_srp.data.regions import Regions  # not above: rarely asked for

    found = Regions.of(given) if isinstance(given, Mapping) else given
    found.refuse_unknown_on([slide_name(slide) for slide in slides])
    return found


def extract_slides(slides: Sequence[Path], settings: Extraction, progress: Progress = silent) -> Outcome:
    """As `extract`, with settings that are resolved already."""
    refuse_same_names(slides)
    keep_freed_memory()
    first = settings.job(slides[0])
    outcome, todo = Outcome(settings.layout.path(first).parent, settings.layout.picture(first).parent), []
    for folder in (outcome.folder, outcome.previews):
        remove_drafts(folder)
    finished = 0

    def report(slide: Path, how: str) -> None:
        nonlocal finished
        finished += 1
        progress(Event("slides", finished, len(slides), f"{slide.name}: {how}", slide))

    made = {}
    for slide in slides:
        try:
            found = _made_of(settings, slide)
        except SlideError as error:
            outcome.failed.append(error)
            report(slide, f"left out: {joined(error.what, cure=error.cure)}")
            continue
        if found is None:
            todo.append(slide)
            continue
        made[slide] = found
        if settings.save_patches and not settings.layout.has_images(settings.job(slide)):
            todo.append(slide)
        else:
            outcome.there.append(slide)
            report(slide, "there already")
    encoder = _load_encoder(settings, made, outcome, needed=bool(set(todo) - set(made))) if todo or made else None
    if not todo or (encoder is None and set(todo) - set(made)):
        return outcome
    pool = _pool(settings.workers)
    try:
        for slide, plan in _plans(pool, todo, settings):
            only_images = slide in made
            how = _extract_one(pool, slide, plan, settings, None if only_images else encoder, outcome, progress)
            report(slide, how)
    except BrokenProcessPool as error:
        raise UserError(
            "a reading process was ended from outside, most likely for lack of memory. Slides finished before are kept",
            cure="Start the same command again with fewer --workers.",
            kind="worker_lost",
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


def _extract_one(
    pool: Executor,
    slide: Path,
    plan: "Future[TilePlan]",
    settings: Extraction,
    encoder: PatchEncoder | None,
    outcome: Outcome,
    progress: Progress,
) -> str:
    """Write one slide's file, without an encoder its images alone, and note it in the outcome; says in words how it went."""
    try:
        tiles = plan.result()
        outcome.notes += tiles.notes
        count = len(tiles.coords)
        progress(Event("patches", 0, count, slide.name, slide))
        job = settings.job(slide)
        if settings.save_patches:
            settings.layout.begin_images(job, tiles.coords)
        with _rows(job, tiles, settings.layout, encoder) as rows:
            for start, batch in _batches(pool, slide, tiles, settings):
                if encoder is not None and rows is not None:
                    rows[start : start + len(batch)] = encode(encoder, batch)
                if settings.save_patches:
                    write_patches(batch, tiles.coords[start : start + len(batch)], settings.layout.images(job))
                progress(Event("patches", start + len(batch), count, slide.name, slide))
        if settings.save_patches:
            settings.layout.finish_images(job, count)
    except SlideError as error:
        outcome.failed.append(error)
        return f"left out: {joined(error.what, cure=error.cure)}"
    if encoder is None:
        outcome.there.append(slide)
        return f"{counted(count, 'patch')} written as images; its features were there already"
    if not count:
        outcome.empty.append(slide)
        return "no tissue found"
    outcome.done.append(slide)
    return counted(count, "patch")


@contextmanager
def _rows(job: Job, tiles: TilePlan, layout: Trident, encoder: PatchEncoder | None) -> Iterator[Any]:
    """The rows of a new feature file; None where it is there already."""
    if encoder is None:
        yield None
        return
    how = {"weights_sha256": encoder.hash, "precision": "32" if encoder.mean.device.type == "cpu" else "bf16"}
    with layout.writing(job, tiles, how) as rows:
        yield rows


def _plans(pool: Executor, slides: Sequence[Path], settings: Extraction) -> Iterator[tuple[Path, "Future[TilePlan]"]]:
    """Each slide with its plan; the tissue of the next one is found while this one is encoded."""

    def submit(slide: Path) -> "Future[TilePlan]":
        job = settings.job(slide)
        how: dict[str, Any] = {"mpp": job.mpp, "picture": settings.layout.picture(job), "regions": settings.regions}
        return pool.submit(plan_slide, slide, settings.tiling, **how)

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
            # One batch for every reader at a time: on a processor that encodes as well, a single reader would hold up one of the
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


def _made_of(settings: Extraction, slide: Path) -> dict[str, Any] | None:
    """What the existing features of a slide were made of and with; None where there are none. Others than asked for are refused."""
    job = settings.job(slide)
    made = settings.layout.made_with(job)
    if made is None:
        return None
    with SlideImage(slide) as image:
        refuse_other(settings.layout.path(job), made, image.info, known_scale=job.mpp is not None)
    wanted = {"regions": None, "exclude_pen": None} | job.settings()
    if "blocks" not in made["slide"]:
        made["normalisation"] = wanted["normalisation"]  # not recorded by versions 0.1 and 0.2
    if made and "resampling" not in made:  # of version 0.2, which knew no other way
        made["resampling"] = settings.encoder.resampling(job.tiling.size, "bicubic")
    different = [f"{key} {made.get(key)}, asked {value}" for key, value in wanted.items() if made.get(key) != value]
    if different:
        raise UserError(
            f"was extracted with other settings ({'; '.join(different)})",
            where=settings.layout.path(job),
            cure="Choose another -o, or remove the file to have it made again.",
            kind="other_settings",
        )
    return made


def _load_encoder(
    settings: Extraction, made: Mapping[Path, Mapping[str, Any]], outcome: Outcome, *, needed: bool
) -> PatchEncoder | None:
    """The encoder; features that are there must have been made with its weights, as far as that can be told."""
    places = {slide: str(settings.layout.path(settings.job(slide))) for slide in made}
    if old := [places[slide] for slide, found in made.items() if "blocks" not in found["slide"]]:
        what = f"{counted(len(old), 'feature file')} made by an earlier version, which did not record what slide they are of"
        cure = "Their slides' sizes agree; more cannot be told. Remove those that you doubt: they are then made again."
        outcome.notes.append(Note("warning", "no_identity", what, tuple(old[:5]), cure))
    try:
        encoder = settings.encoder.load(settings.weights)
    except UserError as error:
        if needed:
            raise
        what = f"the encoder's weights could not be compared with those of features that are there: {error.what}"
        outcome.notes.append(Note("warning", error.kind, what, cure=error.cure))
        return None
    for slide, found in made.items():
        if found.get("weights_sha256", encoder.hash) != encoder.hash:
            raise UserError(
                f"was made with other weights of the encoder {settings.encoder.name!r} ({found['weights_sha256'][:12]}, now {encoder.hash[:12]})",
                where=places[slide],
                cure="Choose another -o, or remove the files to have them made again.",
                kind="other_weights",
            )
    return encoder.to(settings.device or best_device())
