"""Pretraining without labels: a slide model predicts the features of masked patches from those of the others.

The idea is that of masked autoencoders (He et al. 2022), on features of patches in place of pixels. As in BERT a masked patch keeps its
row and its neighbours, and its embedded features become one learned vector, so that gates and positions work as they will in training.

Shapes: N patches, M of them masked, L rows (CLS, patches, square), C channels of the features, D width of the model.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from gated_srp.errors import UserError
from gated_srp.models.fast.inference import Scratch
from gated_srp.models.parts import Arm, Sizes
from gated_srp.models.slide import SlideTransformer, check_bags
from gated_srp.srp import PatchGraph
from gated_srp.srp.lattice import cells_of

_FLAT = 1e-5  # of its mean: a channel that varies less over a slide is constant, but for rounding


@dataclass(frozen=True)
class Masking:
    """``share`` of a slide's patches is masked, in windows of ``block`` x ``block`` places of the lattice; 1: patch by patch."""

    share: float = 0.5
    block: int = 3

    def __post_init__(self) -> None:
        if not 0 < self.share < 1:
            raise UserError(f"is {self.share}", where="mask", cure="Expected a share between 0 and 1, such as 0.5.")
        if self.block < 1:
            raise UserError(f"is {self.block}", where="block", cure="Expected 1 or more places of the lattice.")

    def draw(self, coords: Tensor, stride: float, generator: torch.Generator) -> Tensor:
        """Numbers of the round(share N) masked patches, (M,), sorted: at least one, and not all of several.

        Windows of a lattice with a random origin are masked in random order, the last one in part.

        >>> x, y = torch.meshgrid(torch.arange(4), torch.arange(4), indexing="xy")
        >>> coords = torch.stack([x.flatten(), y.flatten()], 1)
        >>> len(Masking(0.5, block=2).draw(coords, 1.0, torch.Generator().manual_seed(0)))
        8
        """
        count = len(coords)
        masked = max(1, min(round(self.share * count), count - 1))
        origin = torch.randint(self.block, (2,), generator=generator)
        cells = cells_of(coords, float(stride)) + origin
        windows = torch.div(cells, self.block, rounding_mode="floor").unique(dim=0, return_inverse=True)[1]  # (N,)
        turn = torch.randperm(int(windows.max()) + 1, generator=generator)[windows]
        order = (turn * count + torch.randperm(count, generator=generator)).argsort()
        return order[:masked].sort().values


@dataclass(frozen=True, eq=False)
class MaskedGraph(PatchGraph):
    """The graph of one bag of which the patches ``masked`` (M,) are hidden; its homogeneity is of the others alone."""

    masked: Tensor = None  # type: ignore[assignment]  # fields of the base have defaults

    @classmethod
    def of(cls, graph: PatchGraph, features: Tensor, masked: Tensor) -> Self:
        """h_local of a visible patch is the mean cosine to its visible neighbours; where there are none, and for masked patches, it
        is the mean over the patches that have it: what is masked must not be told by what the gate measures."""
        seen = torch.ones(len(features), 1).index_fill_(0, masked, 0.0)  # (N, 1)
        visible = graph.with_features(torch.where(seen > 0, features, 0)).homogeneity * graph.neighbour_count
        near = graph.sum(seen, slice(0, graph.num_rows))[:, 0]
        known = (seen[:, 0] > 0) & (near > 0)
        own = torch.where(known, visible / near.clamp(min=1), 0.0)
        homogeneity = torch.where(known, own, own.sum() / known.sum().clamp(min=1))
        fields = {name: getattr(graph, name) for name in PatchGraph.__dataclass_fields__}
        return cls(**fields | {"homogeneity": homogeneity}, masked=masked)

    @property
    def hidden(self) -> Tensor:
        """Which patches are masked, (N,)."""
        none = torch.zeros(self.lengths[0], dtype=torch.bool, device=self.masked.device)
        return none.index_fill_(0, self.masked, True)

    def to(self, device: torch.device | str) -> Self:
        return replace(super().to(device), masked=self.masked.to(device, non_blocking=True))


class MaskedTransformer(SlideTransformer):
    """A slide model that gives, in place of logits, how well it predicts the features of masked patches: per channel c

        e_c = sum over masked i of (W_c norm(x_i) + b_c - t_ic)^2 / (mean over channels c' of the sum of t_ic'^2),

        t_ic = (f_ic - mean_c) / std_c,

    with x_i the token of patch i behind the last block, and mean and std of the slide's own patches. Channels that do not vary on the slide (a fifth
    of an encoder's, on a small field) count as 0. The loss is the mean of e_c: the squared error as a share of the masked patches' own
    variance around the slide's mean, which itself has a loss of exactly 1, so that 1 - loss is a coefficient of determination.

    Weights have the names that they have in the arm, but for ``mask_token`` and a head of C outputs. The last block, which
    in the arm updates CLS alone, updates all rows here, so that its weights learn too.
    """

    masks: ClassVar[bool] = True

    def __init__(self, in_dim: int, num_outputs: int, **parts: Any) -> None:
        super().__init__(in_dim, num_outputs, **parts)
        self.mask_token = nn.Parameter(torch.zeros(1, 1, self.in_proj.out_features))
        self.blocks[-1].patches = True  # type: ignore[assignment]
        self.packs = True

    def forward(self, features: Tensor, graph: PatchGraph, keep: Tensor | None = None) -> Tensor:
        """``features`` (1, N, C) of one bag and its `MaskedGraph` -> e (1, C)."""
        check_bags(features, graph, self.in_proj.in_features)
        x = self.encode(features, graph, keep)
        return self.errors(x[0, 1:], features[0], graph)[None]

    def tokens(self, features: Tensor, graph: PatchGraph, scratch: Scratch | None = None) -> tuple[Tensor, PatchGraph]:
        if not isinstance(graph, MaskedGraph):
            cure = "Mask some with `MaskedGraph.of`; for labels or vectors of slides train a model from this one."
            raise UserError("no patch is masked, and this model predicts masked ones", where="graph", cure=cure)
        x, rows = super().tokens(features, graph, scratch)  # (1, L, D): CLS, patches, the first ones again
        hidden = graph.hidden
        again = hidden[: x.shape[1] - 1 - len(hidden)]
        return self.hide(x, torch.cat([hidden.new_zeros(1), hidden, again])), rows

    def hide(self, x: Tensor, hidden: Tensor) -> Tensor:
        """The mask token in the rows that are ``hidden`` (L,): (..., L, D)."""
        return torch.where(hidden.unsqueeze(-1), self.mask_token[0].to(x.dtype), x)

    def errors(self, tokens: Tensor, features: Tensor, graph: PatchGraph) -> Tensor:
        """e (C,) of one bag, from the rows of its patches and perhaps others behind them, (L, D)."""
        assert isinstance(graph, MaskedGraph)
        predicted = self.head(self.norm(tokens.index_select(0, graph.masked)))  # (M, C)
        wanted, varies = standardised(features)
        wanted = wanted.index_select(0, graph.masked)
        found = torch.where(varies, (predicted.float() - wanted).square(), 0.0).mean(0)
        variance = wanted.square().mean()
        # A single patch, or means alone masked: nothing can be asked for. Both wheres keep gradients finite.
        known = variance > 0
        return torch.where(known, found / torch.where(known, variance, 1.0), 1.0)


def standardised(features: Tensor) -> tuple[Tensor, Tensor]:
    """By mean and standard deviation over the patches of the slide, channel by channel, in float32, (N, C), 0 where a channel is constant;
    and which channels vary, (C,)."""
    rows = features.float()
    std, mean = torch.std_mean(rows, 0, correction=0)
    varies = std > _FLAT * mean.abs()
    return torch.where(varies, (rows - mean) / std, 0.0), varies


def copying_r2(bags: Iterable[tuple[Tensor, PatchGraph]]) -> float:
    """What copying gives: the share of masked patches' variance that the mean of their visible neighbours explains, at its best scale.

    With targets t and means p (0 without a visible neighbour) over masked patches and channels: <t, p>^2 / (<t, t> <p, p>).
    """
    products = torch.zeros(3, dtype=torch.float64)
    for features, graph in bags:
        assert isinstance(graph, MaskedGraph)
        wanted, seen = standardised(features)[0], (~graph.hidden).float().unsqueeze(-1)  # (N, C), (N, 1)
        rows = slice(0, graph.num_rows)
        near = graph.sum(wanted * seen, rows) / graph.sum(seen, rows).clamp(min=1)
        t, p = (one.index_select(0, graph.masked).double() for one in (wanted, near))
        products += torch.stack([(t * p).sum(), (t * t).sum(), (p * p).sum()])
    both, own, theirs = products.tolist()
    return both**2 / (own * theirs) if own * theirs > 0 else 0.0


def pretrainable(name: str) -> Arm:
    """The arm of this name; one without tokens of patches at its end is refused."""
    from gated_srp.models.arms import ARMS, find_arm  # not above: arms import the models that they are made of

    arm = find_arm(name)
    if arm.no_pretraining:
        fitting = ", ".join(name for name, one in ARMS.items() if not one.no_pretraining)
        what = f"cannot be pretrained on masked patches: {arm.no_pretraining}"
        raise UserError(what, where=f"arm {name!r}", cure=f"Arms that can: {fitting}.", kind="no_pretraining")
    assert isinstance(arm, Arm)
    return arm


def build_masked(name: str, in_dim: int, sizes: Sizes) -> MaskedTransformer:
    """The model that pretrains the weights of an arm."""
    arm = pretrainable(name)
    position = None if arm.position is None else arm.position(sizes.dim)
    return MaskedTransformer(in_dim, in_dim, blocks=arm.blocks(sizes), position=position, drop_path=sizes.drop_path)
