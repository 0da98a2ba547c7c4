"""Heatmaps of a page: which slide, which value, which layer a picture shows, told by its name."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

_NAME = re.compile(
    r"^(?P<slide>.*?)[._-]*(?P<value>attention|beta|homogeneity|correction|change|true_focus)"
    r"(?P<rest>.*?)(?:_layer(?P<layer>\d+))?(?P<end>(?:_head\d+)?(?:_positive)?)$"
)


_TRUTH = "true focus"  # of the demo: first, for the others to be held against


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
    pictures: tuple[Picture, ...]
    values: tuple[str, ...]
    left_out: tuple[str, ...]

    @property
    def slides(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(picture.slide for picture in self.pictures))

    @property
    def layers(self) -> tuple[str, ...]:
        return tuple(sorted({picture.layer for picture in self.pictures if picture.layer}, key=int))


def read_name(name: str) -> tuple[str, str, str]:
    """Slide, value and layer of a picture; what is not told stays empty.

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
    found = tuple(
        sorted((Picture(*read_name(name), uri) for name, uri in pictures), key=lambda one: one.value != _TRUTH)
    )
    return Gallery(found, tuple(dict.fromkeys(picture.value for picture in found)), tuple(left_out))
