"""What a run would answer if its gates did something else: in a layer, a drawn region, a regime, or everywhere.

Shapes: N patches of the file, L of them that the model sees.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from gated_srp.errors import UserError
from gated_srp.reports.viewer.scene import Asked
from gated_srp.srp.coefficient import regimes
from gated_srp.srp.module import GatedSRP
from gated_srp.srp.trace import set_gates


@dataclass(frozen=True)
class WhatIf:
    """Answers in words, with the gates as learned and as set; ``patches``: how many of them lie in the region."""

    before: dict[str, str]
    after: dict[str, str]
    patches: int


def ask(
    asked: Asked,
    centres: np.ndarray,
    *,
    beta: float,
    layer: int | None = None,
    regime: str | None = None,
    region: Sequence[Sequence[float]] | None = None,
) -> WhatIf:
    """The answer with ``beta`` in place of what the gates of a ``layer`` (from 1) learned, inside a polygon of the slide.

    ``centres`` (L, 2): of the patches that the model sees, in the order of its bag and the pixels of the polygon.
    """
    if not any(isinstance(module, GatedSRP) for module in asked.model.modules()):
        raise UserError("this run has no gates", where=asked.run.path)
    if regime is not None and regime not in regimes(torch.zeros(1)):
        raise UserError(f"expected one of {', '.join(regimes(torch.zeros(1)))}", where=f"regime {regime}")
    chosen = None
    if region is not None:  # of a patient's other slides nothing is changed
        chosen = np.zeros(len(asked.bag.features), bool)
        chosen[asked.rows] = inside(region, centres)
    options: dict[str, Any] = {"layers": None if layer is None else (layer - 1,), "regime": regime}
    before = asked.answers()
    with set_gates(asked.model, beta, patches=None if chosen is None else torch.from_numpy(chosen), **options):
        after = asked.answers()
    return WhatIf(before, after, len(centres) if chosen is None else int(chosen.sum()))


def inside(region: Sequence[Sequence[float]], points: np.ndarray) -> np.ndarray:
    """(L,) bool: the points within a polygon, which may cross itself.

    >>> inside([(0, 0), (4, 0), (4, 4), (0, 4)], np.array([[1.0, 1.0], [5.0, 1.0]])).tolist()
    [True, False]
    """
    import shapely

    if len(region) < 3:
        raise UserError(f"a region of {len(region)} points", cure="Draw around some patches.")
    polygon = shapely.make_valid(shapely.Polygon(region))
    found: np.ndarray = shapely.contains_xy(polygon, points[:, 0], points[:, 1])
    return found
