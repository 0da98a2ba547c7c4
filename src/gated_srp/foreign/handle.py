"""`attach`: one call that puts Gated SRP into somebody else's model, and the handle that it returns."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from gated_srp.errors import UserError
from gated_srp.foreign import files, huggingface, timm, torch_mha
from gated_srp.foreign.neighbourhood import Neighbourhood
from gated_srp.foreign.probe import Found, block_of, reads_patches
from gated_srp.foreign.site import Adapter, AdapterSite, Site, Taps, TapSite
from gated_srp.srp import GatedSRP, PatchGraph

Adapters = Mapping[str | type[nn.Module], Adapter | Taps]


class Handle:
    """What `attach` returns: the graph, the gates and the way back.

    The model holds it too, so a copied or unpickled model has its own: `handle_of(model)`.
    """

    def __init__(
        self, model: nn.Module, sites: list[Site], neighbourhood: Neighbourhood, settings: dict[str, Any]
    ) -> None:
        self.model, self.sites, self.settings = model, sites, settings
        self._neighbourhood = neighbourhood
        self._hook = block_of(model, sites[0].name).register_forward_pre_hook(self._see_tokens, with_kwargs=True)

    def set_graph(self, graph: PatchGraph) -> None:
        """The graph of the next forwards: of the patches alone, in the order of the model's rows (`PatchGraph.batch` for several bags).

        Rows in front that it does not cover (CLS, registers) are rows without neighbours; for padding behind, extend it with
        ``graph.with_isolated(after=...)``. Under activation checkpointing call backward before the next graph is set.
        """
        self._neighbourhood.set_graph(graph)

    def set_grid(self, height: int, width: int) -> None:
        """Images of another size than the model's config says: a full grid whose homogeneity is measured on the tokens."""
        self._neighbourhood.set_grid(height, width)

    def gates(self) -> dict[str, GatedSRP]:
        """Name of the attention layer -> its correction."""
        return {site.name: site.module.correction for site in self.sites if site.module.correction is not None}

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        for layer, gate in self.gates().items():
            for name, parameter in gate.named_parameters():
                yield f"{layer}.{name}".lstrip("."), parameter

    def parameters(self) -> Iterator[nn.Parameter]:
        """The gates alone. They are also among the model's own parameters."""
        return (parameter for _, parameter in self.named_parameters())

    def param_groups(self, weight_decay: float) -> list[dict[str, Any]]:
        """For an optimiser: weights of the gates decay, their biases don't (PROTOCOL 4)."""
        named = list(self.named_parameters())
        return [
            {"params": [p for n, p in named if not n.endswith("bias")], "weight_decay": weight_decay},
            {"params": [p for n, p in named if n.endswith("bias")], "weight_decay": 0.0},
        ]

    def save(self, path: str | Path) -> None:
        """The gates alone: a safetensors file with a card of their settings."""
        files.save(Path(path), dict(self.named_parameters()), self._card())

    def load(self, path: str | Path) -> None:
        """Gates that `save` wrote, from the same architecture attached with the same settings."""
        files.load(Path(path), dict(self.named_parameters()), self._card())

    def detach(self) -> None:
        """Give the model back as it was: no gates, no hooks, its own attention."""
        self._hook.remove()
        for site in reversed(self.sites):
            site.remove()
        self.sites = []
        self.model.__dict__.pop("_gated_srp", None)

    def _card(self) -> dict[str, Any]:
        return {**self.settings, "layers": list(self.gates())}

    def _see_tokens(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._neighbourhood.measured:
            tokens = self.sites[0].tokens(args, kwargs)
            if tokens is not None:
                self._neighbourhood.observe(tokens)


def attach(
    model: nn.Module,
    *,
    grid: tuple[int, int] | None = None,
    delta: float = 1.0,
    hidden_dim: int = 64,
    window: int = 3,
    last: bool | None = None,
    adapters: Adapters | None = None,
) -> Handle:
    """Put a `GatedSRP` behind every self-attention of ``model``, in place. Until trained it changes nothing.

    Finds nn.MultiheadAttention (nn.TransformerEncoder), Hugging Face vision transformers and timm's VisionTransformer and
    Eva by itself. ``adapters`` names others: module name or class -> ``adapter(module, *inputs) -> (y, v, finish)`` with y, v
    (B, H, L, D) and finish(z) what the module returns, or `Taps`. ``grid``: patches (height, width) of every input; None takes
    them from an image model's config, and other models wait for ``handle.set_graph(graph)``. ``last``: whether the last layer
    is corrected; None looks whether the head reads CLS alone (no gate) or patches too.

    >>> from torch.nn import TransformerEncoder, TransformerEncoderLayer
    >>> encoder = TransformerEncoder(TransformerEncoderLayer(48, 6, batch_first=True), 2)
    >>> handle = attach(encoder, last=False)
    >>> [name for name in handle.gates()], sum(p.numel() for p in handle.parameters())
    (['layers.0.self_attn'], 351)
    """
    _check(model, grid, delta, hidden_dim)
    found = _find(model, grid, adapters)
    if last is None:
        last = reads_patches(found, model)
    if last is None:
        raise UserError(
            f"attach({type(model).__name__}): cannot tell whether the head reads CLS alone or pools the patches. "
            "Pass last=False (CLS alone: the last layer needs no gate) or last=True (patches are pooled, or all rows are used)."
        )
    neighbourhood = Neighbourhood(window, found.grid or grid, found.front)
    place = next(model.parameters()).device
    installed: list[Site] = []
    try:
        for number, site in enumerate(found.sites):
            with torch.random.fork_rng(devices=[]):  # attaching must not move anybody's random stream
                gated = last or number < len(found.sites) - 1
                gate = GatedSRP(site.num_heads, delta=delta, hidden_dim=hidden_dim).to(place) if gated else None
            site.install(gate, neighbourhood)
            installed.append(site)
    except UserError:
        for site in reversed(installed):
            site.remove()
        raise
    handle = Handle(model, found.sites, neighbourhood, {"delta": delta, "hidden_dim": hidden_dim, "window": window})
    model.__dict__["_gated_srp"] = handle
    return handle


def handle_of(model: nn.Module) -> Handle:
    """The handle of an attached model, for copies and unpickled models."""
    handle = model.__dict__.get("_gated_srp")
    if not isinstance(handle, Handle):
        raise UserError(f"{type(model).__name__}: nothing is attached to it. Call attach(model) first.")
    return handle


def _find(model: nn.Module, grid: tuple[int, int] | None, adapters: Adapters | None) -> Found:
    if adapters is not None:
        return Found(_named(model, adapters))
    if (trunk := huggingface.root(model)) is not None:
        return huggingface.find(model, trunk, grid)
    if (trunk := timm.root(model)) is not None:
        return timm.find(model, trunk, grid)
    sites: list[Site] = list(torch_mha.find(model))
    if not sites:
        raise UserError(
            f"attach({type(model).__name__}): no attention was found (nn.MultiheadAttention, a Hugging Face or a timm vision transformer). Name yours: "
            "attach(model, adapters={AttentionClass: adapter}) with adapter(module, *inputs) -> (y, v, finish), or call GatedSRP yourself."
        )
    return Found(sites)


def _named(model: nn.Module, adapters: Adapters) -> list[Site]:
    """The modules that the user named, by name or class, in the order of registration."""
    sites: list[Site] = []
    used = set()
    for name, module in model.named_modules():
        for key, adapter in adapters.items():
            if name == key or (isinstance(key, type) and isinstance(module, key)):
                used.add(key)
                heads = _heads(name, module)
                make = TapSite(name, module, heads, adapter) if isinstance(adapter, Taps) else None
                sites.append(make or AdapterSite(name, module, heads, adapter))  # type: ignore[arg-type]
                break
    if missing := [key for key in adapters if key not in used]:
        names = ", ".join(name for name, _ in list(model.named_modules())[1:9])
        raise UserError(
            f"adapters: {missing[0]!r} is no module of {type(model).__name__}. Its modules begin with: {names}."
        )
    return sites


def _heads(name: str, module: nn.Module) -> int:
    for attribute in ("num_heads", "n_heads", "heads", "num_attention_heads"):
        if isinstance(getattr(module, attribute, None), int):
            return int(getattr(module, attribute))
    raise UserError(
        f"{name}: the number of heads is not known. Set it before attach: model.get_submodule({name!r}).num_heads = ..."
    )


def _check(model: nn.Module, grid: tuple[int, int] | None, delta: float, hidden_dim: int) -> None:
    if "_gated_srp" in model.__dict__:
        raise UserError(
            f"{type(model).__name__}: Gated SRP is attached already. handle.detach() first, or use handle_of(model)."
        )
    if not delta > 0 or hidden_dim < 1:
        raise UserError(
            f"attach: delta is {delta}, hidden_dim {hidden_dim}; expected a positive range and at least one hidden unit."
        )
    if grid is not None and (len(grid) != 2 or min(grid) < 1):
        raise UserError(f"attach: grid is {grid}, expected (height, width) in patches.")
