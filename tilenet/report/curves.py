"""Curves over the steps of a run."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tilenet.report.axes import Axes, chart, path_of
from tilenet.report.markup import Markup, join, tag
from tilenet.report.thin import Columns, thinned

__all__ = ["COLOURS", "Curve", "Mark", "curves", "legend"]

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
        unit: What is drawn, beside it.
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
