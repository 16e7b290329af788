"""Charts of a run as SVG, and pictures of a plan as files; drawn by matplotlib.

matplotlib is loaded when something is drawn, without a window system.
"""

import io
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from tilenet.errors import TilenetError
from tilenet.report.parts import Drawing

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from tilenet.planning.time.timeline import Timeline

__all__ = [
    "COLOURS",
    "Columns",
    "Curve",
    "Mark",
    "curves",
    "figure_of",
    "plot_level_bytes",
    "plot_timeline",
    "shares",
    "svg",
    "thinned",
]

# Told apart by people who see colours otherwise (Okabe and Ito, 2008).
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#7a6a00", "#56b4e9")
SOFT, INK = "#55616e", "#1b2530"
STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",  # letters stay letters
    "svg.hashsalt": "tilenet",  # the same run gives the same bytes
    "font.size": 9.0,
    "font.family": "sans-serif",
    "axes.edgecolor": "#8a96a3",
    "axes.labelcolor": INK,
    "xtick.color": SOFT,
    "ytick.color": SOFT,
    "grid.color": "#e7ebef",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "path.simplify": False,
}
MOST_COLUMNS = 480  # about one per pixel of a chart
MOST_DOTS = 40  # values that are few enough for a dot each
LOG_RATIO = 50.0  # from here on values are drawn by their logarithms


def figure_of(
    width: float, height: float, layout: Literal["constrained"] | None = "constrained"
) -> "Figure":
    """An empty figure, in inches, that no window system has to show."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=150, layout=layout)
    FigureCanvasAgg(figure)
    return figure


def svg(figure: "Figure", alt: str) -> Drawing:
    """A figure as part of a page.

    Args:
        figure: What is drawn.
        alt: What it shows, in words.
    """
    out = io.StringIO()
    nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
    figure.savefig(out, format="svg", transparent=True, metadata=nothing)
    text = out.getvalue()
    text = text[text.index("<svg") :]
    begin, rest = text.split(">", 1)
    view = begin[begin.index("viewBox") :]
    words = escape(alt, quote=True)
    head = f'<svg role="img" aria-label="{words}" xmlns:xlink="http://www.w3.org/1999/xlink" {view}'
    return Drawing(f"{head}><title>{words}</title>{rest}")


@dataclass(frozen=True)
class Columns:
    """Values in columns of a chart, those without values left out.

    Attributes:
        x: Mean place of a column's values.
        low: Smallest of them.
        high: Largest.
        mean: Their mean.
    """

    x: NDArray[np.float64]
    low: NDArray[np.float64]
    high: NDArray[np.float64]
    mean: NDArray[np.float64]


def thinned(x: NDArray[np.float64], y: NDArray[np.float64], most: int) -> Columns:
    """Values in at most `most` columns of equal width; one each where there are no more values.

    Args:
        x: Rising.
        y: Values; what is not finite is left out.
        most: Columns.
    """
    finite = np.isfinite(x) & np.isfinite(y)
    x, y = x[finite], y[finite]
    if len(x) <= most:
        return Columns(x, y, y, y)
    width = (x[-1] - x[0]) / most or 1.0
    place = np.minimum(((x - x[0]) / width).astype(np.int64), most - 1)
    begins = np.flatnonzero(np.diff(place, prepend=-1))
    counts = np.diff(begins, append=len(x))
    return Columns(
        np.add.reduceat(x, begins) / counts,
        np.minimum.reduceat(y, begins),
        np.maximum.reduceat(y, begins),
        np.add.reduceat(y, begins) / counts,
    )


@dataclass(frozen=True)
class Curve:
    """A line over the steps of a run.

    Attributes:
        name: Its name in the legend.
        steps: Rising.
        values: One per step.
        smooth: Whether values jump about: they are drawn pale, and their mean over them.
    """

    name: str
    steps: NDArray[np.float64]
    values: NDArray[np.float64]
    smooth: bool = False


@dataclass(frozen=True)
class Mark:
    """A point that matters, and what it is."""

    step: float
    value: float
    text: str


@contextmanager
def _chart(unit: str) -> Iterator[tuple["Figure", "Axes"]]:
    """A chart over steps."""
    from matplotlib import rc_context

    with rc_context(STYLE):
        figure = figure_of(5.6, 3.1)
        axes = figure.add_subplot()
        axes.set(xlabel="step", ylabel=unit)
        axes.locator_params(axis="x", integer=True)
        axes.grid(axis="y")
        axes.set_axisbelow(True)
        yield figure, axes


def curves(
    lines: Sequence[Curve],
    alt: str,
    unit: str,
    mark: Mark | None = None,
    *,
    from_zero: bool = False,
    log: bool | None = None,
) -> Drawing:
    """A chart of lines over steps with their legend.

    Args:
        lines: At least one of them with a finite value.
        alt: The chart in words.
        unit: What is drawn, next to it.
        mark: A point to name.
        from_zero: Whether the lowest value that is shown is 0.
        log: Whether logarithms are drawn; None: where values differ by much.
    """
    thin = [thinned(line.steps, line.values, MOST_COLUMNS) for line in lines]
    low = min(float(one.low.min()) for one in thin if len(one.x))
    high = max(float(one.high.max()) for one in thin if len(one.x))
    with _chart(unit) as (figure, axes):
        for line, one, colour in zip(lines, thin, COLOURS, strict=False):
            if len(one.x):
                _draw(axes, line, one, colour)
        if mark is not None:
            axes.plot([mark.step], [mark.value], "o", ms=8, mfc="none", mec=INK, mew=1.5)
            axes.annotate(
                mark.text, (mark.step, mark.value), (0, 9), textcoords="offset points", color=INK,
                ha="left" if mark.step < sum(axes.get_xlim()) / 2 else "right",
            )  # fmt: skip
        if log or (log is None and low > 0 and high > LOG_RATIO * low):
            axes.set_yscale("log")
        elif from_zero and low >= 0:
            axes.set_ylim(0, 1.05 * high or 1)
        figure.legend(loc="outside upper left", ncols=len(lines), frameon=False)
        return svg(figure, alt)


def _draw(axes: "Axes", line: Curve, thin: Columns, colour: str) -> None:
    if (thin.low != thin.high).any():  # each column from its smallest to its largest value
        axes.fill_between(thin.x, thin.low, thin.high, color=colour, alpha=0.25, lw=0)
    elif line.smooth:
        axes.plot(thin.x, thin.mean, color=colour, lw=1, alpha=0.35)
    mean = _moving(thin.mean) if line.smooth else thin.mean
    dots = "o" if not line.smooth and len(thin.x) <= MOST_DOTS else None
    axes.plot(thin.x, mean, color=colour, lw=1.5, marker=dots, ms=4, label=line.name)


def _moving(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Means over a twentieth of the values around each, fewer at the ends."""
    half = len(values) // 40
    sums = np.concatenate([[0.0], np.cumsum(values)])
    places = np.arange(len(values))
    begin, end = np.maximum(places - half, 0), np.minimum(places + half + 1, len(values))
    means: NDArray[np.float64] = (sums[end] - sums[begin]) / (end - begin)
    return means


def shares(
    edges: NDArray[np.float64], parts: NDArray[np.float64], names: Sequence[str], alt: str
) -> Drawing:
    """Shares of time over steps, one on another.

    Args:
        edges: Steps at which columns begin, and the last one's end.
        parts: Seconds of each part in each column, (parts, columns).
        names: Names of the parts.
        alt: The chart in words.
    """
    with _chart("share of a step [%]") as (figure, axes):
        tops = 100 * np.cumsum(parts, axis=0) / np.maximum(parts.sum(axis=0), 1e-300)
        below = np.zeros(parts.shape[1])
        for top, name, colour in zip(tops, names, COLOURS, strict=False):
            axes.stairs(top, edges, baseline=below, fill=True, color=colour, label=name)
            below = top
        axes.set(xlim=(edges[0], edges[-1]), ylim=(0, 100))
        figure.legend(loc="outside upper left", ncols=len(names), frameon=False)
        return svg(figure, alt)


GIB = 2**30
# Told apart in print without colour too: the lighter, the less new it computes.
PART_COLOURS = {
    "F": ("#3b75af", "forward"),
    "R": ("#c9d9ea", "recomputation"),
    "B": ("#e08a3c", "backward"),
    "loss": ("#8c3b5c", "loss"),
    "update": ("#5b5b5b", "update"),
}
ENCODER, DECODER = "#3b75af", "#e08a3c"
UNITS = ((1, "s"), (1e-3, "ms"), (1e-6, "µs"))


def plot_timeline(timeline: "Timeline", path: Path, title: str = "") -> None:
    """Draw each partition's forward, recomputation and backward over time.

    The file's ending chooses the format (png, pdf, svg …).

    Raises:
        TilenetError: matplotlib is missing, or the picture cannot be written.
    """
    span_s = timeline.makespan_s
    scale, unit = next((pair for pair in UNITS if span_s >= pair[0]), UNITS[-1])
    figure = figure_of(10.0, 1.5 + 0.5 * timeline.num_partitions)
    axes = figure.add_subplot()
    for event in timeline.events:
        length = (event.stop_s - event.start_s) / scale
        if not length:
            continue
        axes.barh(
            event.partition,
            length,
            left=event.start_s / scale,
            height=0.8,
            color=PART_COLOURS[event.kind][0],
            edgecolor="white",
            linewidth=0.5,
        )
        # a digit takes about a hundredth of the width
        if event.micro_batch is not None and length * scale > 0.015 * span_s:
            axes.text(
                (event.start_s + event.stop_s) / 2 / scale,
                event.partition,
                str(event.micro_batch),
                ha="center",
                va="center",
                fontsize=7,
                color="black" if event.kind == "R" else "white",
            )
    axes.set_yticks(range(timeline.num_partitions))
    axes.set_ylabel("partition")
    axes.invert_yaxis()
    axes.set_xlim(0, span_s / scale or 1)
    axes.set_xlabel(f"time [{unit}]   (numbers: micro-batches; idle: {timeline.bubble:.0%})")
    axes.spines[["top", "right"]].set_visible(False)
    drawn = {event.kind for event in timeline.events if event.stop_s > event.start_s}
    from matplotlib.patches import Patch

    handles = [
        Patch(color=c, label=label) for kind, (c, label) in PART_COLOURS.items() if kind in drawn
    ]
    figure.legend(
        handles=handles, loc="outside upper right", ncols=len(handles), frameon=False, fontsize=9
    )
    axes.set_title(title, loc="left")
    _write(figure, path)


def plot_level_bytes(
    encoder: Sequence[float], decoder: Sequence[float], path: Path, title: str = ""
) -> None:
    """Draw what the levels take: encoder and decoder on one another, and in network order.

    Args:
        encoder: Bytes of the encoder at each level, the full resolution first.
        decoder: Bytes of the decoder at the same levels; it may lack the lowest ones.
        path: The picture; its ending chooses the format.
        title: Above both panels.

    Raises:
        TilenetError: matplotlib is missing, or the picture cannot be written.
    """
    down = [num_bytes / GIB for num_bytes in encoder]
    up = [num_bytes / GIB for num_bytes in decoder]
    figure = figure_of(10.0, 4.0)
    left, right = figure.subplots(1, 2, sharey=True, width_ratios=[1, 1.6])
    levels = range(max(len(down), len(up)))
    left.bar(range(len(down)), down, color=ENCODER, label="encoder $E_l$")
    under = [down[level] if level < len(down) else 0.0 for level in range(len(up))]
    left.bar(range(len(up)), up, bottom=under, color=DECODER, label="decoder $D_{l'}$")
    left.set_xticks(levels)
    left.set_xlabel("level $l$ (0: full resolution)")
    left.set_ylabel("feature maps [GiB]")
    left.legend(frameon=False)

    names = [*(f"E{level}" for level in range(len(down)))]
    names += [f"D{level}" for level in reversed(range(len(up)))]
    heights = [*down, *reversed(up)]
    colours = [ENCODER] * len(down) + [DECODER] * len(up)
    right.bar(range(len(heights)), heights, color=colours)
    right.set_xticks(range(len(heights)), names)
    right.set_xlabel("in network order: down the encoder, up the decoder")
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
    if title:
        figure.suptitle(title)
    _write(figure, path)


def _write(figure: "Figure", path: Path) -> None:
    """Write next to the target and rename, so that no half picture is ever there."""
    path = Path(path)
    ending = path.suffix.removeprefix(".").lower() or "png"
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        figure.savefig(part, format=ending)
        part.replace(path)
    except (OSError, ValueError) as error:  # ValueError: an ending that matplotlib does not know
        raise TilenetError(
            f"the picture must go where it can be written, as png, pdf or svg ({path}: {error}); "
            "choose another path"
        ) from error
    finally:
        part.unlink(missing_ok=True)
