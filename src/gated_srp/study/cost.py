"""What a study will take, before it starts: time, space and memory, from the headers of a few slides and counted products."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from gated_srp.checks.estimate import Machine, Trunk, run_seconds
from gated_srp.config.cohort import CohortData, preparation
from gated_srp.data.bag import BagError
from gated_srp.data.prepared import open_header
from gated_srp.data.splits.rules import PARTS
from gated_srp.models import find_arm
from gated_srp.study.cells import Cell, distinct
from gated_srp.training.domain import evenly

_LOOKED_AT = 50  # slides whose headers are read
_START = 5.0  # seconds in which a process imports and reads its table
_STATE = 4  # weights, two moments and the best weights: what an unfinished run keeps


@dataclass(frozen=True)
class Cost:
    """Of the cells still to run. ``seconds`` on the whole machine; ``memory`` of the largest slide seen."""

    cells: int = 0
    seconds: float = 0.0
    disk: float = 0.0
    memory: float = 1.0


def cost(cells: Iterable[Cell], data: Mapping[str, CohortData], machine: Machine) -> Cost:
    """Rough, and said to be so: slides are taken to be like the ones looked at."""
    seconds = disk = 0.0
    memory = 1.0
    left = [cell for cell in distinct(cells) if not cell.run.finished]
    looks: dict[str, _Look] = {}
    for cell in left:
        if cell.cohort not in looks:
            looks[cell.cohort] = _look_at(data[cell.cohort], cell)
        look = looks[cell.cohort]
        model = cell.config.model
        trunk = Trunk(look.width, model.dim, model.depth, dense=find_arm(cell.arm).dense)
        parts = {part: [look.typical] * count for part, count in look.counts.items()}
        seconds += run_seconds(trunk, parts, epochs=cell.config.train.epochs, rate=machine.rate) + _START
        weights = 4.0 * (12 * model.dim**2 * model.depth + look.width * model.dim)
        disk += weights
        memory = max(memory, trunk.memory(look.largest * cell.config.at_once))
    disk += _STATE * disk / len(left) if left else 0.0
    return Cost(len(left), seconds, disk, memory)


@dataclass(frozen=True)
class _Look:
    width: int
    typical: int
    largest: int
    counts: dict[str, int]


def _look_at(data: CohortData, cell: Cell) -> _Look:
    frame = data.slides(cell.seed, cell.fold)
    settings = preparation(data.config)
    sizes, width = [], 1
    for row in evenly(list(range(len(frame))), _LOOKED_AT):
        try:
            rows, width = open_header(frame["file"].iloc[row], settings).shape
        except BagError:  # the run itself says which and why
            continue
        sizes.append(min(rows, data.config.cap or rows))
    counts = frame["part"].value_counts()
    sizes = sizes or [1]
    return _Look(width, sum(sizes) // len(sizes), max(sizes), {part: int(counts.get(part, 0)) for part in PARTS})
