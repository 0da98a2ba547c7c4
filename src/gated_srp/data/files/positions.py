"""Positions of a bag's patches: from the feature file itself, or from a file beside it.

Shapes: N patches.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gated_srp.data.bag import BagError
from gated_srp.data.files.containers import Container
from gated_srp.data.files.opening import opened
from gated_srp.data.files.siblings import position_files

_COORDS = ("coords", "coordinates")
_LARGEST = 2**53  # beyond it a float coordinate is no whole number

Places = list[tuple[str, dict[str, Any]]]  # where attributes were found, and they


class Positions(NamedTuple):
    values: Tensor  # (N, 2), int64 where whole
    places: Places
    centres: bool = False  # of patches, instead of corners
    microns: bool = False
    side: float | None = None  # of a patch, where the file holds bounds


def read_positions(file: Container, names: Sequence[str], coords_key: str | None) -> Positions:
    """Positions from the file itself, else from a file beside it."""
    if coords_key:
        name = coords_key if coords_key in names or file.has(coords_key) else None
    else:
        name = next((n for n in _COORDS if n in names), None)
    if name is not None:
        return _tidy(file, name, [("coords", file.attrs(name))])
    for beside in () if coords_key else position_files(file.path):
        try:
            with opened(beside) as other:
                found = _beside(other)
        except BagError as error:
            raise file.error(error.kind, f"its positions cannot be read: {error}") from error
        if found:
            return found
    stem = file.path.stem
    raise file.error(
        "no_coords",
        f"no '{coords_key or 'coords'}' (found: {', '.join(names) or 'nothing'}), and no positions beside it "
        f"({stem}.index.npz, h5_files/{stem}.h5, patches/{stem}_patches.h5). "
        "Gated SRP needs patch positions; name the key with coords_key, or extract again.",
    )


def _beside(other: Container) -> Positions | None:
    names = other.names()
    if other.path.name.endswith(".index.npz"):
        # slideflow's index of a bag; with `locations` it is a TFRecord's, whose arr_0 are byte offsets.
        if "arr_0" not in names or "locations" in names:
            return None
        return _tidy(other, "arr_0", [("coords", {})])._replace(centres=True)
    lone = ("features", "arr_0") if other.path.suffix in (".npy", ".npz") else ()  # the folder says what the array is
    name = next((n for n in (*_COORDS, *lone) if n in names), None)
    if name is None:
        return None
    where = other.path.name
    return _tidy(other, name, [(f"coords of {where}", other.attrs(name)), (f"root of {where}", other.attrs())])


def _tidy(file: Container, name: str, places: Places) -> Positions:
    """x and y of each patch from (N, 2), (N, 4) bounds, (N, 5) of AtlasPatch, with or without a batch axis."""
    shape, dtype = file.spec(name)
    rows = shape[1:] if len(shape) == 3 and shape[0] == 1 else shape
    if rows == (0,):
        return Positions(torch.zeros(0, 2, dtype=torch.int64), places)
    if len(rows) != 2 or rows[1] not in (2, 4, 5) or dtype == torch.bool:
        raise file.error(
            "bad_coords",
            f"'{name}' has shape {shape}, expected (N, 2): x and y of each patch. Name the right array: coords_key.",
        )
    table = file.read(name).reshape(rows)
    side = float((table[:, 2] - table[:, 0]).median()) if rows[1] == 4 and len(table) else None
    values = table[:, :2].contiguous()  # (N, 2)
    if not bool((values.abs() < _LARGEST).all()):  # NaN is not smaller either
        raise file.error(
            "bad_coords",
            f"'{name}' holds positions that are not finite or beyond any slide. Drop those patches, or extract again.",
        )
    if values.is_floating_point():
        values = values.double()
        values = values.long() if bool((values == values.round()).all()) else values
    return Positions(values, places, side=side if side and side > 0 else None)
