"""The frame of a chart: scales, ticks and labels, as SVG.

Curves over the steps of a run.

Make curves of any length short: what a column of pixels can show of them.

Pictures of a plan: who computes when, and how many bytes each level of the network takes.

matplotlib is loaded when a picture is drawn, without a window system.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, floor, log10
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from tilenet.errors import TilenetError
from tilenet.report.html import Markup, join, tag

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from tilenet.planning.time.timeline import Timeline

__all__ = [
    "COLOURS",
    "Axes",
    "Columns",
    "Curve",
    "Mark",
    "chart",
    "curves",
    "legend",
    "path_of",
    "plot_level_bytes",
    "plot_timeline",
    "thinned",
    "ticks",
]

WIDTH, HEIGHT = 560.0, 300.0
LEFT, RIGHT, TOP, BOTTOM = 64.0, 14.0, 16.0, 44.0  # margins


@dataclass(frozen=True)
class Axes:
    """From values to places in the picture.

    Attributes:
        x: First and last value.
        y: Lowest and highest.
        log: Whether heights are logarithms.
    """

    x: tuple[float, float]
    y: tuple[float, float]
    log: bool = False

    def across(self, values: NDArray[np.float64]) -> NDArray[np.float64]:
        """Columns of the picture."""
        low, high = self.x
        return LEFT + (values - low) / ((high - low) or 1.0) * (WIDTH - LEFT - RIGHT)

    def down(self, values: NDArray[np.float64]) -> NDArray[np.float64]:
        """Rows of the picture."""
        low, high = self.y
        if self.log:
            values, low, high = np.log10(values), log10(low), log10(high)
        return HEIGHT - BOTTOM - (values - low) / ((high - low) or 1.0) * (HEIGHT - TOP - BOTTOM)

    def point(self, x: float, y: float) -> tuple[float, float]:
        """The place of one value."""
        return float(self.across(np.array([x]))[0]), float(self.down(np.array([y]))[0])


def chart(axes: Axes, alt: str, labels: tuple[str, str], *parts: Markup) -> Markup:
    """A chart with its axes.

    Args:
        axes: Its scales.
        alt: What it shows, in words.
        labels: Below and next to it.
        parts: What is drawn within.
    """
    return tag(
        "svg",
        tag("title", alt),
        _frame(axes, labels),
        *parts,
        viewBox=f"0 0 {WIDTH:.0f} {HEIGHT:.0f}",
        role="img",
        aria_label=alt,
    )


def ticks(low: float, high: float, about: int = 5) -> list[float]:
    """Round numbers from `low` to `high`."""
    span = high - low
    if not span > 0:
        return [low]
    rough = 10.0 ** floor(log10(span / about))
    step = next(rough * f for f in (1, 2, 5, 10) if span / (rough * f) <= about)
    return [step * n for n in range(ceil(low / step - 1e-9), floor(high / step + 1e-9) + 1)]


def _decades(low: float, high: float) -> list[float]:
    every = max(1, ceil((log10(high) - log10(low)) / 6))
    return [10.0**n for n in range(ceil(log10(low)), floor(log10(high)) + 1, every)]


def _frame(axes: Axes, labels: tuple[str, str]) -> Markup:
    parts: list[Markup] = []
    bottom, right = HEIGHT - BOTTOM, WIDTH - RIGHT
    across = [value for value in ticks(*axes.x) if value.is_integer()]
    for value in across:
        x, _ = axes.point(value, axes.y[0])
        parts.append(tag("line", x1=x, x2=x, y1=bottom, y2=bottom + 4, class_="tick"))
        parts.append(_words(x, bottom + 18, f"{value:,.0f}", "middle"))
    down = _decades(*axes.y) if axes.log else ticks(*axes.y)
    for value in down if len(down) > 1 else axes.y:
        _, y = axes.point(axes.x[0], value)
        parts.append(tag("line", x1=LEFT, x2=right, y1=y, y2=y, class_="grid"))
        parts.append(_words(LEFT - 6, y + 4, f"{value:.6g}", "end"))
    parts.append(tag("line", x1=LEFT, x2=right, y1=bottom, y2=bottom, class_="axis"))
    parts.append(_words((LEFT + right) / 2, HEIGHT - 6, labels[0], "middle", "label"))
    middle = (TOP + bottom) / 2
    parts.append(
        tag(
            "text",
            labels[1],
            x=14,
            y=middle,
            text_anchor="middle",
            class_="label",
            transform=f"rotate(-90 14 {middle:.0f})",
        )
    )
    return join(*parts)


def _words(x: float, y: float, text: str, anchor: str, kind: str | None = None) -> Markup:
    return tag("text", text, x=x, y=y, text_anchor=anchor, class_=kind)


def path_of(xs: Sequence[float] | NDArray[np.float64], ys: NDArray[np.float64]) -> str:
    """The points of a line, as SVG wants them."""
    return " ".join(f"{x:.1f},{y:.1f}" for x, y in zip(xs, ys, strict=True))


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


MOST_COLUMNS = 480  # about one per pixel of the chart
MOST_DOTS = 40  # values that are few enough for a dot each
LOG_RATIO = 50.0  # from here on values are drawn by their logarithms
# Told apart by people who see colours otherwise (Okabe and Ito, 2008).
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#7a6a00", "#56b4e9")


@dataclass(frozen=True)
class Curve:
    """A line.

    Attributes:
        name: In the legend.
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
    """A point that matters.

    Attributes:
        step: Where.
        value: How much.
        text: What it is.
    """

    step: float
    value: float
    text: str


def curves(
    lines: Sequence[Curve],
    alt: str,
    unit: str,
    mark: Mark | None = None,
    *,
    from_zero: bool = False,
    log: bool | None = None,
) -> Markup:
    """A chart of lines over steps with their legend.

    Args:
        lines: At least one of them with a finite value.
        alt: The chart in words.
        unit: What is drawn, next to it.
        mark: A point to name.
        from_zero: Whether the lowest value that is shown is 0.
        log: Whether logarithms are drawn; None: where values differ so much.
    """
    thin = [thinned(line.steps, line.values, MOST_COLUMNS) for line in lines]
    low = min(float(one.low.min()) for one in thin if len(one.x))
    high = max(float(one.high.max()) for one in thin if len(one.x))
    if log is None:
        log = low > 0 and high > LOG_RATIO * low
    if not log:
        room = 0.05 * (high - low) or 0.05 * abs(high) or 1.0
        low, high = (0.0 if from_zero and low >= 0 else low - room), high + room
    first = min(float(one.x[0]) for one in thin if len(one.x))
    last = max(float(one.x[-1]) for one in thin if len(one.x))
    axes = Axes((min(first, 0.0 if first < 2 else first), last), (low, high), log)
    parts = [
        _line(axes, one, line.smooth, COLOURS[number % len(COLOURS)])
        for number, (line, one) in enumerate(zip(lines, thin, strict=True))
        if len(one.x)
    ]
    if mark is not None:
        parts.append(_mark(axes, mark))
    drawn = chart(axes, alt, ("step", unit), *parts)
    keys = [(COLOURS[n % len(COLOURS)], line.name) for n, line in enumerate(lines)]
    return tag("figure", drawn, legend(keys))


def legend(keys: Sequence[tuple[str, str]]) -> Markup:
    """Colours and what they stand for."""
    return tag(
        "figcaption",
        *(
            tag("span", tag("i", style=f"background:{colour}"), " ", name, class_="key")
            for colour, name in keys
        ),
    )


def _line(axes: Axes, line: Columns, smooth: bool, colour: str) -> Markup:
    x, high = axes.across(line.x), axes.down(line.high)
    parts = []
    if (line.low != line.high).any():  # each column from its smallest to its largest value
        back = axes.down(line.low)[::-1]
        points = f"{path_of(x, high)} {path_of(x[::-1], back)}"
        parts.append(tag("polygon", points=points, fill=colour, fill_opacity=0.25))
    elif smooth:
        parts.append(_stroke(path_of(x, high), colour, 1.0, 0.35))
    mean = _moving(line.mean) if smooth else line.mean
    parts.append(_stroke(path_of(x, axes.down(mean)), colour, 2.0, 1.0))
    if not smooth and len(x) <= MOST_DOTS:
        parts += [
            tag("circle", cx=float(a), cy=float(b), r=3, fill=colour)
            for a, b in zip(x, axes.down(mean), strict=True)
        ]
    return join(*parts)


def _stroke(points: str, colour: str, width: float, opacity: float) -> Markup:
    return tag(
        "polyline",
        points=points,
        fill="none",
        stroke=colour,
        stroke_width=width,
        stroke_opacity=opacity,
        stroke_linejoin="round",
    )


def _moving(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Means over a twentieth of the values around each, fewer at the ends."""
    half = len(values) // 40
    sums = np.concatenate([[0.0], np.cumsum(values)])
    places = np.arange(len(values))
    begin, end = np.maximum(places - half, 0), np.minimum(places + half + 1, len(values))
    means: NDArray[np.float64] = (sums[end] - sums[begin]) / (end - begin)
    return means


def _mark(axes: Axes, mark: Mark) -> Markup:
    x, y = axes.point(mark.step, mark.value)
    left = x < 280
    return join(
        tag("circle", cx=x, cy=y, r=6, class_="mark"),
        tag(
            "text",
            mark.text,
            x=x + (10 if left else -10),
            y=max(y - 8, 12.0),
            text_anchor="start" if left else "end",
            class_="mark",
        ),
    )


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
    figure = _figure(10.0, 1.5 + 0.5 * timeline.num_partitions)
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
    figure = _figure(10.0, 4.0)
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


def _figure(width: float, height: float) -> "Figure":
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise TilenetError(
            f"a picture needs matplotlib ({error}); pip install tilenet[plot]"
        ) from error
    figure = Figure(figsize=(width, height), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    return figure


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
