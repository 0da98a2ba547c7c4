"""An arm in its parts: the sizes, the gate and the facts from which a model is built, and what the rest of the house knows of it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from importlib import import_module
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from gated_srp.models.attention import Attention
from gated_srp.models.block import PPEG, Adapter, Block
from gated_srp.models.slide import CorrectedFeatures, SlideTransformer
from gated_srp.srp import Coefficient, Direction, GatedSRP, NeighbourMean, SignedGate, rectified, signed, zeros

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

    @property
    def starts_shut(self) -> bool:
        """Whether beta is 0 everywhere before training."""
        bound, init = self.changes.get("bound", signed), self.changes.get("init", zeros)
        return init is zeros and float(bound(torch.zeros(()), 1.0)) == 0

    @property
    def moved_by_biases(self) -> bool:
        """Whether beta starts at 0 and has biases that carry it towards ±delta: then `config/reach.py` knows how far."""
        bound = self.changes.get("bound", signed)
        return self.starts_shut and self.changes.get("bias", True) and bound in (signed, rectified)

    def __call__(self, sizes: Sizes) -> Coefficient:
        return sizes.gate(self.kind, **self.changes)


@dataclass(frozen=True)
class Arm:
    """A slide model in parts. ``coefficient=None``: no correction; ``last``: the last block is corrected too.

    Facts for the rest of the house: ``title``: what tables print, if not the name; ``about``: what it does, in words; ``trunk``: what
    the paper's gate settings are keyed by; ``base``: the uncorrected arm that this one is paired with, itself for a base; ``dense``:
    attention over all pairs of patches; ``method``: Gated SRP itself, no ablation or control of it; ``without``: the arm that it is
    without its gate, if not its base, or without what else it adds; ``window``: the one that its graphs need, whatever the cohort sets;
    ``scales``: magnifications that its bags need.
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
    without: str = ""
    window: int | None = None
    scales: int = 1

    images: ClassVar[bool] = False
    needs_covariates: ClassVar[bool] = False
    defaults: ClassVar[Mapping[str, Any]] = {}  # where they differ from those of `Sizes`
    refuses: ClassVar[Mapping[str, str]] = {}  # kind of task -> why

    @property
    def gated(self) -> bool:
        """Whether it learns a signed gate, whose ``delta`` and ``hidden_dim`` then matter."""
        return isinstance(self.coefficient, Gate)

    @property
    def moved_by_biases(self) -> bool:
        return isinstance(self.coefficient, Gate) and self.coefficient.moved_by_biases

    @property
    def starts_as(self) -> str:
        """The arm that it equals before training, bit for bit; empty where there is none."""
        if self.coefficient is None:
            return self.without
        shut = isinstance(self.coefficient, Gate) and self.coefficient.starts_shut
        return (self.without or self.base) if shut else ""

    @property
    def kind(self) -> type[SlideTransformer]:
        return SlideTransformer

    @property
    def no_pretraining(self) -> str:
        """Why it cannot be pretrained on masked patches, or nothing."""
        return self.kind.no_pretraining

    def build(self, in_dim: int, num_outputs: int, sizes: Sizes) -> SlideTransformer:
        blocks = self.blocks(sizes)
        position = None if self.position is None else self.position(sizes.dim)
        return self.kind(in_dim, num_outputs, blocks=blocks, position=position, drop_path=sizes.drop_path)

    def correction(self, sizes: Sizes) -> GatedSRP | Adapter | None:
        if self.coefficient is None:
            return None
        return GatedSRP(sizes.num_heads, direction=self.direction(sizes), coefficient=self.coefficient(sizes))

    def blocks(self, sizes: Sizes) -> list[Block]:
        blocks: list[Block] = []
        for number in range(sizes.depth):
            kind, attention = self.kind.block_kind(number, sizes.depth), self.attention(sizes, number)
            # Two maps share a head: then there are half as many, twice as wide.
            heads = replace(sizes, num_heads=attention.num_heads)
            correction = self.correction(heads) if self.last or kind.patches else None
            blocks.append(kind(sizes.dim, attention, correction=correction))
        return blocks


@dataclass(frozen=True)
class ImageArm(Arm):
    """An image model in the same parts: learned positions, twelve blocks."""

    images: ClassVar[bool] = True
    no_pretraining: ClassVar[str] = "it is a model of images, whose patches are pixels"
    defaults: ClassVar[Mapping[str, Any]] = {"depth": 12}

    def build(self, in_dim: int, num_outputs: int, sizes: Sizes) -> SlideTransformer:
        from gated_srp.models.images import ImageTransformer  # which is a slide model

        blocks, patches = self.blocks(sizes), sizes.num_patches
        return ImageTransformer(in_dim, num_outputs, blocks=blocks, num_patches=patches, drop_path=sizes.drop_path)


@dataclass(frozen=True)
class AdaptedArm(Arm):
    """Control: where the gates would be, adapters with at least as many weights."""

    @property
    def starts_as(self) -> str:
        return self.base

    def correction(self, sizes: Sizes) -> Adapter:
        weights = sum(parameter.numel() for parameter in sizes.gate().parameters())
        return Adapter(sizes.dim // sizes.num_heads, budget=weights)


@dataclass(frozen=True)
class OtherArm(Arm):
    """An arm whose model differs from the slide model in more than its attention: ``model`` names it by module and class."""

    model: str = ""

    @property
    def kind(self) -> type[SlideTransformer]:
        found: type[SlideTransformer] = named(self.model)
        return found


@dataclass(frozen=True)
class FeaturesArm(Arm):
    """The coefficient acts on the features, as one head that is its own value, and nothing is corrected behind attention."""

    @property
    def kind(self) -> type[SlideTransformer]:
        return CorrectedFeatures

    def build(self, in_dim: int, num_outputs: int, sizes: Sizes) -> SlideTransformer:
        model = Arm.build(replace(self, coefficient=None), in_dim, num_outputs, sizes)
        assert isinstance(model, CorrectedFeatures)
        model.correction = self.correction(replace(sizes, num_heads=1))
        return model


@dataclass(frozen=True)
class PeerArm:
    """A model of another publication: a name in `peers`, or module and name, and the sizes that it takes. Facts as in `Arm`."""

    name: str
    takes: tuple[str, ...] = ()
    title: str = ""
    about: str = ""
    gated: bool = False
    starts_as: str = ""
    needs_covariates: bool = False

    @property
    def moved_by_biases(self) -> bool:
        return self.gated and bool(self.starts_as)  # by the gate as it is published

    trunk: ClassVar[str] = "peer"
    base: ClassVar[str] = "na"
    dense: ClassVar[bool] = False
    method: ClassVar[bool] = False
    images: ClassVar[bool] = False
    window: ClassVar[int | None] = None
    scales: ClassVar[int] = 1
    defaults: ClassVar[Mapping[str, Any]] = {}
    no_pretraining: ClassVar[str] = "most models of other publications have no token per patch at their end"

    @property
    def refuses(self) -> Mapping[str, str]:
        """As its model says: kind of task -> why it is not made for it."""
        found: Mapping[str, str] = getattr(named(self.name), "refuses", {})
        return found

    def build(self, in_dim: int, num_outputs: int, sizes: Sizes) -> "Peer":
        peer: Peer = named(self.name)(in_dim, num_outputs, **{name: getattr(sizes, name) for name in self.takes})
        return peer


def named(name: str) -> Any:
    """A class or function of another publication by module (`peers` where none is named) and name: a run without it does not load it."""
    module, _, kind = name.rpartition(".")
    return getattr(import_module(f"gated_srp.models.{module or 'peers'}"), kind)
