"""A pre-norm transformer block with room for a correction between attention and output projection, and the control for that place;
and the position of rows in a square.

Shapes: B batch, H heads, L rows (row 0 is CLS), S side of the square, D head width, C channels, R rows of all bags.
"""

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gated_srp.errors import UserError
from gated_srp.models.attention import Attention, merge_heads
from gated_srp.models.fast import LONG, by_hand, one_pass, plain
from gated_srp.models.fast.gradients import depthwise, feed_forward
from gated_srp.models.fast.inference import Scratch, block_by_rows, first_row
from gated_srp.srp import GatedSRP, PatchGraph


class OwnStart(nn.Module):
    """A part that knows its start values itself."""

    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        raise NotImplementedError


class Adapter(OwnStart):
    """Control without a direction: z = y + U gelu(W y) on the rows that a gate would correct, one bottleneck for all heads (Houlsby et al., 2019).

    It is the narrowest one with at least ``budget`` weights: should it do worse than a gate of that many, it is not for
    lack of weights. U starts at zero, so an untrained adapter is the identity. Called like `GatedSRP`; v is not looked at.

    >>> sum(p.numel() for p in Adapter(64, budget=351).parameters())
    384
    """

    coefficient = None  # where a `GatedSRP` keeps its beta

    def __init__(self, head_dim: int, *, budget: int) -> None:
        super().__init__()
        rank = math.ceil(budget / (2 * head_dim))
        self.down = nn.Linear(head_dim, rank, bias=False)
        self.up = nn.Linear(rank, head_dim, bias=False)
        self.reset_parameters()

    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """W as PyTorch's Linear, U zero."""
        nn.init.kaiming_uniform_(self.down.weight, a=math.sqrt(5), generator=generator)
        nn.init.zeros_(self.up.weight)

    def forward(self, y: Tensor, v: Tensor, graph: PatchGraph) -> Tensor:
        """The changed heads, in the shape (B, H, L, D) and dtype of y."""
        change = self.up(F.gelu(self.down(y))).to(y.dtype)
        rows = (graph.neighbour_count > 0).view(len(y), 1, -1, 1)  # never CLS, never padding: the gate's rows
        return torch.where(rows, y + change, y)

    def by_rows(self, v: Tensor, graph: PatchGraph) -> Callable[[Tensor, slice], Tensor]:
        """`forward` of one bag, some rows at a time: y of these rows (1, H, R, D) -> (R, H, D)."""
        return lambda y, rows: self(y, v, graph.part(rows))[0].transpose(0, 1)

    def linear(self, y: Tensor, v: Tensor, graph: PatchGraph, layer: nn.Linear) -> Tensor:
        """layer(merge_heads(self(y, v, graph))): (B, L, O)."""
        merged: Tensor = layer(merge_heads(self(y, v, graph)))
        return merged


class Block(nn.Module):
    """x + keep * attention(LN x), then x + keep * mlp(LN x); ``keep`` (2, B) are drop-path factors, None keeps everything.

    ``scratch``: buffers that the blocks share at inference; x may then be overwritten.
    """

    patches: bool = True  # it changes them, so that a correction of theirs has an effect

    def __init__(
        self, dim: int, attention: Attention, *, correction: GatedSRP | Adapter | None = None, mlp_ratio: int = 4
    ) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(dim)
        self.attn = attention
        self.correction = correction
        self.norm2 = nn.LayerNorm(dim)
        self.mlp = FeedForward(dim, mlp_ratio * dim)

    def forward(
        self, x: Tensor, graph: PatchGraph, keep: Tensor | None = None, scratch: Scratch | None = None
    ) -> Tensor:
        if self._in_one_pass(x, keep):
            return block_by_rows(self, x, graph, scratch)
        y, v = self.attn(self.norm1(x), graph)
        x = self._add(x, self._merge(y, v, graph), keep, 0)
        return self._add(x, self.mlp(self.norm2(x)), keep, 1)

    def cls_attention(self, x: Tensor, graph: PatchGraph, *_: Any, **__: Any) -> Tensor | None:
        """Attention of CLS to the patches, (H, N) for one bag."""
        return graph.patches(self.attn.cls_map(self.norm1(x), graph))

    def _in_one_pass(self, x: Tensor, keep: Tensor | None) -> bool:
        """Then these modules are not called as such."""
        parts = (self.norm1, *self.attn.modules(), self.correction, self.norm2, *self.mlp.modules())
        return one_pass(*parts, x=x, keep=keep)

    def _merge(self, y: Tensor, v: Tensor, graph: PatchGraph) -> Tensor:
        if self.correction is not None:
            if by_hand(self.correction, self.attn.proj):
                return self.correction.linear(y, v, graph, self.attn.proj)
            y = self.correction(y, v, graph)
        merged: Tensor = self.attn.proj(merge_heads(y))
        return merged

    def _add(self, x: Tensor, branch: Tensor, keep: Tensor | None, which: int) -> Tensor:
        """x + keep * branch; the branch's memory takes the sum unless a hook may have kept it, or dtypes differ."""
        if keep is not None:
            branch = branch * keep[which].view(-1, 1, 1).to(branch.dtype)
        fresh = branch.dtype == x.dtype and by_hand(self.attn.proj, self.mlp, self.mlp.fc2)
        return branch.add_(x) if fresh else x + branch


_READ: dict[str, type[nn.Module]] = dict.fromkeys(
    ("qkv", "q_proj", "k_proj", "v_proj", "proj", "fc1", "fc2"), nn.Linear
)
_READ |= dict.fromkeys(("conv7", "conv5", "conv3"), nn.Conv2d)


def refuse_wrapped(blocks: Iterable[Any], position: nn.Module | None) -> None:
    """Fast forms and landmarks read the weights of these layers: what somebody wrapped around one (an adapter) would be passed by."""
    parts = [(f"blocks.{n}.{part}", getattr(block, part)) for n, block in enumerate(blocks) for part in ("attn", "mlp")]
    for name, part in parts if position is None else [*parts, ("ppeg", position)]:
        for leaf, layer in part.named_children():
            if leaf in _READ and not plain(layer, _READ[leaf]):
                found = f"{type(layer).__module__}.{type(layer).__qualname__}"
                what = f"is a {found}, but the model reads the weights of a torch.nn.{_READ[leaf].__name__} there, past what is around it"
                cure = "Merge adapters first (peft: merge_and_unload()), or put them on in_proj and head alone."
                raise UserError(what, where=f"{name}.{leaf}", cure=cure)


class LastBlock(Block):
    """The last block of a model whose head reads CLS alone: keys and values of all rows, everything else for one. (B, 1, C).

    ``patches`` is set to True where it must update all rows, as a `Block` does.
    """

    patches: bool = False

    def forward(
        self, x: Tensor, graph: PatchGraph, keep: Tensor | None = None, scratch: Scratch | None = None
    ) -> Tensor:
        if self.patches:
            return super().forward(x, graph, keep, scratch)
        if self._in_one_pass(x, keep):
            y, v = first_row(self.attn, x, self.norm1, graph, scratch)
        else:
            y, v = self.attn.first_row(self.norm1(x), graph)
        x = self._add(x[:, :1], self._merge(y, v, graph.first_rows()), keep, 0)
        return self._add(x, self.mlp(self.norm2(x)), keep, 1)


class FeedForward(nn.Module):
    """Linear, exact GELU, linear."""

    def __init__(self, dim: int, hidden_dim: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(dim, hidden_dim)
        self.fc2 = nn.Linear(hidden_dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        if by_hand(self.fc1, self.fc2):
            return feed_forward(x, self.fc1, self.fc2)
        out: Tensor = self.fc2(F.gelu(self.fc1(x)))
        return out


class PPEG(nn.Module):
    """Position from the square layout of the rows (PPEG of TransMIL): patches + conv7 + conv5 + conv3 over the S x S square, depthwise; CLS passes by."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.conv7, self.conv5, self.conv3 = (nn.Conv2d(dim, dim, k, padding=k // 2, groups=dim) for k in (7, 5, 3))

    def forward(self, x: Tensor, *, overwrite: bool = False) -> Tensor:
        """(B, L, C) -> the same shape; with ``overwrite`` in the memory of x, which takes no gradient."""
        if overwrite and x.shape[1] > LONG:
            from gated_srp.models.fast.long import convolve_in_place  # not above: few slides need it

            side = round((x.shape[1] - 1) ** 0.5)
            weight, bias = (part.to(x.dtype) for part in self._folded())
            convolve_in_place(x[:, 1:].unflatten(1, (side, side)), weight, bias)
            return x
        if overwrite:
            x[:, 1:] = self.square(x[:, 1:])
            return x
        cls, patches = torch.split(x, [1, x.shape[1] - 1], dim=1)  # its backward is one cat; that of slices fills zeros
        patches = self.square(patches)
        return torch.cat([cls.to(patches.dtype), patches], dim=1)

    def square(self, patches: Tensor) -> Tensor:
        """(B, S * S, C) -> the same shape."""
        side = round(patches.shape[1] ** 0.5)
        # Channels last, and said so by every stride: transposed rows cut into a square look otherwise to the library, which
        # then reorders them, convolves them four times as slowly and hands back an answer that has to be reordered again.
        laid = patches.unflatten(1, (side, side)).movedim(-1, 1)  # (B, C, S, S)
        weight, bias = self._folded()
        if by_hand():
            laid = depthwise(laid, weight, bias)
        else:
            laid = F.conv2d(laid, weight, bias, padding=3, groups=len(weight))
        return laid.movedim(1, -1).flatten(1, 2)

    def _folded(self) -> tuple[Tensor, Tensor]:
        """The three kernels and the skip as one 7 x 7 kernel: convolution is linear in its kernel."""
        skip = F.pad(torch.ones_like(self.conv7.weight[:, :, :1, :1]), (3, 3, 3, 3))
        weight = (
            self.conv7.weight + F.pad(self.conv5.weight, (1, 1, 1, 1)) + F.pad(self.conv3.weight, (2, 2, 2, 2)) + skip
        )
        assert self.conv7.bias is not None and self.conv5.bias is not None and self.conv3.bias is not None
        return weight, self.conv7.bias + self.conv5.bias + self.conv3.bias
