"""Which patches are neighbours: a list of lists, built once per bag.

Shapes: B bags, N patches, L rows (patches and rows without neighbours), E neighbour entries, C channels.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, Self

import torch
from torch import Tensor
from torch.nn import functional as F

from gated_srp.errors import UserError
from gated_srp.srp.lattice import floor_cells, infer_stride, near_offsets, window_places
from gated_srp.srp.projection import chunks, neighbour_mean, neighbour_sum, wide

_FEWEST = 0.1  # mean neighbour count below which a bag of at least _JUDGED patches is refused
_JUDGED = 16
LONG = 65_536  # rows beyond which halves are widened a part at a time
_PART = 4096  # rows of such a part


@dataclass(frozen=True, eq=False)
class PatchGraph:
    """Neighbour lists of one bag, or of several bags laid out as one flat graph over B * L rows.

    Row i has the neighbours ``neighbours[offsets[i]:offsets[i + 1]]``; a row without any (CLS, padding, a lone patch) has
    r_hat = 0 and passes through the correction unchanged, so no mask of real rows exists anywhere.
    """

    scales = 1  # magnifications of its patches; without a type: no field
    plain_lists = True  # means are of the rows in the lists, and of nothing else
    neighbours: Tensor  # (E,) int64, row numbers
    offsets: Tensor  # (B * L + 1,) int64
    homogeneity: Tensor  # (B * L,) float32, mean cosine of the raw features to the neighbours'
    window: int = 3
    lengths: tuple[int, ...] = (0,)  # patches of each bag
    before: int = 0  # rows without neighbours in front of each bag's patches
    places: Tensor | None = None  # (E,) uint8, where in a window of up to 15 each neighbour lies: `window_places`
    covariates: Tensor | None = None  # (B, F), what else is known of each bag: carried along for a model's head
    longest: int | None = None  # entries of the longest list, where `with_places` found more than `most_neighbours`

    @classmethod
    def from_coords(
        cls,
        coords: Tensor,
        features: Tensor | None = None,
        *,
        stride: float | None = None,
        window: int = 3,
        lattice: Literal["floor", "exact"] = "floor",
    ) -> Self:
        """The graph of one bag.

        ``coords`` (N, 2): pixels, microns, anything with a ``stride`` (inferred from the coordinates where None).
        ``features`` (N, C): raw patch features for the homogeneity; None makes it zero.
        ``floor``: cell = coords // stride, a cell belongs to its first patch (as published).
        ``exact``: every patch within stride / 8 of a lattice offset counts, for lattices that start anew in each tissue region.

        >>> PatchGraph.from_coords(torch.tensor([[0, 0], [512, 0], [0, 512], [9216, 9216]])).neighbour_count.tolist()
        [2, 2, 2, 0]
        """
        _check(coords, features, window, lattice)
        step = infer_stride(coords) if stride is None else float(stride)
        if not step > 0 or step == float("inf"):
            what = f"stride is {stride}: expected a positive number, the distance between neighbouring patches."
            raise UserError(what)
        accept = floor_cells if lattice == "floor" else near_offsets
        neighbours, counts = accept(coords, step, window // 2)
        _check_density(counts, coords, step)
        graph = cls(neighbours, _offsets(counts), torch.zeros_like(counts, dtype=torch.float32), window, (len(coords),))
        graph = graph.with_places(coords, step, lattice)
        return graph if features is None else graph.with_features(features)

    @classmethod
    def from_grid(cls, height: int, width: int, *, window: int = 3) -> Self:
        """The graph of a full rectangular grid of tokens, row by row (an image transformer)."""
        y, x = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
        return cls.from_coords(torch.stack([x, y], -1).reshape(-1, 2), stride=1, window=window)

    @classmethod
    def batch(cls, graphs: Sequence["PatchGraph"]) -> Self:
        """Several graphs of patches as one: each bag is filled up with rows without neighbours to the longest."""
        cls._check_alike(graphs)
        rows = max(g.num_rows for g in graphs)
        flat = cls._in_line(
            [g.with_isolated(after=rows - g.num_rows) for g in graphs], tuple(g.lengths[0] for g in graphs)
        )
        known = [g.covariates for g in graphs if g.covariates is not None]
        return replace(flat, covariates=torch.cat(known)) if len(known) == len(graphs) else flat

    @classmethod
    def side_by_side(cls, graphs: Sequence["PatchGraph"]) -> Self:
        """Several graphs of patches as one bag: their rows one after the other, no neighbours across graphs.

        >>> PatchGraph.side_by_side([PatchGraph.from_grid(1, 2), PatchGraph.from_grid(1, 3)]).neighbours.tolist()
        [1, 0, 3, 2, 4, 3]
        """
        cls._check_alike(graphs)
        return cls._in_line(graphs, (sum(g.num_rows for g in graphs),))

    @classmethod
    def _in_line(cls, graphs: Sequence["PatchGraph"], lengths: tuple[int, ...]) -> Self:
        rows = [sum(g.num_rows for g in graphs[:i]) for i in range(len(graphs))]
        starts = [sum(len(g.neighbours) for g in graphs[:i]) for i in range(len(graphs))]
        places = [g.places for g in graphs if g.places is not None]
        known = len(places) == len(graphs)
        return cls(
            torch.cat([g.neighbours + r for g, r in zip(graphs, rows, strict=True)]),
            torch.cat([graphs[0].offsets[:1], *(g.offsets[1:] + s for g, s in zip(graphs, starts, strict=True))]),
            torch.cat([g.homogeneity for g in graphs]),
            graphs[0].window,
            lengths,
            places=torch.cat(places) if known else None,
            longest=max(g.longest or 0 for g in graphs) or None if known else None,
        )

    @staticmethod
    def _check_alike(graphs: Sequence["PatchGraph"]) -> None:
        if any(g.before or len(g.lengths) != 1 or g.num_rows != g.lengths[0] for g in graphs) or not graphs:
            what = "PatchGraph.batch: expected one or more graphs of patches alone (from from_coords or from_grid)."
            raise UserError(what)
        if len({g.window for g in graphs}) != 1:
            what = f"PatchGraph.batch: windows differ ({sorted({g.window for g in graphs})}); build all graphs with one window."
            raise UserError(what)

    @property
    def num_rows(self) -> int:
        """All rows, B * L."""
        return self.offsets.shape[0] - 1

    @property
    def num_bags(self) -> int:
        return len(self.lengths)

    @property
    def spans(self) -> list[slice]:
        """Where the patches of each bag lie among all rows."""
        rows = self.num_rows // self.num_bags
        starts = [bag * rows + self.before for bag in range(self.num_bags)]
        return [slice(start, start + patches) for start, patches in zip(starts, self.lengths, strict=True)]

    @property
    def most_neighbours(self) -> int:
        """K = n * n - 1, the neighbours of a patch inside tissue."""
        return self.window**2 - 1

    @property
    def most_listed(self) -> int:
        """K, or the longest list where it is longer: with lattice `exact` two patches may lie at one place of a window."""
        if self.longest is not None or self.places is not None:
            return self.longest or self.most_neighbours  # nothing waits for a device
        return max(self.most_neighbours, int(self.neighbour_count.max()) if self.num_rows else 0)

    @property
    def neighbour_count(self) -> Tensor:
        """m_i of each row, (B * L,)."""
        return self.offsets.diff()

    def mean(self, rows: Tensor) -> Tensor:
        """Eq. 6 over these lists: (B * L, C) -> (B * L, C)."""
        return neighbour_mean(rows, self.neighbours, self.offsets)

    def sum(self, rows: Tensor, part: slice) -> Tensor:
        """`neighbour_sum` over the lists of ``part`` alone; of halves on a processor only the rows that these need are widened."""
        found, starts = _lists(self.neighbours, self.offsets, part)
        if rows.device.type == "cpu" and wide(rows[:0]).dtype != rows.dtype:  # elsewhere `unique` would wait
            needed, found = found.unique(return_inverse=True)
            rows = wide(rows[needed])
        return neighbour_sum(rows, found, starts)

    def with_isolated(self, before: int = 0, after: int = 0) -> Self:
        """Rows without neighbours in front of (CLS, registers) and behind (padding) each bag's rows."""
        if not before and not after:
            return self
        bags, rows = self.num_bags, self.num_rows // self.num_bags
        counts = F.pad(self.neighbour_count.view(bags, rows), (before, after)).flatten()
        bag = torch.div(self.neighbours, rows, rounding_mode="floor") if bags > 1 else 0
        return replace(
            self,
            neighbours=self.neighbours + (before + bag * (before + after)),
            offsets=_offsets(counts),
            homogeneity=F.pad(self.homogeneity.view(bags, rows), (before, after)).flatten(),
            before=self.before + before,
        )

    def part(self, rows: slice) -> Self:
        """The lists and h_local of some rows alone; their neighbours are still numbered among all rows."""
        neighbours, offsets = _lists(self.neighbours, self.offsets, rows)
        places = None if self.places is None else _lists(self.places, self.offsets, rows)[0]
        return replace(self, neighbours=neighbours, offsets=offsets, homogeneity=self.homogeneity[rows], places=places)

    def first(self, count: int) -> Self:
        """The graph of the first ``count`` patches of one bag alone: neighbours beyond them are left out."""
        neighbours, offsets = _lists(self.neighbours, self.offsets, slice(0, count))
        inside = neighbours < count  # (E,)
        kept = F.pad(inside.cumsum(0), (1, 0))[offsets]
        lists = replace(self, neighbours=neighbours[inside], offsets=kept, homogeneity=self.homogeneity[:count])
        places = None if self.places is None else self.places[: len(neighbours)][inside]
        return replace(lists, lengths=(count,), places=places)

    def first_rows(self) -> Self:
        """The graph of each bag's first row alone (CLS), which has no neighbours."""
        bags = self.num_bags
        offsets, flat = torch.zeros_like(self.offsets[: bags + 1]), self.homogeneity[:bags] * 0
        none = self.neighbours[:0]
        return replace(self, neighbours=none, offsets=offsets, homogeneity=flat, lengths=(0,) * bags, places=None)

    def with_places(self, coords: Tensor, stride: float, lattice: str = "floor") -> Self:
        """The same lists of one bag with each neighbour's place in the window; arguments as in `from_coords`."""
        if self.window > 15:  # more places than a byte has values
            return self
        longest = self.most_neighbours if lattice == "floor" else self.most_listed
        owners = torch.arange(self.num_rows, device=coords.device)
        owners = owners.repeat_interleave(self.neighbour_count, output_size=len(self.neighbours))  # (E,)
        places = window_places((owners, self.neighbours), coords, float(stride), self.window, lattice)
        return replace(self, places=places, longest=longest if longest > self.most_neighbours else None)

    def with_features(self, features: Tensor) -> Self:
        """The same lists with h_local of these raw features, (B * L, C); features that are not finite are refused."""
        rows = features.detach()
        if len(rows) <= LONG or rows.device.type != "cpu":
            rows = wide(rows)  # of a very long slide it would be the largest tensor of all
        norms = torch.cat([torch.linalg.vector_norm(wide(part), dim=-1) for part in rows.split(_PART)])
        _check_finite(norms)
        return replace(self, homogeneity=homogeneity(rows, norms, self.neighbours, self.offsets))

    def with_tokens(self, tokens: Tensor) -> Self:
        """`with_features` inside a forward: nothing is refused, so that nothing waits for a device."""
        rows = wide(tokens.detach())
        norms = torch.linalg.vector_norm(rows, dim=-1)
        return replace(self, homogeneity=homogeneity(rows, norms, self.neighbours, self.offsets))

    def with_covariates(self, values: Tensor) -> Self:
        """The same lists with the covariates of each bag, (B, F), as a model was trained on them (`Covariates.encode`)."""
        return replace(self, covariates=values)

    def to(self, device: torch.device | str) -> Self:
        tensors = ("neighbours", "offsets", "homogeneity", "places", "covariates")
        found = {name: getattr(self, name) for name in tensors}
        moved = {name: one.to(device, non_blocking=True) for name, one in found.items() if one is not None}
        return replace(self, **moved)

    def patches(self, values: Tensor) -> Tensor:
        """Patch columns alone: (B, H, L) -> (H, N) for one bag, (B, H, longest) for several (shorter bags end in padding)."""
        kept = values[..., self.before : self.before + max(self.lengths)]
        return kept[0] if self.num_bags == 1 else kept

    def rows_of(self, patches: Tensor) -> Tensor:
        """Which rows of one bag stand for the patches chosen, (N,) bool -> (rows up to the last such,) bool."""
        return F.pad(patches, (self.before, 0))


torch.export.register_dataclass(PatchGraph, serialized_type_name="gated_srp.PatchGraph")


def homogeneity(rows: Tensor, norms: Tensor, neighbours: Tensor, offsets: Tensor) -> Tensor:
    """h_local: mean over neighbours of cos(phi_i, phi_j) = <phi_i / |phi_i|, mean of phi_j / |phi_j|>; 0 without neighbours.

    ``rows`` (L, C) are the features phi and ``norms`` (L,) their lengths -> (L,). A zero feature has cosine 0 to everything.
    """
    scale = torch.where(norms > 0, 1 / norms, 0.0)
    out = torch.empty_like(norms)
    for part in chunks(rows, 256):  # no copy of all features: fresh memory costs more than the arithmetic
        found, starts = _lists(neighbours, offsets, part)
        table, places, own = rows, found, rows[part]
        if wide(rows[:0]).dtype != rows.dtype:  # halves: only the rows that this chunk needs are widened
            needed, places = found.unique(return_inverse=True)
            table, own = wide(rows[needed]), wide(own)
        around = F.embedding_bag(
            places, table, starts, mode="sum", include_last_offset=True, per_sample_weights=scale[found]
        )
        out[part] = around.mul_(own).sum(-1)  # <phi_i, sum of the neighbours' unit features>
    return (out * scale / offsets.diff().clamp(min=1)).float()


def _check_finite(norms: Tensor) -> None:
    good = torch.isfinite(norms)
    if not good.all():
        bad = (~good).nonzero().flatten()
        what = f"{len(bad)} of {len(good)} rows are not finite (NaN, infinity or too large for float32), the first is row {int(bad[0])}"
        cure = "Drop those rows together with their coordinates, or extract the slide again."
        raise UserError(what, where="features", cure=cure)


def _lists(neighbours: Tensor, offsets: Tensor, part: slice) -> tuple[Tensor, Tensor]:
    """The lists of some rows alone; those of all rows without asking a device where they begin."""
    if part == slice(0, len(offsets) - 1):
        return neighbours, offsets
    ends = offsets[part.start : part.stop + 1]
    return neighbours[ends[0] : ends[-1]], ends - ends[0]


def _offsets(counts: Tensor) -> Tensor:
    return F.pad(counts.cumsum(0), (1, 0))


def _check(coords: Tensor, features: Tensor | None, window: int, lattice: str) -> None:
    if coords.ndim != 2 or coords.shape[1] != 2 or len(coords) == 0:
        what = f"shape {tuple(coords.shape)}, expected (N, 2) with at least one patch: x and y of each patch's corner."
        raise UserError(what, where="coords")
    if coords.is_floating_point() and not torch.isfinite(coords).all():
        cure = "Every patch needs a position: drop those patches or extract the slide again."
        raise UserError("some are NaN or infinite", where="coords", cure=cure)
    if features is not None and (features.ndim != 2 or len(features) != len(coords)):
        what = f"shape {tuple(features.shape)} for {len(coords)} coordinates, expected ({len(coords)}, C)"
        cure = "The two do not belong to the same slide file, or a batch axis is left."
        raise UserError(what, where="features", cure=cure)
    if window < 3 or window % 2 == 0:
        what = f"window is {window}: expected an odd number from 3 on (3 gives 8 neighbours, 5 gives 24, 7 gives 48)."
        raise UserError(what)
    if lattice not in ("floor", "exact"):
        what = f"lattice is {lattice!r}: expected 'floor' (as published) or 'exact' (tolerant of several lattices)."
        raise UserError(what)


def _check_density(counts: Tensor, coords: Tensor, stride: float) -> None:
    """A stride that leaves nobody with neighbours would switch the correction off without a word."""
    if len(counts) < _JUDGED or float(counts.double().mean()) >= _FEWEST:
        return
    try:
        observed = f"successive patches of a row or column are mostly {infer_stride(coords):g} apart"
    except UserError:
        observed = "no two patches share a row or a column"
    what = f"stride {stride:g} leaves {float(counts.double().mean()):.3f} neighbours per patch on average, so Gated SRP would do nothing; {observed}"
    cure = "Pass the distance between neighbouring patches in the units of coords, or leave stride out to have it inferred."
    raise UserError(what, cure=cure, kind="no_neighbours")
