"""Writes the golden numbers beside this file: small models whose every number was computed in plain code, in double precision.

    cd tests && python -m golden.write

Weights are not stored: `drawn` makes them again from a seed. Nothing of `gated_srp` is used: the numbers come from
`reference.py` and `reference_models.py`, which were written from the paper's equations, the protocol and the checkpoints' names.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from reference import neighbour_lists
from reference_models import Plain, Weights, drawn, layout
from torch import Tensor
from torch.nn import functional as F

FOLDER = Path(__file__).resolve().parent
HEADS, WIDTH, IN, OUT, STRIDE = 4, 16, 6, 3, 512
CLASS = 2  # of the loss
_GATE = {"gate_inputs": 3, "hidden": 5}
_SLIDE = {"ppeg": True, "depth": 4, "in_dim": IN}
_SETTINGS = {"embed_dim": WIDTH, "num_heads": HEADS, "num_landmarks": 6, "delta_scale": 1.5, "gate_hidden_dim": 5}


@dataclass(frozen=True)
class Case:
    """A model: its arm, the layout and the settings of its checkpoint, and what the plain model is told beside the weights."""

    arm: str
    layout: dict[str, Any]
    args: dict[str, Any]
    plain: dict[str, Any] = field(default_factory=dict)
    window: int = 3

    def weights(self, seed: int) -> Weights:
        """As a float32 file holds them."""
        shapes = layout(width=WIDTH, heads=HEADS, outputs=OUT, **self.layout)
        return {name: value.float().double() for name, value in drawn(shapes, seed, scale=0.2).items()}


CASES = {
    "na": Case("na", _SLIDE, {"variant": "nystrom_na"}, {"landmarks": 6}),
    "xsa": Case("xsa", _SLIDE, {"variant": "xsa_all_ref"}, {"landmarks": 6, "xsa": True}),
    "diff": Case("diff", {**_SLIDE, "diff": True}, {"variant": "diff_transformer"}, {"landmarks": 6}),
    "gated_srp": Case(
        "gated_srp", {**_SLIDE, **_GATE}, {"variant": "srp_patch_signed_gated"}, {"landmarks": 6, "delta": 1.5}
    ),
    "gated_srp_5x5": Case(
        "gated_srp",
        {**_SLIDE, **_GATE},
        {"variant": "srp_patch_signed_gated", "num_landmarks": 14},
        {"landmarks": 14, "delta": 1.5, "most": 24},  # of 37 rows: segments of three, the fourteenth is empty
        window=5,
    ),
    "vit4": Case(
        "vit4_gated_srp_published",
        {"depth": 4, "in_dim": IN, "gate_inputs": 4, "hidden": 5},
        {"arch": "vit4", "mode": "srp_signed_gated", "srp_r_target": "knn8"},
        {"delta": 1.5},
    ),
    "vit_s16": Case(
        "vit_s16_gated_srp",
        {"depth": 3, "patches": 16, "patch": 4, **_GATE},
        {"use_srp": True, "beta_patch_mode": "signed_gated", "alpha_cls_mode": "zero", "alpha_patch_mode": "zero"},
        {"delta": 1.5},
    ),
}
SEEDS = {name: 100 + number for number, name in enumerate(CASES)}


def checkpoint(name: str) -> dict[str, Any]:
    """The case's model as the release would have saved it, with a leftover of another variant."""
    weights = {key: value.float() for key, value in CASES[name].weights(SEEDS[name]).items()}
    weights["blocks.0.attn.beta_patch"] = torch.zeros(HEADS)
    return {"epoch": 1, "model": weights, "args": {**_SETTINGS, **CASES[name].args}, "val_metrics": {}}


def inputs(name: str) -> dict[str, np.ndarray]:
    """A slide with holes, a shared cell and a lone patch, or an image; what enters is exact in float32."""
    draws = np.random.RandomState(SEEDS[name] + 1000)
    if "patches" in CASES[name].layout:
        return {"image": draws.standard_normal((3, 16, 16)).astype(np.float32)}
    cells = [(x, y) for x in range(6) for y in range(5) if (3 * x + y) % 7] + [(2, 2), (30, 30)]
    coords = STRIDE * np.array(cells) + draws.randint(0, 40, (len(cells), 2))
    features = draws.standard_normal((len(cells), IN)).astype(np.float32)
    return {"coords": coords.astype(np.int64), "features": features, "stride": np.int64(STRIDE)}


def compute(name: str) -> dict[str, np.ndarray]:
    """Everything that a file holds beside its inputs."""
    case, given = CASES[name], inputs(name)
    weights = {key: value.requires_grad_() for key, value in case.weights(SEEDS[name]).items()}
    model = Plain(HEADS, **case.plain)
    if "image" in given:
        grid = torch.tensor([(x, y) for y in range(4) for x in range(4)])
        entered = torch.from_numpy(given["image"]).double().requires_grad_()
        logits = model.image(weights, entered, neighbour_lists(grid, 1))
    else:
        entered = torch.from_numpy(given["features"]).double().requires_grad_()
        lists = neighbour_lists(torch.from_numpy(given["coords"]), STRIDE, case.window)
        logits = model.slide(weights, entered, lists)
    loss = F.cross_entropy(logits[None], torch.tensor([CLASS]))
    loss.backward()
    found: dict[str, Tensor] = {"logits": logits, "loss": loss, "grad_input": entered.grad}
    found |= {f"beta_block{number}": beta for number, beta in model.betas.items()}
    names = sorted(key for key, value in weights.items() if value.grad is not None)
    norms = np.array([float(weights[key].grad.norm()) for key in names])
    arrays = {key: value.detach().numpy() for key, value in found.items()}
    return {**arrays, "grad_norm_names": np.array(names), "grad_norm_values": norms}


if __name__ == "__main__":
    for case in CASES:
        numbers = compute(case)
        np.savez_compressed(FOLDER / f"{case}.npz", window=CASES[case].window, **inputs(case), **numbers)
        print(f"{case}: logits {numbers['logits'].round(4).tolist()}")
