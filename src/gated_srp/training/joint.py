"""Windows whose loss is of all their bags together (Cox's partial likelihood), with the memory of one bag.

Shapes: n bags of a window, K outputs.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from gated_srp.data.loader import SlideBag
from gated_srp.training.loop import Callbacks, Training, batches, error_context, training_step


def accumulate_jointly(
    training: Training, window: Sequence[int], bags: Iterator[SlideBag], callbacks: Callbacks
) -> Tensor:
    """As `accumulate` for a loss of the whole window L(x_1 ... x_n): first all outputs x_i without gradients, then each bag again with
    its dL/dx_i. The gradient is that of all bags at once, with the memory of one."""
    ranks, targets = training.ranks, training.loader.dataset.targets
    assert targets is not None
    outputs = torch.zeros(len(window), training.task.num_outputs, device=ranks.device)
    losses = torch.zeros(len(window), device=ranks.device)

    def seen(logits: Tensor, target: Tensor) -> Tensor:
        outputs[places] = logits.detach().float().reshape(-1, outputs.shape[1])
        return logits.sum() * 0

    def sloped(logits: Tensor, target: Tensor) -> Tensor:
        return (logits.float().reshape(-1, outputs.shape[1]) * slope[places]).sum()

    for places, batch in batches(ranks, bags, len(window), size=training.batch, pack=training.pack):  # noqa: B007 (read by seen)
        with error_context(batch, training.settings), torch.no_grad():
            training_step(training, batch, loss=seen, recorded=False)
    ranks.sum(outputs)
    outputs.requires_grad_()
    loss = training.task.training_loss(outputs, targets[list(window)].to(ranks.device))
    (slope,) = torch.autograd.grad(loss, outputs)
    for places, batch in batches(ranks, bags, len(window), size=training.batch, pack=training.pack):
        with error_context(batch, training.settings):
            training_step(training, batch, loss=sloped).backward()
        losses[places] = loss.detach().float()
        for bag in batch:
            callbacks.bag(bag)
    return losses
