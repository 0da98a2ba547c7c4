"""Fast forms of what the model classes write plainly, and the one place that says when they take over.

`gradients`: parts of a block with hand-written backwards and Nystrom attention, in row chunks.
`inference`: a prediction in one pass over the rows, in memory that the blocks share.
`long`: a prediction of very many rows in half precision. `packed`: several small bags at once. Each equals the plain form (tests/models/fast/).
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from gated_srp.srp.projection import composed

_off = False


@contextmanager
def plain_forwards() -> Iterator[None]:
    """Everything as the classes write it: to compare with, and for whoever doubts a fast form."""
    global _off
    before, _off = _off, True
    try:
        yield
    finally:
        _off = before


def by_hand(*modules: nn.Module | None) -> bool:
    """Whether a part runs by hand instead of through these modules: not for compilers and function transforms, which fuse and derive by
    themselves, and not where somebody has hooks on them."""
    return not (_off or composed() or watched(*modules))


def one_pass(*modules: nn.Module | None, x: Tensor | None = None, keep: Tensor | None = None) -> bool:
    """Whether memory may be reused because no gradient is wanted and nobody sees what goes in and out of these modules.

    A hook may keep what a module took or gave: then nothing is written over. ``x`` (B, L, C), ``keep``: what enters a block, which
    takes its rows in one pass for one bag without drop path.
    """
    one_bag = keep is None and (x is None or len(x) == 1)
    return one_bag and not torch.is_grad_enabled() and by_hand(*modules)


def in_row_chunks(x: Tensor, *, halves: bool = False) -> bool:
    """Whether the rows of x (B, L, C) meet landmarks in chunks that fit a processor's cache, not through two attention calls.

    Logits that a product rounds to half precision are too coarse for a softmax: ``halves`` are taken only by whoever leaves their logits to
    an attention call.
    """
    return x.device.type == "cpu" and len(x) == 1 and (halves or product_dtype(x).itemsize >= 4) and by_hand()


LONG = 131_072  # rows beyond which memory counts more than time


def in_parts(x: Tensor) -> bool:
    """Whether the rows of x (1, L, C) are so many that queries and keys in half precision exist for some of them at a time."""
    return x.shape[1] > LONG and x.device.type == "cpu" and product_dtype(x).itemsize < 4 and by_hand()


def product_dtype(x: Tensor) -> torch.dtype:
    """What a linear layer computes in on rows like x: autocast's precision where it is on."""
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype


def halves_on_processor(x: Tensor) -> bool:
    """Where the library's attention takes up to half as long again over rows of all heads as over heads apart, each in one piece."""
    return x.device.type == "cpu" and x.dtype.itemsize < 4


def watched(*modules: nn.Module | None) -> bool:
    """Whether somebody has hooks on one of them."""
    hooks = (
        m and (m._forward_hooks or m._forward_pre_hooks or m._backward_hooks or m._backward_pre_hooks) for m in modules
    )
    return any(hooks)


def plain(layer: nn.Module, kind: type[nn.Module] = nn.Linear) -> bool:
    """Whether a call of the layer is the library's, with the layer's weight (which may be parametrized): then the weight may be read instead."""
    return type(layer).forward is kind.forward and "forward" not in vars(layer)  # accelerate's hooks replace it
