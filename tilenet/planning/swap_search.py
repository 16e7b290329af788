"""The choices that are worth simulating: a few hundred of 4ⁿ, from bytes and seconds alone.

Cell by cell, partial choices are extended by every action. Of those that leave alike and have alike
peaks, only the cheapest go on, at each of several prices of a copied byte: nothing, where the link
is idle anyway, up to what it costs when all computing waits for it. The limit is not asked for, so
that the same choices answer for every limit, and a larger one can only have more of them.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tilenet.planning.swap_bytes import (
    ALL,
    BOTH,
    CHECKPOINT,
    KEEP,
    Action,
    Cell,
    cell_bytes,
    held_stashes,
    options_of,
    stash_is_left,
)
from tilenet.planning.swap_choices import Choices

__all__ = ["candidates", "leanest"]

MOST_PARTIAL = 600  # choices that go on without being thinned out
PRICES = (0.0, 0.3, 1.0, 2.0)  # of a copied byte, as a share of its time on the link
# Limits to plan for, as shares of the way from the leanest peak to that of keeping everything.
LEVELS = np.array([0, 0.01, 0.025, 0.05, 0.08, 0.12, 0.18, 0.25, 0.35, 0.47, 0.6, 0.75, 1])
MOST_OF_FRONT = 25
RATES = 10  # of a byte that stays
GROUP = np.array(
    [0, 1, 2, 1]
)  # of a cell's action, as far as the next ones tell: BOTH gives up too


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
    micro_batches: int,
    allowed: Collection[Action] = ALL,
    most_partial: int = MOST_PARTIAL,
) -> NDArray[np.int8]:
    """Choices worth simulating, (choices, cells), as places in `ALL`."""
    prices = _Prices.of(cells, bandwidth, micro_batches, allowed)
    partial = _Partial.empty()
    for index, cell in enumerate(cells):
        partial = partial.extended(cells, options_of(cell, tuple(allowed)))
        if len(partial.left) > most_partial and index < len(cells) - 1:
            tells = _tells(cells, index, partial.chosen)
            partial = partial.only(prices.cheapest(partial, tells))
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
        sorts = [np.flatnonzero(tells == sort) for sort in np.unique(tells)]
        fronts = [rows[_front(partial.left[rows], partial.peak[rows])] for rows in sorts]
        partial = partial.only(np.concatenate(fronts))
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


@dataclass(frozen=True)
class _Prices:
    """What partial choices are compared by.

    Attributes:
        micro_batches: How often what is left is there.
        levels: Limits to plan for.
        copy_s: Prices of a copied byte, seconds.
        stay_s: Prices of a byte that stays, seconds.
        later_left: Least bytes that the cells from each one on leave.
        later_peak: Least peak of these, above what the cells before have left.
    """

    micro_batches: int
    levels: NDArray[np.float64]
    copy_s: NDArray[np.float64]
    stay_s: NDArray[np.float64]
    later_left: list[int]
    later_peak: list[int]

    @classmethod
    def of(
        cls,
        cells: Sequence[Cell],
        bandwidth: float,
        micro_batches: int,
        allowed: Collection[Action],
    ) -> "_Prices":
        kept = np.full(len(cells), KEEP, np.int8)
        ends = Choices.of(cells, np.stack([leanest(cells, micro_batches, allowed), kept]))
        low, high = ends.least_peaks(micro_batches)
        later_left, later_peak = [0], [0]
        for cell in reversed(cells):
            least = 0 if cell.may_checkpoint else cell.saved_bytes - cell.swapped_bytes
            later_left.append(later_left[-1] + least)
            work = max(cell.forward_bytes, cell.backward_bytes)
            later_peak.append(max(work, least + later_peak[-1]))
        copy_s = np.array(PRICES) / bandwidth
        rates = [cell.forward_s / cell.saved_bytes for cell in cells if cell.saved_bytes]
        rates = [rate for rate in [*rates, *copy_s] if rate > 0] or [1.0]
        stay_s = np.geomspace(min(rates) / 2, max(rates) * 2, RATES - 2)
        return cls(
            micro_batches,
            low + LEVELS * (high - low),
            copy_s,
            np.array([0, *stay_s, 1e6 * stay_s[-1]]),
            later_left[::-1],
            later_peak[::-1],
        )

    def cheapest(self, partial: _Partial, tells: NDArray[np.int64]) -> NDArray[np.intp]:
        """For each level and at all prices the cheapest of those that can still keep it."""
        behind = partial.chosen.shape[1]
        left = partial.left
        least = np.maximum(partial.peak, left + self.later_peak[behind])
        least = least + (self.micro_batches - 1) * (left + self.later_left[behind])
        costs = (
            partial.again_s[:, None, None]
            + partial.copied[:, None, None] * self.copy_s[:, None]
            + left[:, None, None] * self.stay_s
        ).reshape(len(left), -1)
        whole = (self.micro_batches - 1) * left + partial.peak
        found = []
        for sort in np.unique(tells):
            rows = np.flatnonzero(tells == sort)
            # The leanest first: what can keep one level can keep all higher ones.
            rows = rows[np.argsort(least[rows], kind="stable")]
            ends = np.searchsorted(least[rows], self.levels, side="right")
            for start, end in zip([0, *ends[:-1]], ends, strict=True):
                if end > start:
                    found.append(rows[:end][np.unique(costs[rows[:end]].argmin(axis=0))])
            for price in self.copy_s:
                cost = partial.again_s[rows] + price * partial.copied[rows]
                leans = (left[rows], whole[rows])
                found.extend(rows[_thinned(_front(lean, cost), lean, cost)] for lean in leans)
        return np.unique(np.concatenate(found))


def _thinned(rows: NDArray[np.intp], first: NDArray[Any], second: NDArray[Any]) -> NDArray[np.intp]:
    """Of a front those that are best at some rate between both figures, and some between."""
    if len(rows) <= MOST_OF_FRONT:
        return rows
    hull: list[int] = []
    x, y = first[rows].tolist(), second[rows].tolist()
    for place in range(len(rows)):
        while len(hull) > 1:
            a, b = hull[-2:]
            if (y[b] - y[a]) * (x[place] - x[a]) < (y[place] - y[a]) * (x[b] - x[a]):
                break
            hull.pop()
        hull.append(place)
    some = np.linspace(0, len(rows) - 1, MOST_OF_FRONT).round().astype(np.intp)
    return rows[np.union1d(hull, some)]


def _front(first: NDArray[Any], second: NDArray[Any]) -> NDArray[np.intp]:
    """Places of which no other has as little of both figures; by the first."""
    order = np.lexsort((second, first))
    least = np.minimum.accumulate(second[order])
    return order[np.diff(least, prepend=np.inf) < 0]
