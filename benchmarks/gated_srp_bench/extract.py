"""Extraction from a generated slide, and in turns with it the encoder alone on patches that lie in memory.

Shapes: N patches, S side of a patch.
"""

import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from PIL import Image

from gated_srp.errors import UserError
from gated_srp.progress import Event
from gated_srp.slides.encoders import PatchEncoder, find_encoder
from gated_srp.slides.extract import Extraction, best_batch, best_device, best_workers, encode, extract_slides
from gated_srp.slides.store import Trident
from gated_srp.slides.tiles import Tiling

BOUND = 0.85  # share of the encoder's own speed that must be left
_BLOCK = 256  # pixels of a JPEG block of the slide, as scanners write them
_KINDS = 64  # different blocks
_SMALLER = 4  # the slide's second level
_WARM = 256  # patches before the clock starts
_TURN = 256  # patches of each turn
_SETTLE = 0.3  # seconds until the reading processes have filled their queue and rest: the encoder is then alone


@dataclass(frozen=True)
class Speed:
    """Patches a second in turns: (extraction in its steady state, the encoder alone right after)."""

    encoder: str
    patches: int
    turns: tuple[tuple[float, float], ...]

    @property
    def extraction(self) -> float:
        return median(fed for fed, _ in self.turns)

    @property
    def alone(self) -> float:
        return median(alone for _, alone in self.turns)

    @property
    def share(self) -> float:
        """Of the encoder's own speed that is left: of each turn, so that a slow moment of the machine hits both."""
        return median(fed / alone for fed, alone in self.turns)


def measure_extraction(
    name: str = "efficientnet_lite0", *, side: int = 64, workers: int | None = None, batch: int | None = None
) -> Speed:
    """A slide of ``side`` x ``side`` patches through the same functions as ``gated-srp extract``, in a temporary folder."""
    batch, workers = batch or best_batch(), best_workers() if workers is None else workers
    spec = find_encoder(name)
    if side**2 < 2 * _WARM + _TURN:
        raise UserError(
            f"bench: {side} x {side} patches are too few to see a steady state; expected 28 or more a side."
        )
    encoder = spec.load().to(best_device())
    with tempfile.TemporaryDirectory(prefix="gated-srp-bench-") as place:
        slide = write_slide(Path(place) / "slide.tif", side * spec.tile)
        tiling = Tiling(size=spec.tile, tissue=0.0)
        settings = Extraction(encoder=spec, tiling=tiling, layout=Trident(Path(place)), batch=batch, workers=workers)
        clock = _Clock(encoder, batch, read_ahead=settings.read_ahead * batch)
        outcome = extract_slides([slide], settings, clock)
    if outcome.failed:
        raise outcome.failed[0]
    return Speed(name, clock.total, tuple(clock.turns))


def write_slide(path: Path, side: int) -> Path:
    """A square slide of ``side`` pixels at 20x, tissue all over, in JPEG blocks and two levels."""
    import tifffile

    rng = np.random.default_rng(0)
    kinds = np.stack([_tissue(rng) for _ in range(_KINDS)])
    across = -(-side // _BLOCK)
    which = rng.integers(_KINDS, size=(across, across))
    small = kinds[:, ::_SMALLER, ::_SMALLER]  # (kinds, s, s, 3)
    options: dict[str, Any] = {
        "tile": (_BLOCK, _BLOCK),
        "photometric": "ycbcr",
        "subsampling": (2, 2),
        "compression": "jpeg",
        "compressionargs": {"level": 80},
        "resolution": (2e4, 2e4),  # pixels a centimetre: 0.5 microns a pixel
        "resolutionunit": "CENTIMETER",
    }

    def blocks() -> Iterator[np.ndarray]:
        yield from (kinds[number] for number in which.flat)

    with tifffile.TiffWriter(path) as file:
        file.write(blocks(), shape=(side, side, 3), dtype=np.uint8, **options)
        level = small[which].swapaxes(1, 2).reshape(across * small.shape[1], -1, 3)
        file.write(level[: -(-side // _SMALLER), : -(-side // _SMALLER)], subfiletype=1, **options)
    return path


def _tissue(rng: np.random.Generator) -> np.ndarray:
    """Pink with purple spots of a nucleus's size, (block, block, 3)."""
    spots = Image.fromarray(rng.integers(0, 255, (_BLOCK // 10, _BLOCK // 10)).astype(np.uint8))
    shade = np.asarray(spots.resize((_BLOCK, _BLOCK), Image.Resampling.BICUBIC), np.float32)[..., None] / 255
    colours = np.array([225, 160, 200]) * (1 - shade) + np.array([110, 60, 140]) * shade
    return (colours + rng.normal(0, 4, colours.shape)).clip(0, 255).astype(np.uint8)


@dataclass
class _Clock:
    """Watches an extraction; every few patches it holds it up to time the encoder alone."""

    encoder: PatchEncoder
    batch: int
    read_ahead: int  # patches that wait when the encoder comes back: they cost nothing, so the clock starts after them
    total: int = 0
    first: int = _WARM  # patches done when this turn's clock starts
    start: float = 0.0
    turns: list[tuple[float, float]] = field(default_factory=list)

    def __call__(self, event: Event) -> None:
        """Of the one slide; see `gated_srp.progress`."""
        if event.stage != "patches" or not event.done:
            return
        before, self.total = self.total, event.done
        if before < self.first <= self.total:
            self.first, self.start = self.total, time.perf_counter()
        elif before > self.first and self.total >= self.first + _TURN:
            fed = (self.total - self.first) / (time.perf_counter() - self.start)
            time.sleep(_SETTLE)
            self.turns.append((fed, _alone(self.encoder, self.batch)))
            self.first = self.total + self.read_ahead


def _alone(encoder: PatchEncoder, batch: int) -> float:
    """Patches a second of the encoder on patches in memory."""
    side = encoder.spec.tile
    tiles = np.random.default_rng(0).integers(0, 255, (batch, side, side, 3), np.uint8)
    start = time.perf_counter()
    rounds = max(1, _TURN // batch // 2)
    for _ in range(rounds):
        encode(encoder, tiles)
    return rounds * batch / (time.perf_counter() - start)
