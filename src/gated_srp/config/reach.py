"""How far gates can move in a training, from its steps and learning rate, and how far they did; and what a run computes.

A gate starts at beta = 0. AdamW moves a weight by at most about the learning rate per step, whatever the size of its gradient, so that warm-up
and cosine over T steps let it travel S = gate_lr lr (T / 2 + 1), for every length of the warm-up. docs/method.md derives it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

from gated_srp.config.cohort import CohortConfig
from gated_srp.errors import Note, counted
from gated_srp.machine import Trunk
from gated_srp.models import ARMS, arm_settings, find_arm

if TYPE_CHECKING:
    import pandas as pd

OUTSIDE = 0.5  # |beta| from which on it is no longer called the identity
# Of docs/evidence; a test compares it with the tables.
EVIDENCE = "on real tissue gate_lr 10 let 24 % of coefficients leave the identity and changed the AUC by +0.001 (95 % interval -0.005 to +0.007)"
REMOVAL = (
    "features_gated_srp_from_1 takes from the features what neighbours share: in generated cohorts whose foci are single patches in a background that varies "
    "slowly it changed the AUC of NA by +0.284 (95 % interval +0.206 to +0.362), on real tissue (BreaKHis) by -0.011 (-0.047 to +0.025); "
    "in generated cohorts whose neighbours share the signal removal by force changed it by -0.099 (-0.131 to -0.066)"
)
FURTHEST = 4  # times the logit of ``beta``: more than in any of those runs, whose median is about 1
_FACTORS = (2, 3, 5, 10, 20, 30, 50, 100)
_INPUTS = (1.0, 1.0, math.log(9.0))  # d_tok inside homogeneous tissue: h_local, m / K, log(1 + m)


@dataclass(frozen=True)
class Reach:
    """How far the mean of beta over a layer goes. ``beta``: where the two biases that a head has to itself carry it, about what half of the
    runs show; ``furthest``: further than any run of docs/evidence went (a test compares); ``limit``: all weights of a gate together, every step one way.
    """

    steps: int
    lr: float
    gate_lr: float
    delta: float
    hidden_dim: int

    @property
    def path(self) -> float:
        """S: what one weight can travel."""
        return self.gate_lr * self.lr * (self.steps / 2 + 1)

    @property
    def beta(self) -> float:
        return self.delta * math.tanh(2 * self.path)

    @property
    def furthest(self) -> float:
        return min(self.delta * math.tanh(2 * FURTHEST * self.path), self.limit)

    @property
    def limit(self) -> float:
        # Three biases, the output weights of the token part, and three weights per head whose inputs are at most about 1.
        return self.delta * math.tanh(self.path * (6 + _activity(self.hidden_dim)))

    @property
    def short(self) -> bool:
        """Whether most gates are expected to stay at the identity, where Gated SRP is the base it is attached to."""
        return self.beta < OUTSIDE * min(1.0, self.delta)

    @property
    def factor(self) -> int | None:
        """The first round ``gate_lr`` with which half of the runs are expected to leave it; None where not even the largest would do."""
        wanted = math.atanh(OUTSIDE * min(1.0, self.delta) / self.delta)
        enough = (one for one in _FACTORS if 2 * one * self.lr * (self.steps / 2 + 1) >= wanted)
        return next(enough, None)

    def __str__(self) -> str:
        return (
            f"{counted(self.steps, 'step')} at lr {self.lr:g}, gate_lr {self.gate_lr:g}: the mean of beta typically goes to about ±{self.beta:.2f}, "
            f"hardly beyond ±{self.furthest:.2f}, of ±{self.delta:g}"
        )

    def note(self, arm: str) -> Note:
        """For `check`, `train` and `compare`; a warning where they will hardly leave the identity."""
        known = f"{EVIDENCE}, see docs/evidence.md."
        if not self.short:
            return Note("note", "reach", f"{arm}: {self}", cure=f"Gates that open need not help: {known}")
        more = f" or train.gate_lr: {self.factor}" if self.factor else ""
        cure = f"More steps (epochs, a smaller accumulation){more} would let them open. That need not help: {known}"
        return Note("warning", "reach", f"{arm}: {self}; expect most gates to stay at the identity", ("train",), cure)


@lru_cache
def _activity(hidden_dim: int) -> float:
    """Sum of |GELU| of the token part's hidden units at `_INPUTS`, for start weights of PyTorch's Linear."""
    import torch

    layer = torch.nn.utils.skip_init(torch.nn.Linear, 3, 4096)
    draw = torch.Generator().manual_seed(0)
    limit = 1 / math.sqrt(3)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.uniform_(-limit, limit, generator=draw)
        hidden = layer(torch.tensor(_INPUTS))
    return hidden_dim * float(torch.nn.functional.gelu(hidden).abs().mean())


def gate_reach(config: CohortConfig, bags: int, row: str) -> Reach | None:
    """Of an arm (or a row of a study) that trains on so many slides; None where no gate starts at 0 and moves by its biases."""
    arm, _ = arm_settings(row)
    gate, train = config.gate(arm), config.train
    if not find_arm(arm).moved_by_biases or train.init:
        return None
    return Reach(train.steps(bags), train.lr, train.gate_lr, gate.delta, gate.hidden_dim)


def unnamed_encoder(config: CohortConfig, encoders: Iterable[str]) -> Iterator[Note]:
    """A preset without `encoder` takes UNI-v2's gate: ``encoders`` of the files for which the paper has another one."""
    preset, sizes = config.preset, config.model
    if preset is None or config.encoder or config.images or (sizes.delta and sizes.hidden_dim):
        return
    for name in sorted(encoders):
        own, used = preset.gate(name), config.gate()
        if (own.delta, own.hidden_dim) != (used.delta, used.hidden_dim):
            what = f"no encoder is named, so UNI-v2's gate is used (delta {used.delta:g}, hidden_dim {used.hidden_dim}); the files are of {name}"
            cure = f"`encoder: {name}` takes the paper's for it: delta {own.delta:g}, hidden_dim {own.hidden_dim}."
            yield Note("warning", "gate", what, ("encoder",), cure)


def gates_moved(gates: pd.DataFrame) -> str:
    """What gates.csv says of the last epoch, in words."""
    last = gates[gates["epoch"] == gates["epoch"].max()]
    by_layer = ", ".join(f"{round(mean, 2) + 0.0:+.2f}" for mean in last["mean"])
    left = 100 * (1 - float(last["share_identity"].mean()))
    share = f"{left:.0f} % of coefficients are" if left >= 0.5 else "none is"
    return f"mean beta by layer {by_layer}; {share} outside the identity (|beta| >= {OUTSIDE:g})"


def trunk_of(config: CohortConfig, arm: str, width: int) -> Trunk:
    """What a run of an arm on features of this width computes, for an estimate; an unknown arm is taken for a usual one."""
    model, known = config.model, ARMS.get(arm, ARMS["na"])
    landmarks = model.num_landmarks if known.trunk == "nystrom" else 0
    return Trunk(width, model.dim, model.depth, known.dense, heads=model.num_heads, landmarks=landmarks)
