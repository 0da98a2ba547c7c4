"""Look at a model by calling it once, and leave no trace of that."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from gated_srp.errors import UserError
from gated_srp.foreign.site import Site


@dataclass
class Found:
    """What a family found in a model: its attention layers in the order of the forward, and the fixed grid where there is one.

    ``front``: rows of CLS and registers before the patches. ``inputs``: what the model ``called`` may be called with to look at it.
    ``finish``: what the family does with the handle once the gates are in.
    """

    sites: list[Site]
    grid: tuple[int, int] | None = None
    front: int | None = None
    called: nn.Module | None = None
    inputs: dict[str, Any] = field(default_factory=dict)
    finish: Callable[[Any], None] | None = None


@contextmanager
def looking(model: nn.Module) -> Iterator[None]:
    """Evaluation mode without gradients; every module gets its own mode back. A model that cannot be called is the user's error."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with torch.no_grad():
            yield
    except UserError:
        raise
    except Exception as error:
        raise UserError(
            f"could not be called on a blank image ({type(error).__name__}: {str(error).partition(chr(10))[0]})",
            where=f"attach({type(model).__name__})",
            cure="Images of another size than the model's own: pass grid=(height, width), the number of patches, where it takes them.",
        ) from error
    finally:
        for module, mode in modes:
            module.training = mode


def blank_image(model: nn.Module, channels: int, height: int, width: int) -> Tensor:
    """An image of zeros on the model's device, in its dtype."""
    like = next(model.parameters())
    return torch.zeros(1, channels, height, width, device=like.device, dtype=like.dtype)


def block_of(model: nn.Module, name: str) -> nn.Module:
    """The element of a list of blocks that an attention layer belongs to; the layer itself where there is no list."""
    parts = name.split(".") if name else []
    numbers = [i for i, part in enumerate(parts) if part.isdigit()]
    return model.get_submodule(".".join(parts[: numbers[-1] + 1]) if numbers else name)


def reads_patches(found: Found, model: nn.Module) -> bool | None:
    """Whether the model's output depends on the patch rows of its last block; None where that cannot be seen.

    The rows are replaced by NaN, which survives even a head that starts at zero.
    """
    if found.called is not model or found.front is None:
        return None
    front = found.front

    def poison(module: nn.Module, args: Any, output: Any) -> Any:
        rows = output[0] if isinstance(output, tuple) else output
        rows = rows.clone()
        rows[:, front:] = float("nan")
        return (rows, *output[1:]) if isinstance(output, tuple) else rows

    hook = block_of(model, found.sites[-1].name).register_forward_hook(poison)
    try:
        with looking(model):
            output = model(**found.inputs)
    finally:
        hook.remove()
    scores = output if isinstance(output, Tensor) else getattr(output, "logits", None)
    if not isinstance(scores, Tensor) or scores.ndim != 2:
        return None  # tokens come out: what reads them is not part of the model
    return bool(scores.isnan().any())
