"""The arms: a plain table of how each compared model is put together, what is known of each, and `build_model`.

Nobody outside this package takes an arm's name apart: what the rest needs to know of an arm is a fact of `Arm`.
"""

import difflib
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from gated_srp.errors import UserError
from gated_srp.models.attention import Attention, DenseAttention, LocalAttention
from gated_srp.models.block import Adapter, Block, LastBlock
from gated_srp.models.nystrom import NystromAttention
from gated_srp.models.slide import PPEG, ImageTransformer, SlideModel, SlideTransformer, initialise
from gated_srp.srp import (
    Coefficient,
    Direction,
    FixedCoefficient,
    FourInputGate,
    GatedSRP,
    NeighbourMean,
    OwnValue,
    RandomDirection,
    ShuffledNeighbours,
    SignedGate,
    SlideMean,
    kaiming,
    nonnegative,
    range_free,
    rectified,
    xavier,
)

if TYPE_CHECKING:
    from gated_srp.models.peers import Peer


@dataclass(frozen=True)
class Sizes:
    """What an arm may ask of a model's size; the defaults are the paper's. ``num_patches``: of an image, each has a position."""

    dim: int = 384
    depth: int = 4
    num_heads: int = 6
    num_landmarks: int = 64
    delta: float = 1.0
    hidden_dim: int = 64
    drop_path: float = 0.1
    num_patches: int = 289

    def gate(self, kind: type[SignedGate] = SignedGate, **changes: Any) -> Coefficient:
        return kind(self.num_heads, **{"delta": self.delta, "hidden_dim": self.hidden_dim, **changes})


@dataclass(frozen=True)
class Gate:
    """Makes the signed gate of an arm; ``changes``: arguments of `SignedGate` that the ablation sets otherwise."""

    changes: Mapping[str, Any] = field(default_factory=dict)
    kind: type[SignedGate] = SignedGate

    def __call__(self, sizes: Sizes) -> Coefficient:
        return sizes.gate(self.kind, **self.changes)


@dataclass(frozen=True)
class Arm:
    """A slide model in parts. ``coefficient=None``: no correction; ``last``: the last block is corrected too.

    Facts for the rest of the house: ``title``: what tables print, if not the name; ``trunk``: what the paper's gate settings are
    keyed by; ``base``: the uncorrected arm that this one is paired with, itself for a base; ``dense``: attention over all pairs of
    patches; ``method``: Gated SRP itself, no ablation or control of it.
    """

    attention: Callable[[Sizes, int], Attention]
    coefficient: Callable[[Sizes], Coefficient] | None = None
    direction: Callable[[Sizes], Direction] = lambda sizes: NeighbourMean()
    last: bool = False
    position: Callable[[int], PPEG] | None = PPEG
    title: str = ""
    trunk: str = "nystrom"
    base: str = "na"
    dense: bool = False
    method: bool = False

    images: ClassVar[bool] = False
    defaults: ClassVar[Mapping[str, Any]] = {}  # where they differ from those of `Sizes`

    @property
    def gated(self) -> bool:
        """Whether it learns a signed gate, whose ``delta`` and ``hidden_dim`` then matter."""
        return isinstance(self.coefficient, Gate)

    def build(self, in_dim: int, num_outputs: int, sizes: Sizes) -> SlideTransformer:
        blocks = self._blocks(sizes)
        position = None if self.position is None else self.position(sizes.dim)
        return SlideTransformer(in_dim, num_outputs, blocks=blocks, position=position, drop_path=sizes.drop_path)

    def _blocks(self, sizes: Sizes) -> list[Block]:
        return [self._block(sizes, number) for number in range(sizes.depth)]

    def correction(self, sizes: Sizes) -> GatedSRP | Adapter | None:
        if self.coefficient is None:
            return None
        return GatedSRP(sizes.num_heads, direction=self.direction(sizes), coefficient=self.coefficient(sizes))

    def _block(self, sizes: Sizes, number: int) -> Block:
        last = number == sizes.depth - 1
        correction = self.correction(sizes) if self.last or not last else None
        return (LastBlock if last else Block)(sizes.dim, self.attention(sizes, number), correction=correction)


@dataclass(frozen=True)
class AdaptedArm(Arm):
    """Control: where the gates would be, adapters with at least as many weights."""

    def correction(self, sizes: Sizes) -> Adapter:
        weights = sum(parameter.numel() for parameter in sizes.gate().parameters())
        return Adapter(sizes.dim // sizes.num_heads, budget=weights)


@dataclass(frozen=True)
class ImageArm(Arm):
    """An image model in the same parts: learned positions, twelve blocks."""

    images: ClassVar[bool] = True
    defaults: ClassVar[Mapping[str, Any]] = {"depth": 12}

    def build(self, in_dim: int, num_outputs: int, sizes: Sizes) -> ImageTransformer:
        return ImageTransformer(
            in_dim, num_outputs, blocks=self._blocks(sizes), num_patches=sizes.num_patches, drop_path=sizes.drop_path
        )


@dataclass(frozen=True)
class PeerArm:
    """A model of another publication; ``make`` takes what it wants of the sizes. Facts as in `Arm`."""

    make: Callable[[int, int, Sizes], "Peer"]
    title: str = ""
    gated: bool = False

    trunk: ClassVar[str] = "peer"
    base: ClassVar[str] = "na"
    dense: ClassVar[bool] = False
    method: ClassVar[bool] = False
    images: ClassVar[bool] = False
    defaults: ClassVar[Mapping[str, Any]] = {}

    def build(self, in_dim: int, num_outputs: int, sizes: Sizes) -> "Peer":
        return self.make(in_dim, num_outputs, sizes)


def _nystrom(sizes: Sizes, number: int) -> Attention:
    return NystromAttention(sizes.dim, sizes.num_heads, num_landmarks=sizes.num_landmarks)


def _differential(sizes: Sizes, number: int) -> Attention:
    from gated_srp.models.differential import DifferentialNystrom

    return DifferentialNystrom(sizes.dim, sizes.num_heads, depth=number, num_landmarks=sizes.num_landmarks)


def _dense(sizes: Sizes, number: int) -> Attention:
    return DenseAttention(sizes.dim, sizes.num_heads)


def _local(sizes: Sizes, number: int) -> Attention:
    return LocalAttention(sizes.dim, sizes.num_heads)


def _dense_differential(sizes: Sizes, number: int) -> Attention:
    from gated_srp.models.differential import DifferentialAttention

    return DifferentialAttention(sizes.dim, sizes.num_heads, depth=number)


def _peers() -> Any:
    """Their module; a run of another arm does not load it."""
    from gated_srp.models import peers

    return peers


def _fixed(value: float) -> Callable[[Sizes], Coefficient]:
    return lambda sizes: FixedCoefficient(value)


def _gate(**changes: Any) -> Gate:
    return Gate(changes)


_gated = partial(Arm, _nystrom)
_vit4 = partial(Arm, position=None, trunk="vit4", base="vit4", dense=True)
_vit_s16 = partial(ImageArm, trunk="vit_s16", base="vit_s16", dense=True)

ARMS: dict[str, Arm | PeerArm] = {
    # the paper's comparison
    "na": Arm(_nystrom, title="NA"),
    "xsa": _gated(_fixed(1.0), direction=lambda sizes: OwnValue(), last=True, title="XSA"),
    "diff": Arm(_differential, title="Diff"),
    "gated_srp": _gated(_gate(), title="Gated SRP", method=True),
    # fixed projection strength
    "fixed_beta_minus1": _gated(_fixed(-1.0)),
    "fixed_beta_1": _gated(_fixed(1.0)),
    "fixed_beta_2": _gated(_fixed(2.0)),
    # gate range, gradients, factorisation, initialisation
    "gated_srp_sigmoid": _gated(_gate(bound=nonnegative)),
    "gated_srp_range_free": _gated(_gate(bound=range_free)),
    "gated_srp_live": _gated(_gate(live=True)),
    "gated_srp_token_only": _gated(_gate(head=False)),
    "gated_srp_head_only": _gated(_gate(hidden_dim=None)),
    "gated_srp_no_bias": _gated(_gate(bias=False)),
    "gated_srp_xavier": _gated(_gate(init=xavier)),
    "gated_srp_kaiming": _gated(_gate(init=kaiming)),
    # controls: the same gate on another axis, a gate that only removes, weights without a direction
    "axis_own_value": _gated(_gate(), direction=lambda sizes: OwnValue()),
    "axis_slide_mean": _gated(_gate(), direction=lambda sizes: SlideMean()),
    "axis_random": _gated(
        _gate(), direction=lambda sizes: RandomDirection(sizes.num_heads, sizes.dim // sizes.num_heads)
    ),
    "gated_srp_nonnegative": _gated(_gate(bound=rectified)),
    "axis_shuffled": _gated(_gate(), direction=lambda sizes: ShuffledNeighbours()),
    "adapter": AdaptedArm(_nystrom),
    # dense attention over variable lengths
    "vit4": _vit4(_dense),
    "vit4_xsa": _vit4(_dense, _fixed(1.0), direction=lambda sizes: OwnValue(), last=True),
    "vit4_diff": _vit4(_dense_differential),
    "vit4_gated_srp": _vit4(_dense, _gate(), method=True),
    "vit4_fixed_beta_minus1": _vit4(_dense, _fixed(-1.0)),
    "vit4_fixed_beta_1": _vit4(_dense, _fixed(1.0)),
    "vit4_fixed_beta_2": _vit4(_dense, _fixed(2.0)),
    # as the release trained them on PANDA: the architecture table's gate, and a Diff that is not dense
    "vit4_gated_srp_published": _vit4(_dense, Gate(kind=FourInputGate)),
    "diff_no_ppeg": Arm(_differential, position=None),
    # images, dense attention over a fixed grid
    "vit_s16": _vit_s16(_dense),
    "vit_s16_xsa": _vit_s16(_dense, _fixed(1.0), direction=lambda sizes: OwnValue(), last=True),
    "vit_s16_diff": _vit_s16(_dense_differential),
    "vit_s16_gated_srp": _vit_s16(_dense, _gate(), method=True),
    "vit_s16_fixed_beta_minus1": _vit_s16(_dense, _fixed(-1.0)),
    "vit_s16_fixed_beta_1": _vit_s16(_dense, _fixed(1.0)),
    "vit_s16_fixed_beta_2": _vit_s16(_dense, _fixed(2.0)),
    # peers, at the width of the others; TransMIL and CLAM as published
    "local_attention": Arm(_local),
    "mean_pool": PeerArm(lambda i, o, sizes: _peers().MeanPool(i, o, dim=sizes.dim)),
    "abmil": PeerArm(lambda i, o, sizes: _peers().ABMIL(i, o, dim=sizes.dim)),
    "srp_abmil": PeerArm(
        lambda i, o, sizes: _peers().srp_abmil(i, o, dim=sizes.dim, delta=sizes.delta, hidden_dim=sizes.hidden_dim),
        gated=True,
    ),
    "dsmil": PeerArm(lambda i, o, sizes: _peers().DSMIL(i, o, dim=sizes.dim)),
    "clam_sb": PeerArm(lambda i, o, sizes: _peers().CLAM(i, o)),
    "transmil": PeerArm(lambda i, o, sizes: _peers().TransMIL(i, o)),
    "linear_probe": PeerArm(lambda i, o, sizes: _peers().LinearProbe(i, o)),
}


METHOD = "gated_srp"  # the paper's
TUNED = "_tuned"  # ends the name of the row that `gated-srp tune` adds to a comparison


def find_arm(name: str) -> Arm | PeerArm:
    """The arm of this name; where there is none, the error says which name is near, and lists all.

    >>> find_arm("vit4_gated_srp").base
    'vit4'
    """
    if name in ARMS:
        return ARMS[name]
    near = difflib.get_close_matches(name, ARMS, n=1)
    hint = f"Did you mean {near[0]!r}? " if near else ""
    raise UserError(f"arm {name!r} is not known", cure=f"{hint}Arms: {', '.join(ARMS)}.", kind="unknown_arm")


def arm_title(name: str) -> str:
    """How tables and figures print an arm, or a row of a table that is named after its arm.

    >>> arm_title("gated_srp"), arm_title("gated_srp_tuned"), arm_title("vit4"), arm_title("my own row")
    ('Gated SRP', 'Gated SRP, tuned', 'vit4', 'my own row')
    """
    tuned = name.removesuffix(TUNED)
    if tuned != name and tuned in ARMS and ARMS[tuned].title:
        return f"{ARMS[tuned].title}, tuned"
    return (ARMS[name].title if name in ARMS else "") or name


def build_model(arm: str, *, in_dim: int, num_outputs: int, seed: int = 0, **sizes: Any) -> SlideModel:
    """The model of an arm, its start values from ``seed``; ``sizes`` are the fields of `Sizes`.

    >>> model = build_model("gated_srp", in_dim=1536, num_outputs=4)
    >>> sum(p.numel() for p in model.parameters()) - 3 * 351
    7723780
    """
    parts = find_arm(arm)
    known = {size.name for size in fields(Sizes)}
    if unknown := sorted(set(sizes) - known):
        expected = ", ".join(sorted(known))
        raise UserError(f"unknown size {unknown[0]!r}, expected some of {expected}.", where="build_model")
    full = Sizes(**{**parts.defaults, **sizes})
    # Constructors draw values that `initialise` replaces; nobody else's stream may notice.
    with torch.random.fork_rng(devices=[]):
        model = parts.build(in_dim, num_outputs, full)
    initialise(model, seed)
    model.settings = {"arm": arm, "in_dim": in_dim, "num_outputs": num_outputs, **asdict(full)}
    return model
