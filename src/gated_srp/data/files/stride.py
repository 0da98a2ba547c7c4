"""The stride of a lattice of patches: what the file declares, what the coordinates show, and which of the two is used.

Shapes: N patches.
"""

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gated_srp.data.bag import BagError, Unit
from gated_srp.data.files.siblings import Places, Positions
from gated_srp.errors import Note, UserError
from gated_srp.srp.graph import PatchGraph
from gated_srp.srp.lattice import cells_of, infer_stride

_AGREE = 0.02  # relative difference of two strides that are one
_WORSE = 0.75  # a stride that keeps less than this share of another's lattice does not fit the coordinates
_ENOUGH = 16  # patches from which on coordinates alone may overrule a file
_FOLDER = re.compile(r"(?P<target_magnification>[\d.]+)x_(?P<patch_size>\d+)px_(?P<overlap>\d+)px_overlap")
_HISTORIC_PX, _HISTORIC_UM = 224, 256.0  # STAMP before it wrote attributes: pixels of which 224 are 256 microns

Attrs = Mapping[str, Any]


class Declared(NamedTuple):
    stride: float
    source: str  # place and attribute
    unit: Unit
    patch_size: float | None  # side of a patch in level-0 pixels


class Stride(NamedTuple):
    value: float
    source: str
    warnings: tuple[Note, ...]


def number(attrs: Attrs, *names: str) -> float | None:
    """The first of these attributes that is a finite positive or zero number.

    >>> number({"mpp": "0.5"}, "level0_mpp", "mpp"), number({"mpp": -1}, "mpp")
    (0.5, None)
    """
    for name in names:
        value = attrs.get(name)
        value = value[0] if isinstance(value, list) and value else value  # CLAM's downsample is a pair
        try:
            parsed = float(value)  # type: ignore[arg-type]
        except (TypeError, ValueError, OverflowError):
            continue
        if math.isfinite(parsed) and parsed >= 0 and not isinstance(value, bool):
            return parsed
    return None


def text(attrs: Attrs, *names: str) -> str | None:
    """The first of these attributes that is text."""
    return next((attrs[name] for name in names if isinstance(attrs.get(name), str)), None)


def declared(places: Places, path: Path) -> Declared | None:
    """The stride that the first of these places declares, then the one in the folder's name (20x_256px_0px_overlap)."""
    if found := next(filter(None, (_from_attrs(place, attrs) for place, attrs in places)), None):
        return found
    level0 = next((m for _, attrs in places if (m := number(attrs, "level0_magnification"))), None)
    for folder in reversed(path.parts[:-1]):
        named = _FOLDER.fullmatch(folder)
        if named and level0:
            return _from_attrs(f"folder name {folder}", named.groupdict() | {"level0_magnification": level0})
    return None


def _from_attrs(place: str, attrs: Attrs) -> Declared | None:
    microns = number(attrs, "tile_size_um") or (number(attrs, "tile_size") if text(attrs, "unit") == "um" else None)
    if microns:
        return Declared(microns, f"{place} (tile size in microns)", "um", None)
    size, overlap = number(attrs, "patch_size"), number(attrs, "overlap") or 0.0
    level0, target = number(attrs, "level0_magnification"), number(attrs, "target_magnification")
    if footprint := number(attrs, "patch_size_level0"):
        scale, named = (footprint / size if size else None), "patch_size_level0"
    elif size and level0 and target:
        scale, named = level0 / target, "patch_size and magnifications"
    elif size and (down := number(attrs, "downsample") or (1.0 if number(attrs, "patch_level") == 0 else None)):
        scale, named = down, "patch_size and downsample"
    else:
        return None
    if overlap and scale and size and overlap < size:
        return Declared((size - overlap) * scale, f"{place} ({named}, less overlap)", "px", size * scale)
    side = footprint or (size or 0.0) * (scale or 0.0)
    return Declared(side, f"{place} ({named})", "px", side)


def lattice_of(found: Positions, places: Places, path: Path, given: float | None) -> dict[str, Any]:
    """Positions as top-left corners in one unit, with their stride: fields of a `BagHeader`."""
    file = declared(places, path)
    said_microns = file.unit == "um" if file else any(text(attrs, "unit") == "um" for _, attrs in places)
    unit: Unit = "um" if found.microns or said_microns else "px"
    coords = found.values.double() if unit == "um" else found.values  # (N, 2)
    stride, source, warnings = settle(coords, file, given, path)
    if found.centres:
        # The side of a tile is not stored; half a stride keeps the lattice, and is exact for tiles that do not overlap.
        coords, source = coords - int(stride // 2), f"{source}; tile centres moved to corners by half a stride"
    if coords.is_floating_point():
        coords, stride = on_lattice(coords, stride)
    side = found.side or (file.patch_size if file else None)
    lattice = {"coords": coords, "stride": stride, "stride_source": source, "unit": unit, "patch_size_level0": side}
    return lattice | {"warnings": warnings}


def settle(coords: Tensor, file: Declared | None, given: float | None, path: Path) -> Stride:
    """The stride to use: the caller's, else the declared one if it fits the coordinates, else the observed one."""
    try:
        observed: float | None = infer_stride(coords)
    except UserError:
        observed = None
    if given is not None:
        return _given(given, observed)
    if file is None:
        return _observed_alone(coords, observed, path)
    where = f"declared on {file.source}"
    if observed is None:
        return Stride(file.stride, f"{where}, not confirmed: no two patches share a row or a column", ())
    if abs(file.stride - observed) > _AGREE * observed:
        return _disagreement(coords, file, observed)
    # A small error adds up over a hundred columns: of two that agree, take the one that keeps the lattice.
    if file.stride != observed and _kept(coords, observed) > _kept(coords, file.stride):
        return Stride(observed, f"observed, refines {where}", ())
    return Stride(file.stride, f"{where}, agrees with coordinates", ())


def _given(given: float, observed: float | None) -> Stride:
    if not 0 < given < float("inf"):
        what = f"{given} is no distance: expected a positive number, the distance between neighbouring patches"
        raise UserError(what, where="stride", kind="stride")
    if observed is None or abs(given - observed) <= _AGREE * observed:
        return Stride(float(given), "given by the caller", ())
    what = (
        f"a stride of {given:g} was given and is used, but successive patches of a row or column are mostly "
        f"{observed:g} apart"
    )
    warning = Note("warning", "stride", what, cure="Leave stride out to have it found.")
    return Stride(float(given), f"given by the caller, coordinates show {observed:g}", (warning,))


def _observed_alone(coords: Tensor, observed: float | None, path: Path) -> Stride:
    if observed is not None:
        return Stride(observed, "observed from coordinates, nothing declared", ())
    if len(coords) == 1:
        return Stride(1.0, "a single patch: every stride gives the same graph", ())
    what = f"no stride is declared, and none is observed: no two of the {len(coords)} patches share a row or a column"
    cure = "Pass stride=, the distance between neighbouring patches in the unit of coords."
    raise BagError(what, where=path, cure=cure, kind="no_stride")


def _disagreement(coords: Tensor, file: Declared, observed: float) -> Stride:
    kept, possible = _kept(coords, file.stride), _kept(coords, observed)
    if len(coords) < _ENOUGH and possible < 2 and observed > file.stride:
        # A few scattered patches of the declared lattice: gaps of several strides say nothing against it.
        return Stride(file.stride, f"declared on {file.source}, too few patches to confirm", ())
    wrong = kept < _WORSE * possible
    used, source = (observed, "observed from coordinates") if wrong else (file.stride, f"declared on {file.source}")
    other = f"declared on {file.source}: {file.stride:g}" if wrong else f"coordinates show {observed:g}"
    what = (
        f"the file declares a stride of {file.stride:g} ({file.source}), but successive patches of a row or column "
        f"are mostly {observed:g} apart; {used:g} is used"
    )
    warning = Note("warning", "stride", what, cure="Pass stride= to decide otherwise.")
    return Stride(used, f"{source}, disagrees with {other}" if wrong else f"{source}, but {other}", (warning,))


def _kept(coords: Tensor, stride: float) -> float:
    """Mean neighbour count at this stride, times the share of patches that have a cell of their own."""
    if coords.is_floating_point():
        coords, stride = on_lattice(coords, stride)
    try:
        counts = PatchGraph.from_coords(coords, stride=stride).neighbour_count
    except UserError:  # almost no neighbours
        return 0.0
    cells = cells_of(coords, stride)
    return float(counts.double().mean()) * len(torch.unique(cells, dim=0)) / len(coords)


def unnamed_source(path: Path, source: str) -> str:
    """Where a stride comes from, with the slide's name, if it is part of that, as a star, so that equal sources are equal.

    >>> unnamed_source(Path("pt_files/s1.pt"), "declared on coords of s1.h5")
    'declared on coords of *.h5'
    """
    return re.sub(rf"(?<!\w){re.escape(path.stem)}(?=_patches\.|\.)", "*", source)


def stamp_positions(found: Positions, places: Places) -> Positions:
    """Microns of a STAMP file from before it wrote attributes, recognised by its stride of 224; others unchanged."""
    if any(text(attrs, "unit") == "um" or number(attrs, "tile_size_um") for _, attrs in places):
        return found
    try:
        historic = round(infer_stride(found.values)) == _HISTORIC_PX
    except UserError:
        return found
    microns = found.values.double() * _HISTORIC_UM / _HISTORIC_PX
    return found._replace(values=microns, microns=True) if historic else found


def on_lattice(coords: Tensor, stride: float) -> tuple[Tensor, float]:
    """Float coordinates and stride without rounding noise, where all lie near multiples of the stride.

    255.9999 would fall into the cell of 0. The stride is rounded to 1 / 1024, so its multiples are exact in float64.
    """
    step = round(stride * 1024) / 1024
    if not step:
        return coords, stride
    snapped = (coords / step).round() * step  # (N, 2)
    return (snapped, step) if bool(((coords - snapped).abs() <= step / 8).all()) else (coords, stride)
