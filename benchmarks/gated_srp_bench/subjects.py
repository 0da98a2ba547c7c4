"""What is measured: the textbook and our arms on one generated slide."""

import math
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from gated_srp.machine import has_bf16
from gated_srp.models import build_model
from gated_srp.srp import PatchGraph

IN_DIM, STRIDE = 1536, 512
MULTIPLY_OPERATIONS = 2 * 10_000 * IN_DIM * IN_DIM  # of the product that shows what the machine can do


@dataclass(frozen=True)
class Slide:
    """A generated slide: 70 % of the cells of a square, in the column order that tools write."""

    coords: Tensor
    features: Tensor


def make_coords(tokens: int) -> Tensor:
    side = int((tokens / 0.7) ** 0.5) + 1
    kept = torch.randperm(side * side, generator=torch.Generator().manual_seed(tokens))[:tokens].sort().values
    return torch.stack([kept // side, kept % side], dim=1) * STRIDE


def make_slide(tokens: int) -> Slide:
    return Slide(make_coords(tokens), torch.randn(tokens, IN_DIM, generator=torch.Generator().manual_seed(tokens)))


class Ours:
    """Our model of an arm and what it prepares."""

    def __init__(self, arm: str, slide: Slide) -> None:
        self.slide = slide
        self.model = build_model(arm, in_dim=IN_DIM, num_outputs=4, drop_path=0.0, seed=0)
        self.prepared: PatchGraph | None = None

    def prepare(self) -> None:
        self.prepared = PatchGraph.from_coords(self.slide.coords, self.slide.features, stride=STRIDE)

    def forward(self) -> Tensor:
        assert self.prepared is not None
        logits: Tensor = self.model(self.slide.features[None], self.prepared)[0]
        return logits


class Textbook:
    """The plain model with the same weights."""

    def __init__(self, slide: Slide) -> None:
        self.slide, self.code = slide, load_textbook()
        self.model = self.code.SlideModel(IN_DIM, 4)
        self.model.load_state_dict(build_model("gated_srp", in_dim=IN_DIM, num_outputs=4, seed=0).state_dict())
        self.prepared: tuple[Tensor, Tensor, Tensor] | None = None

    def prepare(self) -> None:
        index, mask = self.code.neighbour_table(self.slide.coords, STRIDE)
        self.prepared = index, mask, self.code.homogeneity(self.slide.features, index, mask)

    def forward(self) -> Tensor:
        logits: Tensor = self.model(self.slide.features, self.prepared)
        return logits


def load_textbook() -> ModuleType:
    """The plain implementation; imported late, since only some measurements need it."""
    from gated_srp_bench import textbook

    return textbook


def make(arm: str, slide: Slide) -> Ours | Textbook:
    return Textbook(slide) if arm == "textbook" else Ours(arm, slide)


def run_phase(subject: Ours | Textbook, phase: str, dtype: str) -> None:
    """prepare: graph and homogeneity; predict: forward; train: forward and backward."""
    if phase == "prepare":
        subject.prepare()
        return
    with torch.set_grad_enabled(phase == "train"), _precision(dtype):
        logits = subject.forward()
    if phase == "train":
        subject.model.zero_grad()
        torch.nn.functional.cross_entropy(logits.float(), torch.tensor(2)).backward()


def predict_operations(tokens: int, dim: int = 384, depth: int = 4, landmarks: int = 64) -> float:
    """Multiplications and additions of our own forward: what the matrix products of the fast path cost."""
    rows = math.ceil(math.sqrt(tokens)) ** 2 + 1
    # Logits of queries and of keys take the place of both, so attention's own products are B v and F u alone.
    block = 2 * rows * dim * (3 * dim + dim + 8 * dim) + 2 * 2 * rows * landmarks * dim
    last = 2 * rows * dim * 2 * dim + 2 * rows * landmarks * dim
    return 2 * tokens * IN_DIM * dim + (depth - 1) * block + last


def _precision(dtype: str) -> AbstractContextManager[Any]:
    """As a run: bf16 where the processor has instructions for it, else float32 (`training.ranks.choose_precision`)."""
    return torch.autocast("cpu", torch.bfloat16) if dtype == "bfloat16" and has_bf16() else nullcontext()
