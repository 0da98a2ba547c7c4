"""The figure of local redundancy, and the tokens after attention that it can be drawn of.

Shapes: N patches, L rows (CLS first, square padding last), H heads, D head width, C channels.
"""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from gated_srp.data.redundancy import Redundancy, pooled, quantiles
from gated_srp.errors import UserError
from gated_srp.models.attention import merge_heads
from gated_srp.models.slide import SlideTransformer
from gated_srp.srp.graph import PatchGraph

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Okabe and Ito's colours, told apart by readers of every colour vision; line styles say the same once more.
_NEAR = ("#0072B2", "#009E73")
_FAR = ("#E69F00", "#CC79A7")
_BINS = 80


def attention_tokens(model: SlideTransformer, features: Tensor, graph: PatchGraph, layer: int) -> dict[str, Tensor]:
    """What attention layer ``layer`` (from 1) adds to each patch's token, (N, C), by name.

    Taken is W_o of the merged heads: the row that enters the residual sum. With a correction in the layer it is given
    twice, for the heads before the correction (y) and after it (z); the run itself uses the corrected one.
    """
    depth = len(model.blocks)
    if not 1 <= layer < depth:
        raise UserError(
            f"layer {layer}: this model has {depth} attention layers, of which 1 to {depth - 1} give every patch a token "
            "(the last one computes CLS alone). Choose one of those."
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


def draw_redundancy(slides: Sequence[Redundancy], stem: Path, *, title: str, unit: str = "slide") -> tuple[Path, Path]:
    """Distribution over all patches (left) and slide by slide (right), to ``stem``.svg and ``stem``.png.

    ``unit``: what a slide is called, where these are none.
    """
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9.6, 4.2), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=[1.25, 1])
    _draw_pooled(left, slides, unit)
    _draw_slides(right, slides, unit)
    figure.suptitle(title, x=0.01, ha="left", fontsize=11)
    figure.legend(*left.get_legend_handles_labels(), loc="outside lower center", ncols=2, frameon=False, fontsize=9)
    paths = stem.with_name(f"{stem.name}.svg"), stem.with_name(f"{stem.name}.png")
    try:
        stem.parent.mkdir(parents=True, exist_ok=True)
        for path in paths:
            draft = path.with_name(f".{os.getpid()}.{path.name}")
            # A fixed salt and no date: the same numbers give the same file.
            with rc_context({"svg.hashsalt": "gated-srp", "svg.fonttype": "none"}):
                figure.savefig(draft, dpi=150, metadata={"Date": None} if path.suffix == ".svg" else None)
            os.replace(draft, path)
    except OSError as error:
        raise UserError(f"{stem}: the figure cannot be written ({error.strerror}). Choose another folder.") from None
    return paths


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
    count = len(everything[0].neighbours)
    number = len({one.slide for one in slides})
    axes.set_title(f"All patches together ({count:,} patches, {number:,} {unit}{'s' * (number != 1)})", fontsize=10)
    axes.set_xlabel(f"cosine of a patch to the mean of its neighbours,\nor of as many random patches of its {unit}")
    axes.set_ylabel("density of patches")
    _tidy(axes)


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
    axes.set_title(f"{unit.capitalize()} by {unit} (median and quartiles)", fontsize=10)
    axes.set_xlabel(f"{unit}s, ordered by their median")
    axes.set_ylabel("cosine")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    _tidy(axes)


def _tidy(axes: "Axes") -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", alpha=0.25, linewidth=0.6)
