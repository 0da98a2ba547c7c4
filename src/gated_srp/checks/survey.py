"""What each feature file of a cohort holds, file by file: the facts that `check` judges.

Shapes: N patches, C channels.
"""

import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from gated_srp.data.bag import Bag
from gated_srp.data.prepared import (
    Preparation,
    capped_graphs,
    capped_rows,
    inside_regions,
    open_bag,
    open_header,
    prepare,
)
from gated_srp.errors import Note, UserError
from gated_srp.progress import Event, Progress, silent

if TYPE_CHECKING:
    from gated_srp.data.regions import Kept

_WORTH_WORKERS = 64  # files from which on starting other processes pays: each imports torch
_CHUNK = 4096  # rows of features that are looked at together


@dataclass(frozen=True)
class Neighbours:
    """Of one slide's graph: neighbours per patch on average, and the share of patches without any."""

    mean: float
    alone: float


@dataclass(frozen=True)
class FileFacts:
    """One feature file. A file that cannot be used has a ``problem`` and may have nothing else."""

    path: Path
    problem: Note | None = None
    bytes: int = 0
    patches: int = 0
    width: int = 0
    dtype: str = ""
    encoder: str | None = None
    stride: float = 0.0
    unit: str = "px"
    stride_um: float | None = None  # where the file says enough
    stride_source: str = ""
    neighbours: Neighbours | None = None
    capped: Neighbours | None = None  # None: not longer than the cap
    shared_cells: int = 0  # patches that another patch of the same lattice cell hides
    duplicates: int = 0  # patches with the coordinates of another
    outside: int = 0  # patches of the file that the regions leave out; `patches` counts those that are kept
    coarse: int = 0  # patches of its lower magnification
    lone: int = 0  # patches without a parent there
    classes: tuple[str, ...] = ()  # drawn on it, where regions choose patches
    nonfinite: int = 0  # rows with NaN, infinity or a length beyond float32; only looked for when deep
    zeros: int = 0  # rows of zeros alone; as above
    warnings: tuple[Note, ...] = ()

    @property
    def usable(self) -> bool:
        return self.problem is None

    @property
    def compressed(self) -> bool:
        """Whether the file is smaller than its features: only then is it certain."""
        size: int = getattr(torch, self.dtype or "float32").itemsize
        return 0 < self.bytes < 0.99 * self.patches * self.width * size


def survey(
    files: Sequence[Path],
    settings: Preparation = Preparation(),  # noqa: B008 - frozen
    *,
    deep: bool = False,
    workers: int = 0,
    progress: Progress = silent,
) -> list[FileFacts]:
    """The facts of each file, in the order of ``files``; ``deep`` looks at the feature arrays too.

    Nothing in a file stops the others: damage becomes a ``problem``; with ``workers`` (processes) also where it ends the
    process that reads.
    """
    look = partial(look_at, settings=settings, deep=deep)
    found = []
    for facts in _pooled(look, files, workers) if workers else map(look, files):
        found.append(facts)
        progress(Event("files", len(found), len(files), data=facts))
    return found


def workers_for(files: int) -> int:
    """Number of processes: none for a few files, since each has to import torch first."""
    return min(8, os.cpu_count() or 1) if files >= _WORTH_WORKERS else 0


def _pooled(look: Callable[[Path], FileFacts], files: Sequence[Path], workers: int) -> Iterator[FileFacts]:
    """In order. A file whose reading ends its process ends the whole pool: the rest is read with one process per file."""
    context, yielded = get_context("spawn"), 0
    try:
        with ProcessPoolExecutor(workers, mp_context=context, initializer=torch.set_num_threads, initargs=(1,)) as pool:
            for facts in pool.map(look, files, chunksize=8):
                yield facts
                yielded += 1
    except BrokenProcessPool:
        for path in files[yielded:]:
            yield _alone(look, path)


def _alone(look: Callable[[Path], FileFacts], path: Path) -> FileFacts:
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        try:
            return pool.submit(look, path).result()
        except BrokenProcessPool:
            what = "reading it ended the process: damaged, or larger than memory"
            return FileFacts(path, Note("error", "crash", what, (str(path),), "Extract the slide again."))


def look_at(path: Path, settings: Preparation, *, deep: bool = False) -> FileFacts:
    """The facts of one file; never raises on what a file holds."""
    try:
        return _facts(path, settings, deep=deep)
    except UserError as error:
        problem = _problem(error, path)
    except Exception as error:  # one bad file must not abort the survey
        said = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        cure = "Extract the slide again; if that does not help, report it as a bug."
        problem = Note("error", "unreadable", f"cannot be read ({said})", (str(path),), cure)
    return FileFacts(path, problem, bytes=_size(path))


def _problem(error: UserError, path: Path) -> Note:
    return Note.of(error, kind="unusable" if error.kind == "user" else error.kind, where=(str(path),))


def _facts(path: Path, settings: Preparation, *, deep: bool) -> FileFacts:
    header = open_bag(path, settings) if deep else open_header(path, settings)
    coords, stride = header.coords, header.stride
    problem, whole, capped, kept, coarse, lone = None, None, None, None, 0, 0
    try:
        if settings.features_low is not None:
            from gated_srp.data.two_scales import Scales  # not above: rarely so

            scales = Scales.open(path, settings)
            coarse, lone = len(scales.coarse.coords), len(coords) - len(scales.parents()[0])
        kept = inside_regions(header, settings)
        whole, capped = _neighbours(coords, stride, settings, kept)
    except UserError as error:
        problem = _problem(error, path)
    nonfinite, zeros = _odd_rows(header.features) if isinstance(header, Bag) else (0, 0)
    if nonfinite and problem is None:
        what = f"{nonfinite} of {len(coords)} rows of features are NaN, infinite or too large for float32"
        cure = "Extract the slide again, or drop those rows together with their positions."
        problem = Note("error", "nonfinite", what, (str(path),), cure)
    places, floor = _distinct(coords), settings.lattice == "floor"
    return FileFacts(
        path,
        problem,
        bytes=_size(path),
        patches=header.shape[0] if kept is None else len(kept.rows),
        width=header.shape[1],
        dtype=str(header.dtype).removeprefix("torch."),
        encoder=header.encoder,
        stride=stride,
        unit=header.unit,
        stride_um=header.stride_um,
        stride_source=header.stride_source,
        neighbours=whole,
        capped=capped,
        # Patches of one cell with different coordinates: several lattices in one slide.
        shared_cells=places - _distinct(torch.div(coords.double(), stride, rounding_mode="floor")) if floor else 0,
        duplicates=len(coords) - places,
        outside=0 if kept is None else header.shape[0] - len(kept.rows),
        coarse=coarse,
        lone=lone,
        classes=() if kept is None else kept.classes or (),
        nonfinite=nonfinite,
        zeros=zeros,
        warnings=header.warnings if kept is None or kept.classes is not None else (*header.warnings, kept.note),
    )


def _neighbours(
    coords: Tensor, stride: float, settings: Preparation, inside: "Kept | None" = None
) -> tuple[Neighbours, Neighbours | None]:
    """Before the cap and after it; of the patches inside the regions alone, where there are some."""
    within = torch.arange(len(coords)) if inside is None else inside.rows
    rows = capped_rows(coords[within], settings.cap)
    rows = within if rows is None else within[rows]
    whole, kept = (graph.neighbour_count for graph in capped_graphs(coords, rows, stride, settings))
    if len(within) < len(coords):
        whole = capped_graphs(coords, within, stride, settings)[1].neighbour_count
    before, after = (Neighbours(float(n.double().mean()), float((n == 0).double().mean())) for n in (whole, kept))
    return before, after if len(kept) < len(whole) else None


def _distinct(points: Tensor) -> int:
    """How many of (N, 2) points differ: one number per point sorts much faster than rows do."""
    x, y = (torch.unique(points[:, i], return_inverse=True)[1] for i in (0, 1))  # ranks: no key can overflow
    return len(torch.unique(x * (int(y.max()) + 1) + y))


def _odd_rows(features: Tensor) -> tuple[int, int]:
    """Rows whose length is not finite in float32, and rows of zeros; a part of the rows at a time."""
    bad = zeros = 0
    for part in features.split(_CHUNK):
        norms = torch.linalg.vector_norm(part.float(), dim=1)
        bad += int((~torch.isfinite(norms)).sum())
        zeros += int((norms == 0).sum())
    return bad, zeros


def reading_seconds(facts: Sequence[FileFacts], settings: Preparation, *, tried: int = 3) -> tuple[float, float]:
    """Seconds per patch to read and prepare a slide, and to copy one that is prepared, as measured on files of middle length."""
    middle = sorted(facts, key=lambda file: file.patches)[len(facts) // 2 :][:tried]
    reading = copying = patches = 0.0
    for file in middle:
        start = time.perf_counter()
        bag = prepare(file.path, settings)
        ready = time.perf_counter()
        bag.features.clone()
        reading, copying = reading + ready - start, copying + time.perf_counter() - ready
        patches += file.patches
    return reading / max(patches, 1), copying / max(patches, 1)


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0
