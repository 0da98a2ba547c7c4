"""Hugging Face transformers v5, through its attention interface: every layer hands (q, k, v) to a function of a registered name.

Shapes: B batch, H heads, L rows, D head width.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from gated_srp.errors import UserError
from gated_srp.foreign.probe import Found, blank_image, looking
from gated_srp.foreign.site import Site

_PREFIX = "gated_srp_"
_PROBE = "gated_srp_probe"

# model_type -> rows in front of the patches. Text towers, and models that order their rows in another way, are not here.
FRONT: dict[str, Callable[[Any], int]] = {
    "vit": lambda config: 1,
    "vit_msn": lambda config: 1,
    "deit": lambda config: 2,
    "dinov2": lambda config: 1,
    "dinov2_with_registers": lambda config: 1 + config.num_register_tokens,
    "dinov3_vit": lambda config: 1 + config.num_register_tokens,
    "siglip_vision_model": lambda config: 0,
    "clip_vision_model": lambda config: 1,
    "ijepa": lambda config: 0,
}


class InterfaceSite(Site):
    """An attention module that asks the interface for its attention function."""

    def enter(self) -> None:
        self.module.srp_site = self
        config = self.module.config
        if not config._attn_implementation.startswith(_PREFIX):  # layers share one config
            config._attn_implementation = _register(config._attn_implementation)

    def leave(self) -> None:
        del self.module.srp_site
        config = self.module.config
        config._attn_implementation = config._attn_implementation.removeprefix(_PREFIX)

    def cls_attention(self, *args: Any, **kwargs: Any) -> Tensor | None:
        seen: list[Tensor] = []
        self.module.srp_watch = seen.append
        try:
            type(self.module).forward(self.module, *args, **kwargs)
        finally:
            del self.module.srp_watch
        return self.patches(seen[0]) if seen else None

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        _register("sdpa"), _register("eager")  # an unpickled model may be the first of its process


def _attention(
    base: str,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """The attention that the model had, then the correction: (B, L, H, D) and what else it returned."""
    y, weights = _base(base, module)(module, query, key, value, attention_mask, **kwargs)
    site = getattr(module, "srp_site", None)
    if site is None:
        return y, weights
    watch = getattr(module, "srp_watch", None)
    if watch is not None:
        watch(_first_row(query, key, attention_mask, kwargs.get("scaling")))
    heads = y.transpose(1, 2)  # (B, H, L, D)
    if value.shape[1] != heads.shape[1]:
        value = value.repeat_interleave(heads.shape[1] // value.shape[1], dim=1)  # grouped queries share values
    return site.correct(heads, value).transpose(1, 2).contiguous(), weights


def _first_row(query: Tensor, key: Tensor, mask: Tensor | None, scaling: float | None) -> Tensor:
    """softmax(q k^T) of row 0, (B, H, L)."""
    key = key.repeat_interleave(query.shape[1] // key.shape[1], dim=1)
    logits = query[:, :, :1].float() @ key.float().transpose(-2, -1) * (scaling or query.shape[-1] ** -0.5)
    if mask is not None:
        row = mask[:, :, :1]
        logits = logits.masked_fill(~row, float("-inf")) if row.dtype == torch.bool else logits + row
    return logits.softmax(-1).squeeze(2)


def _base(name: str, module: nn.Module) -> Callable[..., Any]:
    """The function that the model would have called; 'eager' lives in the model's own file."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    eager: Any = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
    function: Callable[..., Any] = ALL_ATTENTION_FUNCTIONS.get_interface(name, eager)
    return function


def _register(base: str) -> str:
    """Register attention and mask function under our name: without the mask function padding would be dropped silently."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

    name = _PREFIX + base
    AttentionInterface.register(name, partial(_attention, base))
    AttentionMaskInterface.register(name, ALL_MASK_ATTENTION_FUNCTIONS[base])
    return name


def root(model: nn.Module) -> nn.Module | None:
    """The outermost transformers model inside ``model``; transformers is not imported for the question."""
    if "transformers" not in sys.modules:
        return None
    from transformers import PreTrainedModel

    return next((module for module in model.modules() if isinstance(module, PreTrainedModel)), None)


def find(model: nn.Module, trunk: nn.Module, grid: tuple[int, int] | None) -> Found:
    """The attention layers of a vision model, found by calling it once on a blank image."""
    config: Any = trunk.config
    config = getattr(config, "vision_config", config)  # a model of images and text keeps its image half here
    kind = config.model_type
    if kind not in FRONT:
        raise UserError(
            f"{type(trunk).__name__}: transformers model type {kind!r} is not one of {', '.join(FRONT)}. {_why(config)}"
            "Attach to its vision model, or name its attention: attach(model, adapters={AttentionClass: Taps('v_proj', 'o_proj')}, grid=(height, width))."
        )
    if getattr(trunk, "main_input_name", "") != "pixel_values":
        raise UserError(
            f"{type(trunk).__name__}: does not take pixel_values alone. Attach to its vision model (model.vision_model)."
        )
    height, width = (
        _pair(config.image_size)
        if grid is None
        else (g * p for g, p in zip(grid, _pair(config.patch_size), strict=True))
    )
    inputs: dict[str, Any] = {"pixel_values": blank_image(trunk, config.num_channels, height, width)}
    called = _callers(trunk, inputs)
    cells = tuple(side // patch for side, patch in zip((height, width), _pair(config.patch_size), strict=True))
    front = FRONT[kind](config)
    for module, batch, rows in called:
        if (batch, rows) != (1, front + cells[0] * cells[1]):
            raise UserError(
                f"{type(module).__name__}: sees {batch} x {rows} rows of an image of {cells[0]} x {cells[1]} patches and {front} rows in front. "
                "Attention in windows, or over other rows, hides neighbours from the correction."
            )
    names = {module: name for name, module in model.named_modules()}
    sites: list[Site] = [InterfaceSite(names[m], m, _heads(m)) for m, _, _ in called]
    return Found(sites, (cells[0], cells[1]), front, trunk, inputs)


def _callers(trunk: nn.Module, inputs: dict[str, Any]) -> list[tuple[nn.Module, int, int]]:
    """(attention module, batch, rows) in the order of the forward."""
    seen: list[tuple[nn.Module, int, int]] = []

    def watch(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **kwargs: Any) -> Any:
        seen.append((module, query.shape[0], query.shape[2]))
        return _base("eager", module)(module, query, key, value, mask, **kwargs)

    with _interface(trunk, watch), looking(trunk):
        trunk(**inputs)
    if not seen:
        raise UserError(
            f"{type(trunk).__name__}: does not use the attention interface of transformers, so values and heads cannot be reached. "
            "Name its attention: attach(model, adapters={AttentionClass: Taps('v_proj', 'o_proj')}, grid=(height, width))."
        )
    return seen


@contextmanager
def _interface(trunk: nn.Module, function: Callable[..., Any]) -> Iterator[None]:
    """All attention of the model through ``function`` for the length of the `with`."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

    configs: dict[int, Any] = {id(m.config): m.config for m in trunk.modules() if hasattr(m, "config")}
    before = [(config, config._attn_implementation) for config in configs.values()]
    AttentionInterface.register(_PROBE, function)
    AttentionMaskInterface.register(_PROBE, ALL_MASK_ATTENTION_FUNCTIONS["eager"])
    try:
        for config, _ in before:
            config._attn_implementation = _PROBE
        yield
    finally:
        for config, name in before:
            config._attn_implementation = name
        AttentionInterface.register(_PROBE, _finished)


def _finished(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    raise RuntimeError("gated_srp_probe is an attention function of attach() alone")


def _heads(module: Any) -> int:
    for name in ("num_attention_heads", "num_heads"):
        if isinstance(getattr(module, name, None), int):
            return int(getattr(module, name))
    return int(module.config.num_attention_heads)


def _pair(size: Any) -> tuple[int, int]:
    return (size, size) if isinstance(size, int) else (int(size[0]), int(size[1]))


def _why(config: Any) -> str:
    windows = hasattr(config, "window_size")
    return (
        "It attends in windows, which cut the neighbourhood of a patch; Gated SRP needs attention over all patches. "
        if windows
        else ""
    )
