"""The black collar of an image: pixels of zeros that reach its edge, found over the whole image.

Whether a black pixel reaches the edge may be decided far away from it, so no window can tell. The
image is looked at once, in strips of rows. Of each strip only runs of black pixels along rows are
kept, and only of those patches that may go on beyond the strip; the rest is dark water. Then the
runs of all strips are linked. Runs are kept, not the first and last valid pixel of each row: a
collar may have bays, and may lie on both sides of a tongue of data.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from tilenet.geometry.windows import Window

# Firsts and ends (2, N) of black pixels along rows, in order, as places on a line: the rows one
# after another, each with one more place at its end, so that no run goes on in the next row.
Runs = NDArray[np.int64]

STRIP_ROWS = 1024
STRIP_PIXELS = 64 << 20  # a byte each


def collar_strips(size: tuple[int, int], block_rows: int) -> list[Window]:
    """Strips of an image of `size`, of whole blocks of the file where memory allows."""
    height, width = size
    rows = max(1, min(STRIP_ROWS, STRIP_PIXELS // width))
    rows -= rows % block_rows if rows >= block_rows else 0
    return [Window(row, 0, min(rows, height - row), width) for row in range(0, height, rows)]


def strip_runs(black: NDArray[np.bool_], first_row: int) -> Runs:
    """Runs of a strip that may belong to the collar.

    Args:
        black: Whether all bands are zero, (rows of the strip, W).
        first_row: The strip's place in the image.
    """
    rows, width = black.shape
    line = np.zeros((rows, width + 1), np.int8)
    line[:, :-1] = black
    steps = np.diff(line.ravel(), prepend=np.int8(0))
    runs = np.stack([np.flatnonzero(steps == 1), np.flatnonzero(steps == -1)])
    return np.asarray(_from_edges(runs, rows, width) + first_row * (width + 1), np.int64)


class Collar:
    """Where the black collar lies.

    Args:
        parts: Runs of all strips, in order.
        size: Height and width of the image.
    """

    def __init__(self, parts: Sequence[Runs], size: tuple[int, int]) -> None:
        height, self._width = size
        runs = np.concatenate([np.empty((2, 0), np.int64), *parts], axis=1)
        self.runs = _from_edges(runs, height, self._width)

    def inside(self, window: Window) -> NDArray[np.bool_]:
        """Whether each pixel of a window of the image belongs to the collar, (H, W)."""
        line = self._width + 1
        low, high = window.row * line, (window.row + window.height) * line
        part = slice(*np.searchsorted(self.runs[0], (low, high)))
        rows = self.runs[0, part] // line
        first, end = self.runs[:, part] - rows * line - window.col
        visible = (end > 0) & (first < window.width)
        steps = np.zeros((window.height, window.width + 1), np.int8)
        steps[rows[visible] - window.row, first[visible].clip(0)] = 1
        steps[rows[visible] - window.row, end[visible].clip(max=window.width)] = -1
        return np.asarray(steps.cumsum(axis=1, dtype=np.int8)[:, :-1] > 0)


def _from_edges(runs: Runs, rows: int, width: int) -> Runs:
    """The runs of so many rows that touch an edge of these, and those that are linked to one."""
    first, end = runs
    line = width + 1
    at_edge = (first < width) | (first >= (rows - 1) * line)
    at_edge |= (first % line == 0) | (end % line == width)
    return runs[:, _reached(runs, at_edge, width)]


def _reached(runs: Runs, seeds: NDArray[np.bool_], width: int) -> NDArray[np.bool_]:
    """Whether runs are linked to a seed; runs of neighbouring rows that share a column are."""
    first, end = runs
    above = runs - (width + 1)
    # Runs of the row above that overlap: one after another, since runs are in order.
    low = np.searchsorted(end, above[0], side="right")
    count = np.maximum(np.searchsorted(first, above[1], side="left") - low, 0)
    below = np.repeat(np.arange(len(first)), count)
    before = np.arange(len(below)) - np.repeat(np.cumsum(count) - count, count)
    over = low[below] + before
    # Each patch takes the smallest number in it: union-find, all pairs at a time.
    root = np.arange(len(first))
    while True:
        lower, upper = root[below], root[over]
        apart = lower != upper
        if not apart.any():
            break
        below, over, lower, upper = below[apart], over[apart], lower[apart], upper[apart]
        np.minimum.at(root, np.maximum(lower, upper), np.minimum(lower, upper))
        while (root != (up := root[root])).any():
            root = up
    reached = np.zeros(len(first), np.bool_)
    reached[root[seeds]] = True
    return reached[root]
