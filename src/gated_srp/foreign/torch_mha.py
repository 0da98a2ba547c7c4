"""torch.nn.MultiheadAttention and what is built on it (nn.TransformerEncoder, nn.TransformerEncoderLayer).

Shapes: B batch, H heads, L rows, D head width, E = H * D channels.
"""

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gated_srp.errors import UserError
from gated_srp.foreign.site import AdapterSite, Finish


class TorchSite(AdapterSite):
    """An nn.MultiheadAttention; the encoder layers around it stop taking the inference path that calls no attention module."""

    def __init__(self, name: str, module: nn.MultiheadAttention, around: Iterable[nn.Module]) -> None:
        super().__init__(name, module, module.num_heads, self_attention)
        self.batch_first = module.batch_first
        self._around = [m for m in around if isinstance(m, nn.TransformerEncoder | nn.TransformerEncoderLayer)]
        self._before: list[tuple[nn.Module, str, Any]] = []

    def enter(self) -> None:
        super().enter()
        for module in self._around:
            switch = "use_nested_tensor" if isinstance(module, nn.TransformerEncoder) else "activation_relu_or_gelu"
            self._before.append((module, switch, getattr(module, switch)))
            setattr(module, switch, False)

    def leave(self) -> None:
        super().leave()
        for module, switch, value in reversed(self._before):
            setattr(module, switch, value)
        self._before.clear()

    def tokens(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
        rows = super().tokens(args, kwargs)
        return rows if rows is None or self.batch_first else rows.transpose(0, 1)

    def cls_attention(self, *args: Any, **kwargs: Any) -> Tensor | None:
        wanted = {**kwargs, "need_weights": True, "average_attn_weights": False}
        *_, finish = self_attention(self.module, *args, **wanted)
        return self.patches(finish.weights[:, :, 0])  # type: ignore[attr-defined]


class _Finish:
    """The output projection, in the layout that the module was called with."""

    def __init__(self, module: nn.MultiheadAttention, batched: bool, weights: Tensor | None, average: bool) -> None:
        self.module, self.batched, self.weights, self.average = module, batched, weights, average

    def __call__(self, z: Tensor) -> tuple[Tensor, Tensor | None]:
        out_proj = self.module.out_proj
        merged = z.permute(2, 0, 1, 3).flatten(2)  # (L, B, E) as PyTorch lays it out, so that products agree to the bit
        out = F.linear(merged, out_proj.weight, out_proj.bias)
        weights = self.weights.mean(1) if self.weights is not None and self.average else self.weights
        if not self.batched:
            return out.squeeze(1), None if weights is None else weights.squeeze(0)
        return out.transpose(0, 1) if self.module.batch_first else out, weights


def self_attention(
    module: nn.MultiheadAttention,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_padding_mask: Tensor | None = None,
    need_weights: bool = True,
    attn_mask: Tensor | None = None,
    average_attn_weights: bool = True,
    is_causal: bool = False,
) -> tuple[Tensor, Tensor, Finish]:
    """The adapter of nn.MultiheadAttention, with the arguments of its forward; the same products in the same order."""
    if query is not key or key is not value:
        what = "called with queries, keys and values that are not one tensor; Gated SRP corrects self-attention"
        cure = "Attach to the encoder alone (attach(model.encoder)) where the model also has cross-attention or attention pooling."
        raise UserError(what, where="MultiheadAttention", cure=cure)
    if query.is_nested:
        what = "nested tensors have no rows to number"
        raise UserError(what, where="MultiheadAttention", cure="Pad the bags and pass a key padding mask.")
    batched = query.ndim == 3
    x = query.unsqueeze(1) if not batched else query.transpose(0, 1) if module.batch_first else query  # (L, B, E)
    if not batched and key_padding_mask is not None:
        key_padding_mask = key_padding_mask.unsqueeze(0)
    rows = F.linear(x, module.in_proj_weight, module.in_proj_bias)  # (L, B, 3 E)
    parts = (part.unflatten(-1, (module.num_heads, -1)) for part in rows.chunk(3, -1))
    q, k, v = (part.permute(1, 2, 0, 3) for part in parts)  # (B, H, L, D)
    dropout = module.dropout if module.training else 0.0
    if not need_weights:
        causal = is_causal and key_padding_mask is None
        mask = None if causal else _additive(attn_mask, key_padding_mask, q)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=dropout, is_causal=causal)
        return y, v, _Finish(module, batched, None, average_attn_weights)
    weights = _logits(q, k, _additive(attn_mask, key_padding_mask, q)).softmax(-1)
    weights = F.dropout(weights, dropout, training=module.training)
    y = _by_bag(torch.bmm(weights, _as_pytorch(v)), v)
    return y, v, _Finish(module, batched, _by_bag(weights, v), average_attn_weights)


def _logits(q: Tensor, k: Tensor, mask: Tensor | None) -> Tensor:
    """q k^T / sqrt D + mask, (B * H, L, L), by the product that PyTorch calls: another one may round otherwise."""
    bags, heads, rows, width = q.shape
    q, k = _as_pytorch(q) * math.sqrt(1 / width), _as_pytorch(k).transpose(-2, -1)
    if mask is None:
        return torch.bmm(q, k)
    return torch.baddbmm(mask.expand(bags, heads, rows, rows).flatten(0, 1), q, k)


def _as_pytorch(heads: Tensor) -> Tensor:
    """(B, H, L, D) -> (B * H, L, D) in memory of its own, row after row of all bags, as PyTorch lays it out."""
    rows = heads.permute(2, 0, 1, 3).contiguous()  # (L, B, H, D)
    return rows.flatten(1, 2).transpose(0, 1)


def _by_bag(flat: Tensor, heads: Tensor) -> Tensor:
    """(B * H, ...) -> (B, H, ...) with the bags and heads of (B, H, L, D)."""
    return flat.view(*heads.shape[:2], *flat.shape[1:])


def _additive(attn_mask: Tensor | None, key_padding_mask: Tensor | None, q: Tensor) -> Tensor | None:
    """Both masks as one that is added to the logits, broadcast to (B, H, L, L); true means 'do not attend'."""
    total = None
    if attn_mask is not None:
        total = _float(attn_mask, q)
        total = total.view(q.shape[0], -1, *total.shape[1:]) if total.ndim == 3 else total[None, None]
    if key_padding_mask is not None:
        padding = _float(key_padding_mask, q)[:, None, None]
        total = padding if total is None else total + padding
    return total


def _float(mask: Tensor, q: Tensor) -> Tensor:
    if mask.dtype != torch.bool:
        return mask.to(q.dtype)
    return torch.zeros_like(mask, dtype=q.dtype).masked_fill(mask, float("-inf"))


_TOWERS = ("visual", "vision_model", "vision_tower", "image_encoder", "visual_encoder")


def find(model: nn.Module) -> list[TorchSite]:
    """Every nn.MultiheadAttention of the model, in the order of registration."""
    modules = dict(model.named_modules())
    found = (name for name, module in modules.items() if isinstance(module, nn.MultiheadAttention))
    around = {name: [modules[path] for path in _ancestors(name)] for name in found}
    _refuse_towers(model, list(around))
    _refuse_other_queries(around)
    sites = []
    for name, above in around.items():
        module: Any = modules[name]
        if module.bias_k is not None or module.add_zero_attn or not module._qkv_same_embed_dim:
            what = "MultiheadAttention with add_bias_kv, add_zero_attn or other key widths has values that belong to no row; Gated SRP cannot be attached to it"
            raise UserError(what, where=name)
        sites.append(TorchSite(name, module, above))
    return sites


def _refuse_towers(model: nn.Module, names: list[str]) -> None:
    """CLIP, CoCa and the like (open_clip) keep images and text apart, and text has no patches."""
    for tower in _TOWERS:
        inside = [name for name in names if f".{tower}." in f".{name}"]
        if inside and len(inside) < len(names):
            path = inside[0][: f".{inside[0]}".index(f".{tower}.") + len(tower)]
            other = next(name for name in names if name not in inside)
            what = f"a model of images and text: there is attention in '{path}' and outside it ('{other}'), whose rows are no patches"
            cure = f"Attach to its image tower: attach(model.{path}, grid=(height, width), last=...)."
            raise UserError(what, where=f"attach({type(model).__name__})", cure=cure)


def _refuse_other_queries(around: dict[str, list[nn.Module]]) -> None:
    """Decoders and attention pooling (CoCa's and CONCH's attn_pool) bring queries of their own."""
    other = [name for name, above in around.items() if _asks(above)]
    if other:
        stacks = [stack for name in around if name not in other and (stack := _stack(name))]
        part = f"blocks alone: attach(model.{max(stacks, key=stacks.count)}, ...)" if stacks else "encoder alone"
        what = "this MultiheadAttention reads the rows with queries of its own (a decoder or attention pooling); Gated SRP corrects self-attention"
        raise UserError(what, where=other[0], cure=f"Attach to the {part}.")


def _asks(above: list[nn.Module]) -> bool:
    if any(isinstance(module, nn.TransformerDecoder | nn.TransformerDecoderLayer) for module in above):
        return True
    pool = above[-1] if above else nn.Identity()
    return "pool" in type(pool).__name__.lower() or "query" in dict(pool.named_parameters(recurse=False))


def _stack(name: str) -> str:
    """The module that holds the list of blocks of an attention layer; empty where there is no list or the model itself holds it."""
    parts = name.split(".")
    number = next((i for i, part in enumerate(parts) if part.isdigit()), 0)
    return ".".join(parts[: number - 1]) if number > 1 else ""


def _ancestors(name: str) -> list[str]:
    parts = name.split(".") if name else []
    return [".".join(parts[:i]) for i in range(len(parts))]
