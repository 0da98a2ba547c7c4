"""Local redundancy of ordinary photographs, cut and encoded as slides are: what the paper compares slides with.

Shapes: N patches, S side of a patch, D width of the features.
"""

import os
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
from PIL import Image, UnidentifiedImageError

from gated_srp.data.redundancy import Redundancy, measure
from gated_srp.errors import UserError
from gated_srp.slides.encoders import PatchEncoder
from gated_srp.slides.extract import encode
from gated_srp.slides.tiles import lattice
from gated_srp.srp.graph import PatchGraph

ENDINGS = (".jpg", ".jpeg", ".png", ".bmp", ".webp")
_BATCH = 16
_FEWEST = 4  # patches from which on there are neighbours and others to compare with


def find_photographs(folder: Path) -> list[Path]:
    """Image files of a folder and those below it."""
    if not folder.is_dir():
        raise UserError(f"{folder}: no such folder. Expected a folder of photographs ({', '.join(ENDINGS)}).")
    found = sorted(p for p in folder.rglob("*") if p.suffix.lower() in ENDINGS and not p.name.startswith("."))
    if not found:
        raise UserError(f"{folder}: no photographs (endings {', '.join(ENDINGS)}). Point at the folder that has them.")
    return found


def cut(path: Path, size: int) -> tuple[np.ndarray, np.ndarray]:
    """Patches of a photograph that do not overlap, (N, S, S, 3) bytes, and their corners (N, 2)."""
    try:
        with Image.open(path) as opened:
            pixels = np.asarray(opened.convert("RGB"))
    except (OSError, UnidentifiedImageError, Image.DecompressionBombError) as error:
        raise UserError(f"{path}: cannot be read as a picture ({error}).") from None
    corners = lattice((pixels.shape[1], pixels.shape[0]), size, size)
    if len(corners) < _FEWEST:
        raise UserError(
            f"{path}: {pixels.shape[1]} x {pixels.shape[0]} pixels give {len(corners)} patches of {size}, fewer than {_FEWEST}. "
            "Use larger photographs, or a smaller --size."
        )
    return np.stack([pixels[y : y + size, x : x + size] for x, y in corners.tolist()]), corners


def measure_photographs(
    paths: Sequence[Path], encoder: PatchEncoder, *, size: int, seed: int = 0, step: Callable[[object], object] = id
) -> tuple[list[Redundancy], list[str]]:
    """The redundancy of each photograph's patch features, and why some were left out."""
    measured, left_out = [], []
    folder = Path(os.path.commonpath([path.parent for path in paths]))  # below it, names are unique
    for path in paths:
        try:
            tiles, corners = cut(path, size)
        except UserError as error:
            left_out.append(str(error))
        else:
            parts = [encode(encoder, tiles[i : i + _BATCH]) for i in range(0, len(tiles), _BATCH)]
            features = torch.from_numpy(np.concatenate(parts))  # (N, D)
            graph = PatchGraph.from_coords(torch.from_numpy(corners), stride=size)
            measured.append(measure(path.relative_to(folder).as_posix(), features, graph, seed=seed))
        step(path)
    if not measured:
        raise UserError(f"no photograph can be measured. The first: {left_out[0]}")
    return measured, left_out
