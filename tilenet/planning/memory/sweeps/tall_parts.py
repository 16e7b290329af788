"""Bytes of a sweep of a tall part, from those of low ones, since strips in its middle are alike."""

from collections.abc import Callable
from dataclasses import dataclass

from tilenet.geometry.halo import context_of
from tilenet.geometry.layers import Layer

FEW = 8  # strips that are walked besides those within a halo of the first or last row


@dataclass(frozen=True)
class SweepBytes:
    """Bytes of a sweep of a part in training.

    Attributes:
        states: Bytes of the rows that are kept before all its strips.
    """

    peak: int
    states: int


def bytes_of_height(
    walk: Callable[[int], SweepBytes], layers: tuple[Layer, ...], height: int, strip_rows: int
) -> SweepBytes:
    """Return what `walk` returns for a height, walking over few strips.

    A strip in the middle adds its state. Once one more also raises the peak by that, the peak lies
    among the last strips, whatever the height.

    Args:
        walk: Counts the bytes of a part with so many rows, tensor by tensor.
    """
    num_strips, rest = divmod(height, strip_rows)
    few = FEW + -(-2 * context_of(layers).halo_px // strip_rows)
    while few + 1 < num_strips:
        low, next_ = (walk(strips * strip_rows + rest) for strips in (few, few + 1))
        state = next_.states - low.states
        if next_.peak - low.peak == state:
            more = (num_strips - few) * state
            return SweepBytes(low.peak + more, low.states + more)
        few *= 2
    return walk(height)
