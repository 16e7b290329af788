"""Charts of a plan as files: the timeline of the partitions, and the bytes of levels."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from tilenet.report.figure import figure_of, save_figure

if TYPE_CHECKING:
    from tilenet.planning.time.timeline import Timeline

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
    """Draw the bytes of the levels: encoder and decoder on one another, and in network order.

    Args:
        encoder: Bytes of the encoder at each level, the full resolution first.
        decoder: Bytes of the decoder at the same levels; it may lack the lowest ones.
        path: The picture; its ending chooses the format.

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
