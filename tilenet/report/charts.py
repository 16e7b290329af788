"""Charts of values over the steps of a run, as pictures for its report."""

import io
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tilenet.report.figure import data_uri, figure_of

# Readers with colour vision deficiency can tell them apart (Okabe and Ito, 2008).
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#7a6a00", "#56b4e9")
MOST_COLUMNS = 480  # about one per pixel of a chart
MOST_DOTS = 40  # with more values, a curve has no dots
LOG_RATIO = 50.0  # ratio of the largest to the smallest value above which the axis is logarithmic


def thinned(
    x: NDArray[np.float64], y: NDArray[np.float64], most: int
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Reduce a long curve to the smallest and the largest value of each of `most` columns."""
    if len(y) <= 2 * most:
        return x, y
    begins = np.arange(0, len(y), -(-len(y) // most))
    ends = np.minimum.reduceat(y, begins), np.maximum.reduceat(y, begins)
    return np.repeat(x[begins], 2), np.stack(ends, axis=1).ravel()


@dataclass(frozen=True)
class Curve:
    """A line over the steps of a run.

    Attributes:
        steps: Numbers of the steps, ascending.
        values: One value per step; those that are not finite are left out.
        smooth: Whether values are noisy: they are drawn pale, below their moving mean.
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
    """Draw a chart of lines over steps with a legend; return its `uri` and `alt`.

    Args:
        alt: Description of the chart for readers who do not see it.
        unit: Label of the vertical axis.
        mark: Step, value and name of a point to mark.
        log: Whether the axis is logarithmic where values differ by more than `LOG_RATIO`.
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
    """Moving means over a twentieth of the values, over fewer at the ends."""
    half = len(values) // 40
    sums = np.concatenate([[0.0], np.cumsum(values)])
    places = np.arange(len(values))
    begin, end = np.maximum(places - half, 0), np.minimum(places + half + 1, len(values))
    means: NDArray[np.float64] = (sums[end] - sums[begin]) / (end - begin)
    return means
