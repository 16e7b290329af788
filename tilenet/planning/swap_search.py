"""The choices that are worth simulating: a few hundred of 4ⁿ, from bytes and seconds alone.

Cell by cell, partial choices are extended by every action. Of those that leave alike and have alike
peaks, only the cheapest go on, at each of several prices of a copied byte: nothing, where the link
is idle anyway, up to what it costs when all computing waits for it. The limit is not asked for, so
that the same choices answer for every limit, and a larger one can only have more of them.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tilenet.planning.swap_bytes import (
    ALL,
    BOTH,
    CHECKPOINT,
    KEEP,
    SWAP,
    Action,
    Cell,
    cell_bytes,
    held_stashes,
    options_of,
    stash_is_left,
)

__all__ = ["candidates", "leanest"]

MOST_PARTIAL = 600  # choices that go on without being thinned out
PRICES = (0.0, 0.3, 1.0, 2.0)  # of a copied byte, as a share of its time on the link
CLASSES = (40, 4)  # of what is left, of the peak
GROUP = np.array([0, 1, 2, 1])  # of a cell's action, as far as the next ones tell: BOTH gives up too


@dataclass(frozen=True)
class _Partial:
    """Choices for the first cells; arrays over choices.

    Attributes:
        chosen: Places in `ALL`, (choices, cells so far).
        left: Bytes that stay for backward.
        peak: Most bytes at any of these cells.
        again_s: Seconds of recomputation.
        copied: Bytes that go out.
    """

    chosen: NDArray[np.int8]
    left: NDArray[np.int64]
    peak: NDArray[np.int64]
    again_s: NDArray[np.float64]
    copied: NDArray[np.int64]

    @classmethod
    def empty(cls) -> "_Partial":
        zero = np.zeros(1, np.int64)
        return cls(np.zeros((1, 0), np.int8), zero, zero, np.zeros(1), zero)

    def extended(self, cells: Sequence[Cell], options: Sequence[int]) -> "_Partial":
        """With each of these actions for the next cell."""
        index, many = self.chosen.shape[1], len(options)
        column = np.repeat(np.array(options, np.int8), len(self.left))[:, None]
        chosen = np.hstack([np.tile(self.chosen, (many, 1)), column])
        left, peak = np.tile(self.left, many), np.tile(self.peak, many)
        now = cell_bytes(cells, index, chosen)
        again = (column[:, 0] == CHECKPOINT) | (column[:, 0] == BOTH)
        return _Partial(
            chosen,
            left + now.left,
            np.maximum(peak, left + np.maximum(now.forward, now.backward)),
            np.tile(self.again_s, many) + cells[index].forward_s * again,
            np.tile(self.copied, many) + now.out,
        )

    def only(self, rows: NDArray[np.intp]) -> "_Partial":
        return _Partial(
            self.chosen[rows],
            self.left[rows],
            self.peak[rows],
            self.again_s[rows],
            self.copied[rows],
        )


def candidates(
    cells: Sequence[Cell],
    bandwidth: float,
    allowed: Collection[Action] = ALL,
    most_partial: int = MOST_PARTIAL,
) -> NDArray[np.int8]:
    """Choices worth simulating, (choices, cells), as places in `ALL`."""
    partial = _Partial.empty()
    for index, cell in enumerate(cells):
        partial = partial.extended(cells, options_of(cell, tuple(allowed)))
        if len(partial.left) > most_partial:
            tells = _tells(cells, index, partial.chosen)
            partial = partial.only(_cheapest(partial, tells, bandwidth))
    return partial.chosen


def leanest(
    cells: Sequence[Cell], micro_batches: int, allowed: Collection[Action] = ALL
) -> NDArray[np.int8]:
    """Of all choices one with the least peak, exactly; shape (cells,)."""
    partial = _Partial.empty()
    for index, cell in enumerate(cells):
        partial = partial.extended(cells, options_of(cell, tuple(allowed)))
        tells = _tells(cells, index, partial.chosen)
        for number in held_stashes(cells, index + 1):
            tells = 2 * tells + stash_is_left(cells, number, partial.chosen)
        partial = partial.only(_undominated(tells, partial.left, partial.peak))
    peaks = (micro_batches - 1) * partial.left + partial.peak
    found: NDArray[np.int8] = partial.chosen[int(np.argmin(peaks))]
    return found


def _tells(cells: Sequence[Cell], index: int, chosen: NDArray[np.int8]) -> NDArray[np.int64]:
    """A number that is the same where the cells up to this one mean the same to those behind."""
    tells = np.zeros(len(chosen), np.int64)
    for number in range(max(0, index - 3), index + 1):
        is_asked = any(
            behind - cell.input_from == number and cell.input_from
            for behind, cell in enumerate(cells[index + 1 : index + 4], index + 1)
        )
        if is_asked:
            tells = 3 * tells + GROUP[chosen[:, number]]
    return tells


def _cheapest(
    partial: _Partial, tells: NDArray[np.int64], bandwidth: float
) -> NDArray[np.intp]:
    """The cheapest of each class at each price."""
    key = tells
    for figure, classes in zip((partial.left, partial.peak), CLASSES, strict=True):
        low, high = int(figure.min()), int(figure.max())
        key = key * classes + (figure - low) * classes // (high - low + 1)
    found = []
    for price in PRICES:
        cost = partial.again_s + price / bandwidth * partial.copied
        order = np.lexsort((partial.left, cost, key))
        first = np.diff(key[order], prepend=-1) != 0
        found.append(order[first])
    return np.unique(np.concatenate(found))


def _undominated(
    tells: NDArray[np.int64], left: NDArray[np.int64], peak: NDArray[np.int64]
) -> NDArray[np.intp]:
    """Those that no other of the same sort beats in both."""
    order = np.lexsort((peak, left, tells))
    found = []
    group, least = -1, 0
    for row in order:
        if tells[row] != group or peak[row] < least:
            group, least = int(tells[row]), int(peak[row])
            found.append(row)
    return np.array(found)
