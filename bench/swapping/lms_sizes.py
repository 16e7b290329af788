"""The largest size that trains within a device limit, and the way in which it does."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache

import torch

from bench.swapping.lms_networks import Kind
from bench.swapping.lms_training import Place, Training, Way, peak_of
from tilenet.errors import TilenetError
from tilenet.parallel.swap.actions import Action
from tilenet.planning.swap.choose import choose

__all__ = ["Largest", "fitting", "largest", "leanest"]

TRIES = 4  # of the planner's choices at a size


@dataclass(frozen=True)
class Largest:
    """The largest size that trains, and the next one, which does not.

    Attributes:
        size: Pixels of the side, or images.
        peak: Bytes of a step.
        next_size: The next one that could be.
        next_peak: Its bytes; None: it ran out of memory.
    """

    size: int
    peak: int
    next_size: int
    next_peak: int | None


def largest(
    peak_of: Callable[[int], int | None], limit: int, unit: int, start: int, dimensions: int
) -> Largest | None:
    """Search, by measured peaks, among multiples of a unit.

    Peaks grow almost linearly with pixels: so the next size to try is where the line through the
    last two meets the limit. None: nothing trains.

    Args:
        peak_of: Bytes of a step; None: it ran out of memory.
        limit: Bytes.
        unit: Sizes are its multiples.
        start: Multiple to begin with.
        dimensions: Pixels are so high a power of the size.
    """
    fits: dict[int, int] = {}
    fails: dict[int, int | None] = {}
    known: list[tuple[int, int]] = []  # pixels and bytes
    number = start
    while True:
        peak = peak_of(number * unit)
        if peak is not None and peak <= limit:
            fits[number] = peak
        else:
            fails[number] = peak
        if peak is not None:
            known = [*known[-1:], (number**dimensions, peak)]
        below, above = max(fits, default=0), min(fails, default=None)
        if above is not None and above == below + 1:
            if not below:
                return None
            return Largest(below * unit, fits[below], above * unit, fails[above])
        number = _next(known, limit, dimensions)
        tries = len(fits) + len(fails)
        if above is None:
            number = min(max(number, below + 1), 4 * below + 4)
        elif tries % 4 == 0 or peak is None:
            number = (below + above) // 2  # lest a bent line leads nowhere
        else:
            number = min(max(number, below + 1), above - 1)


def _next(known: list[tuple[int, int]], limit: int, dimensions: int) -> int:
    (pixels, peak) = known[-1] if known else (0, 0)
    slope = peak / pixels if pixels else 0.0
    if len(known) > 1 and known[0][0] != pixels:
        slope = (peak - known[0][1]) / (pixels - known[0][0])
    if slope <= 0:
        return 0
    return int(max(0.0, pixels + (limit - peak) / slope) ** (1 / dimensions) + 1e-9)


def fitting(kind: Kind, place: Place, mode: str, batch: int, side: int) -> tuple[Way, int | None]:
    """The least costly way of a mode within the limit, and the peak of a step in bytes."""
    way, peak = leanest(kind, place, mode, batch, side)
    if mode in ("off", "checkpointing") or peak is None or peak > place.limit_bytes:
        return way, peak
    # What is not saved needs as much as when nothing that may go stays; the rest of the limit is
    # for that.
    for share in (1.0, 0.75, 0.5):
        more = replace(way, saved_limit_bytes=int(share * (place.limit_bytes - peak)))
        found = peak_of(kind, place, more, batch, side)
        if found is not None and found <= place.limit_bytes:
            return more, found
    return way, peak


@cache
def leanest(kind: Kind, place: Place, mode: str, batch: int, side: int) -> tuple[Way, int | None]:
    """The way of a mode with nothing kept that may go, and the peak of a step."""
    if mode != "auto":
        return Way(mode), peak_of(kind, place, Way(mode), batch, side)
    try:
        training = Training(kind, place, batch, side)
        groups, room = training.measured(), place.limit_bytes - training.fixed_bytes
        del training  # the next one needs its memory
    except (torch.OutOfMemoryError, TilenetError):
        return Way(mode), None
    # The planner adds up what it knows of groups, and of what lives beside them, a skip in a local
    # variable for instance, it does not know: so what it chose is tried, and chosen again for less.
    for attempt in range(TRIES):
        choice = choose(groups, room, place.bandwidth)
        if choice is None:
            break
        way = Way(mode, 0, choice.actions)
        peak = peak_of(kind, place, way, batch, side)
        if peak is not None and peak <= place.limit_bytes:
            return way, peak
        over = 0 if peak is None else peak - place.limit_bytes
        room -= max(over, room // 16) << attempt
    everything: list[Action] = ["swap"] * len(groups)
    way = Way(mode, 0, tuple(everything))
    return way, peak_of(kind, place, way, batch, side)
