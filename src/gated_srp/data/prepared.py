"""A feature file, or an image, made ready for a model: rows chosen and ordered, features rounded, neighbours listed.

Shapes: N patches of the file, L patches kept, C channels.
"""

import json
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from torch import Tensor

from gated_srp.data.bag import Bag, BagHeader, Unit
from gated_srp.data.files.formats import read_bag, read_header
from gated_srp.data.files.siblings import position_files
from gated_srp.errors import Note, UserError
from gated_srp.srp.graph import PatchGraph

if TYPE_CHECKING:
    from gated_srp.data.files.images import ImageGrid
    from gated_srp.data.regions import Kept, Regions

READING = ("encoder", "features_key", "coords_key", "coords", "stride")  # arguments of `read_bag`
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, kw_only=True)
class Preparation:
    """Every setting that changes what a model sees of a file.

    ``dtype`` None: features stay as they are stored. ``images``: files are images, cut like this; None: files of features.
    ``regions``: which patches of a file are used; None: all. ``features_low``: folder of a second, lower magnification; None: there is one.
    """

    encoder: str | None = None
    features_key: str | None = None
    coords_key: str | None = None
    coords: Path | None = None
    stride: float | None = None
    window: int = 3
    lattice: Literal["floor", "exact"] = "floor"
    order: Literal["file", "raster"] = "file"
    cap: int | None = None
    dtype: Literal["float32", "float16", "bfloat16"] | None = None
    images: "ImageGrid | None" = None
    regions: "Regions | None" = None
    features_low: Path | None = None

    @property
    def reading(self) -> dict[str, Any]:
        """Keyword arguments of `read_bag`."""
        return {key: getattr(self, key) for key in READING}


@dataclass(frozen=True, eq=False, kw_only=True)
class PreparedBag:
    """What a model needs of a slide; row i of ``features`` is the patch at ``coords[i]``."""

    path: Path
    features: Tensor  # (L, C)
    graph: PatchGraph  # of the L rows, with the homogeneity of these features
    coords: Tensor  # (L, 2)
    num_patches: int  # before the cap; inside the regions, where there are some
    stride: float
    stride_source: str
    unit: Unit
    encoder: str | None
    warnings: tuple[Note, ...] = ()


def open_header(path: str | Path, settings: Preparation) -> BagHeader:
    """The header of a feature file, or of an image."""
    if settings.images is not None:
        from gated_srp.data.files.images import image_header

        return image_header(path, settings.images)
    return read_header(path, **settings.reading)


def open_bag(path: str | Path, settings: Preparation, draws: torch.Generator | None = None) -> Bag:
    """The same with its features; ``draws`` vary an image at random, and mean nothing to stored features."""
    if settings.images is not None:
        from gated_srp.data.files.images import read_image

        return read_image(path, settings.images, draws)
    return read_bag(path, **settings.reading)


def prepare(path: str | Path, settings: Preparation, draws: torch.Generator | None = None) -> PreparedBag:
    """Read, choose and order rows, round the features, list the neighbours; ``draws`` as in `open_bag`."""
    if settings.features_low is not None:
        from gated_srp.data.two_scales import both_scales

        return both_scales(Path(path), settings, prepare)
    bag = open_bag(path, settings, draws)
    inside = inside_regions(bag, settings)
    rows = kept_rows(bag.coords, settings, inside)
    features = _rounded(bag, rows, settings)  # (L, C)
    bag = replace(bag, features=features)  # those of the file may be twice as large: let them go
    try:
        graph, notes = _graph(bag, rows, settings, inside)
        graph = graph.with_features(features)
    except UserError as error:
        raise error.changed(where=f"{bag.path}: {error.where}" if error.where else str(bag.path)) from None
    return PreparedBag(
        features=features,
        graph=graph,
        coords=bag.coords if rows is None else bag.coords[rows],  # (L, 2)
        num_patches=len(bag.coords if inside is None else inside.rows),
        warnings=(*bag.warnings, *notes),
        **{key: getattr(bag, key) for key in ("path", "stride", "stride_source", "unit", "encoder")},
    )


def capped_rows(coords: Tensor, cap: int | None) -> Tensor | None:
    """Rows that a cap keeps, (L,): sorted by x, then y, at even spacing; None where all are kept, in the file's order."""
    if cap is None or len(coords) <= cap:
        return None
    x, y = coords.numpy().T
    order = np.lexsort((y, x))
    return torch.from_numpy(order[np.linspace(0, len(order) - 1, cap).astype(np.int64)])


def inside_regions(header: BagHeader, settings: Preparation) -> "Kept | None":
    """What the settings' regions leave of a slide; None where they have none."""
    return None if settings.regions is None else settings.regions.look(header)


def kept_rows(coords: Tensor, settings: Preparation, inside: "Kept | None" = None) -> Tensor | None:
    """Rows to keep in the order they are wanted, (L,); None: all, in the file's order. Of ``inside`` alone, where it is given."""
    if inside is not None:
        rows = kept_rows(coords[inside.rows], settings)
        return inside.rows if rows is None else inside.rows[rows]
    rows = capped_rows(coords, settings.cap)
    if settings.order == "file":
        return rows
    rows = torch.arange(len(coords)) if rows is None else rows.sort().values  # equal positions stay in file order
    x, y = coords[rows].numpy().T
    return rows[torch.from_numpy(np.lexsort((x, y)))]


def _rounded(bag: Bag, rows: Tensor | None, settings: Preparation) -> Tensor:
    """The kept features in the wanted type, finite."""
    bad = bag.nonfinite_rows()
    if len(bad):
        what = f"{len(bad)} of {len(bag.features)} rows of features are not finite (NaN or infinity), the first is row {int(bad[0])}"
        cure = "Extract the slide again, or leave it out of the table; `gated-srp check --deep` lists all such slides."
        raise UserError(what, where=bag.path, cure=cure, kind="nonfinite")
    features = bag.features if rows is None else bag.features[rows]
    if settings.dtype is None or features.dtype == DTYPES[settings.dtype]:
        return features
    rounded = features.to(DTYPES[settings.dtype])
    if settings.dtype == "float16" and not all(torch.isfinite(part).all() for part in rounded.split(2048)):
        cure = "Set `cache: {dtype: bfloat16}` or float32."
        raise UserError("features beyond 65504 do not fit float16", where=bag.path, cure=cure, kind="wrong_dtype")
    return rounded


def _graph(
    bag: Bag, rows: Tensor | None, settings: Preparation, inside: "Kept | None"
) -> tuple[PatchGraph, tuple[Note, ...]]:
    """The graph of the kept rows; what regions left, and with a cap, how many neighbours it cost."""
    said = () if inside is None else (inside.note,)
    if rows is None or len(rows) == len(bag.coords):
        return _build(bag.coords if rows is None else bag.coords[rows], bag.stride, settings), said
    whole, kept = capped_graphs(bag.coords, rows, bag.stride, settings)
    if inside is not None and len(rows) == len(inside.rows):
        return kept, said
    before, after = (float(graph.neighbour_count.double().mean()) for graph in (whole, kept))
    count = len(bag.coords) if inside is None else len(inside.rows)
    what = f"{len(rows)} of {count} patches kept; neighbours per patch {before:.2f} before, {after:.2f} after"
    return kept, (*said, Note("warning", "cap", what))


def capped_graphs(coords: Tensor, rows: Tensor, stride: float, settings: Preparation) -> tuple[PatchGraph, PatchGraph]:
    """The graph of all patches, kept rows in front, and that of the kept rows alone.

    The lists of the whole slide are cut to the kept rows, which gives the graph of these rows (a cell then belongs to its first
    kept patch), while a wrong stride is still judged on the whole slide: a cap may thin a lattice until no patch has a neighbour.
    """
    dropped = torch.ones(len(coords), dtype=torch.bool).index_fill_(0, rows, False).nonzero().flatten()
    whole = _build(coords[torch.cat([rows, dropped])], stride, settings)
    return whole, whole.first(len(rows))


def _build(coords: Tensor, stride: float, settings: Preparation) -> PatchGraph:
    return PatchGraph.from_coords(coords, stride=stride, window=settings.window, lattice=settings.lattice)


# Which files a bag comes from -----------------------------------------------------------------------------------------


def files_of(path: Path, settings: Preparation) -> list[Path]:
    """A feature file, the files that may hold its positions, the annotations that choose its patches; and those of its lower magnification."""
    drawn = None if settings.regions is None else settings.regions.file_of(path)
    own = [path, *position_files(path, settings.coords), path.parent / "bags_config.json", *([drawn] if drawn else [])]
    if settings.features_low is None:
        return own
    from gated_srp.data.two_scales import apart

    return own + files_of(*apart(path, settings)[1])


def identify(path: Path, settings: Preparation) -> str:
    """Name, size and time of a feature file and of all that is read with it (`files_of`); changes when one of them does."""
    files = files_of(path, settings)
    with suppress(OSError):  # a missing file is reported by the reader
        if path.is_dir():
            files += sorted(path.rglob("*"))
    stamps: list[object] = [] if settings.regions is None else ["masks by value"]  # how their classes are named
    for file in files:
        with suppress(OSError):
            info = file.stat()
            stamps.append((str(file), info.st_size, info.st_mtime_ns))
    return json.dumps(stamps)
