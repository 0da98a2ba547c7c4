"""The slides of a cohort as prepared bags, one at a time, the next one ready when it is asked for.

slides = SlideDataset(frame, Preparation(encoder="uni_v2"))
with BagLoader(slides, workers=1) as loader:
    for bag in loader.epoch(order):
"""

import shutil
import signal
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import pandas as pd
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from gated_srp.data.prepared import Preparation, PreparedBag, prepare
from gated_srp.errors import UserError, counted
from gated_srp.machine import keep_freed_memory
from gated_srp.srp.graph import PatchGraph
from gated_srp.streams import stream

_SHARED = Path("/dev/shm")  # where the bags of worker processes pass through on Linux
_ROOM = 2**31  # bytes of it that let a few large bags pass
Variation = tuple[int, int]  # seed and epoch of a training run
Cached = tuple[Path, Preparation]  # what an entry of the cache is made from

if TYPE_CHECKING:
    from gated_srp.data.cache import BagCache
    from gated_srp.data.covariates import BagCovariates


@dataclass(frozen=True, eq=False, kw_only=True)
class SlideBag(PreparedBag):
    """A prepared bag with its slide, patient and target. Of a patient's slides together ``slide`` is the patient."""

    index: int  # in the dataset
    slide: str
    case: str
    target: Tensor | None
    parts: tuple[
        tuple[str, Path, int], ...
    ] = ()  # of a patient: slide, file and rows of each, in the order of the rows


def together(bags: Sequence[SlideBag]) -> tuple[Tensor, PatchGraph]:
    """Features (B, N, C) and one graph of bags of equal length; a single bag is not copied."""
    if len(bags) == 1:
        return bags[0].features[None], bags[0].graph
    return torch.stack([bag.features for bag in bags]), PatchGraph.batch([bag.graph for bag in bags])


class SlideDataset(Dataset[SlideBag]):
    """Item i: the bag of row i of ``slides`` (columns slide, case, file), with ``targets[i]`` where given.

    Files are opened when an item is asked for, by the process that asks.
    """

    def __init__(
        self,
        slides: pd.DataFrame,
        settings: Preparation,
        *,
        targets: Tensor | None = None,
        cache: "BagCache | None" = None,
    ) -> None:
        if targets is not None and len(targets) != len(slides):
            raise ValueError(f"{len(targets)} targets for {counted(len(slides), 'slide')}")
        self.slides = slides[["slide", "case"]].reset_index(drop=True)
        self.files = [Path(file) for file in slides["file"]]
        self.settings = settings
        self.targets = targets
        self.cache = cache
        self.caps: dict[int, int] = {}  # of slides that share the cap of a patient's bag
        self.covariates: BagCovariates | None = None  # what models' heads see beside the bags

    @property
    def members(self) -> "SlideDataset":
        """The dataset of single slides: itself, unless bags are patients."""
        return self

    def member_rows(self, rows: Sequence[int]) -> list[int]:
        """Rows of `members` that these bags are made of."""
        return list(rows)

    def cached(self, index: int) -> list[Cached]:
        """Files and settings of the cache entries of a bag."""
        if self.settings.features_low is None:
            return [(self.files[index], self.settings_of(index))]
        from gated_srp.data.two_scales import apart

        return list(apart(self.files[index], self.settings_of(index)))

    def settings_of(self, index: int) -> Preparation:
        """How a slide is prepared."""
        return replace(self.settings, cap=self.caps[index]) if index in self.caps else self.settings

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> SlideBag:
        return self.varied(index, None)

    def informed(self, bag: SlideBag) -> SlideBag:
        """The bag with its covariates, where there are any."""
        return bag if self.covariates is None else self.covariates.added_to(bag)

    def varied(self, index: int, variation: Variation | None) -> SlideBag:
        """As an epoch of training sees it: an image is augmented by a stream of its own, a slide stays as it is."""
        file, (slide, case), draws = self.files[index], self.slides.iloc[index], None
        if variation is not None and self.settings.images is not None:
            seed, epoch = variation
            draws = stream(seed, f"augment/{epoch}/{slide}")
        settings = self.settings_of(index)
        try:
            bag = self.cache.read(file, settings) if self.cache else prepare(file, settings, draws)
        except UserError as error:  # with the slide's name, which need not be in the file's
            raise error.changed(where=f"{error.where or file} (slide {slide!r})") from None
        except MemoryError as error:
            cure = "Set a `cap` in a new run, or fewer train.workers."
            raise UserError(
                f"out of memory while slide {slide!r} was read", where=file, cure=cure, kind="memory"
            ) from error
        whole = SlideBag(
            **{field.name: getattr(bag, field.name) for field in fields(bag)},
            index=index,
            slide=slide,
            case=case,
            target=None if self.targets is None else self.targets[index],
        )
        return self.informed(whole)


class BagLoader:
    """Goes through a dataset in the orders it is given, while ``workers`` processes prepare the bags that come next.

    With a cache the workers only make sure that the next entries exist and are in memory; the bag is mapped here, so nothing is
    copied between processes. Workers live from epoch to epoch; `close` ends them.
    """

    def __init__(self, dataset: SlideDataset, *, workers: int = 1) -> None:
        self.dataset = dataset
        self.notes: tuple[str, ...] = ()
        if workers and dataset.cache is None and _SHARED.is_dir() and shutil.disk_usage(_SHARED).free < _ROOM:
            workers = 0
            self.notes = (
                f"workers: {_SHARED} is too small to pass bags between processes, so slides are read one after the other. "
                "Set `cache`, or enlarge it (docker: --shm-size 8g).",
            )
        self._order: list[tuple[int, Variation | None]] = []  # what the loader goes through, anew each epoch
        # A generator of its own: drawing the workers' seed from the global stream would tie results to their number.
        options: dict[str, Any] = {"persistent_workers": True, "worker_init_fn": _begin_reader} if workers else {}
        self._loader = DataLoader(
            _Work(dataset, hand_over=bool(workers) and dataset.cache is not None),
            batch_size=None,
            sampler=self._order,
            num_workers=workers,
            collate_fn=_unchanged,
            generator=torch.Generator(),
            **options,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def epoch(self, order: Sequence[int], variation: Variation | None = None) -> Iterator[SlideBag]:
        """The bags of these rows, in this order; with a ``variation`` as that epoch of training sees them."""
        self._order[:] = [(int(index), variation) for index in order]
        for found in self._loader:
            if isinstance(found, UserError):
                raise found
            if isinstance(found, int) and self.dataset.cache is not None:  # a worker has just checked its entry
                for file, settings in self.dataset.cached(found):
                    self.dataset.cache.sound.add(self.dataset.cache.entry(file, settings))
                found = self.dataset.varied(found, variation)
            yield found

    def close(self) -> None:
        """End the workers."""
        del self._loader  # its own clean-up joins them


class _Work(Dataset[Any]):
    """What a worker does: a bag, or the index of one that is ready in the cache, or the error."""

    def __init__(self, dataset: SlideDataset, *, hand_over: bool) -> None:
        self.dataset = dataset
        self.hand_over = hand_over

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, asked: tuple[int, Variation | None]) -> Any:
        index, variation = asked
        cache = self.dataset.cache
        try:
            bag = self.dataset.varied(index, variation)
            if self.hand_over and cache and all(cache.touch(*one) for one in self.dataset.cached(index)):
                return index
            return bag
        except UserError as error:  # torch would bury the message in a traceback
            return error


def _unchanged(found: Any) -> Any:
    return found


def _begin_reader(worker: int) -> None:
    """Ctrl-C is the main process's to handle; it ends the workers. A reader makes and frees the same few tensors for every bag."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    keep_freed_memory()
