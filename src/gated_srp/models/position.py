"""Position from the square layout of the rows (PPEG of TransMIL).

Shapes: B batch, S side of the square, C channels, L = 1 + S * S rows (row 0 is CLS).
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F


class PPEG(nn.Module):
    """patches + conv7 + conv5 + conv3 over the S x S square, depthwise; CLS passes by."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.conv7, self.conv5, self.conv3 = (nn.Conv2d(dim, dim, k, padding=k // 2, groups=dim) for k in (7, 5, 3))

    def forward(self, x: Tensor) -> Tensor:
        cls, patches = torch.split(x, [1, x.shape[1] - 1], dim=1)  # its backward is one cat; that of slices fills zeros
        patches = self._convolved(patches)
        return torch.cat([cls.to(patches.dtype), patches], dim=1)

    def overwrite(self, x: Tensor) -> Tensor:
        """`forward` in the memory of x: when no gradient is wanted and nobody needs x afterwards."""
        x[:, 1:] = self._convolved(x[:, 1:])
        return x

    def _convolved(self, patches: Tensor) -> Tensor:
        """(B, S * S, C) -> the same shape."""
        side = round(patches.shape[1] ** 0.5)
        # Channels last, and said so by every stride: transposed rows cut into a square look otherwise to the library, which
        # then reorders them, convolves them four times as slowly and hands back an answer that has to be reordered again.
        square = patches.unflatten(1, (side, side)).movedim(-1, 1)  # (B, C, S, S)
        return depthwise(square, *self._folded()).movedim(1, -1).flatten(1, 2)

    def _folded(self) -> tuple[Tensor, Tensor]:
        """The three kernels and the skip as one 7 x 7 kernel: convolution is linear in its kernel."""
        skip = F.pad(torch.ones_like(self.conv7.weight[:, :, :1, :1]), (3, 3, 3, 3))
        weight = (
            self.conv7.weight + F.pad(self.conv5.weight, (1, 1, 1, 1)) + F.pad(self.conv3.weight, (2, 2, 2, 2)) + skip
        )
        assert self.conv7.bias is not None and self.conv5.bias is not None and self.conv3.bias is not None
        return weight, self.conv7.bias + self.conv5.bias + self.conv3.bias


def depthwise(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """A convolution of every channel with its own odd kernel, x (B, C, S, S) -> the same shape."""
    if torch.compiler.is_compiling():
        return F.conv2d(x, weight, bias, padding=weight.shape[-1] // 2, groups=len(weight))
    out: Tensor = _Depthwise.apply(x, weight.to(x.dtype), bias.to(x.dtype))  # type: ignore[no-untyped-call]
    return out


class _Depthwise(torch.autograd.Function):
    """Both gradients as convolutions: of the output's gradient with the turned kernel, and of the input with the output's gradient.

    On a CPU the library's own weight gradient of a depthwise convolution takes four times as long.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return F.conv2d(x, weight, bias, padding=weight.shape[-1] // 2, groups=len(weight))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, ...]:
        x, weight = ctx.saved_tensors
        (dout,) = grads
        bags, channels = x.shape[:2]
        margin = weight.shape[-1] // 2
        dx = F.conv2d(dout, weight.flip(2, 3), padding=margin, groups=channels)
        rows = x.contiguous().view(1, bags * channels, *x.shape[2:])
        kernels = dout.contiguous().view(bags * channels, 1, *dout.shape[2:])
        dweight = F.conv2d(rows, kernels, padding=margin, groups=bags * channels)  # (1, B * C, 7, 7)
        return dx, dweight.view(bags, *weight.shape).sum(0), dout.sum((0, 2, 3))
