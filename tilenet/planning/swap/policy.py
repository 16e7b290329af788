"""Keep, compute again, or swap: what each cell of a partition does with what backward needs.

Everything that fits is kept. Beyond that three ways compete: computing a cell again costs its
forward's time wherever it stands; swapping costs nothing where the link is idle, which it is most
for the oldest cells, since backward needs those last; and both at once leave nothing at all. A plan
for a limit is the choice that a simulated step is fastest with, among those that fit.

The choices that are worth simulating: a few hundred of 4ⁿ, from bytes and seconds alone.

Cell by cell, partial choices are extended by every action. Of those that leave alike and have alike
peaks, only the cheapest go on, at each of several prices of a copied byte: nothing, where the link
is idle anyway, up to what it costs when all computing waits for it. The limit is not asked for, so
that the same choices answer for every limit, and a larger one can only have more of them.

What whole choices of actions cost: bytes and seconds of every cell, many choices at a time.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import inf
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tilenet.planning.swap.cells import (
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
from tilenet.planning.swap.simulate import StepCosts, simulate_step

__all__ = [
    "ALL",
    "Action",
    "Cell",
    "Choice",
    "Choices",
    "candidates",
    "choose",
    "leanest",
    "predict",
]


@dataclass(frozen=True)
class Choices:
    """Choices and what they cost; arrays (choices, cells), with bytes as in `StepCosts`.

    Attributes:
        cells: In the order of forward.
        chosen: Places of the actions in `ALL`.
    """

    cells: tuple[Cell, ...]
    chosen: NDArray[np.int8]
    backward_s: NDArray[np.float64]
    left: NDArray[np.int64]
    forward: NDArray[np.int64]
    backward: NDArray[np.int64]
    out: NDArray[np.int64]
    back: NDArray[np.int64]

    @classmethod
    def of(cls, cells: Sequence[Cell], chosen: NDArray[np.int8]) -> "Choices":
        single = [cell_bytes(cells, index, chosen) for index in range(len(cells))]
        left, forward, backward, out, early = (
            np.stack([getattr(one, name) for one in single], axis=1)
            for name in ("left", "forward", "backward", "out", "early")
        )
        before = np.cumsum(left, axis=1) - left
        back = out + early
        for index, cell in enumerate(cells):
            if cell.input_from:
                back[:, index - cell.input_from] -= early[:, index]
        again = (chosen == CHECKPOINT) | (chosen == BOTH)
        backward_s = np.array([cell.backward_s for cell in cells])
        backward_s = backward_s + again * np.array([cell.forward_s for cell in cells])
        found = (left, before + forward, before + backward, out, np.maximum(back, 0))
        return cls(tuple(cells), chosen, backward_s, *found)

    def least_peaks(self, micro_batches: int) -> NDArray[np.int64]:
        """Bytes that each choice needs at the least."""
        most = np.maximum(self.forward, self.backward).max(axis=1)
        total: NDArray[np.int64] = (micro_batches - 1) * self.left.sum(axis=1) + most
        return total

    def least_seconds(self, bandwidth: float, micro_batches: int) -> NDArray[np.float64]:
        """Seconds that no step with each choice can be faster than."""
        forward_s = sum(cell.forward_s for cell in self.cells)
        computing = forward_s + self.backward_s.sum(axis=1)
        copying = (self.out.sum(axis=1) + self.back.sum(axis=1)) / bandwidth
        found: NDArray[np.float64] = micro_batches * np.maximum(computing, copying) * (1 - 1e-12)
        return found

    def step_costs(self, row: int) -> StepCosts:
        """What a step of one choice is simulated from."""
        return StepCosts(
            [cell.forward_s for cell in self.cells],
            self.backward_s[row].tolist(),
            self.left[row].tolist(),
            self.forward[row].tolist(),
            self.backward[row].tolist(),
            self.out[row].tolist(),
            self.back[row].tolist(),
        )


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


@dataclass(frozen=True)
class Choice:
    """What each cell does, and what that costs.

    Attributes:
        actions: One per cell.
        seconds: Forward and backward of all micro-batches, with stalls and recomputation.
        peak_bytes: Without the fixed bytes: parameters, gradients, optimizer, what comes in.
        swapped_bytes: Bytes that go out in a step, all micro-batches.
    """

    actions: tuple[Action, ...]
    seconds: float
    peak_bytes: int
    swapped_bytes: int


def predict(
    cells: Sequence[Cell],
    actions: Sequence[Action],
    bandwidth: float,
    micro_batches: int = 1,
    limit_bytes: float | None = None,
) -> Choice:
    """Simulate a step.

    Args:
        cells: In the order of forward.
        actions: One per cell.
        bandwidth: Bytes per second to the host, and as many back.
        limit_bytes: Copies wait for it, and less is fetched ahead; where the actions need more,
            that. None: copies hold nothing back, and their memory counts in the peak.

    Raises:
        ValueError: A cell that may not be computed again shall be, or the numbers differ.
    """
    chosen = np.array([[ALL.index(action) for action in actions]], np.int8)
    if len(actions) != len(cells) or not cells:
        raise ValueError(f"one action per cell (actions: {len(actions)}, cells: {len(cells)})")
    for index, (cell, action) in enumerate(zip(cells, actions, strict=True)):
        if action in ("checkpoint", "both") and not cell.may_checkpoint:
            raise ValueError(f"cell {index} may not be computed again ({action})")
    limit = inf if limit_bytes is None else limit_bytes
    return _simulated(Choices.of(cells, chosen), 0, bandwidth, micro_batches, limit)


def choose(
    cells: Sequence[Cell],
    limit_bytes: float,
    bandwidth: float,
    micro_batches: int = 1,
    allowed: Collection[Action] = ALL,
) -> Choice | None:
    """The actions that are predicted to be fastest within a limit; None: not even the leanest fit.

    The choice is what `predict` says for its actions and the limit. A larger limit never takes more
    seconds.

    Args:
        limit_bytes: For the cells; the fixed bytes are taken off already.
        allowed: Actions besides keep.
    """
    names = tuple(action for action in ALL if action in allowed)
    # Looked at first: a planner asks for many blocks that have no chance.
    if _leanest(tuple(cells), micro_batches, names).least_peaks(micro_batches)[0] > limit_bytes:
        return None
    family = _family(tuple(cells), bandwidth, micro_batches, names)
    fits = np.flatnonzero(family.least_peaks(micro_batches) <= limit_bytes)
    best: Choice | None = None
    bounds = family.least_seconds(bandwidth, micro_batches)
    copied = family.out.sum(axis=1)
    for row in fits[np.lexsort((copied[fits], bounds[fits]))]:
        if best is not None and bounds[row] >= best.seconds:
            break
        found = _simulated(family, int(row), bandwidth, micro_batches, limit_bytes)
        if best is None or found.seconds < best.seconds:
            best = found
    return best


def _simulated(
    choices: Choices, row: int, bandwidth: float, micro_batches: int, limit: float
) -> Choice:
    costs = choices.step_costs(row)
    seconds, peak = simulate_step(costs, bandwidth, micro_batches, limit)
    return Choice(
        tuple(ALL[place] for place in choices.chosen[row]),
        seconds,
        peak,
        micro_batches * sum(costs.out),
    )


@lru_cache(maxsize=64)
def _leanest(cells: tuple[Cell, ...], micro_batches: int, allowed: tuple[Action, ...]) -> Choices:
    return Choices.of(cells, leanest(cells, micro_batches, allowed)[None])


@lru_cache(maxsize=64)
def _family(
    cells: tuple[Cell, ...], bandwidth: float, micro_batches: int, allowed: tuple[Action, ...]
) -> Choices:
    """Choices for all limits: those of the search, all kept, and the leanest."""
    kept = np.zeros((1, len(cells)), np.int8)
    lean = _leanest(cells, micro_batches, allowed).chosen
    found = candidates(cells, bandwidth, micro_batches, allowed)
    relaxed = _relaxed(cells, lean, micro_batches, allowed)
    return Choices.of(cells, np.concatenate([kept, lean, *relaxed, found]))


def _relaxed(
    cells: Sequence[Cell],
    lean: NDArray[np.int8],
    micro_batches: int,
    allowed: Sequence[Action],
) -> list[NDArray[np.int8]]:
    """Choices as lean, with cheaper actions wherever the peak does not mind.

    Oldest cells first, and newest first; and rather kept, swapped or computed again.
    """
    least = Choices.of(cells, lean).least_peaks(micro_batches)[0]
    found = []
    for order in (range(len(cells)), reversed(range(len(cells)))):
        now = lean.copy()
        for index in order:
            options = np.array(options_of(cells[index], allowed), np.int8)
            tried = np.repeat(now, len(options), axis=0)
            tried[:, index] = options
            peaks = Choices.of(cells, tried).least_peaks(micro_batches)
            now = tried[[int(np.argmax(peaks <= least))]]
        found.append(now)
    return found
