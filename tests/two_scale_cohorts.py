"""Slides of two magnifications for tests: 20x patches of 512 level-0 pixels, and 5x patches that cover 4 x 4 of them."""

from pathlib import Path

import numpy as np
from factories import Slide, open_h5, trident_attrs, write_trident
from training.toy_cohorts import planted, write_cohort

RATIO, STEP = 4, 512


def write_low(job: Path, name: str, fine: Slide, *, drop: int = 0, encoder: str = "uni_v2", shift: int = 0) -> Path:
    """<job>/5x_256px_0px_overlap/features_uni_v2/<name>.h5: each patch is the mean of its children; the first ``drop`` are missing."""
    cells = np.unique(fine.cells // RATIO, axis=0)[drop:]
    means = [fine.features[(fine.cells // RATIO == cell).all(1)].mean(0) for cell in cells]
    path = job / "5x_256px_0px_overlap" / f"features_{encoder}" / f"{name}.h5"
    with open_h5(path) as file:
        features = file.create_dataset("features", data=np.stack(means))
        features.attrs.update({"name": name, "encoder": encoder})
        coords = file.create_dataset("coords", data=cells * RATIO * STEP + shift)
        about = {"patch_size_level0": RATIO * STEP, "target_magnification": 5.0}
        coords.attrs.update(trident_attrs(name) | about)
    return path


def write_two_scale_cohort(folder: Path, *, slides: int = 24, drop: int = 0, **settings: object) -> Path:
    """As `write_cohort`, with `features_low`."""
    path = write_cohort(folder, slides=slides, features_low="low", **settings)
    for i in range(slides):
        fine = planted(i, 2.0 * (2 * (i % 2) - 1), columns=9, rows=6)
        write_trident(folder / "feats", f"s{i:03d}", fine)
        write_low(folder / "low", f"s{i:03d}", fine, drop=drop)
    return path
