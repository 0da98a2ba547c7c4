"""What the documentation does beyond its plugins: equations become MathML while the site is built, so that no script has to draw them, and
`Example:` of our docstrings is read as code."""

import html
import re
from typing import Any

import griffe
from latex2mathml.converter import convert

_EQUATION = re.compile(r'<(span|div) class="arithmatex">\\([(\[])(.*?)\\[)\]]</\1>', re.S)


def on_page_content(content: str, **_: Any) -> str:
    """MkDocs calls it with the HTML of each page."""
    return _EQUATION.sub(_mathml, content)


def _mathml(found: re.Match[str]) -> str:
    source = html.unescape(found.group(3)).strip()
    if found.group(2) == "(":
        return convert(source, display="inline")
    return f'<div class="equation">{convert(source, display="block")}</div>'


class Examples(griffe.Extension):
    """For mkdocstrings, which knows the section under its plural alone."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = obj.docstring.value.replace("\nExample:\n", "\nExamples:\n")
