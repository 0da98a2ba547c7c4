"""Local redundancy drawn: the figure, and what else it can be measured on: tokens after attention, photographs.

Shapes: N patches, S side of a patch, L rows (CLS first, square padding last), H heads, D head width, C channels.
"""

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from PIL import Image, UnidentifiedImageError
from torch import Tensor

from gated_srp.data.redundancy import Redundancy, measure, pooled, quantiles
from gated_srp.errors import UserError
from gated_srp.models.attention import merge_heads
from gated_srp.models.slide import SlideTransformer
from gated_srp.reports.figures import COLOURS, save, tidy
from gated_srp.slides.encoders import PatchEncoder
from gated_srp.slides.extract import encode
from gated_srp.slides.tiles import lattice
from gated_srp.srp.graph import PatchGraph

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PHOTOGRAPHS = (".jpg", ".jpeg", ".png", ".bmp", ".webp")
_NEAR, _FAR = (COLOURS[0], COLOURS[2]), (COLOURS[1], COLOURS[3])
_BINS = 80
_BATCH = 16
_FEWEST = 4  # least patches of a photograph: there must be neighbours, and others to compare with


# The figure -----------------------------------------------------------------------------------------------------------


def draw_redundancy(slides: Sequence[Redundancy], stem: Path, *, title: str, unit: str = "slide") -> list[Path]:
    """Distribution over all patches (left) and slide by slide (right), to ``stem``.svg and ``stem``.png.

    ``unit``: what to call a slide, where these are none.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9.6, 4.2), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=[1.25, 1])
    _draw_pooled(left, slides, unit)
    _draw_slides(right, slides, unit)
    figure.suptitle(title, x=0.01, ha="left", fontsize=11)
    figure.legend(*left.get_legend_handles_labels(), loc="outside lower center", ncols=2, frameon=False, fontsize=9)
    return save(figure, stem)


def _draw_pooled(axes: "Axes", slides: Sequence[Redundancy], unit: str) -> None:
    everything = pooled(slides)
    low = min(float(min(one.neighbours.min(), one.random.min())) for one in everything)
    edges = torch.linspace(max(-1.0, low - 0.02), 1.0, _BINS + 1).tolist()
    for place, one in enumerate(everything):
        near, far = _NEAR[place % 2], _FAR[place % 2]
        name = "" if len(everything) == 1 else f"{one.rows}: "
        for cosines, colour, style, partners in (
            (one.neighbours, near, "-", "neighbours"),
            (one.random, far, "--", "random patches"),
        ):
            shared: dict[str, Any] = {"bins": edges, "density": True, "color": colour}
            axes.hist(cosines.numpy(), histtype="stepfilled", alpha=0.18, **shared)
            median = float(cosines.median())
            label = f"{name}{partners} (median {median:.2f})"
            axes.hist(cosines.numpy(), histtype="step", linestyle=style, linewidth=1.6, label=label, **shared)
            axes.axvline(median, color=colour, linestyle=":", linewidth=1.2)
    count, number = len(everything[0].neighbours), len({one.slide for one in slides})
    title = f"All patches together ({count:,} patches, {number:,} {unit}{'s' * (number != 1)})"
    what = f"cosine of a patch to the mean of its neighbours,\nor of as many random patches of its {unit}"
    tidy(axes, x=what, y="density of patches", title=title)


def _draw_slides(axes: "Axes", slides: Sequence[Redundancy], unit: str) -> None:
    """Each slide's median with its quartiles, slides ordered by the median of the first kind of rows."""
    from matplotlib.ticker import MaxNLocator

    kinds = list(dict.fromkeys(one.rows for one in slides))
    first = {one.slide: float(one.neighbours.median()) for one in slides if one.rows == kinds[0]}
    rank = {slide: place for place, slide in enumerate(sorted(first, key=lambda slide: (first[slide], slide)), 1)}
    size = max(1.5, min(5.0, 200 / len(rank)))
    for place, kind in enumerate(kinds):
        same = [one for one in slides if one.rows == kind]
        ranks = [rank[one.slide] for one in same]
        for partners, colour, marker in (("neighbours", _NEAR[place % 2], "o"), ("random", _FAR[place % 2], "s")):
            spreads = [quantiles(getattr(one, partners)) for one in same]
            low, middle, high = ([spread[name] for spread in spreads] for name in ("q25", "median", "q75"))
            axes.vlines(ranks, low, high, colors=colour, alpha=0.45, linewidth=1)
            axes.plot(ranks, middle, marker=marker, color=colour, markersize=size, linestyle="none")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    title = f"{unit.capitalize()} by {unit} (median and quartiles)"
    tidy(axes, x=f"{unit}s, ordered by their median", y="cosine", title=title)


# Tokens after attention -----------------------------------------------------------------------------------------------


def attention_tokens(model: SlideTransformer, features: Tensor, graph: PatchGraph, layer: int) -> dict[str, Tensor]:
    """What attention layer ``layer`` (from 1) adds to each patch's token, (N, C), by name.

    That is W_o of the merged heads: the row that enters the residual sum. Where the layer has a correction it is returned
    twice, for the heads before the correction (y) and after it (z); the run itself uses the corrected one.
    """
    depth = len(model.blocks)
    if not 1 <= layer < depth:
        raise UserError(
            f"this model has {depth} attention layers, of which 1 to {depth - 1} give every patch a token (the last one computes "
            "CLS alone)",
            where=f"layer {layer}",
            cure="Choose one of those.",
        )
    block: Any = model.blocks[layer - 1]
    seen: dict[str, Tensor] = {}

    def keep(module: Any, args: tuple[Any, ...], heads: tuple[Tensor, Tensor]) -> None:
        y, v = heads  # (1, H, L, D)
        patches = slice(1, 1 + graph.num_rows)
        before = module.proj(merge_heads(y))[0, patches]  # (N, C)
        if block.correction is None:
            seen[f"layer {layer}"] = before
            return
        z = block.correction(y, v, args[1])
        seen[f"layer {layer}, before correction"] = before
        seen[f"layer {layer}, corrected"] = module.proj(merge_heads(z))[0, patches]

    handle = block.attn.register_forward_hook(keep)
    try:
        with torch.no_grad():
            model(features.unsqueeze(0), graph)
    finally:
        handle.remove()
    return seen


# Photographs, cut and encoded as slides are: what the paper compares slides with --------------------------------------


def find_photographs(folder: Path) -> list[Path]:
    """Image files of a folder and those below it."""
    if not folder.is_dir():
        cure = f"Expected a folder of photographs ({', '.join(PHOTOGRAPHS)})."
        raise UserError("no such folder", where=folder, cure=cure)
    found = sorted(p for p in folder.rglob("*") if p.suffix.lower() in PHOTOGRAPHS and not p.name.startswith("."))
    if not found:
        what = f"no photographs (endings {', '.join(PHOTOGRAPHS)})"
        raise UserError(what, where=folder, cure="Point at the folder that has them.")
    return found


def cut_photograph(path: Path, size: int) -> tuple[np.ndarray, np.ndarray]:
    """Patches that do not overlap, (N, S, S, 3) bytes, and their corners (N, 2)."""
    try:
        with Image.open(path) as opened:
            pixels = np.asarray(opened.convert("RGB"))
    except (OSError, UnidentifiedImageError, Image.DecompressionBombError) as error:
        raise UserError(f"cannot be read as a picture ({error}).", where=path) from None
    corners = lattice((pixels.shape[1], pixels.shape[0]), size, size)
    if len(corners) < _FEWEST:
        given = f"{pixels.shape[1]} x {pixels.shape[0]} pixels give {len(corners)} patches of {size}"
        cure = "Use larger photographs, or a smaller --size."
        raise UserError(f"{given}, fewer than {_FEWEST}", where=path, cure=cure)
    return np.stack([pixels[y : y + size, x : x + size] for x, y in corners.tolist()]), corners


def measure_photographs(
    paths: Sequence[Path], encoder: PatchEncoder, *, size: int, seed: int = 0, step: Callable[[object], object] = id
) -> tuple[list[Redundancy], list[str]]:
    """The redundancy of each photograph's patch features, and why some were left out."""
    measured, left_out = [], []
    folder = Path(os.path.commonpath([path.parent for path in paths]))  # below it, names are unique
    for path in paths:
        try:
            tiles, corners = cut_photograph(path, size)
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
