"""Patches for other programs: GeoJSON for QuPath, a table, an HDF5 file with the rows of the feature file.

Shapes: L patches, N patches of the feature file.
"""

import json
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from gated_srp.errors import UserError
from gated_srp.files import whole, whole_hdf5
from gated_srp.reports.draw import is_quiet
from gated_srp.reports.maps import Patches, PatchMap

_HOT = [200, 30, 30]
_NAMES = uuid.UUID("7d5b5f3e-3a53-4f0c-9d6e-6a1f2f0c5b11")  # ids that stay the same when a file is written again


def feature_collection(
    patches: Patches, values: Mapping[str, np.ndarray], *, top: PatchMap | None = None, share: float = 0.1
) -> dict[str, Any]:
    """Patches as detections with measurements; the highest ``share`` of ``top`` merged into annotations."""
    if patches.header.unit != "px":
        raise UserError(
            "positions are in microns, QuPath needs pixels of the slide",
            where=patches.header.path,
            cure="Name the slide with --wsi.",
        )
    features = []
    for i, (x, y) in enumerate(patches.corners.tolist()):
        ring = [[x, y], [x + patches.side, y], [x + patches.side, y + patches.side], [x, y + patches.side], [x, y]]
        # JSON has no NaN: a patch without a value has no such measurement.
        known = {name: float(f"{found[i]:.7g}") for name, found in values.items() if np.isfinite(found[i])}
        features.append(_feature(f"{i}", [ring], {"objectType": "detection", "measurements": known}))
    if top is not None:
        features += _regions(patches, top, share)
    return {"type": "FeatureCollection", "features": features}


def _regions(patches: Patches, top: PatchMap, share: float) -> list[dict[str, Any]]:
    """None of a map in which next to nothing happens; of patches with one value all are in or none, since none is better."""
    known = np.flatnonzero(np.isfinite(top.values))
    order = known[np.argsort(-top.values[known], kind="stable")]
    count = max(1, round(share * len(known)))
    chosen = order[:count][top.values[order[:count]] > (top.values[order[count]] if count < len(order) else -np.inf)]
    if not len(chosen) or is_quiet(top):
        return []
    name = f"top {share:.0%} {top.name}".replace("%", " %")
    shared = {"classification": {"name": name, "color": _HOT}, "isLocked": False}
    return [
        _feature(f"region {i}", rings, {"objectType": "annotation", "name": f"{name}, region {i + 1}", **shared})
        for i, rings in enumerate(merged(patches.corners[chosen], patches.side))
    ]


def _feature(key: str, rings: list[list[list[float]]], properties: dict[str, Any]) -> dict[str, Any]:
    geometry = {"type": "Polygon", "coordinates": rings}
    name = str(uuid.uuid5(_NAMES, f"{key} {rings[0][0]}"))
    return {"type": "Feature", "id": name, "geometry": geometry, "properties": properties}


def merged(corners: np.ndarray, side: float) -> list[list[list[list[float]]]]:
    """The union of squares as polygons (an outer ring, then its holes, closed); squares that share an edge are one polygon."""
    xs, ys = (np.unique(np.concatenate([corners[:, i], corners[:, i] + side])) for i in (0, 1))
    low = np.searchsorted(xs, corners[:, 0]), np.searchsorted(ys, corners[:, 1])
    high = np.searchsorted(xs, corners[:, 0] + side), np.searchsorted(ys, corners[:, 1] + side)
    cover = np.zeros((len(ys), len(xs)), np.int32)
    for x, y, sign in ((low[0], low[1], 1), (high[0], low[1], -1), (low[0], high[1], -1), (high[0], high[1], 1)):
        np.add.at(cover, (y, x), sign)
    from scipy import ndimage

    labels, count = ndimage.label(cover.cumsum(0).cumsum(1) > 0)
    boxes = ndimage.find_objects(labels)
    polygons = []
    for number in range(count):
        part, box = labels[boxes[number]] == number + 1, boxes[number]
        rings = [
            [[float(xs[x + box[1].start]), float(ys[y + box[0].start])] for x, y in ring] for ring in _outline(part)
        ]
        rings.sort(key=lambda ring: -abs(_area(ring)))  # the outer ring encloses its holes
        polygons.append(rings)
    return polygons


def _outline(cells: np.ndarray) -> list[list[tuple[int, int]]]:
    """Closed rings of grid points around the true cells, cells on the left: outer rings turn one way, holes the other."""
    padded = np.pad(cells, 1)
    steps: dict[tuple[int, int], list[tuple[int, int]]] = {}

    def add(where: np.ndarray, start: tuple[int, int], move: tuple[int, int]) -> None:
        for y, x in np.argwhere(where).tolist():
            steps.setdefault((x + start[0], y + start[1]), []).append(move)

    inner = padded[1:-1, 1:-1]
    add(inner & ~padded[:-2, 1:-1], (0, 0), (1, 0))  # nothing above: along the top
    add(inner & ~padded[1:-1, 2:], (1, 0), (0, 1))
    add(inner & ~padded[2:, 1:-1], (1, 1), (-1, 0))
    add(inner & ~padded[1:-1, :-2], (0, 1), (0, -1))
    rings = []
    while steps:
        start = next(iter(steps))
        ring, at, before = [start], start, (0, 0)
        while True:
            moves = steps[at]
            # Where two cells touch at a corner, follow the same empty side: a hole there gets a ring of its own.
            turn = (before[1], -before[0])
            move = turn if turn in moves else moves[0]
            moves.remove(move)
            if not moves:
                del steps[at]
            if move == before:
                ring.pop()  # straight on: no corner here
            at, before = (at[0] + move[0], at[1] + move[1]), move
            ring.append(at)
            if at == start:
                break
        rings.append(ring)
    return rings


def _area(ring: list[list[float]]) -> float:
    points = np.array(ring)
    x, y = points.T
    return float((x[:-1] * y[1:] - x[1:] * y[:-1]).sum() / 2)


# Files ----------------------------------------------------------------------------------------------------------------


def write_geojson(path: Path, patches: Patches, values: Mapping[str, np.ndarray], top: PatchMap | None) -> None:
    """For QuPath: drag the file onto the open slide."""
    content = feature_collection(patches, values, top=top)
    with whole(path) as draft:
        draft.write_text(json.dumps(content, allow_nan=False, separators=(",", ":")), encoding="utf-8")


def write_csv(path: Path, patches: Patches, values: Mapping[str, np.ndarray], top: PatchMap | None) -> None:
    with whole(path) as draft:
        _table(patches, values).to_csv(draft, index=False, lineterminator="\n")


def write_parquet(path: Path, patches: Patches, values: Mapping[str, np.ndarray], top: PatchMap | None) -> None:
    with whole(path) as draft:
        _table(patches, values).to_parquet(draft, index=False)


def write_h5(path: Path, patches: Patches, values: Mapping[str, np.ndarray], top: PatchMap | None) -> None:
    """/coords as in the feature file and /<value> (N,) in the same order; NaN for patches that the model did not see."""
    coords = patches.header.coords.numpy()
    with whole_hdf5(path) as file:
        file["coords"] = coords
        file["coords"].attrs["patch_size_level0"] = patches.side
        for name, found in values.items():
            full = np.full(len(coords), np.nan, np.float32)
            full[patches.rows] = found
            file[name] = full


WRITERS: dict[str, Callable[[Path, Patches, Mapping[str, np.ndarray], PatchMap | None], None]] = {
    "geojson": write_geojson,
    "csv": write_csv,
    "parquet": write_parquet,
    "h5": write_h5,
}


def _table(patches: Patches, values: Mapping[str, np.ndarray]) -> Any:
    """One row per patch: row of the feature file, x, y, side, values."""
    import pandas as pd

    x, y = patches.header.coords.numpy()[patches.rows].T
    return pd.DataFrame({"row": patches.rows, "x": x, "y": y, "side": patches.side, **values})
