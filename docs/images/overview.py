"""The drawings of the method in the documentation: python docs/images/overview.py writes overview.svg and signed_gate.svg beside itself."""

from pathlib import Path
from typing import Any

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch, Rectangle

from gated_srp.files import whole
from gated_srp.reports.figures import COLOURS
from gated_srp.reports.gates import draw_signed_gate

BLUE, ORANGE, GREEN, PINK = COLOURS[:4]
GREY, DARK = "#E9E9E9", "#333333"


def box(
    axes: Axes, at: tuple[float, float], text: str, *, width: float = 1.7, height: float = 0.55, colour: str = GREY
) -> None:
    """Text in a rounded box with its middle at ``at``."""
    x, y = at
    shape = FancyBboxPatch((x - width / 2, y - height / 2), width, height, boxstyle="round,pad=0.02,rounding_size=0.08")
    shape.set(facecolor=colour, edgecolor=DARK, linewidth=0.9)
    axes.add_patch(shape)
    axes.text(x, y, text, ha="center", va="center", fontsize=9, color="white" if colour == BLUE else "black")


def arrow(axes: Axes, start: tuple[float, float], end: tuple[float, float], **style: Any) -> None:
    """From start to end."""
    look = {"arrowstyle": "-|>", "color": DARK, "linewidth": 1.1, "shrinkA": 0, "shrinkB": 0} | style
    axes.annotate("", end, start, arrowprops=look)


def draw_block(axes: Axes) -> None:
    """(a) Where it sits: between the attention of each head and the output projection."""
    steps = {
        0.5: ("tokens: CLS and patches", GREY),
        1.5: ("LayerNorm", GREY),
        2.5: ("self-attention\n(any kind)", GREY),
        3.7: ("Gated SRP\npatch tokens only", BLUE),
        4.8: ("heads joined, output\nprojection", GREY),
        6.6: ("LayerNorm, MLP", GREY),
    }
    for y, (text, colour) in steps.items():
        box(axes, (2, y), text, width=2.3, height=0.62, colour=colour)
    axes.plot(2, 5.7, marker="o", markersize=13, markerfacecolor="white", markeredgecolor=DARK)
    axes.text(2, 5.7, "+", ha="center", va="center", fontsize=12)
    for low, high in ((0.81, 1.19), (1.81, 2.19), (2.81, 3.39), (4.01, 4.49), (5.11, 5.53), (5.88, 6.29)):
        arrow(axes, (2, low), (2, high))
    axes.plot([2, 0.35, 0.35], [1.0, 1.0, 5.7], color=DARK, linewidth=1.1)
    arrow(axes, (0.35, 5.7), (1.83, 5.7))
    axes.text(2.2, 3.08, "y, and the values v", fontsize=8, va="center")
    axes.text(2.2, 4.24, "z", fontsize=9, va="center")
    axes.text(
        3.35, 3.7, "+0.004 to 0.026 %\nparameters; at the\nstart z = y exactly", fontsize=8, va="center", color=BLUE
    )
    axes.set(xlim=(0, 4.9), ylim=(0, 7.1))


def draw_neighbourhood(axes: Axes, left: float, low: float) -> None:
    for row in range(3):
        for column in range(3):
            middle = row == 1 and column == 1
            square = Rectangle((left + 0.5 * column, low + 0.5 * row), 0.46, 0.46, edgecolor=DARK, linewidth=0.8)
            square.set_facecolor(ORANGE if middle else "#F5D9A6")
            axes.add_patch(square)
            axes.text(
                left + 0.5 * column + 0.23,
                low + 0.5 * row + 0.23,
                "i" if middle else "v",
                ha="center",
                va="center",
                fontsize=8,
            )


def draw_correction(axes: Axes) -> None:
    """(b) What it does to the output y of one head for one patch."""
    draw_neighbourhood(axes, 0.2, 4.6)
    axes.text(0.95, 6.35, "the 3 x 3 neighbours of\npatch i on the slide", ha="center", va="center", fontsize=8.5)
    box(axes, (3.1, 5.35), "r̂: direction of\nthe mean of their values", width=2.2, height=0.7)
    arrow(axes, (1.75, 5.35), (1.98, 5.35))
    box(axes, (3.1, 3.9), "c = ⟨y, r̂⟩ r̂\nwhat y shares with them", width=2.2, height=0.7, colour="#F3D3E4")
    arrow(axes, (3.1, 4.98), (3.1, 4.27))
    axes.text(0.95, 3.9, "y\nattention output", ha="center", va="center", fontsize=9)
    arrow(axes, (1.62, 3.9), (1.98, 3.9))
    box(axes, (6.2, 5.35), "gate of this layer and head", width=2.5, height=0.6, colour=BLUE)
    axes.text(
        6.2,
        6.35,
        "patch: homogeneity, number of neighbours\nhead: cosine of y to r̂, its size, |y|",
        ha="center",
        va="center",
        fontsize=8.5,
    )
    arrow(axes, (6.2, 6.0), (6.2, 5.67))
    box(axes, (6.2, 3.9), "β = δ tanh(ℓ)\nbetween −δ and +δ", width=2.3, height=0.7, colour="#CDE3F2")
    arrow(axes, (6.2, 5.05), (6.2, 4.27))
    box(axes, (4.65, 2.3), "z = y − β c", width=2.6, height=0.7, colour="#CBE9DF")
    for start in ((3.3, 3.53), (6.0, 3.53)):
        arrow(axes, start, (4.65 + (0.6 if start[0] > 5 else -0.6), 2.67))
    axes.plot([0.95, 0.95], [3.45, 2.3], color=DARK, linewidth=1.1)
    arrow(axes, (0.95, 2.3), (3.33, 2.3))
    regimes = (
        ("β = 1", "removes what is shared", BLUE),
        ("β = 0", "leaves the token as it is", DARK),
        ("β = 2", "flips it", COLOURS[4]),
        ("β < 0", "amplifies it", GREEN),
    )
    for place, (beta, words, colour) in enumerate(regimes):
        x, y = 0.6 + 3.9 * (place % 2), 1.25 - 0.5 * (place // 2)
        axes.text(x, y, beta, fontsize=9, color=colour, weight="bold")
        axes.text(x + 0.85, y, words, fontsize=9, color=colour)
    axes.text(0.6, 0.15, "CLS, padding and patches without neighbours pass unchanged.", fontsize=8.5, color="#555555")
    axes.set(xlim=(0, 8), ylim=(0, 7.1))


def draw(path: Path) -> None:
    """Both parts, as a drawing whose letters are shapes: it looks alike everywhere."""
    with rc_context({"svg.hashsalt": "gated-srp", "svg.fonttype": "path"}):
        figure = Figure(figsize=(11.2, 5.6), layout="constrained")
        left, right = figure.subplots(1, 2, width_ratios=[4.9, 8])
        draw_block(left)
        draw_correction(right)
        for axes, title in ((left, "(a) in a transformer block"), (right, "(b) for one patch and one head")):
            axes.set_title(title, loc="left", fontsize=11)
            axes.set_axis_off()
        figure.patch.set_facecolor("white")  # also on dark pages
        with whole(path) as draft:
            figure.savefig(draft, format="svg", metadata={"Date": None})


if __name__ == "__main__":
    here = Path(__file__)
    draw(here.with_suffix(".svg"))
    drawing, copy = draw_signed_gate(here.with_name("signed_gate"))
    copy.unlink()  # the page shows the drawing
