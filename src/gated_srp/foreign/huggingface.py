"""Hugging Face transformers v5, through its attention interface: every layer hands (q, k, v) to a function of a registered name.

Shapes: B batch, H heads, L rows, D head width.
"""

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from gated_srp.errors import UserError
from gated_srp.foreign.site import Found, Site, blank_image, check_rows, looking, number_of_heads

_PREFIX = "gated_srp_"
_PROBE = "gated_srp_probe"
_CARD = "gated_srp"  # attribute of the model's config
_TAPS = "attach(model, adapters={AttentionClass: Taps('v_proj', 'o_proj')}, grid=(height, width))"

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


class GatedConfig:
    """The config of one attention module: the model's own, except that its attention function goes on to the correction.

    The model's config stays as it is, so `set_attn_implementation`, `output_attentions` and saved configs work as without gates.
    """

    def __init__(self, config: Any) -> None:
        self.own, self.prefix = config, _PREFIX
        _register(config._attn_implementation or "eager")

    @property
    def _attn_implementation(self) -> str:
        name = self.own._attn_implementation or "eager"
        if not torch.compiler.is_compiling():
            _register(name)  # somebody may have switched to another one
        return self.prefix + name

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["own"], name)

    def __reduce__(self) -> tuple[Any, ...]:
        return GatedConfig, (self.own,)  # an unpickled model may be the first of its process: it registers again


class InterfaceSite(Site):
    """An attention module that asks the interface for its attention function; ``config`` is that of the whole model."""

    def __init__(self, name: str, module: nn.Module, num_heads: int, config: Any) -> None:
        super().__init__(name, module, num_heads)
        self.config = config

    def enter(self) -> None:
        self.module.srp_site = self
        self.module.config = GatedConfig(self.module.config)

    def leave(self) -> None:
        self.module.config = self.module.config.own
        del self.module.srp_site
        self.config.__dict__.pop(_CARD, None)

    def cls_attention(self, *args: Any, **kwargs: Any) -> Tensor | None:
        seen: list[Tensor] = []
        self.module.srp_watch = seen.append
        try:
            type(self.module).forward(self.module, *args, **kwargs)
        finally:
            del self.module.srp_watch
        return self.patches(seen[0]) if seen else None


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
    site: Any = module.srp_site
    site.module.config.prefix = ""  # flash attention asks the config for its own name
    try:
        y, weights = _base(base, module)(module, query, key, value, attention_mask, **kwargs)
    finally:
        site.module.config.prefix = _PREFIX  # also where memory ran out: the next forward must not pass the gate by
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


def _register(base: str) -> None:
    """The attention function ``base`` and the correction behind it, under a name of ours. Masks are made for ``base`` by the model."""
    from transformers import AttentionInterface
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    if _PREFIX + base not in ALL_ATTENTION_FUNCTIONS:
        AttentionInterface.register(_PREFIX + base, partial(_attention, base))


def root(model: nn.Module) -> nn.Module | None:
    """The outermost transformers model inside ``model``; transformers is not imported for the question."""
    loaded = sys.modules.get("transformers.modeling_utils")
    if loaded is None:
        return None
    return next((module for module in model.modules() if isinstance(module, loaded.PreTrainedModel)), None)


def find(model: nn.Module, trunk: nn.Module, grid: tuple[int, int] | None) -> Found:
    """The attention layers of a vision model, found by calling it once on a blank image."""
    config: Any = trunk.config
    config = getattr(config, "vision_config", config)  # a model of images and text keeps its image half here
    kind = config.model_type
    if hasattr(config, "window_size"):
        what = f"transformers model type {kind!r} attends in windows, which cut the neighbourhood of a patch; Gated SRP needs attention over all patches"
        cure = f"Take an encoder that attends over all patches: {', '.join(FRONT)}."
        raise UserError(what, where=type(trunk).__name__, cure=cure)
    if kind not in FRONT:
        what = f"transformers model type {kind!r} is not one of {', '.join(FRONT)}"
        cure = f"Attach to its vision model, or name its attention: {_TAPS}."
        raise UserError(what, where=type(trunk).__name__, cure=cure)
    if getattr(trunk, "main_input_name", "") != "pixel_values":
        what = "does not take pixel_values alone"
        raise UserError(what, where=type(trunk).__name__, cure="Attach to its vision model (model.vision_model).")
    if any(hasattr(module, "srp_site") for module in trunk.modules()):
        what = "Gated SRP is attached to it already, or to a part of it"
        cure = "handle.detach() first, or attach to another part of the model."
        raise UserError(what, where=type(trunk).__name__, cure=cure)
    sides, patch = _pair(config.image_size), _pair(config.patch_size)
    if grid is not None:
        sides = (grid[0] * patch[0], grid[1] * patch[1])
    cells = (sides[0] // patch[0], sides[1] // patch[1])
    inputs: dict[str, Any] = {"pixel_values": blank_image(trunk, config.num_channels, *sides)}
    called = _callers(trunk, inputs)
    front = FRONT[kind](config)
    names = {module: name for name, module in model.named_modules()}
    sites: list[Site] = []
    for module, seen in called:
        check_rows(module, seen, cells, front)
        heads = number_of_heads(module) or config.num_attention_heads
        sites.append(InterfaceSite(names[module], module, heads, trunk.config))
    return Found(sites, cells, front, trunk, inputs, partial(_remember, trunk))


class _Live(dict[str, Any]):
    """The card of gates that are in place now; one that came from a config.json is a plain dict."""


def _remember(trunk: Any, handle: Any) -> None:
    """`save_pretrained` writes the gates with the model, but `from_pretrained` knows of no gates: attaching again brings them back."""
    card, folder = getattr(trunk.config, _CARD, None), Path(trunk.name_or_path or "")
    trunk.config.gated_srp = _Live(handle.card())
    if type(card) is not dict:
        return
    try:
        if not folder.is_dir() or not list(folder.glob("*.safetensors")):
            settings = ", ".join(f"{key} {card.get(key)}" for key in ("delta", "hidden_dim", "window"))
            what = f"saved with trained gates ({settings}), but the folder that it came from is not here, so these gates would start anew"
            cure = "Load the model from a local folder, or del model.config.gated_srp before attach (and handle.load what handle.save wrote)."
            raise UserError(what, where=type(trunk).__name__, cure=cure)
        handle.load(folder)
    except UserError:
        handle.detach()
        trunk.config.gated_srp = card
        raise


def _callers(trunk: nn.Module, inputs: dict[str, Any]) -> list[tuple[nn.Module, tuple[int, int]]]:
    """Attention modules in the order of the forward, each with (batch, rows) that it saw."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

    seen: list[tuple[nn.Module, tuple[int, int]]] = []

    def watch(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **kwargs: Any) -> Any:
        seen.append((module, (query.shape[0], query.shape[2])))
        return _base("eager", module)(module, query, key, value, mask, **kwargs)

    configs: dict[int, Any] = {id(m.config): m.config for m in trunk.modules() if hasattr(m, "config")}
    before = [(config, config._attn_implementation) for config in configs.values()]
    AttentionInterface.register(_PROBE, watch)
    AttentionMaskInterface.register(_PROBE, ALL_MASK_ATTENTION_FUNCTIONS["eager"])
    try:
        for config, _ in before:
            config._attn_implementation = _PROBE
        with looking(trunk):
            trunk(**inputs)
    finally:
        for config, name in before:
            config._attn_implementation = name
        AttentionInterface.register(_PROBE, _finished)
    if not seen:
        what = "does not use the attention interface of transformers, so values and heads cannot be reached"
        raise UserError(what, where=type(trunk).__name__, cure=f"Name its attention: {_TAPS}.")
    return seen


def _finished(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    raise RuntimeError("gated_srp_probe is an attention function of attach() alone")


def _pair(size: Any) -> tuple[int, int]:
    return (size, size) if isinstance(size, int) else (int(size[0]), int(size[1]))
