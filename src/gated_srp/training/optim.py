"""What is trained and how: AdamW as the paper sets it, the learning rate of each step, start weights, frozen trunks."""

import hashlib
import inspect
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from gated_srp.errors import UserError
from gated_srp.models import SlideModel
from gated_srp.srp import Coefficient, Direction


def gate_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Names and parameters of every gate, of an axis that learns too."""
    for name, module in model.named_modules():
        if isinstance(module, Coefficient | Direction):
            yield from module.named_parameters(prefix=name)


def parameter_groups(model: nn.Module, weight_decay: float, *, gate_lr: float = 1.0) -> list[dict[str, object]]:
    """All of the trunk decays, biases and norms too; of a gate the weights decay, the biases don't. Frozen ones are left out.

    ``gate_lr`` other than 1 gives the gates groups of their own, with the key ``lr_factor``.
    """
    gates = {name for name, _ in gate_parameters(model)}
    trained = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    apart = gates if gate_lr != 1 else set()
    factor = {"lr_factor": gate_lr} if gate_lr != 1 else {}

    def of(names: Callable[[str], bool]) -> list[nn.Parameter]:
        return [parameter for name, parameter in trained if names(name)]

    biases = {name for name in gates if name.endswith("bias")}
    groups: list[dict[str, object]] = [
        {"params": of(lambda name: name not in biases | apart), "weight_decay": weight_decay},
        {"params": of(lambda name: name in apart - biases), "weight_decay": weight_decay, **factor},
        {"params": of(lambda name: name in biases), "weight_decay": 0.0, **factor},
    ]
    return [group for group in groups if group["params"]]


class AdamW(torch.optim.AdamW):
    """PyTorch's, without the import of its compiler, which takes as long as the import of PyTorch itself.

    Some methods import it on their first call, only to keep themselves from being compiled. Nothing is compiled here.
    A version of PyTorch that does so otherwise gets the plain methods, and the import.
    """

    def __init__(self, groups: list[dict[str, object]], **settings: Any) -> None:
        for name in ("add_param_group", "load_state_dict", "state_dict"):
            method = getattr(torch.optim.Optimizer, name)
            plain = inspect.unwrap(method)
            looks = "__dynamo_disable" in getattr(getattr(method, "__code__", None), "co_consts", ())
            if looks and plain is not method and not hasattr(plain, "__dynamo_disable"):
                setattr(plain, "__dynamo_disable", plain)
        super().__init__(groups, **settings)

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        """One update of all parameters from their gradients."""
        inspect.unwrap(torch.optim.AdamW.step)(self)


def make_optimiser(model: nn.Module, *, lr: float, weight_decay: float, gate_lr: float = 1.0) -> AdamW:
    """AdamW (0.9, 0.999) over the parameter groups of a model that is on its device."""
    fused = all(p.device.type in ("cpu", "cuda") for p in model.parameters())
    return AdamW(parameter_groups(model, weight_decay, gate_lr=gate_lr), lr=lr, betas=(0.9, 0.999), fused=fused)


def flat_gradients(model: nn.Module) -> Tensor:
    """One buffer of zeros of which each trained parameter's gradient is a view.

    Backward then adds to memory that no two parameters share: it may otherwise hand one tensor to several of them, which a second
    backward, or clipping, would change several times. It is also what several ranks sum, in one call.
    """
    trained = [p for p in model.parameters() if p.requires_grad]
    flat = torch.zeros(sum(p.numel() for p in trained), device=trained[0].device, dtype=trained[0].dtype)
    for parameter, part in zip(trained, flat.split([p.numel() for p in trained]), strict=True):
        parameter.grad = part.view_as(parameter)
    return flat


def learning_rate(step: int, total: int, *, lr: float, warmup: float = 0.05) -> float:
    """Of optimiser step ``step`` (from 0) of ``total``: linear up in W = max(1, floor(warmup * total)) steps, then cosine to 0.

    >>> [round(learning_rate(s, 40, lr=1.0), 3) for s in (0, 1, 2, 21, 39)]
    [0.5, 1.0, 1.0, 0.5, 0.002]
    """
    rising = max(1, math.floor(warmup * total))
    if step < rising:
        return lr * (step + 1) / rising
    return lr * 0.5 * (1 + math.cos(math.pi * (step - rising) / (total - rising)))


# Start weights -------------------------------------------------------------------------------------------------------


def file_hash(path: Path) -> str:
    """SHA-256 of a file of start weights."""
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        cure = "Expected a model file or checkpoint."
        raise UserError(f"cannot be read ({error.strerror})", where=f"--init {path}", cure=cure) from None


def start_weights(model: SlideModel, checkpoint: Path, *, all_of_trunk: bool) -> list[str]:
    """Copy a model file's weights (model.safetensors, or a published checkpoint) into a model; notes on what was not copied.

    Gates that the file lacks start anew, and so do a head of another width and weights of covariates unless ``all_of_trunk``.
    """
    from gated_srp.models import load_model, load_published

    found = (load_model if checkpoint.suffix == ".safetensors" else load_published)(checkpoint)
    source, own = found.state_dict(), model.state_dict()
    if found.settings.get("masked"):  # its head predicts features: of as many classes it would fit by chance
        source = {name: one for name, one in source.items() if not name.startswith("head.")}
    gates = {name for name, _ in gate_parameters(model)}
    fresh = [name for name in own if name not in source or source[name].shape != own[name].shape]
    allowed = gates if all_of_trunk else gates | {name for name in own if name.startswith(("head.", "covariates."))}
    if wrong := [name for name in fresh if name not in allowed]:
        there = tuple(source[wrong[0]].shape) if wrong[0] in source else "missing"
        raise UserError(
            f"does not fit this model: {wrong[0]} is {there}, expected {tuple(own[wrong[0]].shape)}",
            where=f"--init {checkpoint}",
            cure="Use a checkpoint of the same encoder, trunk and sizes, or set `model` to its sizes.",
        )
    model.load_state_dict({name: own[name] if name in fresh else source[name] for name in own})
    unused = [name for name in source if name not in own]
    notes = [f"start weights from {checkpoint}: {len(own) - len(fresh)} of {len(own)} tensors"]
    notes += [f"started anew, since the file has none that fit: {', '.join(fresh)}"] if fresh else []
    return notes + ([f"not used of the file: {', '.join(unused)}"] if unused else [])


def freeze_all_but_gates(model: nn.Module, arm: str) -> None:
    """``train.only: gate``: the trunk stays as it is."""
    gates = dict(gate_parameters(model))
    if not gates:
        cure = "Choose an arm such as gated_srp."
        raise UserError(f"train.only: gate, but arm {arm!r} has no gate to fit", cure=cure)
    model.requires_grad_(False)
    for parameter in gates.values():
        parameter.requires_grad_(True)
