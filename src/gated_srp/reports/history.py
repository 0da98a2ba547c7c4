"""A run's history as a figure."""

from pathlib import Path

import pandas as pd

from gated_srp.reports.figures import COLOURS, STYLES, panels, save, tidy


def draw_history(run: Path, stem: Path, *, title: str) -> list[Path]:
    """Loss and every other metric of history.csv by epoch, a panel each; nothing where there is no history."""
    from matplotlib.ticker import MaxNLocator

    path = run / "history.csv"
    if not path.is_file():
        return []
    history = pd.read_csv(path)
    metrics = list(dict.fromkeys(history["metric"]))[:8]
    if not metrics:
        return []
    figure, axes = panels(len(metrics), width=3.0, height=2.4)
    for axis, metric in zip(axes, metrics, strict=True):
        for place, (split, part) in enumerate(history[history["metric"] == metric].groupby("split", sort=False)):
            axis.plot(part["epoch"], part["value"], color=COLOURS[place], linestyle=STYLES[place], label=str(split))
        axis.xaxis.set_major_locator(MaxNLocator(integer=True))
        tidy(axis, x="epoch", y=str(metric))
        axis.legend(frameon=False, fontsize=8)
    figure.suptitle(title, x=0.01, ha="left", fontsize=11)
    return save(figure, stem)
