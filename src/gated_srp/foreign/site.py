"""One attention layer of a foreign model and how its heads are reached; a model looked at by calling it once.

Shapes: B batch, H heads, L rows, D head width, C channels.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from gated_srp.errors import UserError, counted
from gated_srp.foreign.neighbourhood import Neighbourhood
from gated_srp.srp import GatedSRP

Finish = Callable[[Tensor], Any]
Adapter = Callable[..., tuple[Tensor, Tensor, Finish]]


class Site:
    """An attention module, its correction and its share of the graph. Subclasses say how y and v are reached.

    The correction becomes the submodule ``correction``, so that devices, optimisers, copies and checkpoints of the model
    include it; a checkpoint from before still loads strictly, since the gates keep their values where it has none.
    `trace` finds the layer by ``correction`` and ``cls_attention``.
    """

    def __init__(self, name: str, module: nn.Module, num_heads: int) -> None:
        self.name, self.num_heads = name, num_heads
        self.module: Any = module  # of somebody else's class
        self._hooks: list[Any] = []

    def install(self, correction: GatedSRP | None, neighbourhood: Neighbourhood) -> None:
        if hasattr(self.module, "correction"):
            cure = "Detach the model first (handle.detach()), or attach to another part of it."
            raise UserError("has a correction already", where=self.name, cure=cure)
        self.neighbourhood = neighbourhood
        self.module.correction = correction
        self.module.cls_attention = self.cls_attention
        if correction is not None:
            self._hooks.append(self.module.register_load_state_dict_pre_hook(self._keep_gates))
        self.enter()

    def remove(self) -> None:
        self.leave()
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        del self.module.correction, self.module.cls_attention

    def enter(self) -> None:
        """Make the module's forward pass through `correct`."""
        raise NotImplementedError

    def leave(self) -> None:
        """Undo `enter`, as far as it is not hooks."""

    def correct(self, y: Tensor, v: Tensor) -> Tensor:
        """y, v (B, H, L, D) -> z (B, H, L, D), contiguous as (B, L, H, D); y itself where the layer has no gate."""
        correction: GatedSRP | None = self.module.correction
        if correction is None:
            return y
        z: Tensor = correction(y, v, self.neighbourhood.rows(y))
        return z

    def cls_attention(self, *args: Any, **kwargs: Any) -> Tensor | None:
        """Attention of the first row to the patches, (H, N) for one bag, for `trace`; None where it cannot be reached."""
        return None

    def patches(self, weights: Tensor) -> Tensor | None:
        """Patch columns of the first row's weights (B, H, L); None where the first row is a patch."""
        rows = self.neighbourhood.rows(weights.unsqueeze(-1))
        return rows.patches(weights) if rows.before else None

    def tokens(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
        """The rows (B, L, C) that a block is called with."""
        tensors = [t for t in (*args, *kwargs.values()) if isinstance(t, Tensor) and t.ndim == 3]
        return tensors[0] if tensors else None

    def _keep_gates(self, module: Any, state: dict[str, Any], prefix: str, *_: Any) -> None:
        own = module.correction.state_dict(prefix=f"{prefix}correction.")
        if not any(key in state for key in own):
            state.update(own)


class AdapterSite(Site):
    """Reached by a function: ``adapter(module, *inputs) -> (y, v, finish)``, where finish(z) is what the module returns."""

    def __init__(self, name: str, module: nn.Module, num_heads: int, adapter: Adapter) -> None:
        super().__init__(name, module, num_heads)
        self.adapter = adapter

    def enter(self) -> None:
        self.module.forward = self.forward  # an attribute of this one object, above the class's method

    def leave(self) -> None:
        del self.module.forward

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        y, v, finish = self.adapter(self.module, *args, **kwargs)
        return finish(self.correct(y, v))


class Taps:
    """Reached through two submodules: the output of ``values`` ends in the values, the input of ``heads`` is the merged heads.

    The module's own forward runs unchanged between them, so masks, rotary positions and normalised keys need no word here.
    ``values`` may name a fused projection (its last third is taken) or that of the values alone.
    """

    def __init__(self, values: str, heads: str) -> None:
        self.values, self.heads = values, heads


class TapSite(Site):
    """See `Taps`."""

    def __init__(self, name: str, module: nn.Module, num_heads: int, taps: Taps) -> None:
        super().__init__(name, module, num_heads)
        self.taps = taps
        self._values: Tensor | None = None
        self._mapping = False
        self._tap_hooks: list[Any] = []
        self._tapped = self._ends()  # a wrong path is refused before anything is changed

    def enter(self) -> None:
        self._tap()
        self._hooks.append(self.module.register_forward_pre_hook(self._follow))

    def leave(self) -> None:
        self._untap()

    def _tap(self) -> None:
        values, heads = self._tapped = self._ends()
        self._tap_hooks = [
            values.register_forward_hook(self._see_values),
            heads.register_forward_pre_hook(self._correct_heads),
        ]

    def _untap(self) -> None:
        for hook in self._tap_hooks:
            hook.remove()
        self._tap_hooks = []

    def _ends(self) -> tuple[nn.Module, nn.Module]:
        return self._inside(self.taps.values), self._inside(self.taps.heads)

    def _inside(self, path: str) -> nn.Module:
        try:
            return self.module.get_submodule(path)  # type: ignore[no-any-return]
        except AttributeError:
            inside = ", ".join(name for name, _ in self.module.named_modules() if name) or "none"
            what = f"{type(self.module).__name__} has no submodule '{path}'"
            cure = f"Its submodules: {inside}. Where values or heads pass through none of them, write an adapter(module, *inputs) -> (y, v, finish)."
            raise UserError(what, where=f"Taps of {self.name or 'the model'}", cure=cure) from None

    def _follow(self, module: nn.Module, args: Any) -> None:
        """peft puts its own layers around these ones: corrected heads must enter the new ones, values come out of them."""
        if not torch.compiler.is_compiling() and self._ends() != self._tapped:
            self._untap()
            self._tap()

    def _see_values(self, module: nn.Module, args: Any, output: Tensor) -> None:
        self._values = output.detach()

    def _correct_heads(self, module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...] | None:
        if self.module.correction is None or self._mapping:
            return None
        merged = args[0]  # (B, L, H * D)
        if self._values is None or self._values.shape[-1] < merged.shape[-1]:
            what = f"'{self.taps.values}' gave no values as wide as the heads ({merged.shape[-1]}) before '{self.taps.heads}' was reached"
            cure = "Name the projection of the values (or the fused one that ends in them) and the module that reads the merged heads."
            raise UserError(what, where=self.name, cure=cure)
        v, self._values = self._values[..., -merged.shape[-1] :], None
        z = self.correct(self._split(merged), self._split(v))
        return (z.transpose(1, 2).reshape(merged.shape), *args[1:])

    def _split(self, merged: Tensor) -> Tensor:
        heads: Tensor = merged.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)  # (B, H, L, D)
        return heads


class FusedTapSite(TapSite):
    """timm's attention: `Taps`, and its attention map seen once with the fused kernel off."""

    def cls_attention(self, *args: Any, **kwargs: Any) -> Tensor | None:
        seen: list[Tensor] = []
        fused = self.module.fused_attn
        dropout = self.module.get_submodule("attn_drop")
        hook = dropout.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
        try:
            self.module.fused_attn, self._mapping = False, True
            type(self.module).forward(self.module, *args, **kwargs)
        finally:
            self.module.fused_attn, self._mapping, self._values = fused, False, None
            hook.remove()
        return self.patches(seen[0][:, :, 0]) if seen else None


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
        what = f"could not be called on a blank image ({type(error).__name__}: {str(error).partition(chr(10))[0]})"
        cure = "Images of another size than the model's own: pass grid=(height, width), the number of patches, where it takes them."
        raise UserError(what, where=f"attach({type(model).__name__})", cure=cure) from error
    finally:
        for module, mode in modes:
            module.training = mode


def check_rows(module: nn.Module, seen: tuple[int, int], cells: tuple[int, int], front: int) -> None:
    """Refuse attention that saw other rows, (batch, rows), than all of a blank image's patches and those in front."""
    if seen != (1, front + cells[0] * cells[1]):
        what = f"sees {seen[0]} x {seen[1]} rows of an image of {cells[0]} x {cells[1]} patches and {counted(front, 'row')} in front"
        cure = "Attention in windows, or over other rows, hides neighbours from the correction."
        raise UserError(what, where=type(module).__name__, cure=cure)


def number_of_heads(module: nn.Module) -> int | None:
    """As an attention module names it itself."""
    names = ("num_heads", "n_heads", "heads", "num_attention_heads")
    return next((int(heads) for name in names if isinstance(heads := getattr(module, name, None), int)), None)


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
