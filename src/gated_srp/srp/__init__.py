"""The paper: neighbours, projection, gate. Torch alone."""

from gated_srp.srp.coefficient import (
    Coefficient,
    FixedCoefficient,
    FourInputGate,
    SignedGate,
    from_removal,
    kaiming,
    nonnegative,
    range_free,
    rectified,
    regimes,
    signed,
    xavier,
    zeros,
)
from gated_srp.srp.direction import Direction, NeighbourMean, OwnValue, RandomDirection, ShuffledNeighbours, SlideMean
from gated_srp.srp.graph import PatchGraph
from gated_srp.srp.lattice import infer_stride
from gated_srp.srp.module import GatedSRP
from gated_srp.srp.projection import neighbour_mean, project, unit

__all__ = [
    "Coefficient",
    "Direction",
    "FixedCoefficient",
    "FourInputGate",
    "GatedSRP",
    "NeighbourMean",
    "OwnValue",
    "PatchGraph",
    "RandomDirection",
    "ShuffledNeighbours",
    "SignedGate",
    "SlideMean",
    "from_removal",
    "infer_stride",
    "kaiming",
    "neighbour_mean",
    "nonnegative",
    "project",
    "range_free",
    "rectified",
    "regimes",
    "signed",
    "unit",
    "xavier",
    "zeros",
]
