"""Charts of a run as pictures for its page, and pictures of a plan as files; drawn by matplotlib.

matplotlib is loaded when something is drawn, without a window system.
"""

import base64
import io
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from tilenet.errors import TilenetError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from tilenet.planning.time.timeline import Timeline

__all__ = [
    "Curve",
    "curves",
    "data_uri",
    "figure_of",
    "plot_level_bytes",
    "plot_timeline",
    "save_figure",
    "thinned",
]

# Told apart by people who see colours otherwise (Okabe and Ito, 2008).
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#7a6a00", "#56b4e9")
MOST_COLUMNS = 480  # about one per pixel of a chart
MOST_DOTS = 40  # values that are few enough for a dot each
LOG_RATIO = 50.0  # from here on values are drawn by their logarithms


def figure_of(width: float, height: float, dpi: int = 150) -> "Figure":
    """An empty figure, in inches, that no window system has to show."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=dpi, layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def data_uri(png: bytes) -> str:
    """Address that holds the whole picture."""
    return "data:image/png;base64," + base64.b64encode(png).decode("ascii")


def thinned(
    x: NDArray[np.float64], y: NDArray[np.float64], most: int
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """The smallest and the largest value of each of at most `most` columns of a long curve."""
    if len(y) <= 2 * most:
        return x, y
    begins = np.arange(0, len(y), -(-len(y) // most))
    ends = np.minimum.reduceat(y, begins), np.maximum.reduceat(y, begins)
    return np.repeat(x[begins], 2), np.stack(ends, axis=1).ravel()


@dataclass(frozen=True)
class Curve:
    """A line over the steps of a run.

    Attributes:
        name: Name in the legend.
        steps: Rising.
        values: One per step; what is not finite is left out.
        smooth: Whether values jump about: they are drawn pale, and their mean over them.
    """

    name: str
    steps: NDArray[np.float64]
    values: NDArray[np.float64]
    smooth: bool = False


def curves(
    lines: Sequence[Curve],
    alt: str,
    unit: str,
    mark: tuple[float, float, str] | None = None,
    *,
    log: bool = False,
) -> dict[str, str]:
    """A chart of lines over steps with their legend: its `uri`, and what it shows as `alt`.

    Args:
        lines: Curves to draw.
        alt: The chart in words.
        unit: Label of the axis.
        mark: Step, value and name of a point.
        log: Whether logarithms are drawn where values differ by much.
    """
    figure = figure_of(5.6, 3.1)
    axes = figure.add_subplot()
    axes.set(xlabel="step", ylabel=unit)
    axes.locator_params(axis="x", integer=True)
    axes.grid(axis="y", color="#e7ebef")
    axes.spines[["top", "right"]].set_visible(False)
    for line, colour in zip(lines, COLOURS, strict=False):
        known = np.isfinite(line.values)
        steps, values = line.steps[known], line.values[known]
        if line.smooth:
            axes.plot(*thinned(steps, values, MOST_COLUMNS), color=colour, lw=1, alpha=0.35)
            values = _moving(values)
        dots = "o" if not line.smooth and len(steps) <= MOST_DOTS else None
        thin = thinned(steps, values, MOST_COLUMNS)
        axes.plot(*thin, color=colour, lw=1.5, marker=dots, ms=4, label=line.name)
    if mark is not None:
        step, value, text = mark
        axes.plot([step], [value], "o", ms=8, mfc="none", mec="#1b2530", mew=1.5)
        left = step < sum(axes.get_xlim()) / 2
        axes.annotate(
            text, (step, value), (0, 9), textcoords="offset points", ha="left" if left else "right"
        )
    values = np.concatenate([line.values[np.isfinite(line.values)] for line in lines])
    if log and len(values) and 0 < LOG_RATIO * values.min() < values.max():
        axes.set_yscale("log")
    figure.legend(loc="outside upper left", ncols=len(lines), frameon=False)
    out = io.BytesIO()
    figure.savefig(out, format="png", metadata={"Software": None})
    return {"uri": data_uri(out.getvalue()), "alt": alt}


def _moving(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Means over a twentieth of the values around each, fewer at the ends."""
    half = len(values) // 40
    sums = np.concatenate([[0.0], np.cumsum(values)])
    places = np.arange(len(values))
    begin, end = np.maximum(places - half, 0), np.minimum(places + half + 1, len(values))
    means: NDArray[np.float64] = (sums[end] - sums[begin]) / (end - begin)
    return means


GIB = 2**30
# Told apart in print without colour too: the lighter, the less new it computes.
PART_COLOURS = {
    "F": ("#3b75af", "forward"),
    "R": ("#c9d9ea", "recomputation"),
    "B": ("#e08a3c", "backward"),
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
        if length * scale > 0.015 * span_s:
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
    save_figure(figure, path)


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
    save_figure(figure, path)


def save_figure(figure: "Figure", path: Path) -> None:
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
