"""How alike a patch is to its neighbours (the paper's Fig. 1c): its cosine to their mean, beside the same for random patches.

Shapes: N patches, M of them with neighbours, E neighbour entries, C channels.
"""

import csv
import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from gated_srp.files import whole
from gated_srp.srp.graph import PatchGraph
from gated_srp.srp.projection import along, neighbour_mean, unit

POOLED = "all slides"
_QUANTILES = {"q05": 0.05, "q25": 0.25, "median": 0.5, "q75": 0.75, "q95": 0.95}


@dataclass(frozen=True, eq=False)
class Redundancy:
    """Of one slide, or of several pooled. ``rows`` says what was compared: features, or tokens of a layer."""

    slide: str
    rows: str
    neighbours: Tensor  # (M,) cosine of each patch with neighbours to their mean
    random: Tensor  # (M,) the same for as many random other patches of the slide


def redundancy(rows: Tensor, graph: PatchGraph, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Cosine of each patch that has neighbours to their mean, and to the mean of as many random patches: (N, C) -> two (M,).

    A patch's random partners differ from each other and from the patch: the neighbour lists are relabelled by one
    permutation; where that gives the patch itself, the patch's own image stands in, which its list cannot hold yet.

    >>> line = PatchGraph.from_coords(torch.tensor([[0, 0], [1, 0], [2, 0]]), stride=1)
    >>> features = torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0]])
    >>> [round(cosine, 2) for cosine in redundancy(features, line, torch.Generator())[0].tolist()]
    [1.0, 0.71, 0.0]
    """
    counts = graph.neighbour_count
    alive = counts > 0
    own = torch.arange(len(rows)).repeat_interleave(counts)  # (E,)
    image = torch.randperm(len(rows), generator=generator)
    drawn = image[graph.neighbours]
    drawn = torch.where(drawn == own, image[own], drawn)
    axis = unit(rows)  # (N, C)
    near, far = (unit(neighbour_mean(rows, lists, graph.offsets)) for lists in (graph.neighbours, drawn))
    return along(axis, near)[alive].clamp(-1, 1), along(axis, far)[alive].clamp(-1, 1)  # rounding may exceed 1


def measure(slide: str, rows: Tensor, graph: PatchGraph, *, what: str = "features", seed: int = 0) -> Redundancy:
    """The redundancy of one slide; its random draw depends on the seed and the slide's name alone."""
    digest = hashlib.sha256(f"{seed}/{slide}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))
    return Redundancy(slide, what, *redundancy(rows, graph, generator))


def pooled(slides: Sequence[Redundancy], *, name: str = POOLED) -> list[Redundancy]:
    """All patches together, once for each kind of rows, in the order these appear."""
    kinds = dict.fromkeys(one.rows for one in slides)
    found = []
    for kind in kinds:
        same = [one for one in slides if one.rows == kind]
        near, far = (torch.cat([getattr(one, which) for one in same]) for which in ("neighbours", "random"))
        found.append(Redundancy(name, kind, near, far))
    return found


def write_table(measured: Iterable[Redundancy], path: Path) -> None:
    """One row for each slide, kind of rows and kind of partners: number of patches, mean and quantiles of the cosine."""
    with whole(path) as draft, draft.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["slide", "rows", "partners", "patches", "mean", *_QUANTILES])
        for one in measured:
            for partners in ("neighbours", "random"):
                cosines = getattr(one, partners)
                numbers = [f"{number:.6f}" for number in (cosines.mean(), *quantiles(cosines).values())]
                writer.writerow([one.slide, one.rows, partners, len(cosines), *numbers])


def quantiles(cosines: Tensor) -> dict[str, float]:
    """Of any number of values, by linear interpolation; torch's own quantile refuses large inputs."""
    values = np.quantile(cosines.double().numpy(), list(_QUANTILES.values()))
    return dict(zip(_QUANTILES, values.tolist(), strict=True))
