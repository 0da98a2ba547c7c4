"""timm's VisionTransformer family and Eva: the values come out of ``qkv`` or ``v_proj``, the merged heads enter ``norm`` or ``proj``.

Shapes: B batch, L rows, C channels.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gated_srp.errors import UserError
from gated_srp.foreign.site import Found, FusedTapSite, Site, Taps, blank_image, check_rows, looking


class BiasedTapSite(FusedTapSite):
    """Eva and BEiT add the biases of their fused projection outside it: the values are computed once more, without gradient."""

    def _tap(self) -> None:
        if type(self.module.qkv) is not nn.Linear:
            what = f"'qkv' is a {type(self.module.qkv).__name__} now, and {type(self.module).__name__} adds the bias of its values outside it"
            cure = "Leave 'qkv' out of peft's target_modules, or merge the adapter into it (merge_and_unload) before attach."
            raise UserError(what, where=self.name, cure=cure)
        _, heads = self._tapped = self._ends()
        self._tap_hooks = [
            self.module.register_forward_pre_hook(self._see_rows, with_kwargs=True),
            heads.register_forward_pre_hook(self._correct_heads),
        ]

    def _see_rows(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        x = args[0] if args else kwargs["x"]
        if self.module.correction is not None:
            with torch.no_grad():
                weight, bias = module.qkv.weight, module.v_bias
                self._values = F.linear(x, weight[-len(bias) :], bias)


def root(model: nn.Module) -> nn.Module | None:
    """The outermost timm model with patches inside ``model``; timm is not imported for the question."""
    timm = (m for m in model.modules() if type(m).__module__.startswith("timm.models."))
    return next((m for m in timm if hasattr(m, "patch_embed")), None)


def find(model: nn.Module, trunk: Any, grid: tuple[int, int] | None) -> Found:
    """The attention layers of a timm model, found by calling it once on a blank image."""
    kind = type(trunk).__name__
    if not hasattr(trunk, "blocks") or not hasattr(trunk, "num_prefix_tokens"):
        what = "no flat list of blocks over all patches (a Swin attends in windows, others merge or pool patches on the way)"
        cure = "So a patch does not see its neighbourhood. Supported: the VisionTransformer family and Eva."
        raise UserError(what, where=f"timm {kind}", cure=cure)
    front = int(trunk.num_prefix_tokens)
    cells = tuple(grid or getattr(trunk.patch_embed, "grid_size", None) or ())
    if len(cells) != 2:
        cure = "Pass attach(model, grid=(height, width)), the number of patches."
        raise UserError("takes images of any size", where=f"timm {kind}", cure=cure)
    names = {module: name for name, module in model.named_modules()}
    rows = _rows_seen(trunk, image := _image(trunk, cells))
    sites: list[Site] = []
    for module, seen in rows.items():
        check_rows(module, seen, cells, front)
        sites.append(_site(names[module], module))
    if not sites:
        what = "its blocks have no attention module with 'qkv' (or 'v_proj') and 'proj': values cannot be reached"
        raise UserError(what, where=f"timm {kind}")
    return Found(sites, (int(cells[0]), int(cells[1])), front, trunk, {"x": image})


def _image(trunk: Any, cells: tuple[Any, ...]) -> Tensor:
    """A blank image of that many patches; convolutions in front of the patches (ViTamin, hybrids) make a patch wider."""
    embed = trunk.patch_embed
    patch = embed.feat_ratio(as_scalar=False) if hasattr(embed, "feat_ratio") else getattr(embed, "patch_size", None)
    first = next((module for module in embed.modules() if isinstance(module, nn.Conv2d)), None)
    if patch is None or first is None:
        what = f"'patch_embed' is a {type(embed).__name__} that says neither how large a patch is nor how many channels an image has"
        cure = (
            "Name its attention: attach(model, adapters={AttentionClass: Taps('qkv', 'proj')}, grid=(height, width))."
        )
        raise UserError(what, where=f"timm {type(trunk).__name__}", cure=cure)
    height, width = (int(cell) * int(side) for cell, side in zip(cells, patch, strict=True))
    return blank_image(trunk, first.in_channels, height, width)


def _rows_seen(trunk: nn.Module, image: Tensor) -> dict[nn.Module, tuple[int, int]]:
    """Attention module -> (batch, rows) that it saw, in the order of the forward."""
    seen: dict[nn.Module, tuple[int, int]] = {}

    def watch(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        x = args[0] if args else kwargs["x"]
        seen[module] = (x.shape[0], x.shape[1])

    blocks = trunk.get_submodule("blocks")
    hooks = [m.register_forward_pre_hook(watch, with_kwargs=True) for m in blocks.modules() if _is_attention(m)]
    try:
        with looking(trunk):
            trunk(image)
    finally:
        for hook in hooks:
            hook.remove()
    return seen


def _is_attention(module: nn.Module) -> bool:
    values = any(getattr(module, name, None) is not None for name in ("qkv", "v_proj"))
    return values and hasattr(module, "attn_drop")


def _site(name: str, module: Any) -> Site:
    apart = getattr(module, "v_proj", None) is not None
    width = module.v_proj.out_features if apart else module.qkv.out_features // 3
    if type(module).__name__.startswith("Diff") or width != module.proj.in_features:
        what = f"{type(module).__name__} has values of another width or number than its heads; Gated SRP cannot be attached to it"
        raise UserError(what, where=name)
    normed = isinstance(getattr(module, "norm", None), nn.Module)
    taps = Taps("v_proj" if apart else "qkv", "norm" if normed else "proj")
    kind = FusedTapSite if getattr(module, "v_bias", None) is None else BiasedTapSite
    return kind(name, module, int(module.num_heads), taps)
