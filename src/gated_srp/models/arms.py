"""The arms: a plain table of how each compared model is put together, what is known of each, and `build_model`.

Nobody outside this package takes an arm's name apart: what the rest needs to know of an arm is a fact of `Arm`.
"""

import difflib
import re
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from gated_srp import srp
from gated_srp.errors import UserError
from gated_srp.models.attention import Attention, DenseAttention, LocalAttention
from gated_srp.models.block import Adapter, Block, LastBlock
from gated_srp.models.nystrom import DifferentialAttention, DifferentialNystrom, NystromAttention
from gated_srp.models.slide import PPEG, ImageTransformer, SlideModel, SlideTransformer, initialise
from gated_srp.srp import Coefficient, Direction, GatedSRP, NeighbourMean, OwnValue, SignedGate

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


class Gate:
    """Makes the signed gate of an arm; ``changes``: arguments of `SignedGate` that the ablation sets otherwise."""

    def __init__(self, kind: type[SignedGate] = SignedGate, **changes: Any) -> None:
        self.kind, self.changes = kind, changes

    def __call__(self, sizes: Sizes) -> Coefficient:
        return sizes.gate(self.kind, **self.changes)


@dataclass(frozen=True)
class Arm:
    """A slide model in parts. ``coefficient=None``: no correction; ``last``: the last block is corrected too.

    Facts for the rest of the house: ``title``: what tables print, if not the name; ``about``: what it does, in words; ``trunk``: what
    the paper's gate settings are keyed by; ``base``: the uncorrected arm that this one is paired with, itself for a base; ``dense``:
    attention over all pairs of patches; ``method``: Gated SRP itself, no ablation or control of it.
    """

    attention: Callable[[Sizes, int], Attention]
    coefficient: Callable[[Sizes], Coefficient] | None = None
    direction: Callable[[Sizes], Direction] = lambda sizes: NeighbourMean()
    last: bool = False
    position: Callable[[int], PPEG] | None = PPEG
    title: str = ""
    about: str = ""
    trunk: str = "nystrom"
    base: str = "na"
    dense: bool = False
    method: bool = False

    images: ClassVar[bool] = False
    defaults: ClassVar[Mapping[str, Any]] = {}  # where they differ from those of `Sizes`
    refuses: ClassVar[Mapping[str, str]] = {}  # kind of task -> why

    @property
    def gated(self) -> bool:
        """Whether it learns a signed gate, whose ``delta`` and ``hidden_dim`` then matter."""
        return isinstance(self.coefficient, Gate)

    def build(self, in_dim: int, num_outputs: int, sizes: Sizes) -> SlideTransformer:
        blocks = self.blocks(sizes)
        position = None if self.position is None else self.position(sizes.dim)
        return SlideTransformer(in_dim, num_outputs, blocks=blocks, position=position, drop_path=sizes.drop_path)

    def correction(self, sizes: Sizes) -> GatedSRP | Adapter | None:
        if self.coefficient is None:
            return None
        return GatedSRP(sizes.num_heads, direction=self.direction(sizes), coefficient=self.coefficient(sizes))

    def blocks(self, sizes: Sizes) -> list[Block]:
        blocks: list[Block] = []
        for number in range(sizes.depth):
            last = number == sizes.depth - 1
            correction = self.correction(sizes) if self.last or not last else None
            kind = LastBlock if last else Block
            blocks.append(kind(sizes.dim, self.attention(sizes, number), correction=correction))
        return blocks


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
        blocks, patches = self.blocks(sizes), sizes.num_patches
        return ImageTransformer(in_dim, num_outputs, blocks=blocks, num_patches=patches, drop_path=sizes.drop_path)


@dataclass(frozen=True)
class PeerArm:
    """A model of another publication: a name in `peers` and the sizes that it takes. Facts as in `Arm`."""

    name: str
    takes: tuple[str, ...] = ()
    title: str = ""
    about: str = ""
    gated: bool = False

    trunk: ClassVar[str] = "peer"
    base: ClassVar[str] = "na"
    dense: ClassVar[bool] = False
    method: ClassVar[bool] = False
    images: ClassVar[bool] = False
    defaults: ClassVar[Mapping[str, Any]] = {}

    @property
    def refuses(self) -> Mapping[str, str]:
        """As its model says: kind of task -> why it is not made for it."""
        from gated_srp.models import peers

        found: Mapping[str, str] = getattr(getattr(peers, self.name), "refuses", {})
        return found

    def build(self, in_dim: int, num_outputs: int, sizes: Sizes) -> "Peer":
        from gated_srp.models import peers  # a run of another arm does not load them

        peer: Peer = getattr(peers, self.name)(
            in_dim, num_outputs, **{name: getattr(sizes, name) for name in self.takes}
        )
        return peer


def _nystrom(sizes: Sizes, number: int) -> Attention:
    return NystromAttention(sizes.dim, sizes.num_heads, num_landmarks=sizes.num_landmarks)


def _differential(sizes: Sizes, number: int) -> Attention:
    return DifferentialNystrom(sizes.dim, sizes.num_heads, depth=number, num_landmarks=sizes.num_landmarks)


def _dense(sizes: Sizes, number: int) -> Attention:
    return DenseAttention(sizes.dim, sizes.num_heads)


def _local(sizes: Sizes, number: int) -> Attention:
    return LocalAttention(sizes.dim, sizes.num_heads)


def _dense_differential(sizes: Sizes, number: int) -> Attention:
    return DifferentialAttention(sizes.dim, sizes.num_heads, depth=number)


def _fixed(value: float) -> Callable[[Sizes], Coefficient]:
    return lambda sizes: srp.FixedCoefficient(value)


_gated = partial(Arm, _nystrom)
_vit4 = partial(Arm, position=None, trunk="vit4", base="vit4", dense=True)
_vit_s16 = partial(ImageArm, trunk="vit_s16", base="vit_s16", dense=True)

ARMS: dict[str, Arm | PeerArm] = {
    # The paper's comparison
    "na": Arm(_nystrom, title="NA", about="Nystrom attention, nothing corrected: the base of all that follow"),
    "xsa": _gated(
        _fixed(1.0),
        direction=lambda sizes: OwnValue(),
        last=True,
        title="XSA",
        about="removes what lies along each token's own value",
    ),
    "diff": Arm(_differential, title="Diff", about="differential attention: one map minus lambda times a second"),
    "gated_srp": _gated(
        Gate(),
        title="Gated SRP",
        method=True,
        about="the paper's method: a learned signed gate along the neighbours' mean",
    ),
    # Fixed projection strength
    "fixed_beta_minus1": _gated(_fixed(-1.0), about="doubles the part along the neighbours' mean"),
    "fixed_beta_1": _gated(_fixed(1.0), about="removes that part"),
    "fixed_beta_2": _gated(_fixed(2.0), about="flips that part"),
    # Ablations of the gate: range, gradients, factorisation, initialisation
    "gated_srp_sigmoid": _gated(
        Gate(bound=srp.nonnegative), about="beta between 0 and delta (a sigmoid); does not start as an identity"
    ),
    "gated_srp_range_free": _gated(Gate(bound=srp.range_free), about="2 tanh(logit / 2) in place of delta tanh(logit)"),
    "gated_srp_live": _gated(Gate(live=True), about="gradients flow through what the gate measures"),
    "gated_srp_token_only": _gated(
        Gate(head=False), about="one coefficient for all heads of a token, but for their biases"
    ),
    "gated_srp_head_only": _gated(Gate(hidden_dim=None), about="no token MLP"),
    "gated_srp_no_bias": _gated(Gate(bias=False), about="no biases in the gate"),
    "gated_srp_xavier": _gated(Gate(init=srp.xavier), about="starts from Xavier's values, not as an identity"),
    "gated_srp_kaiming": _gated(Gate(init=srp.kaiming), about="starts from Kaiming's values, not as an identity"),
    # Controls: the same gate on another axis, a gate that only removes, weights without a direction
    "axis_own_value": _gated(Gate(), direction=lambda sizes: OwnValue(), about="the gate along the token's own value"),
    "axis_slide_mean": _gated(
        Gate(), direction=lambda sizes: srp.SlideMean(), about="the gate along the mean of the whole slide"
    ),
    "axis_random": _gated(
        Gate(),
        direction=lambda sizes: srp.RandomDirection(sizes.num_heads, sizes.dim // sizes.num_heads),
        about="the gate along a random direction per head",
    ),
    "gated_srp_nonnegative": _gated(Gate(bound=srp.rectified), about="starts as an identity, but can only remove"),
    "axis_shuffled": _gated(
        Gate(),
        direction=lambda sizes: srp.ShuffledNeighbours(),
        about="the gate along the mean of as many patches from elsewhere on the slide",
    ),
    "adapter": AdaptedArm(_nystrom, about="a small bottleneck in place of the gate, with at least as many weights"),
    # Dense attention over slides
    "vit4": _vit4(_dense, about="dense attention without positions, nothing corrected"),
    "vit4_xsa": _vit4(_dense, _fixed(1.0), direction=lambda sizes: OwnValue(), last=True, about="the same with XSA"),
    "vit4_diff": _vit4(_dense_differential, about="the same with differential attention"),
    "vit4_gated_srp": _vit4(_dense, Gate(), method=True, about="the same with Gated SRP"),
    "vit4_gated_srp_published": _vit4(
        _dense,
        Gate(srp.FourInputGate),
        about="its gate has a fourth input, as released: the PANDA row of the architecture table",
    ),
    # Images: dense attention over a fixed grid
    "vit_s16": _vit_s16(_dense, about="ViT-S/16 on images, nothing corrected"),
    "vit_s16_xsa": _vit_s16(
        _dense, _fixed(1.0), direction=lambda sizes: OwnValue(), last=True, about="the same with XSA"
    ),
    "vit_s16_diff": _vit_s16(_dense_differential, about="the same with differential attention"),
    "vit_s16_gated_srp": _vit_s16(_dense, Gate(), method=True, about="the same with Gated SRP"),
    "vit_s16_fixed_beta_minus1": _vit_s16(_dense, _fixed(-1.0), about="doubles the part along the neighbours' mean"),
    "vit_s16_fixed_beta_1": _vit_s16(_dense, _fixed(1.0), about="removes that part"),
    "vit_s16_fixed_beta_2": _vit_s16(_dense, _fixed(2.0), about="flips that part"),
    # Other methods, at the width of the others; TransMIL and CLAM as published
    "local_attention": Arm(_local, about="each patch attends to itself and its neighbours alone; CLS reads all"),
    "mean_pool": PeerArm("MeanPool", ("dim",), about="a linear layer with ReLU, the mean over patches, a linear layer"),
    "abmil": PeerArm("ABMIL", ("dim",), about="attention-based MIL with gated attention (Ilse et al. 2018)"),
    "srp_abmil": PeerArm(
        "srp_abmil", ("dim", "delta", "hidden_dim"), gated=True, about="ABMIL whose patches Gated SRP corrects first"
    ),
    "dsmil": PeerArm("DSMIL", ("dim",), about="dual-stream MIL: a critical patch and attention to it (Li et al. 2021)"),
    "abmil_published": PeerArm(
        "published_abmil", about="ABMIL at the sizes of the paper's table of MIL models: 512, 128"
    ),
    "dsmil_published": PeerArm(
        "PublishedDSMIL", about="DSMIL at the sizes of that table: 512 channels, queries of two layers and width 128"
    ),
    "clam_sb": PeerArm("CLAM", about="CLAM, one attention branch, with its loss on patches (Lu et al. 2021)"),
    "transmil": PeerArm("TransMIL", about="TransMIL as published: two blocks of width 512 (Shao et al. 2021)"),
    "linear_probe": PeerArm("LinearProbe", about="a linear layer on the mean of the features"),
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


def arm_settings(name: str) -> tuple[str, dict[str, str]]:
    """An arm, and the settings of the cohort that a study changes for it: ``ARM@SETTING=VALUE``, repeated for several.

    >>> arm_settings("gated_srp@train.gate_lr=10")
    ('gated_srp', {'train.gate_lr': '10'})
    """
    arm, *changes = name.split("@")
    if wrong := [change for change in changes if not re.fullmatch(r"[\w.]+=[\w.+-]+", change)]:
        cure = "expected ARM@SETTING=VALUE, e.g. gated_srp@train.gate_lr=10."
        raise UserError(f"{wrong[0]!r} is no setting", where=f"arm {name}", cure=cure, kind="unknown_arm")
    return arm, dict(change.split("=", 1) for change in changes)


def arm_title(name: str) -> str:
    """How tables and figures print an arm, or a row of a table that is named after its arm.

    >>> arm_title("gated_srp"), arm_title("gated_srp_tuned"), arm_title("vit4"), arm_title("my own row")
    ('Gated SRP', 'Gated SRP, tuned', 'vit4', 'my own row')
    """
    tuned = name.removesuffix(TUNED)
    if tuned != name and tuned in ARMS and ARMS[tuned].title:
        return f"{ARMS[tuned].title}, tuned"
    if "@" in name:
        arm, changes = arm_settings(name)
        return ", ".join([arm_title(arm), *(f"{key.rpartition('.')[2]} {value}" for key, value in changes.items())])
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


def is_gated(name: str) -> bool:
    """Whether an arm, or a row of a table that is named after its arm, has the paper's gates.

    >>> is_gated("gated_srp"), is_gated("gated_srp@train.gate_lr=10"), is_gated("na"), is_gated("my own row")
    (True, True, False, False)
    """
    arm = arm_settings(name)[0].removesuffix(TUNED) if "@" in name else name.removesuffix(TUNED)
    return arm in ARMS and ARMS[arm].gated
