"""The frame of a chart: scales, ticks and labels, as SVG."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, floor, log10

import numpy as np
from numpy.typing import NDArray

from tilenet.report.markup import Markup, join, tag

__all__ = ["Axes", "chart", "path_of", "ticks"]

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
        labels: Below and beside it.
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
