"""Pictures inside a page: SVG cleaned of all that could run or load, PNG made small enough to carry along."""

from __future__ import annotations

import base64
import io
import re
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from pathlib import Path

_SVG = "http://www.w3.org/2000/svg"
_LINK = "http://www.w3.org/1999/xlink"
_DRAWN = frozenset(
    [
        "svg",
        "g",
        "defs",
        "clipPath",
        "path",
        "rect",
        "use",
        "text",
        "tspan",
        "title",
        "line",
        "circle",
        "ellipse",
        "polygon",
        "polyline",
        "image",
        "linearGradient",
        "stop",
    ]
)
_LARGEST = 3_000_000  # bytes of an SVG file; matplotlib's are a hundredth
_WIDEST = 1400  # pixels of a PNG
_COLOURS = 128
_SHRINK = 0.6


def inline_svg(path: Path, prefix: str) -> str | None:
    """The drawing as markup to be put into a page, its ids prefixed; None where the file is no drawing.

    Only elements that draw stay, without handlers, and nothing that points outside the drawing itself.
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
    if width:  # on a phone it shrinks so far and scrolls from there on
        root.set("style", f"min-width: {float(width[1]) * _SHRINK:.0f}{width[2] or 'px'}")
    root.attrib |= {"aria-hidden": "true", "focusable": "false"}  # the figure's words are its name
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
        if plain.startswith("on") or (plain == "href" and not _inside(value)) or _points_out(value):
            del element.attrib[name]
        elif plain == "id":
            element.attrib[name] = prefix + value
        elif plain == "href":
            element.attrib[name] = f"#{prefix}{value[1:]}" if value.startswith("#") else value
        else:
            element.attrib[name] = re.sub(r"url\(#", f"url(#{prefix}", value)


def _inside(link: str) -> bool:
    return link.startswith(("#", "data:image/png;base64,"))


def _points_out(value: str) -> bool:
    lowered = value.lower()
    return bool(re.search(r"url\((?!#)", lowered)) or "javascript:" in lowered or "@import" in lowered


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


def data_uri(png: bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(png).decode("ascii")


def within(pictures: Iterator[tuple[str, bytes]], budget: int) -> tuple[list[tuple[str, str]], list[str]]:
    """Names with data URIs while they fit, and the names of those left out."""
    kept, left_out = [], []
    for name, png in pictures:
        uri = data_uri(png)
        if len(uri) <= budget:
            budget -= len(uri)
            kept.append((name, uri))
        else:
            left_out.append(name)
    return kept, left_out
