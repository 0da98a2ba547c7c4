"""Attribute values as tools really store them: 0-d arrays, byte strings, the text 'None', numbers and JSON as text."""

import json
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

# Attributes that are read; anything else in a file stays untouched.
WANTED = frozenset(
    {
        "patch_size",
        "patch_size_level0",
        "level0_magnification",
        "target_magnification",
        "overlap",
        "level0_width",
        "level0_height",
        "wsi_path",
        "mpp",
        "mpp_x",
        "level0_mpp",
        "encoder",
        "extractor",
        "unit",
        "tile_size_um",
        "tile_size",
        "feat_type",
        "patch_level",
        "downsample",
    }
)


def plain(value: Any) -> Any:
    """A Python number, text, list or dict; None for whatever means nothing.

    >>> plain(np.array([512.0])), plain(b"None"), plain('{"a": 1}'), plain(np.int64(3)), plain(b"uni_v2")
    (512.0, None, {'a': 1}, 3, 'uni_v2')
    """
    if isinstance(value, np.ndarray | np.generic):
        value = value.item() if value.size == 1 else value.tolist() if value.size else None
    if isinstance(value, bytes):
        value = value.decode("utf-8", "replace")
    if isinstance(value, str):
        value = value.strip("\0 \n")
        if value.lower() in ("", "none", "null", "nan"):
            return None
        if value[0] in '{["':
            try:
                return json.loads(value)
            except ValueError:
                return value
    return value if isinstance(value, int | float | str | list | dict) else None


def number(attrs: Mapping[str, Any], *names: str) -> float | None:
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


def text(attrs: Mapping[str, Any], *names: str) -> str | None:
    """The first of these attributes that is text."""
    return next((attrs[name] for name in names if isinstance(attrs.get(name), str)), None)
