"""The image model: pixels of patches and their graph in, logits out.

Shapes: B batch, N patches, P side of a patch, L = 1 + N rows (CLS first), C channels.
"""

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor, nn

from gated_srp.errors import UserError
from gated_srp.models.block import Block
from gated_srp.models.fast.inference import Scratch
from gated_srp.models.slide import SlideTransformer
from gated_srp.srp import PatchGraph, SignedGate


class ImageTransformer(SlideTransformer):
    """A `SlideTransformer` with a learned position for CLS and each of ``num_patches`` patches, and no square padding.

    ``features`` (B, N, 3 * P * P) are the pixels of each patch, row by row, so the first linear layer is the convolution with P x P
    kernels and stride P by which a ViT cuts and embeds an image. The gates' h_local comes from what enters the first block: patch
    tokens with positions added, detached, image by image; that of the graph, of raw pixels, is not used. Images of one size fill a
    batch: their graphs are one, from `PatchGraph.batch`.
    """

    images: ClassVar[bool] = True
    torch_start: ClassVar[frozenset[str]] = frozenset({"in_proj"})  # as the release's convolution

    def __init__(
        self, in_dim: int, num_outputs: int, *, blocks: Sequence[Block], num_patches: int = 289, drop_path: float = 0.1
    ) -> None:
        super().__init__(in_dim, num_outputs, blocks=blocks, drop_path=drop_path)
        self.pos_embed = nn.Parameter(torch.zeros(1, 1 + num_patches, self.in_proj.out_features))
        self.gated = any(isinstance(module, SignedGate) for module in self.modules())

    def tokens(self, features: Tensor, graph: PatchGraph, scratch: Scratch | None = None) -> tuple[Tensor, PatchGraph]:
        known = self.pos_embed.shape[1] - 1
        if features.shape[1] != known or set(graph.lengths) != {known}:
            what = f"{features.shape[1]} patches, but the model has learned positions for {known}"
            cure = "It takes images of one size, that of its training; slides need an arm without learned positions, such as gated_srp."
            raise UserError(what, where="features", cure=cure)
        x, rows = super().tokens(features, graph, scratch)
        x = x + self.pos_embed.to(x.dtype)  # (B, L, C)
        return x, rows.with_tokens(x.flatten(0, 1)) if self.gated else rows
