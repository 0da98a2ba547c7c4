"""CLS apart from the patches: attention of CLS alone in the last blocks (CaiT), and norms of its own.

Shapes: B batch, L rows (row 0 is CLS), C channels.
"""

from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from gated_srp.models.block import PPEG, Block, LastBlock
from gated_srp.models.fast.inference import Scratch
from gated_srp.models.slide import SlideTransformer
from gated_srp.srp import PatchGraph


class PatchPPEG(PPEG):
    """`PPEG` of rows that are all patches."""

    def forward(self, x: Tensor, *, overwrite: bool = False) -> Tensor:
        return self.square(x)


class PatchBlock(Block):
    """A block without CLS, whose attention to patches then does not exist."""

    def cls_attention(self, x: Tensor, graph: PatchGraph, *_: Any, **__: Any) -> None:
        return None


class ClassBlock(LastBlock):
    """CLS reads all rows and is changed; patches pass as they are: (B, L, C)."""

    def forward(
        self, x: Tensor, graph: PatchGraph, keep: Tensor | None = None, scratch: Scratch | None = None
    ) -> Tensor:
        cls = super().forward(x, graph, keep, scratch)  # (B, 1, C)
        return torch.cat([cls, x[:, 1:].to(cls.dtype)], dim=1)


class ClassAttentionTransformer(SlideTransformer):
    """CaiT (Touvron et al. 2021): patches attend to patches, then CLS enters for the last two blocks, which change it alone."""

    no_pretraining: ClassVar[str] = "its last two blocks read patches for CLS alone, and would learn nothing"

    checked: ClassVar[str] = (
        "A forward written out by hand: patches pass as if there were no CLS and stay as they are in the class "
        "blocks. CaiT's LayerScale and talking heads are left out."
    )

    @staticmethod
    def block_kind(number: int, depth: int) -> type[Block]:
        if number == depth - 1:
            return LastBlock
        return ClassBlock if number == depth - 2 else PatchBlock

    def tokens(self, features: Tensor, graph: PatchGraph, scratch: Scratch | None = None) -> tuple[Tensor, PatchGraph]:
        x, rows = super().tokens(features, graph, scratch)
        missing = rows.num_rows // rows.num_bags - 1 - features.shape[1]
        return x[:, 1:], graph.with_isolated(after=missing)

    def before_block(self, number: int, x: Tensor, rows: PatchGraph) -> tuple[Tensor, PatchGraph]:
        if number != max(0, len(self.blocks) - 2):
            return x, rows
        return torch.cat([self.cls_token.to(x.dtype).expand(len(x), -1, -1), x], dim=1), rows.with_isolated(before=1)


class SplitNorm(nn.LayerNorm):
    """LayerNorm with weights of their own for CLS, row 0: (B, L, C)."""

    def __init__(self, dim: int) -> None:
        super().__init__(dim)
        self.cls = nn.LayerNorm(dim)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.cls(x[:, :1]), super().forward(x[:, 1:])], dim=1)


class SplitBlock(Block):
    """`Block` with norms of their own for CLS and patches."""

    def __init__(self, dim: int, *args: Any, **parts: Any) -> None:
        super().__init__(dim, *args, **parts)
        self.norm1, self.norm2 = SplitNorm(dim), SplitNorm(dim)

    def _in_one_pass(self, x: Tensor, keep: Tensor | None) -> bool:
        return False  # chunks of rows do not know which of them is CLS


class SplitLastBlock(LastBlock):
    """`LastBlock` with them; its second norm reads CLS alone."""

    def __init__(self, dim: int, *args: Any, **parts: Any) -> None:
        super().__init__(dim, *args, **parts)
        self.norm1 = SplitNorm(dim)

    def _in_one_pass(self, x: Tensor, keep: Tensor | None) -> bool:
        return False


class SplitNormTransformer(SlideTransformer):
    """The norms of a block are split into one for CLS and one for patches (Marouani et al. 2026); the last norm reads CLS alone anyway."""

    no_pretraining: ClassVar[str] = "its last block has no norm for patches"

    checked: ClassVar[str] = (
        "A loop over the rows of a norm. Of that publication's specialisation these are the norms alone; its "
        "projections are left out."
    )

    @staticmethod
    def block_kind(number: int, depth: int) -> type[Block]:
        return SplitLastBlock if number == depth - 1 else SplitBlock
