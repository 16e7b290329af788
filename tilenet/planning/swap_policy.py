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

from tilenet.planning.swap_bytes import ALL, Action, Cell, options_of
from tilenet.planning.swap_choices import Choices
from tilenet.planning.swap_search import candidates, leanest
from tilenet.planning.swap_timeline import simulate_step

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
def _family(
    cells: tuple[Cell, ...], bandwidth: float, micro_batches: int, allowed: tuple[Action, ...]
) -> Choices:
    """Choices for all limits: those of the search, all kept, and the leanest."""
    kept = np.zeros((1, len(cells)), np.int8)
    lean = leanest(cells, micro_batches, allowed)[None]
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
