"""The slide model: patch features and their graph in, logits out.

Shapes: B batch, N patches, S side of the square, L = 1 + S * S rows (CLS first), C channels.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from gated_srp.errors import UserError
from gated_srp.models.adapter import Adapter
from gated_srp.models.block import Block
from gated_srp.models.position import PPEG
from gated_srp.srp import PatchGraph, SignedGate
from gated_srp.srp.coefficient import Coefficient
from gated_srp.streams import stream

Loss = Callable[[Tensor, Tensor], Tensor]  # logits (B, K), targets -> a number


class SlideModel(nn.Module):
    """What training and prediction ask of any model of slides: features (B, N, in_dim) and their graph -> logits (B, K).

    ``refuses``: kind of task -> why this model is not made for it. ``images``: it is a model of images instead, whose bags have one
    length and go through it together; their features are pixels. ``keep`` are the random numbers of a forward, drawn
    beforehand by `draw_keep`, so that no hidden stream takes part. `training_loss` is what training minimises.
    """

    refuses: ClassVar[Mapping[str, str]] = {}
    images: ClassVar[bool] = False
    settings: dict[str, Any]  # how `build_model` made it: what a model file needs to make it again
    drop_path: float
    checkpointing: bool

    def forward(self, features: Tensor, graph: PatchGraph, keep: Tensor | None = None) -> Tensor:
        raise NotImplementedError

    def draw_keep(
        self, batch: int, *, device: torch.device | str = "cpu", generator: torch.Generator | None = None
    ) -> Tensor:
        raise NotImplementedError

    def training_loss(
        self, features: Tensor, graph: PatchGraph, target: Tensor, *, loss: Loss, keep: Tensor | None = None
    ) -> Tensor:
        return loss(self(features, graph, keep), target)


class SlideTransformer(SlideModel):
    """Linear to C channels, CLS in front, blocks, LayerNorm, CLS, linear.

    With a ``position`` (TransMIL style) the rows are filled up to a square by repeating the first ones, and the position module
    runs after the first block; without one (`vit4`) there is no square, and bags of several lengths may share a batch.
    The last block must be a `LastBlock`. ``checkpointing = True`` recomputes each block in backward.
    """

    def __init__(
        self,
        in_dim: int,
        num_outputs: int,
        *,
        blocks: Sequence[Block],
        position: PPEG | None = None,
        drop_path: float = 0.1,
    ) -> None:
        super().__init__()
        dim = blocks[0].norm1.normalized_shape[0]
        self.in_proj = nn.Linear(in_dim, dim)
        self.cls_token = nn.Parameter(torch.zeros(1, 1, dim))
        self.blocks = nn.ModuleList(blocks)
        self.ppeg = position
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, num_outputs)
        self.drop_path = drop_path
        self.checkpointing = False

    def forward(self, features: Tensor, graph: PatchGraph, keep: Tensor | None = None) -> Tensor:
        """``features`` (B, N, in_dim), ``graph`` of the patches alone, ``keep`` from `draw_keep` (drawn here in training) -> (B, outputs)."""
        self._check(features, graph)
        if keep is None and self.training and self.drop_path > 0:
            keep = self.draw_keep(len(features), device=features.device)
        x, rows = self.tokens(features, graph)
        for number, block in enumerate(self.blocks):
            scale = None if keep is None else keep[number]
            if self.checkpointing and torch.is_grad_enabled():
                x = checkpoint(block, x, rows, scale, use_reentrant=False, preserve_rng_state=False)
            else:
                x = block(x, rows, scale, overwrite=True)
            if number == 0 and self.ppeg is not None:
                x = self.ppeg(x)
        logits: Tensor = self.head(self.norm(x[:, 0]))
        return logits

    def tokens(self, features: Tensor, graph: PatchGraph) -> tuple[Tensor, PatchGraph]:
        """What enters the first block, (B, L, C): CLS, the embedded patches, what fills the square; and the graph of these rows."""
        x = self.embed(features)  # (B, N, C)
        missing = 0 if self.ppeg is None else math.ceil(math.sqrt(x.shape[1])) ** 2 - x.shape[1]
        first, rest = torch.split(x, [missing, x.shape[1] - missing], dim=1)
        x = torch.cat([self.cls_token.to(x.dtype).expand(len(x), -1, -1), first, rest, first], dim=1)  # (B, L, C)
        return x, graph.with_isolated(before=1, after=missing)

    def embed(self, features: Tensor) -> Tensor:
        """The first linear layer; half-precision features are widened a few rows at a time when no gradient is wanted."""
        dtype = self.in_proj.weight.dtype
        if torch.is_grad_enabled() or features.dtype == dtype or torch.compiler.is_compiling():
            return self.in_proj(features.to(dtype))  # type: ignore[no-any-return]
        return torch.cat([self.in_proj(part.to(dtype)) for part in torch.split(features, 8192, dim=1)], dim=1)

    def draw_keep(
        self, batch: int, *, device: torch.device | str = "cpu", generator: torch.Generator | None = None
    ) -> Tensor:
        """Drop-path factors (depth, 2, batch): 0 with a probability that rises linearly over depth, else 1 / (1 - it)."""
        rates = torch.linspace(0, self.drop_path, len(self.blocks), device=device).view(-1, 1, 1)
        draws = torch.rand(len(self.blocks), 2, batch, device=device, generator=generator)
        return (draws >= rates) / (1 - rates)

    def _check(self, features: Tensor, graph: PatchGraph) -> None:
        if features.ndim != 3 or features.shape[-1] != self.in_proj.in_features or features.shape[1] == 0:
            raise UserError(
                f"features: shape {tuple(features.shape)}, expected (B, N, {self.in_proj.in_features}) with at least one patch. "
                "One bag needs a batch axis (features[None]); another last size means features of another encoder."
            )
        if graph.num_bags != len(features) or graph.num_rows != features.shape[0] * features.shape[1] or graph.before:
            raise UserError(
                f"graph: {graph.num_bags} bags and {graph.num_rows} rows for features {tuple(features.shape)}. Build the graph from the "
                "coordinates of these patches alone (PatchGraph.from_coords); the model adds CLS and padding itself."
            )


def initialise(model: nn.Module, seed: int) -> None:
    """Start values that depend on the seed and a parameter's name alone, so that paired arms share every weight of the same name.

    Weights truncated normal (std 0.02), biases 0, norms 1 and 0; a gate or an adapter draws its own from a stream of its name.
    """
    gates = [f"{name}." for name, module in model.named_modules() if isinstance(module, Coefficient | Adapter)]
    for name, module in model.named_modules():
        if isinstance(module, SignedGate | Adapter):
            module.reset_parameters(stream(seed, name))
        if any(f"{name}.".startswith(gate) for gate in gates):
            continue
        for leaf, parameter in module.named_parameters(recurse=False):
            full = f"{name}.{leaf}".lstrip(".")
            if isinstance(module, nn.LayerNorm | nn.RMSNorm):
                nn.init.constant_(parameter, 1.0 if leaf == "weight" else 0.0)
            elif leaf == "bias":
                nn.init.zeros_(parameter)
            elif leaf.startswith("lambda_"):
                nn.init.normal_(parameter, std=0.1, generator=stream(seed, full))
            else:
                nn.init.trunc_normal_(parameter, std=0.02, generator=stream(seed, full))
