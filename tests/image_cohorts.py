"""Small generated cohorts of images on disk: PNG files, a table, a YAML."""

from pathlib import Path

import numpy as np
import yaml
from PIL import Image

SMALL = {"dim": 24, "depth": 2, "num_heads": 2, "hidden_dim": 4}
LABELS = ("red", "bright")


def write_image(path: Path, seed: int, labels: tuple[int, int], *, size: int = 32) -> Path:
    """Noise around a colour that tells both labels."""
    rng = np.random.default_rng(seed)
    colour = np.array([110 + 60 * labels[0], 110, 110]) + 50 * labels[1]
    pixels = (colour + rng.normal(0, 12, (size, size, 3))).clip(0, 255).astype(np.uint8)
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).save(path)
    return path


def write_images(folder: Path, *, count: int = 30, first: int = 0, **settings: object) -> Path:
    """Two labels an image, each image its own patient; returns the YAML."""
    rows = ["image_id," + ",".join(LABELS)]
    for i in range(first, first + count):
        labels = (i % 2, i // 2 % 2)
        write_image(folder / "images" / f"{i:03d}.png_crop_{i}.png", i, labels)
        rows.append(f"{i:03d}.png_crop_{i}.png,{labels[0]},{labels[1]}")
    (folder / "table.csv").write_text("\n".join(rows) + "\n")
    train = {"epochs": 3, "batch_size": 4, "lr": 2e-3, "workers": 0, **settings.pop("train", {})}
    plain = {"name": "toy", "images": {"folder": "images", "size": 32, "patch": 8}, "table": "table.csv"}
    plain |= {"slide": "image_id", "case": "image_id", "target": list(LABELS), "model": SMALL, "train": train}
    path = folder / "cohort.yaml"
    path.write_text(yaml.safe_dump(plain | settings))
    return path
