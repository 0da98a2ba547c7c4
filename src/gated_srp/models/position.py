"""Position from the square layout of the rows (PPEG of TransMIL).

Shapes: B batch, S side of the square, C channels, L = 1 + S * S rows (row 0 is CLS).
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class PPEG(nn.Module):
    """patches + conv7 + conv5 + conv3 over the S x S square, depthwise; CLS passes by."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.conv7, self.conv5, self.conv3 = (nn.Conv2d(dim, dim, k, padding=k // 2, groups=dim) for k in (7, 5, 3))

    def forward(self, x: Tensor) -> Tensor:
        cls, patches = x[:, :1], x[:, 1:]
        side = round(patches.shape[1] ** 0.5)
        square = patches.transpose(1, 2).unflatten(2, (side, side))  # (B, C, S, S), channels last in memory
        weight, bias = self._folded()
        square = F.conv2d(square, weight, bias, padding=3, groups=len(weight))
        return torch.cat([cls.to(square.dtype), square.flatten(2).transpose(1, 2)], dim=1)

    def _folded(self) -> tuple[Tensor, Tensor]:
        """The three kernels and the skip as one 7 x 7 kernel: convolution is linear in its kernel."""
        skip = F.pad(torch.ones_like(self.conv7.weight[:, :, :1, :1]), (3, 3, 3, 3))
        weight = (
            self.conv7.weight + F.pad(self.conv5.weight, (1, 1, 1, 1)) + F.pad(self.conv3.weight, (2, 2, 2, 2)) + skip
        )
        biases = [conv.bias for conv in (self.conv7, self.conv5, self.conv3) if conv.bias is not None]
        return weight, torch.stack(biases).sum(0)
