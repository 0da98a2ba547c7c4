"""A second magnification of each slide: its feature file, the parent of each fine patch, and both as one bag.

Shapes: N fine patches, M coarse patches, P fine patches that have a parent.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import isclose
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gated_srp.data.bag import BagHeader
from gated_srp.data.files.siblings import find_bags, may_be_same
from gated_srp.data.matching import slide_stem
from gated_srp.data.prepared import Preparation, PreparedBag, open_header
from gated_srp.errors import Note, UserError, counted
from gated_srp.models.two_scales import TwoScaleGraph

_COARSER = 1.5  # times the fine stride that a coarse one has at least
_SAME = 0.1  # relative difference of two ratios that count as one

Read = Callable[[Path, Preparation], PreparedBag]


@dataclass(frozen=True, eq=False)
class Scales:
    """The headers of both files of a slide, which fit each other."""

    fine: BagHeader
    coarse: BagHeader

    @classmethod
    def open(cls, path: Path, settings: Preparation) -> "Scales":
        """Refused where the coarse file is missing, of another encoder or width, in another unit, or no coarser."""
        (_, one), (low, other) = apart(path, settings)
        found = cls(open_header(path, one), open_header(low, other))
        fine, coarse, kind, what = found.fine, found.coarse, "", ""
        cure = "Both magnifications need one encoder: extract one of them again, or correct `features_low`."
        if fine.encoder and coarse.encoder and not may_be_same(fine.encoder, coarse.encoder):
            kind, what = "wrong_encoder", f"has features of {coarse.encoder!r}, these are of {fine.encoder!r}"
        elif fine.shape[1] != coarse.shape[1]:
            kind, what = "width", f"has {coarse.shape[1]} channels, these {fine.shape[1]}"
        elif fine.unit != coarse.unit:
            kind, what = "unit", f"has positions in {coarse.unit}, these are in {fine.unit}"
            cure = "Extract both with one tool: a parent is found by positions in one unit."
        elif found.ratio < _COARSER:
            kind, what = "scales", f"has patches {coarse.stride:g} {coarse.unit} apart, these are {fine.stride:g} apart"
            cure = "`features_low` is the lower magnification, of larger patches: are the two exchanged, or one folder?"
        if what:
            raise UserError(f"its lower magnification {low} {what}", where=path, cure=cure, kind=kind)
        return found

    @property
    def ratio(self) -> float:
        """How many fine strides a coarse one has: 4 for 20x and 5x."""
        return self.coarse.stride / self.fine.stride

    @property
    def sides(self) -> tuple[float, float]:
        """Of a fine and of a coarse patch."""
        fine, coarse = (float(one.patch_size_level0 or one.stride) for one in (self.fine, self.coarse))
        return fine, coarse

    def parents(self, fine: Tensor | None = None, coarse: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """`find_parents` of these corners, by default all of the files; nothing found at all is refused."""
        places = self.fine.coords if fine is None else fine, self.coarse.coords if coarse is None else coarse
        children, parents = find_parents(*places, self.sides)
        if not len(children):
            (low, high), (first, last) = ((xy.amin(0).tolist(), xy.amax(0).tolist()) for xy in places)
            what = (
                f"none of {counted(len(places[0]), 'patch')} lies in one of its lower magnification {self.coarse.path}"
            )
            what += f" (fine corners from {low} to {high}, coarse ones from {first} to {last})"
            cure = "Both need positions in level-0 pixels of one slide: is it the same slide, and the same tool?"
            raise UserError(what, where=self.fine.path, cure=cure, kind="no_parents")
        return children, parents

    def problem(self, trained: dict[str, Any]) -> Note | None:
        """What is wrong with the ratio for a model whose card says ``trained``, or None."""
        if any(isclose(self.ratio, one, rel_tol=_SAME) for one in trained["ratio"]):
            return None
        listed = ", ".join(f"{one:g}" for one in trained["ratio"])
        what = f"features_low: a coarse stride has {self.ratio:g} fine ones, but {listed} in training"
        return Note("error", "scales", what, cure="Extract the lower magnification as for the training slides.")


def find_parents(fine: Tensor, coarse: Tensor, sides: tuple[float, float]) -> tuple[Tensor, Tensor]:
    """(P,) rows of fine patches, rising, and the rows of their parents: the coarse patch that holds the child's centre.

    Corners (N, 2) and (M, 2), ``sides`` of fine and coarse squares. Left and upper edges belong to a square. Of squares that overlap
    the one whose centre is nearest, along x or y, whichever is farther; of equal ones the first.

    >>> find_parents(torch.tensor([[0, 0], [3, 0], [9, 0]]), torch.tensor([[0, 0], [4, 0]]), (1, 4))
    (tensor([0, 1]), tensor([0, 0]))
    """
    side = sides[1]
    centres, corners = fine.double() + sides[0] / 2, coarse.double()
    cells = torch.div(corners, side, rounding_mode="floor").long()
    low, high = cells.amin(0), cells.amax(0)
    span = int(high[1] - low[1]) + 3  # so that a neighbouring cell of one column is none of another
    order = (key := (cells[:, 0] - low[0]) * span + cells[:, 1] - low[1]).argsort(stable=True)  # (M,)
    key, home = key[order], torch.div(centres, side, rounding_mode="floor").long()
    best, parents = torch.full((len(fine),), float("inf")).double(), torch.full((len(fine),), len(coarse))
    for dx, dy in (
        (0, 0),
        (-1, 0),
        (0, -1),
        (-1, -1),
    ):  # a square that holds a point begins in its cell or in one before
        at = home + torch.tensor([dx, dy])
        inside = ((at >= low) & (at <= high)).all(1)
        asked = torch.where(inside, (at[:, 0] - low[0]) * span + at[:, 1] - low[1], -1)
        start, stop = torch.searchsorted(key, asked), torch.searchsorted(key, asked, right=True)
        for step in range(int((stop - start).max())):
            rows = (start + step < stop).nonzero().flatten()
            tried = order[start[rows] + step]
            apart = centres[rows] - corners[tried]
            holds = ((apart >= 0) & (apart < side)).all(1)
            far = (apart - side / 2).abs().amax(1)
            better = holds & ((far < best[rows]) | ((far == best[rows]) & (tried < parents[rows])))
            best[rows[better]], parents[rows[better]] = far[better], tried[better]
    children = (parents < len(coarse)).nonzero().flatten()
    return children, parents[children]


def apart(path: Path, settings: Preparation) -> tuple[tuple[Path, Preparation], tuple[Path, Preparation]]:
    """File and settings of each scale: stride, cap and folder of positions are those of the fine one."""
    assert settings.features_low is not None
    alone = replace(settings, features_low=None)
    return (path, alone), (low_file(path, settings), replace(alone, coords=None, stride=None, cap=None))


def both_scales(path: Path, settings: Preparation, read: Read) -> PreparedBag:
    """The bag of both magnifications: rows of the fine patches, then of the coarse ones. ``read`` prepares one scale."""
    scales = Scales.open(path, settings)
    fine, coarse = (read(*one) for one in apart(path, settings))
    children, parents = scales.parents(fine.coords, coarse.coords)
    said = lone_notes([(len(fine.coords) - len(children), len(fine.coords))])
    return replace(
        fine,
        features=torch.cat([fine.features, coarse.features]),  # (N + M, C)
        coords=torch.cat([fine.coords, coarse.coords]),  # (N + M, 2)
        graph=TwoScaleGraph.of(fine.graph, coarse.graph, children, parents),
        warnings=(*fine.warnings, *coarse.warnings, *said),
    )


def ratios(files: Iterable[Path], settings: Preparation) -> list[float]:
    """Of coarse to fine strides, rounded, each once."""
    return sorted({round(Scales.open(file, settings).ratio, 3) for file in files})


def lone_patches(path: Path, settings: Preparation) -> tuple[int, int]:
    """Fine patches without a parent, and all of them, from the headers alone."""
    scales = Scales.open(path, settings)
    count = len(scales.fine.coords)
    return count - len(scales.parents()[0]), count


def lone_notes(slides: Sequence[tuple[int, int]]) -> tuple[Note, ...]:
    """What to say of the `lone_patches` of some slides, if there are any.

    >>> lone_notes([(2, 40), (0, 60)])[0].what
    'features_low: 2 of 100 fine patches, on 1 of 2 slides, lie in no coarse patch: they have no parent'
    """
    lone, count = (sum(each) for each in zip(*slides, strict=True))
    on = f", on {sum(one > 0 for one, _ in slides)} of {counted(len(slides), 'slide')}," if len(slides) > 1 else ""
    what = f"features_low: {lone:,} of {counted(count, 'fine patch')}{on} lie in no coarse patch: they have no parent"
    cure = "They are corrected along their neighbours alone; if these are many, extract both with one tissue mask."
    return (Note("note", "no_parent", what, cure=cure),) if lone else ()


def low_file(path: Path, settings: Preparation) -> Path:
    """The feature file of a slide's lower magnification: of the same name, anywhere below the folder."""
    folder, stem = settings.features_low, slide_stem(path)
    assert folder is not None
    if (near := folder / path.name).exists():
        return near
    key = str(folder), settings.encoder
    found = _listed(*key).get(stem) or _listed.__wrapped__(*key).get(stem, [])  # which may have come since
    if len(found) == 1:
        return found[0]
    if found:
        what = f"its lower magnification has {counted(len(found), 'file')}: {', '.join(str(one) for one in found[:4])}"
        cure = "Name a folder of one magnification and one encoder with `features_low`."
        raise UserError(what, where=path, cure=cure, kind="scales")
    cure = "Extract its lower magnification, leave the slide out with `exclude`, or correct `features_low`."
    raise UserError(f"no feature file of slide {stem!r} in {folder}", where=path, cure=cure, kind="no_low_file")


@lru_cache(maxsize=16)
def _listed(folder: str, encoder: str | None) -> dict[str, list[Path]]:
    files: dict[str, list[Path]] = {}
    for path in find_bags(folder, encoder=encoder):
        files.setdefault(slide_stem(path), []).append(path)
    return files
