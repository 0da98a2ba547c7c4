"""Files of annotations as polygons in the units of the file: QuPath's GeoJSON, ASAP's and Aperio's XML, tables of patches.

`annotations` puts them onto a slide. Nothing is trusted: sizes, depths and numbers are bounded, XML may declare nothing.

Shapes: K corners of a ring.
"""

import json
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from gated_srp.errors import Note, UserError, counted
from gated_srp.records import parse_numbers

if TYPE_CHECKING:
    from shapely import Geometry

UNCLASSIFIED = "unclassified"
_BYTES = 200_000_000  # of a text file
_POINTS = 5_000_000  # corners of all its outlines
_FARTHEST = 1e8  # no slide has as many pixels along a side
_DEEPEST = 20  # collections in collections
_AGAIN = "Export it again."
_CLASS = ("class", "label", "classification")[::-1]  # properties that may hold it: QuPath's, others'
_EXCLUDED = ("_2", "exclusion", "exclude", "excluded")  # CAMELYON16's groups of what was cut out of a tumour
_KEPT = "normal"  # CAMELYON17's: cut out of the metastases, and a class of its own
_TUMOUR = ("_0", "_1")  # CAMELYON16's groups of tumour


@dataclass(frozen=True, eq=False)
class Drawing:
    """One drawn outline. ``cuts``: it is no region but is taken out of the others; ``layer``: out of those of this layer alone.

    ``also``: another name that it answers to.
    """

    name: str
    shape: "Geometry"
    cuts: bool = False
    layer: str = ""
    also: str = ""


@dataclass
class Parsed:
    """What a file holds; what of it is no area is counted in ``ignored``."""

    drawings: list[Drawing] = field(default_factory=list)
    ignored: Counter[str] = field(default_factory=Counter)
    notes: list[Note] = field(default_factory=list)
    points: int = 0

    def ring(self, corners: Any, where: str) -> np.ndarray | None:
        """Corners (K, 2) of a ring, finite and not too many; None where they enclose nothing."""
        try:
            found = np.asarray(corners, dtype=np.float64)
            found = found[:, :2] if found.ndim == 2 and found.shape[1] >= 2 else np.empty(0)
        except (TypeError, ValueError, OverflowError):
            found = np.empty(0)
        if found.ndim != 2:
            raise broken(f"{where} is no list of x, y")
        if not np.isfinite(found).all() or (np.abs(found) > _FARTHEST).any():
            raise broken(f"{where} has coordinates that are no finite numbers, or larger than any slide")
        self.points += len(found)
        if self.points > _POINTS:
            raise broken(f"more than {_POINTS:,} corners", "Simplify the outlines.")
        if len(np.unique(found, axis=0)) < 3:
            self.ignored["outlines of fewer than three corners"] += 1
            return None
        return found

    def add(self, name: str, rings: Sequence[Any], where: str, **how: Any) -> None:
        """An outline and its holes."""
        import shapely

        outer, *holes = [self.ring(ring, where) for ring in rings] or [None]
        if outer is not None:
            shape = shapely.Polygon(outer, [hole for hole in holes if hole is not None])
            self.drawings.append(Drawing(name or UNCLASSIFIED, shape, **how))


def broken(what: str, cure: str = _AGAIN) -> UserError:
    return UserError(what, cure=cure, kind="annotations")


def parse_text(path: Path) -> Parsed:
    """GeoJSON or XML, by content; the file's name stands in every error."""
    try:
        if path.stat().st_size > _BYTES:
            raise broken(f"larger than {_BYTES / 1e6:.0f} MB", "Export fewer objects: annotations, no cells.")
        raw = path.read_bytes()
    except OSError as error:
        raise UserError(f"cannot be read ({error.strerror})", where=path, kind="annotations") from None
    try:
        start = raw.lstrip(b"\xef\xbb\xbf \t\r\n")[:1]
        if not start:
            raise broken("the file is empty")
        # XML of Windows tools may be UTF-16, which begins with its mark.
        return _xml(raw) if start == b"<" or raw[:2] in (b"\xff\xfe", b"\xfe\xff") else _geojson(raw)
    except UserError as error:
        raise error.changed(where=str(path)) from None


# GeoJSON --------------------------------------------------------------------------------------------------------------


def _geojson(raw: bytes) -> Parsed:
    try:
        content = json.loads(raw.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise broken(f"not valid GeoJSON ({' '.join(str(error).split())[:100]})") from None
    features = list(_features(content, 0))
    kinds = [_kind(feature) for feature in features]
    only = all(kind != "annotation" for kind in kinds)  # cells or patches alone: then they are what is meant
    parsed = Parsed()
    for number, (feature, kind) in enumerate(zip(features, kinds, strict=True), 1):
        if kind != "annotation" and not only:
            parsed.ignored[f"objects of the type {kind}"] += 1
        else:
            _add_geometry(parsed, feature.get("geometry"), _class_of(feature), f"feature {number}", 0)
    if only and features:
        said = f"no annotations in it; its {counted(len(features), 'object')} of the type {kinds[0]} are used"
        parsed.notes.append(Note("note", "annotations", said))
    return parsed


def _features(content: Any, depth: int) -> Iterator[dict[str, Any]]:
    """Of a collection, a list (of collections), one feature, or a bare geometry."""
    if depth > _DEEPEST:
        raise broken("collections nested too deeply")
    if isinstance(content, list):
        for one in content:
            yield from _features(one, depth + 1)
    elif isinstance(content, dict) and isinstance(content.get("features"), list):
        yield from _features(content["features"], depth + 1)
    elif isinstance(content, dict) and ("geometry" in content or content.get("type") == "Feature"):
        yield content
    elif isinstance(content, dict) and ("coordinates" in content or "geometries" in content):
        yield {"geometry": content}
    else:
        raise broken("no GeoJSON: expected features with a geometry", "Export annotations as GeoJSON in QuPath.")


def _properties(feature: dict[str, Any]) -> dict[str, Any]:
    found = feature.get("properties")
    return found if isinstance(found, dict) else {}


def _kind(feature: dict[str, Any]) -> str:
    """annotation, detection, cell, tile, ...: QuPath says it in one of three places, depending on its version."""
    known = _properties(feature)
    said = known.get("objectType", known.get("object_type", feature.get("id")))
    old = str(said).removeprefix("Path").removesuffix("Object").lower() if isinstance(said, str) else ""
    word = old if old in ("annotation", "detection", "cell", "tile", "tma_core", "tmacore", "root") else "annotation"
    return word


def _class_of(feature: dict[str, Any]) -> str:
    known = _properties(feature)
    said = next((known[key] for key in _CLASS if known.get(key)), "")
    if isinstance(said, dict):
        names = said.get("names")
        said = said.get("name") or (": ".join(map(str, names)) if isinstance(names, list) else "")
    return str(said).strip()


def _add_geometry(parsed: Parsed, geometry: Any, name: str, where: str, depth: int) -> None:
    if geometry is None:
        parsed.ignored["objects without a geometry"] += 1
        return
    kind = geometry.get("type") if isinstance(geometry, dict) else None
    inside = geometry.get("geometries" if kind == "GeometryCollection" else "coordinates") if kind else None
    if not isinstance(inside, list) or depth > _DEEPEST:
        raise broken(f"{where}: its geometry has no coordinates, or is nested too deeply")
    if kind == "GeometryCollection":
        for one in inside:
            _add_geometry(parsed, one, name, where, depth + 1)
    elif kind == "Polygon":
        parsed.add(name, inside, where)
    elif kind == "MultiPolygon":
        for rings in inside:
            if not isinstance(rings, list):
                raise broken(f"{where} is no list of rings")
            parsed.add(name, rings, where)
    elif kind in ("Point", "MultiPoint", "LineString", "MultiLineString"):
        parsed.ignored["points and lines"] += 1
    else:
        raise broken(f"{where}: unknown geometry {str(kind)[:40]!r}")


# XML ------------------------------------------------------------------------------------------------------------------


def _xml(raw: bytes) -> Parsed:
    from xml.etree.ElementTree import ParseError

    from defusedxml import DefusedXmlException
    from defusedxml.ElementTree import fromstring

    try:
        root = fromstring(raw, forbid_dtd=True)
    except DefusedXmlException as error:
        raise broken(f"its XML declares entities or a document type ({error})") from None
    except (ParseError, ValueError, LookupError, RecursionError) as error:
        raise broken(f"not valid XML ({error})") from None
    if root.tag == "ASAP_Annotations":
        return _asap(root)
    if root.tag == "Annotations":
        return _aperio(root)
    what = f"XML of an unknown kind, <{str(root.tag)[:40]}>; expected ASAP's or Aperio ImageScope's"
    raise broken(what, "Export GeoJSON instead.")


def _asap(root: Any) -> Parsed:
    """CAMELYON's: a region's class is its group; ``_0`` and ``_1`` are tumour, ``_2`` and ``Exclusion`` are cut out of it."""
    parsed = Parsed()
    cut = splines = 0
    for number, one in enumerate(root.iterfind("./Annotations/Annotation"), 1):
        group, kind = one.get("PartOfGroup", "None").strip(), one.get("Type", "Polygon").lower()
        where = f"annotation {number} ({one.get('Name', '')[:40]})"
        corners = [
            _pair(corner, where)
            for corner in sorted(
                one.iterfind("./Coordinates/Coordinate"), key=lambda c: _number(c.get("Order", 0), where)
            )
        ]
        if kind not in ("polygon", "rectangle", "spline"):
            parsed.ignored["dots and measurements"] += 1
            continue
        splines += kind == "spline"
        name = "tumour" if group in _TUMOUR else "" if group.lower() in ("none", "") else group
        own, cuts = group.lower() == _KEPT, group.lower() in (*_EXCLUDED, _KEPT)
        cut += cuts
        if own:
            parsed.add(name, [corners], where, layer=_KEPT)
        parsed.add(name, [corners], where, cuts=cuts)
    if splines:
        said = f"{counted(splines, 'spline')}: the points are joined by straight lines"
        parsed.notes.append(Note("note", "annotations", said))
    if cut:
        said = f"{counted(cut, 'region')} of the groups _2, Exclusion or normal are cut out of the others"
        parsed.notes.append(Note("note", "annotations", said))
    return parsed


def _aperio(root: Any) -> Parsed:
    """ImageScope's: a region's class is the name of its layer, else its text; ``NegativeROA`` regions are cut out of their layer."""
    parsed = Parsed()
    for number, layer in enumerate(root.iterfind("./Annotation"), 1):
        said = layer.get("Name", "").strip() or next(
            (text for one in layer.iterfind("./Attributes/Attribute") if (text := one.get("Value", "").strip())), ""
        )
        for count, region in enumerate(layer.iterfind("./Regions/Region"), 1):
            where = f"layer {number}, region {count}"
            corners = [_pair(corner, where) for corner in region.iterfind("./Vertices/Vertex")]
            kind = region.get("Type", "0")
            if kind not in ("0", "1", "2"):
                parsed.ignored["arrows and rulers"] += 1
                continue
            if kind in ("1", "2") and len(corners) == 2:  # opposite corners
                corners = _framed(corners, ellipse=kind == "2")
            cuts = region.get("NegativeROA", "0") not in ("0", "")
            parsed.add(said or region.get("Text", "").strip(), [corners], where, cuts=cuts, layer=str(number))
    return parsed


def _framed(corners: list[tuple[float, float]], *, ellipse: bool) -> list[tuple[float, float]]:
    (x0, y0), (x1, y1) = corners
    if not ellipse:
        return [(x0, y0), (x1, y0), (x1, y1), (x0, y1)]
    turns = (math.tau * i / 64 for i in range(64))
    return [((x0 + x1) / 2 + (x1 - x0) / 2 * math.cos(t), (y0 + y1) / 2 + (y1 - y0) / 2 * math.sin(t)) for t in turns]


def _pair(corner: Any, where: str) -> tuple[float, float]:
    return _number(corner.get("X"), where), _number(corner.get("Y"), where)


def _number(text: Any, where: str) -> float:
    try:
        return float(str(text).replace(",", "."))  # of a machine with decimal commas
    except ValueError:
        raise broken(f"{where}: {str(text)[:40]!r} is no number") from None


# Tables of patches ----------------------------------------------------------------------------------------------------


def parse_table(path: Path, side: float | None) -> Parsed:
    """The demo's truth: x, y and a column that is above zero where the patch has it, which is the class."""
    import pandas as pd
    import shapely

    cure = "Expected the columns x, y and one of zeros and ones, a row per patch."
    try:
        separator = "\t" if path.suffix.lower() == ".tsv" else ","
        table = pd.read_csv(path, sep=separator, encoding="utf-8-sig", float_precision="round_trip")
        names = {str(name).strip().lower(): name for name in table}
        found = table.apply(parse_numbers)
        if (found.isna() & table.notna()).to_numpy().any():
            raise ValueError("a cell that is no number")
    except (OSError, ValueError, TypeError, OverflowError) as error:
        what = f"cannot be read as a table of numbers ({' '.join(str(error).split())[:100]})"
        raise UserError(what, where=path, cure=cure, kind="annotations") from None
    values = [name for lower, name in names.items() if lower not in ("x", "y", "row", "patch", "index", "side")]
    if not {"x", "y"} <= set(names) or not values:
        what = f"no table of patches (columns: {', '.join(map(str, table))[:100]})"
        raise UserError(what, where=path, cure=cure, kind="annotations")
    if side is None:
        what = "a table of patches, and the side of a patch is not known"
        raise UserError(what, where=path, cure="Use outlines (GeoJSON).", kind="annotations")
    parsed = Parsed()
    for name in values:
        corners = found.loc[found[name] > 0, [names["x"], names["y"]]].to_numpy(float)
        if not np.isfinite(corners).all() or (np.abs(corners) > _FARTHEST).any():
            raise UserError("a position is no finite number", where=path, cure=cure, kind="annotations")
        boxes = shapely.box(*corners.T, *(corners + side).T)
        parsed.drawings.append(Drawing(str(name), shapely.union_all(boxes)))  # empty: a class that this slide has not
    return parsed
