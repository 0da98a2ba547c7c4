"""What the gates did in an epoch: statistics of beta over heads and patches of each training bag, averaged over the bags.

Shapes: G gates, B bags of a forward, L rows, H heads, N patches.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from gated_srp.srp import PatchGraph, SignedGate, range_free

# Regimes: <= -0.5 adds to the common part, around 0 leaves it, 0.5 to 1.5 removes it, > 1.5 turns it round.
STATISTICS = ("mean", "std", "share_anti", "share_identity", "share_projection", "share_reflection", "share_negative")
COLUMNS = ("epoch", "layer", *STATISTICS, "mean_over_delta")


def summary(beta: Tensor) -> Tensor:
    """The `STATISTICS` of each bag's coefficients, (..., H, N) -> (..., 7), on their device."""
    beta = beta.detach().float().flatten(-2)  # (..., H * N)
    parts = (beta <= -0.5, (beta > -0.5) & (beta < 0.5), (beta >= 0.5) & (beta <= 1.5), beta > 1.5, beta < 0)
    shares = [part.float().mean(-1) for part in parts]
    return torch.stack([beta.mean(-1), beta.std(-1, correction=0), *shares], -1)


class GateRecorder:
    """Sums the summaries of every gate over training forwards, through hooks and without asking the device for a value.

    Call `next_bag` before each training forward: recomputation by activation checkpointing is not counted again.
    """

    def __init__(self, model: nn.Module) -> None:
        found = [(number, block.correction.coefficient) for number, block in _corrected(model)]
        gates = [(number, gate) for number, gate in found if isinstance(gate, SignedGate)]
        self.layers = [number for number, _ in gates]
        self.deltas = [2.0 if gate.bound is range_free else gate.delta for _, gate in gates]
        self._sums: list[Tensor | None] = [None] * len(gates)
        self._open: set[int] = set()
        self._handles = [gate.register_forward_hook(self._hook(i)) for i, (_, gate) in enumerate(gates)]

    def next_bag(self) -> None:
        """The next forward of each gate counts."""
        self._open = set(range(len(self.layers)))

    def take(self, device: torch.device | str = "cpu") -> Tensor:
        """The sums since the last call, (G, 7)."""
        self._open = set()
        none = torch.zeros(0, len(STATISTICS), device=device)
        sums = [none.new_zeros(1, len(STATISTICS)) if s is None else s.to(device)[None] for s in self._sums]
        self._sums = [None] * len(self._sums)
        return torch.cat([none, *sums])

    def rows(self, epoch: int, sums: Tensor, bags: int) -> list[list[float]]:
        """Rows of gates.csv (`COLUMNS`) for an epoch's sums over this many bags."""
        means = (sums / bags).tolist()
        return [
            [epoch, layer, *values, values[0] / delta]
            for layer, delta, values in zip(self.layers, self.deltas, means, strict=True)
        ]

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()

    def _hook(self, place: int) -> Callable[..., None]:
        def record(module: nn.Module, args: tuple[Any, ...], beta: Tensor) -> None:
            if place not in self._open:
                return
            self._open.discard(place)
            graph: PatchGraph = args[2]
            heads = beta.view(graph.num_bags, -1, beta.shape[-1]).transpose(1, 2)  # (B, H, L), of one length
            found = summary(heads[..., graph.before : graph.before + max(graph.lengths)]).sum(0)
            before = self._sums[place]
            self._sums[place] = found if before is None else before + found

        return record


def _corrected(model: nn.Module) -> list[tuple[int, Any]]:
    blocks = getattr(model, "blocks", ())
    return [(number, block) for number, block in enumerate(blocks) if getattr(block, "correction", None) is not None]
