"""AdamW as the paper sets it: which parameters decay, and the learning rate of each step."""

import math
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from gated_srp.srp.coefficient import Coefficient


def gate_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Names and parameters of every gate."""
    for name, module in model.named_modules():
        if isinstance(module, Coefficient):
            yield from module.named_parameters(prefix=name)


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, object]]:
    """All of the trunk decays, biases and norms too; of a gate the weights decay, the biases don't. Frozen ones are left out."""
    biases = {name for name, _ in gate_parameters(model) if name.endswith("bias")}
    trained = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for name, p in trained if name not in biases], "weight_decay": weight_decay},
        {"params": [p for name, p in trained if name in biases], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def make_optimiser(model: nn.Module, *, lr: float, weight_decay: float) -> torch.optim.AdamW:
    """AdamW (0.9, 0.999) over the parameter groups of a model that is on its device."""
    fused = all(p.device.type in ("cpu", "cuda") for p in model.parameters())
    return torch.optim.AdamW(parameter_groups(model, weight_decay), lr=lr, betas=(0.9, 0.999), fused=fused)


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
