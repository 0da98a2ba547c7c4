"""Small foreign models with random weights, and what must hold for every one of them.

The checks are plain functions: pytest runs them here for torch and transformers, and a subprocess runs them for timm.
"""

import copy
import pickle
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from gated_srp import PatchGraph, attach, trace
from gated_srp.foreign import handle_of
from gated_srp.models.attention import DenseAttention
from gated_srp.models.block import Block
from gated_srp.srp import GatedSRP

WIDTH, HEADS = 32, 4


@dataclass
class Case:
    """A model, how it is called and what `attach` should find."""

    name: str
    make: Callable[[], nn.Module]
    inputs: dict[str, torch.Tensor]
    output: Callable[[Any], torch.Tensor]
    gates: list[bool]  # which layers are corrected
    front: int
    grid: tuple[int, int] | None = None
    graph: PatchGraph | None = None
    settings: dict[str, Any] = field(default_factory=dict)

    def model(self) -> nn.Module:
        """Weights large enough that attention is far from uniform."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model = self.make().eval()
            with torch.no_grad():
                for p in model.parameters():
                    p.add_(0.15 * torch.randn_like(p))
        return model

    def attach(self, model: nn.Module) -> Any:
        handle = attach(model, hidden_dim=8, delta=1.5, **self.settings)
        if self.graph is not None:
            handle.set_graph(self.graph, stay=True)
        return handle

    def attached(self) -> tuple[nn.Module, Any]:
        """A model with trained gates."""
        model = self.model()
        handle = self.attach(model)
        wake(handle)
        return model, handle

    def __call__(self, model: nn.Module, **changes: Any) -> torch.Tensor:
        return self.output(model(**{**self.inputs, **changes}))

    def first(self) -> tuple[str, torch.Tensor]:
        return next(iter(self.inputs.items()))


def wake(handle: Any) -> None:
    draw = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for p in handle.parameters():
            p.copy_(0.5 * torch.randn(p.shape, generator=draw))


@contextmanager
def slow_path() -> Iterator[None]:
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


def skeleton(model: nn.Module) -> list[Any]:
    """All that a detached model must have back: names, plain attributes, hooks."""
    seen = []
    for name, module in model.named_modules():
        plain = {k: v for k, v in vars(module).items() if isinstance(v, str | int | float | bool | type(None))}
        hooks = [len(v) for k, v in sorted(vars(module).items()) if k.endswith("_hooks") and isinstance(v, dict)]
        seen.append((name, type(module), plain, hooks, sorted(vars(module))))
        if hasattr(module, "config"):
            seen.append(module.config._attn_implementation)
    return seen


def check_outputs_are_bit_equal_before_training(case: Case) -> None:
    model = case.model()
    with slow_path():
        plain = case(model)
        with torch.no_grad():
            still = case(model)
    handle = case.attach(model)
    assert [site.module.correction is not None for site in handle.sites] == case.gates
    assert torch.equal(case(model), plain)
    with torch.no_grad():
        assert torch.equal(case(model), still)


def check_original_checkpoints_load_strictly(case: Case) -> None:
    model = case.model()
    before = copy.deepcopy(model.state_dict())
    handle = case.attach(model)
    wake(handle)
    gates = [p.clone() for p in handle.parameters()]
    with torch.no_grad():
        for p in model.parameters():
            if not any(p is q for q in handle.parameters()):
                p.zero_()
    model.load_state_dict(before, strict=True)
    assert all(torch.equal(model.state_dict()[name], value) for name, value in before.items())
    assert all(torch.equal(a, b) for a, b in zip(gates, handle.parameters(), strict=True))
    full = copy.deepcopy(model.state_dict())
    other, _ = case.attached()
    other.load_state_dict(full, strict=True)
    assert torch.equal(case(other), case(model))


def check_detach_restores(case: Case) -> None:
    model = case.model()
    before, plain, names = skeleton(model), case(model), list(model.state_dict())
    handle = case.attach(model)
    wake(handle)
    with torch.no_grad():
        assert not torch.allclose(case(model), plain, atol=1e-3)
    handle.detach()
    assert skeleton(model) == before and list(model.state_dict()) == names
    assert torch.equal(case(model), plain)
    case.attach(model)  # and again


def check_gradients_reach_the_gates(case: Case) -> None:
    model, handle = case.attached()
    model.requires_grad_(False)
    for p in handle.parameters():
        p.requires_grad_(True)
    case(model).square().sum().backward()
    grads = {name: p.grad for name, p in handle.named_parameters()}
    assert len(grads) == 7 * sum(case.gates)
    assert all(g is not None and g.abs().max() > 0 for g in grads.values()), grads
    # Of the last gate alone: gradients do not flow through what later gates measure, finite differences would.
    name, p = [(n, p) for n, p in handle.named_parameters() if n.endswith("layer_head_bias")][-1]
    with torch.no_grad():
        step = torch.zeros_like(p)
        step[1] = 1e-2
        p.add_(step)
        up = case(model).square().sum()
        p.sub_(2 * step)
        down = case(model).square().sum()
    slope = float(up - down) / 2e-2
    assert abs(slope - float(grads[name][1])) <= 2e-2 * abs(slope) + 1e-3, (slope, grads[name][1])


def check_autocast(case: Case) -> None:
    model = case.model()
    with torch.autocast("cpu", torch.bfloat16):
        plain = case(model)
    handle = case.attach(model)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(case(model), plain)
    wake(handle)
    full = case(model)
    with torch.autocast("cpu", torch.bfloat16):
        half = case(model)
    assert torch.isfinite(half).all() and (half - full).abs().mean() <= 0.1 * full.abs().mean()
    half.float().square().sum().backward()
    assert all(torch.isfinite(p.grad).all() and p.grad.dtype == torch.float32 for p in handle.parameters())


def check_compile(case: Case) -> None:
    model, handle = case.attached()
    plain = case(model)
    plain.square().sum().backward()
    grads = [p.grad.clone() for p in handle.parameters()]
    model.zero_grad()
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="aot_eager")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The .grad attribute")  # dynamo's own look at tensors between two graphs
        out = case(compiled)
        torch.testing.assert_close(out, plain, atol=1e-4, rtol=1e-4)
        out.square().sum().backward()
    for p, grad in zip(handle.parameters(), grads, strict=True):
        torch.testing.assert_close(p.grad, grad, atol=1e-3, rtol=1e-3)


def check_activation_checkpointing(case: Case) -> None:
    model, handle = case.attached()
    key, value = case.first()
    one = value.clone().requires_grad_()
    case(model, **{key: one}).square().sum().backward()
    grads = [p.grad.clone() for p in handle.parameters()]
    model.zero_grad()
    two = value.clone().requires_grad_()
    checkpoint(lambda x: case(model, **{key: x}), two, use_reentrant=False).square().sum().backward()
    torch.testing.assert_close(two.grad, one.grad)
    for p, grad in zip(handle.parameters(), grads, strict=True):
        torch.testing.assert_close(p.grad, grad)


def check_copies(case: Case) -> None:
    model, handle = case.attached()
    out = case(model)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(case(twin), out)
        own = handle_of(twin)
        assert own is not handle and own.model is twin
        with torch.no_grad():
            for p in own.parameters():
                p.zero_()
        assert torch.equal(case(model), out) and not torch.equal(case(twin), out)
        own.detach()
        assert not hasattr(own.model, "_gated_srp")
        assert torch.equal(case(model), out)


def check_trace(case: Case) -> None:
    model, _ = case.attached()
    with trace(model) as seen:
        out = case(model)
    assert torch.equal(case(model), out)
    assert [layer.beta is not None for layer in seen] == case.gates
    for layer in seen:
        assert (layer.cls_attention is None) == (case.front == 0)
        if layer.cls_attention is not None:
            total = layer.cls_attention.sum(-1)
            assert (layer.cls_attention >= 0).all() and (total > 0).all() and (total < 1).all()
        if layer.beta is not None:
            assert layer.beta.abs().max() <= 1.5 and layer.correction.abs().max() > 0


def check_gate_files(case: Case, folder: Any) -> None:
    model, handle = case.attached()
    out = case(model)
    path = folder / f"{case.name}.safetensors"
    handle.save(path)
    fresh = case.model()
    other = case.attach(fresh)
    assert not torch.equal(case(fresh), out)
    other.load(path)
    assert torch.equal(case(fresh), out)


CHECKS = [
    check_outputs_are_bit_equal_before_training,
    check_original_checkpoints_load_strictly,
    check_detach_restores,
    check_gradients_reach_the_gates,
    check_activation_checkpointing,
    check_copies,
    check_trace,
]


@dataclass
class Weights:
    """One pre-norm block in the terms of our own: (weight, bias) of each part."""

    norm1: nn.Module
    qkv: list[tuple[torch.Tensor, torch.Tensor]]
    proj: nn.Module
    norm2: nn.Module
    fc1: nn.Module
    fc2: nn.Module


def our_block(parts: Weights, correction: GatedSRP | None) -> Block:
    block = Block(WIDTH, DenseAttention(WIDTH, HEADS), correction=correction)
    with torch.no_grad():
        block.attn.qkv.weight.copy_(torch.cat([w for w, _ in parts.qkv]))
        block.attn.qkv.bias.copy_(torch.cat([b for _, b in parts.qkv]))
    pairs = (block.norm1, parts.norm1), (block.norm2, parts.norm2), (block.attn.proj, parts.proj)
    for ours, theirs in (*pairs, (block.mlp.fc1, parts.fc1), (block.mlp.fc2, parts.fc2)):
        ours.load_state_dict(theirs.state_dict())
        if isinstance(ours, nn.LayerNorm):
            ours.eps = theirs.eps
    return block.eval()


def check_equals_our_own_blocks(
    case: Case, model: nn.Module, blocks: list[Any], parts: Callable[[Any], Weights]
) -> None:
    """Tokens in and out of the foreign blocks, against `Block` with the same weights on the graph that the paper asks for."""
    seen: list[tuple[torch.Tensor, torch.Tensor]] = []

    def watch(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        tokens = args[0] if args else kwargs["hidden_states"]
        seen.append((tokens.detach(), (out[0] if isinstance(out, tuple) else out).detach()))

    hooks = [block.register_forward_hook(watch, with_kwargs=True) for block in blocks]
    case(model)
    for hook in hooks:
        hook.remove()
    tokens = seen[0][0]
    if case.grid is None:
        graph = case.graph.with_isolated(before=case.front)
    else:
        graph = PatchGraph.batch([PatchGraph.from_grid(*case.grid)] * len(tokens)).with_isolated(before=case.front)
        graph = graph.with_features(tokens.flatten(0, 1))
    corrections = [site.module.correction for site in handle_of(model).sites]
    assert any(c is not None for c in corrections)
    for block, correction, (before, after) in zip(blocks, corrections, seen, strict=True):
        torch.testing.assert_close(our_block(parts(block), correction)(before, graph), after, atol=3e-5, rtol=3e-5)
