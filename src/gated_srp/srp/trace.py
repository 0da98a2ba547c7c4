"""See what the layers did: ``with trace(model) as seen: model(features, graph)``, then ``seen[0].beta`` and so on; and ask what if
gates gave another beta: ``with set_gates(model, 0.0): model(features, graph)``.

Everything comes through hooks that live as long as the `with`: modules keep no memory.
"""

from collections.abc import Container, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gated_srp.srp.coefficient import regimes
from gated_srp.srp.graph import PatchGraph
from gated_srp.srp.module import GatedSRP


@dataclass
class LayerTrace:
    """One attention layer, patch columns alone: (H, N) for one bag, (B, H, N) for several; None where there is no such thing.

    ``beta``: the coefficient of every patch, lone ones too. ``correction``: |beta <y, r_hat>|, the length of what was removed.
    ``cls_attention``: raw attention of CLS to the patches.
    """

    beta: Tensor | None = None
    correction: Tensor | None = None
    cls_attention: Tensor | None = None


@contextmanager
def trace(model: nn.Module, *, attention: Container[int] | bool = True) -> Iterator[Sequence[LayerTrace]]:
    """Record the first forward inside the `with`, one `LayerTrace` per layer.

    ``attention``: layers (from 0) whose attention map is wanted, or all, or none: each costs time and memory.

    A layer is a module with a ``correction`` (a GatedSRP or None) and a method ``cls_attention`` with the arguments of its forward.
    Recomputation by activation checkpointing is not recorded again. Hooks are blind to a model compiled before.
    """
    layers = _layers(model)
    seen = [LayerTrace() for _ in layers]
    calls = 0
    handles = []

    def watch(layer: nn.Module, record: LayerTrace, mapped: bool) -> None:
        done = False
        parts: list[
            tuple[Tensor, Tensor, PatchGraph]
        ] = []  # beta and correction: a gate may be asked some rows at a time

        def on_layer(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], _: Any) -> None:
            nonlocal calls, done
            calls += 1
            if mapped and not done:
                with torch.no_grad():
                    record.cls_attention = module.cls_attention(*args, **kwargs)
            if parts and not done and any(parts[0][2].lengths):  # a last block corrects CLS alone
                betas, corrections, graphs = zip(*parts, strict=True)
                record.beta, record.correction = (_columns(torch.cat(rows), graphs[0]) for rows in (betas, corrections))
            done = True

        def on_gate(_: Any, args: tuple[Any, ...], beta: Tensor) -> None:
            component, _norm, graph = args
            if not done:
                beta, component = beta.detach(), component.detach()
                parts.append((beta, (beta * component).abs(), graph))

        handles.append(layer.register_forward_hook(on_layer, with_kwargs=True))
        for gate in _gates(layer):
            handles.append(gate.coefficient.register_forward_hook(on_gate))

    for number, (layer, record) in enumerate(zip(layers, seen, strict=True)):
        watch(layer, record, attention if isinstance(attention, bool) else number in attention)
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()
    if not calls:
        raise RuntimeError(
            f"trace: none of the {len(layers)} layers of {type(model).__name__} was called. Call the model inside the `with`, and trace it "
            "before torch.compile: hooks added to a compiled model never fire."
        )


@contextmanager
def set_gates(
    model: nn.Module,
    beta: float,
    *,
    layers: Container[int] | None = None,
    patches: Tensor | None = None,
    regime: str | None = None,
) -> Iterator[None]:
    """Inside the `with`, gates of ``model`` give ``beta`` instead of what they learned: a what-if of one bag at a time.

    ``layers``: of these layers alone (from 0, as `trace` counts them). ``patches`` (N,) bool: of these patches alone.
    ``regime``: only where the learned beta is in this one of `regimes`. All three together narrow it further.
    With beta 0 everywhere the model computes exactly what it computes without any correction.
    """
    handles = []

    def watch(layer: nn.Module, coefficient: nn.Module) -> None:
        row = 0  # a gate may be asked some rows at a time, in their order

        def on_layer(*_: Any) -> None:
            nonlocal row
            row = 0

        def on_gate(_: Any, args: tuple[Any, ...], learned: Tensor) -> Tensor:
            nonlocal row
            chosen = torch.ones_like(learned, dtype=torch.bool)  # (rows, H)
            if patches is not None:
                graph: PatchGraph = args[2]
                inside = F.pad(graph.rows_of(patches.to(learned.device)), (0, row + len(learned)))
                chosen &= inside[row : row + len(learned), None]
                row += len(learned)
            if regime is not None:
                chosen &= regimes(learned)[regime]
            return torch.where(chosen, beta, learned)

        handles.append(layer.register_forward_pre_hook(on_layer))
        handles.append(coefficient.register_forward_hook(on_gate))

    for number, layer in enumerate(_layers(model)):
        for gate in _gates(layer) if layers is None or number in layers else ():
            watch(layer, gate.coefficient)
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _layers(model: nn.Module) -> list[nn.Module]:
    return [m for m in model.modules() if hasattr(m, "correction") and hasattr(m, "cls_attention")]


def _gates(layer: nn.Module) -> list[GatedSRP]:
    """The layer's, if it has one; of several, where a library such as peft keeps copies of it, only one is called."""
    found = layer.correction.modules() if isinstance(layer.correction, nn.Module) else ()
    return [module for module in found if isinstance(module, GatedSRP)]


def _columns(rows: Tensor, graph: PatchGraph) -> Tensor:
    """(B * L, H) -> patch columns of (B, H, L)."""
    return graph.patches(rows.view(graph.num_bags, -1, rows.shape[-1]).transpose(1, 2))
