"""Pictures inside a page: SVG cleaned of everything that could run or load, PNG made small, and heatmaps sorted by what they show."""

from __future__ import annotations

import base64
import io
import re
import xml.etree.ElementTree as ET
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

_SVG = "http://www.w3.org/2000/svg"
_LINK = "http://www.w3.org/1999/xlink"
_DRAWN = {"svg", "g", "defs", "clipPath", "path", "rect", "use", "text", "tspan", "title", "line", "circle"}
_DRAWN |= {"ellipse", "polygon", "polyline", "image", "linearGradient", "stop"}
_LARGEST = 3_000_000  # bytes of an SVG file; matplotlib's are a hundredth
_WIDEST = 1400  # pixels of a PNG
_COLOURS = 128
_SHRINK = 0.6
_NAME = re.compile(
    r"^(?P<slide>.*?)[._-]*(?P<value>attention|beta|homogeneity|correction|change|true_focus)"
    r"(?P<rest>.*?)(?:_layer(?P<layer>\d+))?(?P<end>(?:_head\d+)?(?:_positive)?)$"
)
_TRUTH = "true focus"  # of the demo: shown first, to compare the others with


# SVG ------------------------------------------------------------------------------------------------------------------


def inline_svg(path: Path, prefix: str) -> str | None:
    """The drawing as markup for a page, its ids prefixed; None where the file is no drawing.

    Only elements that draw stay, without event handlers, and nothing that points outside the drawing itself.
    """
    try:
        if path.stat().st_size > _LARGEST:
            return None
        root = ET.fromstring(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, ET.ParseError):
        return None
    if root.tag != f"{{{_SVG}}}svg":
        return None
    _clean(root, prefix)
    width = re.match(r"([\d.]+)(pt|px)?$", root.get("width", ""))
    for name in ("height", "version"):
        root.attrib.pop(name, None)
    if width:  # on a phone it shrinks to this width and scrolls from there on
        root.set("style", f"min-width: {float(width[1]) * _SHRINK:.0f}{width[2] or 'px'}")
    root.attrib |= {"aria-hidden": "true", "focusable": "false"}  # the figure around it has the words
    ET.register_namespace("", _SVG)
    ET.register_namespace("xlink", _LINK)
    return ET.tostring(root, encoding="unicode")


def _clean(element: ET.Element, prefix: str) -> None:
    for child in list(element):
        if not isinstance(child.tag, str) or child.tag.removeprefix(f"{{{_SVG}}}") not in _DRAWN:
            element.remove(child)
        else:
            _clean(child, prefix)
    for name, value in list(element.attrib.items()):
        plain = name.rsplit("}", 1)[-1].lower()
        inside = value.startswith(("#", "data:image/png;base64,"))
        if plain.startswith("on") or (plain == "href" and not inside) or _points_out(value):
            del element.attrib[name]
        elif plain == "id":
            element.attrib[name] = prefix + value
        elif plain == "href":
            element.attrib[name] = f"#{prefix}{value[1:]}" if value.startswith("#") else value
        else:
            element.attrib[name] = re.sub(r"url\(#", f"url(#{prefix}", value)


def _points_out(value: str) -> bool:
    lowered = value.lower()
    return bool(re.search(r"url\((?!#)", lowered)) or "javascript:" in lowered or "@import" in lowered


# PNG ------------------------------------------------------------------------------------------------------------------


def small_png(path: Path) -> bytes | None:
    """A PNG of at most 1400 pixels width and 128 colours; None where the file is no picture."""
    from PIL import Image

    try:
        with Image.open(path, formats=["PNG"]) as picture:
            picture.load()
            shown = picture.convert("RGB")
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError):
        return None
    if shown.width > _WIDEST:
        shown = shown.resize((_WIDEST, max(1, round(shown.height * _WIDEST / shown.width))), Image.Resampling.LANCZOS)
    out = io.BytesIO()
    shown.quantize(_COLOURS).save(out, "PNG", optimize=True)
    return out.getvalue()


def within(pictures: Iterator[tuple[str, bytes]], budget: int) -> tuple[list[tuple[str, str]], list[str]]:
    """Names with data URIs as long as they fit into so many bytes, and the names of those left out."""
    kept, left_out = [], []
    for name, png in pictures:
        uri = "data:image/png;base64," + base64.b64encode(png).decode("ascii")
        if len(uri) <= budget:
            budget -= len(uri)
            kept.append((name, uri))
        else:
            left_out.append(name)
    return kept, left_out


# Heatmaps -------------------------------------------------------------------------------------------------------------


class Picture(NamedTuple):
    slide: str
    value: str
    layer: str
    uri: str

    @property
    def words(self) -> str:
        """For a reader who does not see it."""
        return f"{self.value}{f', layer {self.layer}' if self.layer else ''}, slide {self.slide}"


class Gallery(NamedTuple):
    pictures: tuple[Picture, ...] = ()
    values: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()

    @property
    def slides(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(picture.slide for picture in self.pictures))

    @property
    def layers(self) -> tuple[str, ...]:
        return tuple(sorted({picture.layer for picture in self.pictures if picture.layer}, key=int))


def read_name(name: str) -> tuple[str, str, str]:
    """Slide, value and layer of a picture by its name; what the name does not say stays empty.

    >>> read_name("heatmaps/P001_a_beta_layer2"), read_name("heatmaps/overview")
    (('P001_a', 'beta', '2'), ('heatmaps', 'overview', ''))
    """
    folder, _, stem = name.rpartition("/")
    found = _NAME.match(stem)
    if not found:
        return folder, stem, ""
    end = f"{found['rest']}{found['end']}".replace("_", " ")
    return found["slide"] or folder, (found["value"].replace("_", " ") + end).strip(), found["layer"] or ""


def gallery(pictures: Sequence[tuple[str, str]], left_out: Sequence[str]) -> Gallery:
    """``pictures``: names (folder/stem) with their data URIs."""
    found = [Picture(*read_name(name), uri) for name, uri in pictures]
    found.sort(key=lambda one: one.value != _TRUTH)
    return Gallery(tuple(found), tuple(dict.fromkeys(picture.value for picture in found)), tuple(left_out))
