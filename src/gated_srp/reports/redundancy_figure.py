"""Figures of local redundancy: a cohort's, and slides beside photographs as in the paper's Fig. 1c."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from gated_srp.errors import counted
from gated_srp.reports.figures import COLOURS, panels, save, tidy
from gated_srp.reports.redundancy import Measured, Redundancy, pooled, quantiles

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_NEAR, _FAR = (COLOURS[0], COLOURS[2]), (COLOURS[1], COLOURS[3])
_BINS = 80


def draw_redundancy(slides: Sequence[Redundancy], stem: Path, *, title: str, unit: str = "slide") -> list[Path]:
    """Distribution over all patches (left) and slide by slide (right); ``unit``: what to call a slide, where these are none."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9.6, 4.2), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=[1.25, 1])
    _draw_pooled(left, slides, unit)
    _draw_slides(right, slides, unit)
    figure.legend(*left.get_legend_handles_labels(), loc="outside lower center", ncols=2, frameon=False, fontsize=9)
    return save(figure, stem, title=title)


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
    title = f"All patches together ({counted(count, 'patch')}, {counted(number, unit)})"
    what = f"cosine of a patch to the mean of its neighbours,\nor of as many random patches of its {unit}"
    tidy(axes, x=what, y="density of patches", title=title)


def _draw_slides(axes: "Axes", slides: Sequence[Redundancy], unit: str) -> None:
    """Each slide's median with its quartiles, slides ordered by the median of the first kind of rows."""
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
    title = f"{unit.capitalize()} by {unit} (median and quartiles)"
    tidy(axes, x=f"{unit}s, ordered by their median", y="cosine", title=title, whole_numbers=True)


def draw_together(slides: Measured, photographs: Measured, stem: Path, *, title: str) -> list[Path]:
    """One panel per kind of rows (features, tokens after attention): slides and photographs on one axis."""
    kinds = {one.rows: one for one in slides.pooled}
    others = {one.rows: one for one in photographs.pooled}
    shown = [kind for kind in kinds if kind in others]
    figure, axes = panels(len(shown), width=4.8, height=3.8, most=3)
    low = min(float(one[kind].neighbours.min()) for one in (kinds, others) for kind in shown)
    edges = torch.linspace(max(-1.0, low - 0.02), 1.0, _BINS + 1).tolist()
    for axis, kind in zip(axes, shown, strict=True):
        for one, unit, colour, style in (
            (kinds[kind], "slide", COLOURS[0], "-"),
            (others[kind], "photograph", COLOURS[1], "--"),
        ):
            near, far = (float(cosines.median()) for cosines in (one.neighbours, one.random))
            shared: dict[str, Any] = {"bins": edges, "density": True, "color": colour}
            axis.hist(one.neighbours.numpy(), histtype="stepfilled", alpha=0.25, **shared)
            label = f"{unit}s (median {near:.2f}; random patches {far:.2f})"
            axis.hist(one.neighbours.numpy(), histtype="step", linestyle=style, linewidth=1.6, label=label, **shared)
            axis.axvline(near, ymax=0.78, color=colour, linestyle=style, linewidth=1.2)
            axis.axvline(far, ymax=0.78, color=colour, linestyle=":", linewidth=1.2)
        heading = "patch features" if kind == "features" else f"tokens after attention, {kind}"
        tidy(
            axis,
            x="cosine of a patch to the mean of its neighbours\n(dotted: median to as many random patches)",
            y="density",
            title=heading,
        )
        axis.legend(frameon=False, fontsize=8, loc="upper left")
        axis.set_ylim(0, axis.get_ylim()[1] * 1.3)
    return save(figure, stem, title=title)
