"""Keep, compute again, or swap: what each cell of a partition does with what backward needs.

Everything that fits is kept. Beyond that three ways compete: computing a cell again costs its
forward's time wherever it stands; swapping costs nothing where the link is idle, which it is most
for the oldest cells, since backward needs those last; and both at once leave nothing at all. A plan
for a limit is the choice that a simulated step is fastest with, among those that fit.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import inf

import numpy as np
from numpy.typing import NDArray

from tilenet.planning.swap_bytes import ALL, Action, Cell, cell_bytes, options_of
from tilenet.planning.swap_search import candidates, leanest
from tilenet.planning.swap_timeline import StepCosts, simulate_step

__all__ = ["ALL", "Action", "Cell", "Choice", "choose", "predict"]


@dataclass(frozen=True)
class Choice:
    """What each cell does, and what that costs.

    Attributes:
        actions: One per cell.
        seconds: Forward and backward of all micro-batches, with stalls and recomputation.
        peak_bytes: Without the fixed bytes: parameters, gradients, optimizer, what comes in.
        swapped_bytes: That go out in a step, all micro-batches.
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
    return _simulated(_Chosen.of(cells, chosen), 0, bandwidth, micro_batches, limit)


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
        allowed: Actions beside keep.
    """
    names = tuple(action for action in ALL if action in allowed)
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


@dataclass(frozen=True)
class _Chosen:
    """Choices and what they cost, (choices, cells); bytes as in `StepCosts`."""

    cells: tuple[Cell, ...]
    chosen: NDArray[np.int8]
    backward_s: NDArray[np.float64]
    left: NDArray[np.int64]
    forward: NDArray[np.int64]
    backward: NDArray[np.int64]
    out: NDArray[np.int64]
    back: NDArray[np.int64]

    @classmethod
    def of(cls, cells: Sequence[Cell], chosen: NDArray[np.int8]) -> "_Chosen":
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
        again = (chosen == ALL.index("checkpoint")) | (chosen == ALL.index("both"))
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
        return micro_batches * np.maximum(computing, copying) * (1 - 1e-12)


def _simulated(
    family: _Chosen, row: int, bandwidth: float, micro_batches: int, limit: float
) -> Choice:
    costs = StepCosts(
        [cell.forward_s for cell in family.cells],
        family.backward_s[row].tolist(),
        family.left[row].tolist(),
        family.forward[row].tolist(),
        family.backward[row].tolist(),
        family.out[row].tolist(),
        family.back[row].tolist(),
    )
    seconds, peak = simulate_step(costs, bandwidth, micro_batches, limit)
    return Choice(
        tuple(ALL[place] for place in family.chosen[row]),
        seconds,
        peak,
        micro_batches * sum(costs.out),
    )


@lru_cache(maxsize=64)
def _family(
    cells: tuple[Cell, ...], bandwidth: float, micro_batches: int, allowed: tuple[Action, ...]
) -> _Chosen:
    """Choices for all limits: those of the search, all kept, and the leanest."""
    kept = np.zeros((1, len(cells)), np.int8)
    lean = leanest(cells, micro_batches, allowed)[None]
    found = candidates(cells, bandwidth, allowed)
    relaxed = _relaxed(cells, lean, micro_batches, allowed)
    return _Chosen.of(cells, np.concatenate([kept, lean, *relaxed, found]))


def _relaxed(
    cells: Sequence[Cell],
    lean: NDArray[np.int8],
    micro_batches: int,
    allowed: Sequence[Action],
) -> list[NDArray[np.int8]]:
    """Choices as lean, with cheaper actions wherever the peak does not mind.

    Oldest cells first, and newest first; and rather kept, swapped or computed again.
    """
    least = _Chosen.of(cells, lean).least_peaks(micro_batches)[0]
    found = []
    for order in (range(len(cells)), reversed(range(len(cells)))):
        now = lean.copy()
        for index in order:
            options = np.array(options_of(cells[index], allowed), np.int8)
            tried = np.repeat(now, len(options), axis=0)
            tried[:, index] = options
            peaks = _Chosen.of(cells, tried).least_peaks(micro_batches)
            now = tried[[int(np.argmax(peaks <= least))]]
        found.append(now)
    return found
