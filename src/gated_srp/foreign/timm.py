"""timm's VisionTransformer family and Eva: the values come out of ``qkv`` or ``v_proj``, the merged heads enter ``norm`` or ``proj``.

Shapes: B batch, L rows, C channels.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gated_srp.errors import UserError
from gated_srp.foreign.site import Found, FusedTapSite, Site, Taps, blank_image, looking


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
        raise UserError(
            "no flat list of blocks over all patches (a Swin attends in windows, others merge or pool patches on the way), "
            "so a patch does not see its neighbourhood",
            where=f"timm {kind}",
            cure="Supported: the VisionTransformer family and Eva.",
        )
    front = int(trunk.num_prefix_tokens)
    cells = tuple(grid or getattr(trunk.patch_embed, "grid_size", None) or ())
    if len(cells) != 2:
        cure = "Pass attach(model, grid=(height, width)), the number of patches."
        raise UserError("takes images of any size", where=f"timm {kind}", cure=cure)
    names = {module: name for name, module in model.named_modules()}
    rows = _rows_seen(trunk, image := _image(trunk, cells))
    sites: list[Site] = []
    for module, shape in rows.items():
        if shape != (1, front + cells[0] * cells[1]):
            raise UserError(
                f"{type(module).__name__} sees {shape[0]} x {shape[1]} rows of an image of {cells[0]} x {cells[1]} patches "
                f"and {front} rows in front; attention in windows, or over other rows, hides neighbours from the correction",
                where=f"timm {kind}",
            )
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
        raise UserError(
            f"'patch_embed' is a {type(embed).__name__} that says neither how large a patch is nor how many channels an image has",
            where=f"timm {type(trunk).__name__}",
            cure="Name its attention: attach(model, adapters={AttentionClass: Taps('qkv', 'proj')}, grid=(height, width)).",
        )
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
    fused, apart = getattr(module, "qkv", None), getattr(module, "v_proj", None)
    return isinstance(module, nn.Module) and (fused is not None or apart is not None) and hasattr(module, "attn_drop")


def _site(name: str, module: Any) -> Site:
    heads = int(module.num_heads)
    apart = getattr(module, "v_proj", None) is not None
    width = module.v_proj.out_features if apart else module.qkv.out_features // 3
    if type(module).__name__.startswith("Diff") or width != module.proj.in_features:
        what = f"{type(module).__name__} has values of another width or number than its heads; Gated SRP cannot be attached to it"
        raise UserError(what, where=name)
    taps = Taps(
        "v_proj" if apart else "qkv", "norm" if isinstance(getattr(module, "norm", None), nn.Module) else "proj"
    )
    if getattr(module, "v_bias", None) is not None:
        return BiasedTapSite(name, module, heads, taps)
    return FusedTapSite(name, module, heads, taps)
