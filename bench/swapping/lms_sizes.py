"""The largest size that trains within a device limit, and the way in which it does."""

import gc
import re
from collections.abc import Callable
from dataclasses import dataclass
from math import inf
from time import perf_counter

import torch

from bench.swapping.lms_networks import Kind
from bench.swapping.lms_training import Place, Training, Way
from tilenet.errors import TilenetError

__all__ = ["Largest", "fitting", "largest", "peak_of"]


@dataclass(frozen=True)
class Largest:
    """The largest size that trains, and the next one, which does not.

    Attributes:
        size: Pixels of the side, or images; 0: nothing trains.
        peak_mib: MiB of a step.
        next_size: The least that is known not to train.
        to_the_end: Whether the search ended before its time was over.
    """

    size: int
    peak_mib: float
    next_size: int | None
    to_the_end: bool


def largest(
    peak_of: Callable[[int], int | None], limit: int, unit: int, start: int, until: float = inf
) -> Largest:
    """Search among multiples of a unit: upwards by halves, then by bisection.

    Args:
        peak_of: Bytes of a step; None: it ran out of memory.
        limit: Bytes.
        unit: Sizes are its multiples.
        start: Size to begin with.
        until: When no further size is tried, by `perf_counter`.
    """
    fits: dict[int, int] = {0: 0}
    fails: set[int] = set()
    number = max(start // unit, 1)
    while max(fits) + 1 not in fails and perf_counter() < until:
        peak = peak_of(number * unit)
        if peak is not None and peak <= limit:
            fits[number] = peak
        else:
            fails.add(number)
        most = max(fits)
        number = (most + min(fails)) // 2 if fails else most + (most + 1) // 2
    most, least = max(fits), min(fails, default=0)
    return Largest(most * unit, fits[most] / 2**20, least * unit or None, most + 1 in fails)


def peak_of(kind: Kind, place: Place, way: Way, batch: int, side: int) -> int | None:
    """Most bytes on the device in a step; None: the device or the host ran out of memory."""
    if place.cuda:
        gc.collect()  # what an earlier one left in cycles
    try:
        return Training(kind, place, batch, side).peak(way)
    except (torch.OutOfMemoryError, TilenetError):
        return None
    except RuntimeError as error:
        # cuDNN finds no engine whose workspace there is room for
        if place.cuda and re.search("out of memory|cudnn|engine", str(error).lower()):
            return None
        raise


def fitting(kind: Kind, place: Place, mode: str, side: int) -> tuple[Way, int | None]:
    """The least costly way of a mode within the limit, for one image, and the peak of a step."""
    way = Way(mode)
    peak = peak_of(kind, place, way, 1, side)
    if mode != "swap" or peak is None or peak > place.limit_bytes:
        return way, peak
    # What is not saved needs as much as when nothing that may go stays; the rest of the limit is
    # for that.
    for share in (1.0, 0.75, 0.5):
        more = Way(mode, int(share * (place.limit_bytes - peak)))
        found = peak_of(kind, place, more, 1, side)
        if found is not None and found <= place.limit_bytes:
            return more, found
    return way, peak
