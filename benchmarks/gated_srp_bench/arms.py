"""What a patch costs in each arm: processor seconds of a prediction and of a training step on one slide, as multiples of NA's.

An arm and its yardstick take turns, so that a slow moment of the machine hits both; the ratio is the median over turns. Processor
time, since it hardly changes with what else the machine does.
"""

import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch

from gated_srp.models import ARMS, build_model, find_arm
from gated_srp.srp import PatchGraph
from gated_srp_bench.measure import STRIDE, make_slide, turns_of

TOKENS, TURNS = 1_024, 3
SIDE, PIXELS = 17, 768  # of an image: patches along an edge, numbers of each


@dataclass(frozen=True)
class Cost:
    """Of one arm: microseconds per patch, and as multiples of the yardstick's in the same turns, (low, median, high)."""

    arm: str
    against: str
    patches: int
    predict_us: float
    train_us: float
    predict: tuple[float, float, float]
    train: tuple[float, float, float]


def measure_arms(names: Sequence[str], *, tokens: int = TOKENS, turns: int = TURNS, **sizes: Any) -> Iterator[Cost]:
    """One `Cost` per arm; slides against NA, images against ViT-S/16. ``sizes``: other than the defaults."""
    yardsticks: dict[str, Callable[[str], None]] = {}
    for name in names:
        against = "vit_s16" if find_arm(name).images else "na"
        if against not in yardsticks:
            yardsticks[against] = _runner(against, tokens, sizes)
        arm, base = _runner(name, tokens, sizes), yardsticks[against]
        found = {phase: _paired(arm, base, phase, turns) for phase in ("predict", "train")}
        patches = SIDE * SIDE if find_arm(name).images else tokens
        (predict_s, predict), (train_s, train) = found["predict"], found["train"]
        yield Cost(name, against, patches, 1e6 * predict_s / patches, 1e6 * train_s / patches, predict, train)


def _runner(name: str, tokens: int, sizes: dict[str, Any]) -> Callable[[str], None]:
    """Runs one phase of an arm on a generated slide, or image, that is prepared."""
    if find_arm(name).images:
        features = torch.randn(SIDE * SIDE, PIXELS, generator=torch.Generator().manual_seed(0))
        graph = PatchGraph.from_grid(SIDE, SIDE).with_features(features)
    else:
        slide = make_slide(tokens)
        features, window = slide.features, find_arm(name).window or 3
        graph = PatchGraph.from_coords(slide.coords, features, stride=STRIDE, window=window)
        if find_arm(name).scales > 1:
            features, graph = _with_coarse(features, slide.coords, graph)
    covariates = 3 * find_arm(name).needs_covariates
    graph = graph.with_covariates(torch.zeros(1, covariates)) if covariates else graph
    sizes = {"drop_path": 0.0, "covariates": covariates, **sizes}
    model = build_model(name, in_dim=features.shape[1], num_outputs=4, **sizes)

    def run(phase: str) -> None:
        model.train(phase == "train")
        with torch.set_grad_enabled(phase == "train"):
            logits = model(features[None], graph)
        if phase == "train":
            model.zero_grad()
            torch.nn.functional.cross_entropy(logits, torch.tensor([2])).backward()

    return run


def _with_coarse(features: torch.Tensor, coords: torch.Tensor, fine: PatchGraph) -> tuple[torch.Tensor, PatchGraph]:
    """A coarse patch for each 4 x 4 fine ones, behind them; costs stay those per fine patch."""
    from gated_srp.data.two_scales import find_parents
    from gated_srp.models.two_scales import TwoScaleGraph

    corners = torch.unique(coords // (4 * STRIDE), dim=0) * 4 * STRIDE
    rows = features[: len(corners)]
    coarse = PatchGraph.from_coords(corners, rows, stride=4 * STRIDE)
    both = TwoScaleGraph.of(fine, coarse, *find_parents(coords, corners, (STRIDE, 4 * STRIDE)))
    return torch.cat([features, rows]), both


def _paired(
    arm: Callable[[str], None], base: Callable[[str], None], phase: str, turns: int
) -> tuple[float, tuple[float, float, float]]:
    took = turns_of({"arm": partial(arm, phase), "base": partial(base, phase)}, turns, clock=time.process_time)
    ratios = sorted(mine / other for mine, other in zip(took["arm"], took["base"], strict=True))
    return median(took["arm"]), (ratios[0], median(ratios), ratios[-1])


def chosen(words: str) -> list[str]:
    """``all``, or arms by name, with commas between them; an unknown one is refused with the nearest."""
    names = list(ARMS) if words == "all" else [word.strip() for word in words.split(",") if word.strip()]
    return [name for name in names if find_arm(name)]


def merged(costs: Sequence[Cost], path: Path | None, machine: str) -> list[dict[str, Any]]:
    """These measurements in place of those that a file has of the same arms, in the order of the table."""
    known: dict[str, dict[str, Any]] = {}
    if path is not None and path.is_file():
        known = {row["arm"]: row for row in json.loads(path.read_text(encoding="utf-8"))}
    known |= {cost.arm: {**asdict(cost), "machine": machine} for cost in costs}
    return [known[name] for name in ARMS if name in known]
