"""Where patches lie on the lattice: the stride, and who falls into whose window.

Shapes: N patches, P pairs, E neighbour entries.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from gated_srp.errors import UserError


def _signed(coords: Tensor) -> Tensor:
    """Whole numbers as int64: differences of unsigned or short ones would wrap around."""
    return coords if coords.is_floating_point() else coords.long()


def infer_stride(coords: Tensor) -> float:
    """The most frequent distance between successive patches of a row or a column.

    >>> infer_stride(torch.tensor([[0, 0], [512, 0], [1024, 0], [0, 512]]))
    512.0
    """
    coords, gaps = _signed(coords), []
    for a, b in ((0, 1), (1, 0)):  # gaps in a among patches that share b
        order = coords[:, a].argsort(stable=True)
        order = order[coords[order, b].argsort(stable=True)]
        run = coords[order]
        gap = run[1:, a] - run[:-1, a]
        gaps.append(gap[(run[1:, b] == run[:-1, b]) & (gap > 0)])
    found = torch.cat(gaps)
    if not len(found):
        raise UserError(
            f"stride: cannot be inferred, since no two of the {len(coords)} patches share a row or a column. "
            "Pass stride=, the distance between neighbouring patches in the units of coords."
        )
    if not found.is_floating_point():
        return float(found.mode().values)
    # Microns carry rounding noise: count in steps of 1 %, then take the middle of what fell into the fullest step.
    bins = (found.double().log() / 0.01).round()
    near = (bins - bins.mode().values).abs() <= 1
    return float(found[near].median())


def _compact(cells: Tensor, radius: int) -> Tensor:
    """Renumber cells so that gaps wider than any window shrink to radius + 1: keys then fit int64 for any coordinates."""
    values, inverse = torch.unique(cells, return_inverse=True)
    steps = values.diff().clamp(1, radius + 1)  # an overflowing difference is negative: still a wide gap
    steps = torch.where(values.diff() < 1, radius + 1, steps)
    return F.pad(steps.cumsum(0), (1, 0)).long()[inverse]


def _keys(cells: Tensor, radius: int) -> tuple[Tensor, int]:
    """One number a cell, (N,), and the distance between the keys of neighbouring columns."""
    x, y = (cells - cells.amin(0)).unbind(1)
    if not (0 <= int(x.max()) < 2**31 and 0 <= int(y.max()) < 2**31 - 2 * radius):
        x, y = (_compact(cells[:, i], radius) for i in (0, 1))
    pitch = int(y.max()) + 2 * radius + 1  # the margin keeps a window from wrapping into the next column
    return x * pitch + y + radius, pitch


def _smaller(ordered: Tensor, queries: Tensor) -> Tensor:
    """How many of the ordered keys are smaller than each query."""
    span = int(ordered[-1]) + 2
    if span > 8 * len(ordered):
        return torch.searchsorted(ordered, queries)
    # Keys of a slide are dense: answer every possible query once, then look up.
    table = torch.searchsorted(ordered, torch.arange(span, device=ordered.device))
    return table[queries.clamp(0, span - 1)]


def _candidates(keys: Tensor, pitch: int, listed: Tensor, radius: int) -> tuple[Tensor, Tensor]:
    """All pairs (row, listed patch) whose cells lie within the radius, ordered by row: two (P,) tensors of patch numbers.

    ``listed`` is ordered by key, so the cells (x + dx, y - radius ... y + radius) are one run.
    """
    ordered = keys[listed]
    columns = torch.arange(-radius, radius + 1, device=keys.device) * pitch
    middle = (keys.unsqueeze(1) + columns).flatten()  # (N * (2 * radius + 1),)
    first = _smaller(ordered, middle - radius)
    counts = _smaller(ordered, middle + radius + 1) - first
    shift = (first - counts.cumsum(0) + counts).repeat_interleave(counts)
    found = listed[torch.arange(len(shift), device=keys.device) + shift]
    numbers = torch.arange(len(keys), device=keys.device)
    return numbers.repeat_interleave(counts.view(len(keys), -1).sum(1)), found


def cells_of(coords: Tensor, stride: float) -> Tensor:
    """The cell of each patch, (N, 2): coords // stride, but that a float on the border of two cells is in the upper one.

    >>> cells_of(torch.tensor([[128.0, 127.0]], dtype=torch.float64), 25.6)  # 128 // 25.6 is 4
    tensor([[5, 4]])
    """
    coords = _signed(coords)
    if not coords.is_floating_point():
        whole = stride.is_integer()
        return torch.div(
            coords if whole else coords.double(), int(stride) if whole else stride, rounding_mode="floor"
        ).long()
    steps = coords.double() / stride
    nearest = steps.round()
    rounding = min(1e-3, 0.5 / stride)  # of coordinates in float32 or with a few digits; a whole pixel never is
    return torch.where((steps - nearest).abs() < rounding, nearest, steps.floor()).long()


def floor_cells(coords: Tensor, stride: float, radius: int) -> tuple[Tensor, Tensor]:
    """Lattice `floor`: neighbours are the first patches of the other cells of the window."""
    cells = cells_of(coords, stride)
    keys, pitch = _keys(cells, radius)
    order = keys.argsort(stable=True)
    first = F.pad(keys[order].diff() != 0, (1, 0), value=True)  # stable: the first of a run is the cell's first patch
    rows, found = _candidates(keys, pitch, order[first], radius)
    other = keys[rows] != keys[found]
    return found[other], torch.bincount(rows[other], minlength=len(cells))


def near_offsets(coords: Tensor, stride: float, radius: int) -> tuple[Tensor, Tensor]:
    """Lattice `exact`: neighbours are all patches within stride / 8 of a lattice offset, the offset (0, 0) excepted."""
    coords = _signed(coords)
    cells = torch.div(coords.double(), stride, rounding_mode="floor").long()
    keys, pitch = _keys(cells, radius + 1)
    rows, found = _candidates(keys, pitch, keys.argsort(stable=True), radius + 1)
    steps = (coords[found] - coords[rows]).double() / stride  # (P, 2)
    nearest = steps.round()
    hit = ((steps - nearest).abs() <= 1 / 8).all(1) & (nearest.abs() <= radius).all(1) & (nearest != 0).any(1)
    return found[hit], torch.bincount(rows[hit], minlength=len(cells))


def window_places(pairs: tuple[Tensor, Tensor], coords: Tensor, stride: float, window: int, lattice: str) -> Tensor:
    """Where in the window of its row each neighbour lies, (E,) uint8: (dx + r) n + dy + r with steps dx, dy along x and y, n = 2 r + 1.

    ``pairs``: row and neighbour of each entry, (E,) each, as the lattice found them.
    """
    rows, found = pairs
    if lattice == "floor":
        cells = cells_of(coords, stride)
        steps = cells[found] - cells[rows]  # (E, 2)
    else:
        coords = _signed(coords)
        steps = ((coords[found] - coords[rows]).double() / stride).round().long()
    dx, dy = (steps + window // 2).unbind(1)
    return (dx * window + dy).to(torch.uint8)
