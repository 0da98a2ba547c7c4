"""Position from the square layout of the rows (PPEG of TransMIL).

Shapes: B batch, S side of the square, C channels, L = 1 + S * S rows (row 0 is CLS).
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gated_srp.models.fast import by_hand
from gated_srp.models.fast.gradients import depthwise


class PPEG(nn.Module):
    """patches + conv7 + conv5 + conv3 over the S x S square, depthwise; CLS passes by."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.conv7, self.conv5, self.conv3 = (nn.Conv2d(dim, dim, k, padding=k // 2, groups=dim) for k in (7, 5, 3))

    def forward(self, x: Tensor, *, overwrite: bool = False) -> Tensor:
        """(B, L, C) -> the same shape; with ``overwrite`` in the memory of x, which takes no gradient."""
        if overwrite:
            x[:, 1:] = self._convolved(x[:, 1:])
            return x
        cls, patches = torch.split(x, [1, x.shape[1] - 1], dim=1)  # its backward is one cat; that of slices fills zeros
        patches = self._convolved(patches)
        return torch.cat([cls.to(patches.dtype), patches], dim=1)

    def _convolved(self, patches: Tensor) -> Tensor:
        """(B, S * S, C) -> the same shape."""
        side = round(patches.shape[1] ** 0.5)
        # Channels last, and said so by every stride: transposed rows cut into a square look otherwise to the library, which
        # then reorders them, convolves them four times as slowly and hands back an answer that has to be reordered again.
        square = patches.unflatten(1, (side, side)).movedim(-1, 1)  # (B, C, S, S)
        weight, bias = self._folded()
        if by_hand():
            square = depthwise(square, weight, bias)
        else:
            square = F.conv2d(square, weight, bias, padding=3, groups=len(weight))
        return square.movedim(1, -1).flatten(1, 2)

    def _folded(self) -> tuple[Tensor, Tensor]:
        """The three kernels and the skip as one 7 x 7 kernel: convolution is linear in its kernel."""
        skip = F.pad(torch.ones_like(self.conv7.weight[:, :, :1, :1]), (3, 3, 3, 3))
        weight = (
            self.conv7.weight + F.pad(self.conv5.weight, (1, 1, 1, 1)) + F.pad(self.conv3.weight, (2, 2, 2, 2)) + skip
        )
        assert self.conv7.bias is not None and self.conv5.bias is not None and self.conv3.bias is not None
        return weight, self.conv7.bias + self.conv5.bias + self.conv3.bias
