"""A small slide with an image, and two runs, as the tests of the viewer need them."""

from pathlib import Path

import h5py
import numpy as np
import torch
from slides.images import picture, write_slide

from gated_srp.models import build_model, save_model

SIDE = 64
SIZE = (700, 500)
CELLS = np.array([(x, y) for y in range(1, 7) for x in range(1, 10) if (x + y) % 7])
CARD = {"task": "classification", "classes": ["benign", "tumour"], "cohort": "toy"}


def image(folder: Path) -> Path:
    pixels = picture(SIZE, [(64, 64, 580, 390)])
    pixels[192:256, 320:384] = (20, 200, 30)  # one patch that can be found again
    return write_slide(folder / "s1.tif", pixels)


def features(
    folder: Path, name: str = "s1", *, cells: np.ndarray = CELLS, side: int = SIDE, scan: bool = True, draw: int = 3
) -> Path:
    path = folder / f"{name}.h5"
    rng = np.random.default_rng(draw)
    with h5py.File(path, "w") as file:
        file["features"] = rng.standard_normal((len(cells), 12)).astype(np.float32)
        file["coords"] = cells * side
        file["coords"].attrs.update({"patch_size": side, "patch_size_level0": side, "overlap": 0})
        if scan:
            file["coords"].attrs.update({"level0_magnification": 20, "target_magnification": 20})
    return path


def run(folder: Path, arm: str, seed: int = 42, card: dict[str, object] = CARD) -> Path:
    model = build_model(arm, in_dim=12, num_outputs=2, dim=24, depth=3, num_heads=4, num_landmarks=4).eval()
    draw = torch.Generator().manual_seed(seed - 41)
    for name, parameter in model.named_parameters():
        torch.nn.init.normal_(parameter, std=1.0 if "correction" in name else 0.3, generator=draw)
    home = folder / arm / f"seed{seed}"
    home.mkdir(parents=True, exist_ok=True)
    save_model(model, home / "model.safetensors", card)
    return home
