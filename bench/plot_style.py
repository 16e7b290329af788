"""How the benches' plots look: colours, settings, and the parts that several share."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = [
    "BLUE", "GREEN", "GREY", "MARKERS", "ORANGE", "PALE", "PURPLE", "RED", "WIDTH", "grouped",
    "labelled", "logarithmic", "settings",
]  # fmt: skip

# By M. Okabe and K. Ito: told apart with any colour vision
BLUE, ORANGE, GREEN, RED, PURPLE = (
    "#0072b2", "#e69f00", "#009e73", "#d55e00", "#cc79a7",
)  # fmt: skip
GREY, PALE = "#666666", "#e8e8e8"
MARKERS = "osD^v"
WIDTH = 6.6  # inches of 72 points; shown at some 640 px
STYLE: dict[str, Any] = {
    "svg.hashsalt": "tilenet",
    "svg.fonttype": "none",
    "font.family": ["sans-serif"],
    "font.sans-serif": ["DejaVu Sans"],
    "font.size": 9,
    "axes.titlesize": 9.5,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": PALE,
    "lines.linewidth": 1.6,
    "lines.markersize": 4.5,
    "legend.fontsize": 8.5,
    "legend.frameon": False,
}


def settings() -> Any:
    """A context in which nothing of a user's own settings counts."""
    from matplotlib import style

    return style.context(["default", STYLE])


def labelled(axes: "Axes", title: str, x: str, y: str, *, legend: int = 1) -> None:
    """Title, axes and a legend: 0: none; 1: inside; else below, in so many columns."""
    axes.set_title(title)
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    if legend == 1:
        axes.legend()
    elif legend:
        axes.legend(
            loc="upper left", bbox_to_anchor=(-0.15, -0.2), ncols=legend,
            handlelength=1.6, columnspacing=1,
        )  # fmt: skip


def grouped(
    axes: "Axes", names: Sequence[str], bars: dict[str, list[float]], colours: Sequence[str]
) -> None:
    """Groups of bars side by side, a group for each name."""
    wide = 0.8 / len(bars)
    for number, ((label, values), colour) in enumerate(zip(bars.items(), colours, strict=True)):
        shift = (number - (len(bars) - 1) / 2) * wide
        places = [place + shift for place in range(len(names))]
        axes.bar(places, values, wide, color=colour, label=label)
    axes.set_xticks(range(len(names)), names)
    axes.grid(visible=False, axis="x")


def logarithmic(axes: "Axes", x: Sequence[float], y: Sequence[float]) -> None:
    """Both axes, with plain numbers at some places."""
    axes.set(xscale="log", yscale="log")
    axes.set_xticks(x, [f"{one:g}" for one in x])
    axes.set_yticks(y, [f"{one:g}" for one in y])
    axes.minorticks_off()
