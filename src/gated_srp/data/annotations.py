"""Regions that somebody drew on a slide, as polygons in its level-0 pixels, and which share of each patch they cover.

    drawn = read_annotations("s17.geojson", size=(80000, 60000))
    drawn.classes                                   # ('necrosis', 'tumour')
    drawn.coverage(corners, 512, ["tumour"])        # (N,) 0 to 1

Shapes: N patches.
"""

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from gated_srp.data.annotation_files import Drawing, Parsed, parse_table, parse_text
from gated_srp.data.masks import parse_mask
from gated_srp.data.matching import match_slides, slide_stem
from gated_srp.errors import Note, UserError, counted

if TYPE_CHECKING:
    from shapely import Geometry

    from gated_srp.data.bag import BagHeader

ENDINGS = (".geojson", ".json", ".xml", ".png", ".tif", ".tiff", ".csv", ".tsv")
_MASKS, _TABLES = (".png", ".tif", ".tiff"), (".csv", ".tsv")
DRAWINGS = tuple(ending for ending in ENDINGS if ending not in _MASKS)  # whose classes are known without the slide
_SLACK = 0.05  # of the slide's longer side: a hand may draw beyond the glass
_CROSSINGS = 200_000  # of a file's outlines with themselves, beyond which mending them would take for ever
_SAMPLED = 100  # edges by which crossings are estimated
_SMALL = 64  # corners of a piece whose overlap with a patch is computed at once


@dataclass(frozen=True, eq=False)
class Region:
    """One drawn region: its class, its area as a valid shapely polygon or several, and another name of the class, if it has one."""

    name: str
    shape: "Geometry"
    also: str = ""


@dataclass(frozen=True, eq=False)
class Annotations:
    """What was drawn on one slide, in level-0 pixels. ``notes``: what was mended or left out."""

    path: Path | None
    regions: tuple[Region, ...]
    notes: tuple[Note, ...] = ()
    _shapes: dict[tuple[str, ...], "Geometry"] = field(default_factory=dict, repr=False)

    @property
    def classes(self) -> tuple[str, ...]:
        """Names as they are written, sorted."""
        return tuple(sorted({region.name for region in self.regions}))

    @property
    def names(self) -> tuple[str, ...]:
        """``classes``, and the other names to which these answer: the value of a binary mask, as label masks have it."""
        return (*self.classes, *sorted({region.also for region in self.regions} - {"", *self.classes}))

    def shape(self, classes: Sequence[str] = ()) -> "Geometry":
        """The union of the regions of some classes, or of all; capitals and the spelling of tumor do not matter."""
        import shapely

        wanted = tuple(sorted(map(plain, classes)))
        if wanted not in self._shapes:
            chosen = [
                region.shape
                for region in self.regions
                if not wanted or {plain(region.name), plain(region.also)}.intersection(wanted)
            ]
            self._shapes[wanted] = shapely.union_all(chosen)
        return self._shapes[wanted]

    def coverage(self, corners: np.ndarray, side: float, classes: Sequence[str] = ()) -> np.ndarray:
        """Share (N,) of each square of ``side`` with the top-left ``corners`` (N, 2) that regions of these classes cover."""
        return covered_share(self.shape(classes), corners, side)


NOTHING = Annotations(None, ())


def plain(name: str) -> str:
    """
    >>> plain("Tumor ") == plain("tumour"), plain("Stroma")
    (True, 'stroma')
    """
    return name.strip().casefold().replace("tumor", "tumour")


def refuse_unknown(wanted: Iterable[str], known: Iterable[str], where: str | Path) -> None:
    """Each class that is asked for must be drawn somewhere."""
    there = {plain(name): name for name in known}
    for name in wanted:
        if plain(name) not in there:
            found = ", ".join(sorted(there.values())) or "none"
            what = f"no region of the class {name!r} (classes: {found})"
            raise UserError(what, where=where, cure="Name one of these.", kind="annotations")


def read_annotations(
    path: str | Path, *, size: tuple[int, int] | None = None, side: float | None = None, mpp: float | None = None
) -> Annotations:
    """Read one file of annotations: GeoJSON (QuPath), XML (ASAP, Aperio ImageScope), a mask (PNG, TIFF), a table of patches.

    Args:
        path: the file.
        size: width and height of the slide's level 0: outlines beyond it are refused, and a mask gets its scale from it.
        side: of a patch in level-0 pixels, for a table of patches.
        mpp: microns per level-0 pixel, for a mask without ``size``.

    Returns:
        `Annotations`: ``regions``, ``classes``, ``coverage(corners, side, classes)``, ``notes``.

    Example:
        >>> drawn = read_annotations("s17.geojson")  # doctest: +SKIP
        >>> drawn.coverage(np.array([[0, 0], [512, 0]]), 512, ["tumour"])  # doctest: +SKIP
        array([0.25, 1.  ])
    """
    path = Path(path)
    parsed = _parsed(path, size, side, mpp)
    crossed = [one for one in parsed.drawings if not one.shape.is_valid]
    if sum(_crossings(one.shape) for one in crossed) > _CROSSINGS:
        what = "outlines that cross themselves too often to be mended"
        raise UserError(what, where=path, cure="Draw them again.", kind="annotations")
    regions = _cut([_mended(one) for one in parsed.drawings])
    notes = [*parsed.notes]
    if crossed:
        said = f"{counted(len(crossed), 'outline')} that cross themselves were mended: what is enclosed an odd number of times counts"
        notes.append(Note("note", "annotations", said))
    if parsed.ignored:
        listed = ", ".join(f"{count} {what}" for what, count in parsed.ignored.items())
        notes.append(Note("note", "annotations", f"left out, since they have no area: {listed}"))
    _refuse_outside(regions, size, path)
    named = tuple(Note(note.level, note.kind, note.what, (path.name,), note.cure) for note in notes)
    return Annotations(path, tuple(regions), named)


def _parsed(path: Path, size: tuple[int, int] | None, side: float | None, mpp: float | None) -> Parsed:
    ending = path.suffix.lower()
    if not path.is_file():
        raise UserError("no such file", where=path, kind="annotations")
    if ending in _MASKS:
        return parse_mask(path, size, mpp)
    return parse_table(path, side) if ending in _TABLES else parse_text(path)


def _corners(shape: "Geometry") -> int:
    import shapely

    return int(shapely.get_num_coordinates(shape))


def _crossings(shape: "Geometry") -> float:
    """About how often the edges of an outline cross each other, from some of the edges against all."""
    import shapely

    corners, ring = shapely.get_coordinates(shapely.get_rings(shape), return_index=True)
    edges = np.flatnonzero(ring[1:] == ring[:-1])
    start, end = corners[edges], corners[edges + 1]
    some = np.linspace(0, len(edges) - 1, min(_SAMPLED, len(edges))).astype(int)

    def side(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
        (bx, by), (cx, cy) = ((one[..., 0] - a[..., 0], one[..., 1] - a[..., 1]) for one in (b, c))
        turn: np.ndarray = np.sign(bx * cy - by * cx)
        return turn

    p, q = start[some, None], end[some, None]  # (sampled, 1, 2)
    apart = (side(p, q, start) * side(p, q, end) < 0) & (side(start, end, p) * side(start, end, q) < 0)
    return float(apart.sum() / max(len(some), 1) * len(edges) / 2)


def _mended(one: Drawing) -> Drawing:
    """Valid, and areas alone."""
    import shapely

    shape = one.shape if one.shape.is_valid else shapely.make_valid(one.shape)
    if shape.geom_type not in ("Polygon", "MultiPolygon"):
        parts = shapely.get_parts(shapely.get_parts(shape))
        shape = shapely.union_all([part for part in parts if part.geom_type in ("Polygon", "MultiPolygon")])
    return replace(one, shape=shape)


def _cut(drawings: Sequence[Drawing]) -> list[Region]:
    """Regions without what is cut out of their layer."""
    import shapely

    holes: Mapping[str, Any] = {
        layer: shapely.union_all([one.shape for one in drawings if one.cuts and one.layer == layer])
        for layer in {one.layer for one in drawings if one.cuts}
    }
    return [
        Region(one.name, one.shape.difference(holes[one.layer]) if one.layer in holes else one.shape, one.also)
        for one in drawings
        if not one.cuts
    ]


def _refuse_outside(regions: Sequence[Region], size: tuple[int, int] | None, path: Path) -> None:
    drawn = [region.shape.bounds for region in regions if not region.shape.is_empty]
    if size is None or not drawn:
        return
    bounds = np.array(drawn)
    low, high, slack = bounds[:, :2].min(0), bounds[:, 2:].max(0), _SLACK * max(size)
    if (low >= -slack).all() and (high <= np.array(size) + slack).all():
        return
    times = 2.0 ** math.ceil(math.log2(max((high / np.array(size)).max(), 1e-9)))
    fits = f"; divided by {times:g} they would fit" if times > 1 and (low >= -slack).all() else ""
    raise UserError(
        f"its regions reach from ({low[0]:.0f}, {low[1]:.0f}) to ({high[0]:.0f}, {high[1]:.0f}), but the slide has "
        f"{size[0]} x {size[1]} pixels{fits}",
        where=path,
        cure="It is of another slide, or not in pixels of the slide's full resolution: export it again.",
        kind="annotations",
    )


# Patches --------------------------------------------------------------------------------------------------------------


def covered_share(shape: "Geometry", corners: np.ndarray, side: float) -> np.ndarray:
    """(N,): exact, by the area that each square shares with the shape.

    A large outline is cut into small pieces first: a patch then meets a few corners instead of all of them.
    """
    import shapely

    share = np.zeros(len(corners))
    if shape.is_empty or not len(corners):
        return share
    boxes = shapely.box(*corners.T, *(corners + side).T)
    shapely.prepare(shape)
    share[shapely.contains_properly(shape, boxes)] = 1.0
    edge = np.flatnonzero((share == 0) & shapely.intersects(shape, boxes))
    pieces = np.array(list(_pieces(shape)), dtype=object)
    patch, piece = shapely.STRtree(pieces).query(boxes[edge])
    areas = shapely.area(shapely.intersection(boxes[edge][patch], pieces[piece]))
    np.add.at(share, edge[patch], areas / side**2)
    return share.clip(0, 1)


def _pieces(shape: "Geometry") -> Iterable["Geometry"]:
    """The shape halved again and again along its longer side until its pieces have few corners."""
    import shapely

    todo = [(part, 0) for part in shapely.get_parts(shape)]
    while todo:
        part, depth = todo.pop()
        if _corners(part) <= _SMALL or depth > 40:
            yield part if part.is_valid else shapely.make_valid(part)
            continue
        x0, y0, x1, y1 = part.bounds
        x, y = (x0 + x1) / 2, (y0 + y1) / 2
        wide = x1 - x0 > y1 - y0
        for half in ((x0, y0, x, y1), (x, y0, x1, y1)) if wide else ((x0, y0, x1, y), (x0, y, x1, y1)):
            cut = shapely.get_parts(shapely.clip_by_rect(part, *half))
            todo += [(one, depth + 1) for one in cut if one.geom_type == "Polygon" and one.area]


# Which file belongs to which slide ------------------------------------------------------------------------------------


def find_annotations(place: str | Path, slides: Sequence[str]) -> dict[str, Path]:
    """The file of each slide in a folder, of exactly its name (``_mask`` may follow); or the one file for the one slide. Slides without one are not in it."""
    place = Path(place)
    if place.is_file():
        if len(slides) != 1:
            what = f"one file of annotations for {counted(len(slides), 'slide')}"
            raise UserError(what, where=place, cure="Name the folder with a file per slide.", kind="annotations")
        return {slides[0]: place}
    if not place.is_dir():
        raise UserError("no such file or folder", where=place, kind="annotations")
    named: dict[Path, list[Path]] = {}
    known = {slide_stem(slide).casefold() for slide in slides}
    for path in sorted(place.rglob("*")):
        if path.suffix.lower() in ENDINGS and not path.name.startswith("."):
            stem = path.with_suffix("")
            if slide_stem(stem).casefold() not in known:
                stem = stem.with_name(re.sub("_mask$", "", stem.name, flags=re.IGNORECASE) or stem.name)
            named.setdefault(stem, []).append(path)
    matches = match_slides(slides, named)
    found = {slide: stem for slide, stem in matches.found.items() if slide not in matches.by_prefix}
    double = {slide: named[stem] for slide, stem in found.items() if len(named[stem]) > 1}
    double |= {
        slide: [named[stem][0] for stem in stems]
        for slide, stems in matches.several.items()
        if slide not in matches.by_prefix
    }
    for slide, files in double.items():
        what = f"slide {slide} has {counted(len(files), 'file')} of annotations: {', '.join(file.name for file in files[:4])}"
        raise UserError(what, where=place, cure="Keep one of them in the folder.", kind="annotations")
    if not found:
        listed = ", ".join(path.name for files in list(named.values())[:3] for path in files) or "none"
        raise UserError(
            f"no file of annotations has the name of a slide (slides: {', '.join(slides[:3])}; files: {listed})",
            where=place,
            cure=f"Name them as the slides, with one of the endings {', '.join(ENDINGS)}.",
            kind="annotations",
        )
    return {slide: named[stem][0] for slide, stem in found.items()}


def qupath_crops(file: Path | None, slide: Path | None, bounds: tuple[int, int] | None = None) -> tuple[Note, ...]:
    """What to say of GeoJSON from or for QuPath (``file``; None: for it) on a slide that QuPath shows without its empty margin.

    ``bounds``: the corner from which QuPath counts; None: not known, then the slide's ending tells.

    >>> qupath_crops(Path("s1.geojson"), Path("s1.svs")), qupath_crops(Path("s1.xml"), Path("s1.mrxs"))
    ((), ())
    """
    cropped = any(bounds) if bounds else slide is not None and slide.suffix.lower() in (".mrxs", ".scn")
    if slide is None or not cropped or (file is not None and file.suffix.lower() not in (".geojson", ".json")):
        return ()
    corner = (
        "the corner of what was scanned (openslide.bounds-x and -y)"
        if bounds is None
        else f"({bounds[0]}, {bounds[1]})"
    )
    what = f"QuPath counts pixels of this slide from {corner}, positions here are from the corner of the whole glass: "
    what += "GeoJSON is read and written without that difference"
    cure = "Add the corner to coordinates that were drawn in QuPath; subtract it from those that QuPath is to show."
    return (Note("warning", "qupath", what, (slide.name,), cure),)


def annotations_of(path: Path, header: "BagHeader", bounds: tuple[int, int] | None = None) -> Annotations:
    """A slide's annotations beside its feature file, which knows the size of the slide and of a patch.

    ``bounds``: of the slide's image, where it is at hand; see `qupath_crops`.
    """
    if header.unit != "px":
        what = "its positions are in microns, so annotations in pixels cannot be laid over them"
        raise UserError(what, where=header.path, cure="Extract the slide again.", kind="annotations")
    side = float(header.patch_size_level0 or header.stride)
    found = read_annotations(path, size=header.level0_size, side=side, mpp=header.mpp)
    return replace(found, notes=(*found.notes, *qupath_crops(path, header.wsi_path, bounds)))
