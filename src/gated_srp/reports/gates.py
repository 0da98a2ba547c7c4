"""Figures of the gates: how they open over epochs, what they do in the kept one, and the geometry of the signed gate."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from gated_srp.reports.figures import COLOURS, STYLES, Runs, panels, save, tidy
from gated_srp.reports.tables import short

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_REGIMES = {
    "share_anti": ("adds (β ≤ −0.5)", "#D55E00", "xx"),
    "share_identity": ("leaves (around 0)", "#DDDDDD", ""),
    "share_projection": ("removes (0.5 to 1.5)", "#0072B2", ""),
    "share_reflection": ("reflects (β > 1.5)", "#56B4E9", "//"),
}


def read_gates(runs: Runs) -> dict[str, pd.DataFrame]:
    """By cohort the gates of its seeds, with the columns ``run`` and ``kept`` (the epoch whose weights were kept, else the last).

    Cohorts without gates are left out.
    """
    found = {}
    for cohort, folders in runs.items():
        tables = []
        for number, run in enumerate(folders):
            if len(gates := run.gates):
                best = run.results.get("best_epoch")
                kept = best if (gates["epoch"] == best).any() else gates["epoch"].max()
                tables.append(gates.assign(run=number, kept=gates["epoch"] == kept))
        if tables:
            found[cohort] = pd.concat(tables, ignore_index=True)
    return found


def draw_trajectories(runs: Runs, stem: Path, *, title: str, mark: str = "") -> list[Path]:
    """Mean beta of each gated layer by epoch: mean over seeds, band of one standard deviation; one panel per cohort."""
    found = read_gates(runs)
    if not found:
        return []
    figure, axes = panels(len(found))
    for axis, (cohort, gates) in zip(axes, found.items(), strict=True):
        for place, (layer, part) in enumerate(gates.groupby("layer")):
            by_epoch = part.groupby("epoch")["mean"].agg(["mean", "std"]).fillna(0.0)
            colour = COLOURS[place % len(COLOURS)]
            line = {"color": colour, "linestyle": STYLES[place % len(STYLES)], "label": f"layer {int(str(layer)) + 1}"}
            axis.plot(by_epoch.index, by_epoch["mean"], **line)  # type: ignore[arg-type]
            low, high = by_epoch["mean"] - by_epoch["std"], by_epoch["mean"] + by_epoch["std"]
            axis.fill_between(by_epoch.index, low, high, color=colour, alpha=0.18, linewidth=0)
        for level in (0.0, 1.0):
            axis.axhline(level, color="#888888", linewidth=0.8, linestyle=":")
        kept = gates[gates["kept"]].groupby("run")["epoch"].first()
        foot: dict[str, Any] = {"transform": axis.get_xaxis_transform(), "clip_on": False, "s": 18, "zorder": 3}
        axis.scatter(kept, np.zeros(len(kept)), marker="^", color="#444444", label="kept epoch, one per seed", **foot)
        seeds = gates["run"].nunique()
        heading = f"{short(cohort)} ({seeds} seed{'s' if seeds > 1 else ''})"
        tidy(axis, x="epoch", y="effective β", title=heading, whole_numbers=True)
    handles, labels = max((axis.get_legend_handles_labels() for axis in axes), key=lambda found: len(found[1]))
    figure.legend(handles, labels, loc="outside lower center", ncols=4, frameon=False, fontsize=8)
    return save(figure, stem, title=f"{title}: gate trajectories, mean ± 1 std over seeds", mark=mark)


def draw_regimes(runs: Runs, stem: Path, *, title: str, mark: str = "") -> list[Path]:
    """Share of heads and patches in each regime in the epoch that was kept, mean over seeds; one bar per layer."""
    found = read_gates(runs)
    if not found:
        return []
    figure, axes = panels(len(found))
    for axis, (cohort, gates) in zip(axes, found.items(), strict=True):
        kept = gates[gates["kept"]]
        shares = kept.groupby("layer")[list(_REGIMES)].mean()
        names = [f"layer {int(str(layer)) + 1}" for layer in shares.index]
        bottom = np.zeros(len(shares))
        for column, (label, colour, hatch) in _REGIMES.items():
            share = shares[column].to_numpy()
            style: dict[str, Any] = {"color": colour, "hatch": hatch, "edgecolor": "#555555", "linewidth": 0.5}
            axis.bar(names, share, bottom=bottom, label=label, **style)
            bottom += share
        about = kept.groupby("layer")[["mean", "mean_over_delta", "share_negative"]].mean()
        for place, (mean, relative, negative) in enumerate(about.to_numpy()):
            text = f"β {mean:+.2f}\nβ/δ {relative:+.2f}\n{negative:.0%} below 0".replace("-", "−")
            axis.text(place, 1.02, text, ha="center", fontsize=7)
        axis.set(ylim=(0, 1.25), yticks=np.linspace(0, 1, 6))
        tidy(axis, x="", y="share of heads and patches", title=short(cohort))
        axis.grid(visible=False, axis="x")
        axis.set_axisbelow(True)
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=2, frameon=False, fontsize=8)
    return save(figure, stem, title=f"{title}: what the gates do in the kept epoch", mark=mark)


_GATE = {  # beta: colour, name of the result, what happens to it, what is added to y
    2.0: (COLOURS[4], r"$z_{\mathrm{refl}}$", "β = 2: reflection", "−2c"),
    1.0: (COLOURS[0], r"$z_{\mathrm{proj}}$", "β = 1: projection", "−c"),
    0.0: ("#000000", r"$z_{\mathrm{iden}} = y$", "β = 0: identity", ""),
    -1.0: (COLOURS[2], r"$z_{\mathrm{anti}}$", "β < 0: anti-projection", "+c"),
}


def draw_signed_gate(stem: Path, *, delta: float = 2.0) -> list[Path]:
    """The paper's figure of the signed gate: (a) z = y - β c for several β, as arrows; (b) β = δ tanh(ℓ) on the number line."""
    figure, (left, right) = panels(2, width=4.6, height=3.0)
    for axes, name in ((left, "(a)"), (right, "(b)")):
        axes.set_axis_off()
        axes.set_title(name, loc="left", fontsize=12)
    _draw_arrows(left)
    _draw_number_line(right, delta)
    return save(figure, stem, formulas=True)


def _draw_arrows(axes: Axes) -> None:
    """Everything moves along the axis of the neighbours' mean; what lies across it never changes."""
    along, across = 0.92, 1.62
    solid: dict[str, Any] = {"arrowstyle": "-|>", "linewidth": 1.8, "shrinkA": 0, "shrinkB": 0}
    axes.annotate("", (2.5, 0), (-1.5, 0), arrowprops={"arrowstyle": "->", "color": "#888888"})
    axes.text(2.5, -0.14, "r̂: mean value of\nthe neighbours", ha="right", va="top", fontsize=8, color="#555555")
    axes.plot([along, along], [0, across], color="#888888", linestyle=":", linewidth=1)
    axes.annotate("", (along, 0), (0, 0), arrowprops=solid | {"color": COLOURS[3], "linewidth": 2.6})
    axes.text(along / 2, -0.14, "c = ⟨y, r̂⟩ r̂", ha="center", va="top", fontsize=8.5, color=COLOURS[3])
    for place, (beta, (colour, name, _, added)) in enumerate(_GATE.items()):
        tip = along - beta * along
        axes.annotate("", (tip, across), (0, 0), arrowprops=solid | {"color": colour})
        axes.text(tip, across + 0.3, name, ha="center", fontsize=10, color=colour)
        if added:  # from y to the result, one above the other where they overlap
            high = across + 0.1 + 0.09 * (place == 0)
            dashed = {"arrowstyle": "->", "linestyle": "--", "color": "#777777", "shrinkA": 0, "shrinkB": 0}
            axes.annotate("", (tip, high), (along, high), arrowprops=dashed)
            at = {"−2c": -0.46, "−c": 0.46, "+c": 1.38}[added]
            axes.text(at, across - 0.12, added, ha="center", va="top", fontsize=8, color="#555555")
    axes.set(xlim=(-1.7, 2.7), ylim=(-0.75, 2.2))


def _draw_number_line(axes: Axes, delta: float) -> None:
    for place, (colour, _, words, _) in enumerate(_GATE.values()):
        axes.plot(-0.9, 2.3 - 0.42 * place, marker="o", color=colour, markersize=5)
        axes.text(-0.7, 2.3 - 0.42 * place, words, va="center", fontsize=9, color=colour)
    axes.fill_between([-delta, delta], -0.1, 0.1, color=COLOURS[5], alpha=0.3, linewidth=0)
    reach = max(delta, 2.0) + 0.5
    axes.annotate("", (reach, 0), (-reach, 0), arrowprops={"arrowstyle": "->", "color": "#000000"})
    axes.text(reach, 0.14, "β", ha="right", fontsize=10)
    for beta in (-2.0, -1.0, 0.0, 1.0, 2.0):
        colour = _GATE.get(beta, _GATE[-1.0])[0]
        axes.plot([beta, beta], [-0.12, 0.12], color=colour, linewidth=1)
        axes.plot(beta, 0, marker="o", color=colour, markersize=4)
        axes.text(
            beta,
            -0.2,
            f"{beta:+g}".replace("-", "−").replace("+0", "0"),
            ha="center",
            va="top",
            color=colour,
            fontsize=9,
        )
    for end, name in ((-delta, "−δ"), (delta, "+δ")):
        axes.text(end, 0.16, name, ha="center", fontsize=9, color=COLOURS[0])
    axes.text(0, -0.6, f"β = δ tanh(ℓ), here δ = {delta:g}; ℓ = 0 at the start", ha="center", va="top", fontsize=9)
    axes.set(xlim=(-reach - 0.2, reach + 0.2), ylim=(-1.0, 2.6))
