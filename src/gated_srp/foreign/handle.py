"""`attach`: one call that puts Gated SRP into somebody else's model, and the handle that it returns."""

import json
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn

from gated_srp.errors import UserError, counted
from gated_srp.files import read_tensors, write_tensors
from gated_srp.foreign import huggingface, timm, torch_mha
from gated_srp.foreign.neighbourhood import Neighbourhood
from gated_srp.foreign.site import (
    Adapter,
    AdapterSite,
    Found,
    Site,
    Taps,
    TapSite,
    block_of,
    number_of_heads,
    reads_patches,
)
from gated_srp.srp import GatedSRP, PatchGraph

Adapters = Mapping[str | type[nn.Module], Adapter | Taps]

FORMAT, KIND = 1, "gated-srp gates"  # of a file that `Handle.save` writes
_MARK = ".correction."
_EXPECTED = "Expected what handle.save wrote."


class Handle:
    """What `attach` returns: the graph, the gates and the way back.

    The model holds it too, so a copied or unpickled model has its own: `handle_of(model)`.
    """

    def __init__(
        self, model: nn.Module, sites: list[Site], neighbourhood: Neighbourhood, settings: dict[str, Any]
    ) -> None:
        self.model, self.sites, self.settings = model, sites, settings
        self._neighbourhood, self._trainable = neighbourhood, True
        first = block_of(model, sites[0].name)
        self._hooks = [
            model.register_forward_pre_hook(self._enter_model),
            model.register_forward_hook(self._leave_model, always_call=True),
            first.register_forward_pre_hook(self._enter_first_block, with_kwargs=True),
        ]

    def set_graph(self, graph: PatchGraph, *, stay: bool = False) -> None:
        """The graph of the next forward: of the patches alone, in the order of the model's rows (`PatchGraph.batch` for several bags).

        Rows in front that it does not cover (CLS, registers) are rows without neighbours, as many in every forward; for
        padding behind, extend it with ``graph.with_isolated(after=...)``. ``stay``: it serves until another one is set, for
        several forwards of the same patches. Recomputation by activation checkpointing is part of its forward.
        """
        self._neighbourhood.set_graph(graph, stay=stay)

    def set_grid(self, height: int, width: int) -> None:
        """Images of another size than the model's config says: a full grid whose homogeneity is measured on the tokens."""
        self._neighbourhood.set_grid(height, width)

    def gates(self) -> dict[str, GatedSRP]:
        """Name of the attention layer -> its correction."""
        found = {site.name: site.module.correction for site in self.sites}
        return {name: _unwrapped(gate) for name, gate in found.items() if gate is not None}

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        for layer, gate in self.gates().items():
            for name, parameter in gate.named_parameters():
                yield f"{layer}.{name}".lstrip("."), parameter

    def parameters(self) -> Iterator[nn.Parameter]:
        """The gates alone. They are also among the model's own parameters."""
        return (parameter for _, parameter in self.named_parameters())

    def param_groups(self, weight_decay: float, *, lr: float | None = None) -> list[dict[str, Any]]:
        """For an optimiser: weights of the gates decay, their biases do not, as in the paper; ``lr``: the gates' own, if any."""
        named, rate = list(self.named_parameters()), {} if lr is None else {"lr": lr}
        return [
            {"params": [p for n, p in named if not n.endswith("bias")], "weight_decay": weight_decay, **rate},
            {"params": [p for n, p in named if n.endswith("bias")], "weight_decay": 0.0, **rate},
        ]

    def requires_grad_(self, trainable: bool = True) -> Self:
        """Thaw the gates (after peft or a frozen trunk froze them too) or freeze them on purpose."""
        self._trainable = trainable
        for parameter in self.parameters():
            parameter.requires_grad_(trainable)
        return self

    def save(self, path: str | Path) -> None:
        """The gates alone: a safetensors file with a card of their settings."""
        write_tensors(Path(path), dict(self.named_parameters()), {"format": FORMAT, "kind": KIND, **self.card()})

    def load(self, path: str | Path) -> None:
        """Gates that `save` wrote, or a folder of Hugging Face's save_pretrained; same architecture, same settings.

        Nothing is changed where they do not fit.
        """
        path, ours, gates = Path(path), self.card(), dict(self.named_parameters())
        theirs, tensors = _gates_of_folder(path, ours["layers"]) if path.is_dir() else _gates_of_file(path)
        for key, value in ours.items():
            if theirs.get(key) != value:
                what = f"saved with {key} {theirs.get(key)}, this model has {value}"
                raise UserError(what, where=path, cure="Attach with the same settings.")
        if {n: t.shape for n, t in tensors.items()} != {n: t.shape for n, t in gates.items()}:
            what = "its tensors do not fit the gates of this model"
            raise UserError(what, where=path, cure="Expected gates of the same architecture.")
        with torch.no_grad():
            for name, gate in gates.items():
                gate.copy_(tensors[name])

    def detach(self) -> None:
        """Give the model back as it was: no gates, no hooks, its own attention."""
        for hook in self._hooks:
            hook.remove()
        for site in reversed(self.sites):
            site.remove()
        self.sites = []
        self.model.__dict__.pop("_gated_srp", None)

    def card(self) -> dict[str, Any]:
        """What a file of these gates says of them."""
        return {**self.settings, "layers": list(self.gates())}

    def _enter_model(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        if getattr(module, "_is_replica", False):
            what = "nn.DataParallel splits a batch among threads that would share one graph"
            cure = "Use torch.nn.parallel.DistributedDataParallel, one process per device."
            raise UserError(what, where=f"attach({type(module).__name__})", cure=cure)
        if module.training and not torch.compiler.is_compiling():
            self._warn_of_frozen_gates()
        self._neighbourhood.enter_model()

    def _leave_model(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        self._neighbourhood.leave_model()

    def _enter_first_block(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._neighbourhood.enter_first_block()
        if self._neighbourhood.measured:
            tokens = self.sites[0].tokens(args, kwargs)
            if tokens is not None:
                self._neighbourhood.observe(tokens)

    def _warn_of_frozen_gates(self) -> None:
        """peft and a trunk frozen after `attach` freeze the gates too, and training them would do nothing."""
        if not self._trainable or not torch.is_grad_enabled() or any(p.requires_grad for p in self.parameters()):
            return
        self._trainable = False  # said once
        warnings.warn(
            "attach: every gate is frozen (requires_grad is False) although the model is in training mode, so no gate will learn. "
            "Thaw them with handle.requires_grad_(True) after peft or model.requires_grad_(False) and before the optimiser is made; "
            "handle.requires_grad_(False) says that it is meant.",
            stacklevel=2,
        )


def attach(
    model: nn.Module,
    *,
    grid: tuple[int, int] | None = None,
    front: int | None = None,
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
    them from an image model's config, and other models wait for ``handle.set_graph(graph)``. ``front``: rows of CLS and registers
    before the patches; None takes them from the config, or else from the first forward, and they are fixed from then on.
    ``last``: whether the last layer is corrected; None looks whether the head reads CLS alone (no gate) or patches too.

    >>> from torch.nn import TransformerEncoder, TransformerEncoderLayer
    >>> encoder = TransformerEncoder(TransformerEncoderLayer(48, 6, batch_first=True), 2)
    >>> handle = attach(encoder, last=False)
    >>> [name for name in handle.gates()], sum(p.numel() for p in handle.parameters())
    (['layers.0.self_attn'], 351)
    """
    _check(model, grid, front, delta, hidden_dim, window)
    found = _find(model, grid, adapters)
    if last is None:
        last = reads_patches(found, model)
    if last is None:
        what = "cannot tell whether the head reads CLS alone or pools the patches"
        cure = "Pass last=False (CLS alone: the last layer needs no gate) or last=True (patches are pooled, or all rows are used)."
        raise UserError(what, where=f"attach({type(model).__name__})", cure=cure)
    if None not in (front, found.front) and front != found.front:
        what = f"front is {front}, but the model puts {counted(found.front or 0, 'row')} before the patches"
        raise UserError(what, where=f"attach({type(model).__name__})", cure="Leave front out.")
    neighbourhood = Neighbourhood(window, found.grid or grid, front if found.front is None else found.front)
    place = next((p.device for p in model.parameters()), torch.device("cpu"))
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
    if found.finish is not None:
        found.finish(handle)
    return handle


def handle_of(model: nn.Module) -> Handle:
    """The handle of an attached model, for copies and unpickled models."""
    handle = model.__dict__.get("_gated_srp")
    if not isinstance(handle, Handle):
        raise UserError("nothing is attached to it", where=type(model).__name__, cure="Call attach(model) first.")
    return handle


def _unwrapped(gate: Any) -> GatedSRP:
    """The gate that works where peft keeps copies of it (``modules_to_save``): that of the active adapter, else the one attached."""
    copies = getattr(gate, "modules_to_save", None)
    if copies is None:
        own: GatedSRP = gate
        return own
    active = [name for name in gate.active_adapters if name in copies and not gate.disable_adapters]
    working: GatedSRP = copies[active[0]] if active else gate.original_module
    return working


def _find(model: nn.Module, grid: tuple[int, int] | None, adapters: Adapters | None) -> Found:
    if adapters is not None:
        return Found(_named(model, adapters))
    if (trunk := huggingface.root(model)) is not None:
        return huggingface.find(model, trunk, grid)
    if (trunk := timm.root(model)) is not None:
        return timm.find(model, trunk, grid)
    sites: list[Site] = list(torch_mha.find(model))
    if not sites:
        what = "no attention was found (nn.MultiheadAttention, a Hugging Face or a timm vision transformer)"
        cure = "Name yours: attach(model, adapters={AttentionClass: adapter}) with adapter(module, *inputs) -> (y, v, finish), or call GatedSRP yourself."
        raise UserError(what, where=f"attach({type(model).__name__})", cure=cure)
    return Found(sites)


def _named(model: nn.Module, adapters: Adapters) -> list[Site]:
    """The modules that the user named, by name or class, in the order of registration."""
    sites: list[Site] = []
    used = set()
    for name, module in model.named_modules():
        for key, adapter in adapters.items():
            if name == key or (isinstance(key, type) and isinstance(module, key)):
                used.add(key)
                sites.append(_adapted(name, module, adapter))
                break
    if missing := [key for key in adapters if key not in used]:
        names = ", ".join(name for name, _ in list(model.named_modules())[1:9])
        cure = f"Its modules begin with: {names}." if names else "It has no modules inside."
        raise UserError(f"{missing[0]!r} is no module of {type(model).__name__}", where="adapters", cure=cure)
    if not sites:
        cure = "Name the attention, {AttentionClass: Taps('qkv', 'proj')}, or leave adapters out to have it found."
        raise UserError("names no module", where="adapters", cure=cure)
    return sites


def _adapted(name: str, module: nn.Module, adapter: Any) -> Site:
    if not isinstance(adapter, Taps) and (not callable(adapter) or isinstance(adapter, type)):
        cure = "Expected Taps(values, heads) or a function (module, *inputs) -> (y, v, finish)."
        raise UserError(f"{name!r} is to be reached by {adapter!r}", where="adapters", cure=cure)
    if (heads := number_of_heads(module)) is None:
        cure = f"Set it before attach: model.get_submodule({name!r}).num_heads = ..."
        raise UserError("the number of heads is not known", where=name, cure=cure)
    if isinstance(adapter, Taps):
        return TapSite(name, module, heads, adapter)
    return AdapterSite(name, module, heads, adapter)


def _check(
    model: nn.Module, grid: tuple[int, int] | None, front: int | None, delta: float, hidden_dim: int, window: int
) -> None:
    if not isinstance(model, nn.Module):
        raise UserError(f"got {type(model).__name__}, expected a torch.nn.Module", where="attach")
    if "_gated_srp" in model.__dict__:
        what = "Gated SRP is attached already"
        raise UserError(what, where=type(model).__name__, cure="handle.detach() first, or use handle_of(model).")
    if not delta > 0 or hidden_dim < 1:
        what = f"delta is {delta}, hidden_dim {hidden_dim}; expected a positive range and at least one hidden unit"
        raise UserError(what, where="attach")
    if window < 3 or window % 2 == 0:
        raise UserError(f"window is {window}, expected an odd number from 3 on", where="attach")
    if grid is not None and (len(grid) != 2 or min(grid) < 1):
        raise UserError(f"grid is {grid}, expected (height, width) in patches", where="attach")
    if front is not None and front < 0:
        raise UserError(f"front is {front}, expected the number of rows before the patches", where="attach")


def _gates_of_file(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    card, tensors = read_tensors(path, called="file of gates", cure=_EXPECTED)
    if card.get("kind") != KIND or card.get("format", 0) > FORMAT:
        raise UserError(f"no card of gated-srp gates, format up to {FORMAT}", where=path, cure=_EXPECTED)
    return card, tensors


def _gates_of_folder(folder: Path, layers: list[str]) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Of save_pretrained: the card is in its config, the tensors under whatever names its layers have there."""
    config = folder / "config.json"
    try:
        card = json.loads(config.read_text(encoding="utf-8"))["gated_srp"] if config.is_file() else None
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        card = None
    found: dict[str, Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        found |= read_tensors(path, called="file of gates", cure=_EXPECTED, only=_MARK)[1]
    if not isinstance(card, dict) or not found:
        what = "no gates in this folder (a config.json with 'gated_srp', and tensors of 'correction')"
        cure = "Expected a folder that save_pretrained wrote of an attached model, or a file of handle.save."
        raise UserError(what, where=folder, cure=cure)
    # transformers renames layers on the way to a file and back; their order stays.
    theirs = sorted({name.rpartition(_MARK)[0] for name in found}, key=_natural)
    if len(theirs) != len(layers):
        return card, found
    names = dict(zip(theirs, layers, strict=True))
    split = {name: name.rpartition(_MARK) for name in found}
    return card, {f"{names[layer]}.{rest}": found[name] for name, (layer, _, rest) in split.items()}


def _natural(name: str) -> list[Any]:
    return [int(part) if part.isdigit() else part for part in name.split(".")]
