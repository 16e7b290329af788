"""How training sweeps a tile, in which strips and whether sweeps hand maps on, and what that takes.

A network is swept once for each average of the whole image, then for its output. Where sweeps hand
maps on, no layer is computed in two of them; the maps and their gradients are held whole, and the
states of all sweeps at one time are those of a single one, in parts. Else each begins at the image.
"""

from collections.abc import Collection
from dataclasses import dataclass
from functools import lru_cache

from tilenet.geometry.halo import context_of, summed_cells
from tilenet.geometry.layers import GlobalPool, Layer
from tilenet.geometry.sweep import Sweeps, strip_edges
from tilenet.planning.kept_maps import kept_maps
from tilenet.planning.memory.layer import LayerBytes, layer_bytes
from tilenet.planning.memory.swept_training import SweptBackward

__all__ = ["averaged_sweeps", "maps_to_keep", "plan_sweeps", "trained_bytes"]

FEWEST_ROWS = 64  # of a strip
PRECISIONS = {2: "float16", 4: "float32", 8: "float64"}
# Of a device for a step's tensors with maps that are kept; convolutions reorder theirs besides.
SHARE = 0.5


def averaged_sweeps(layers: tuple[Layer, ...]) -> tuple[int, ...]:
    """Numbers of the layers to whose averages of the whole image training sweeps."""
    averages = (n for n in summed_cells(layers) if isinstance(layers[n], GlobalPool))
    return tuple(number for number in averages if number)


def maps_to_keep(layers: tuple[Layer, ...], height: int, width: int) -> dict[int, Collection[int]]:
    """The maps with which no layer is computed in two sweeps, as `Sweeps.kept`."""
    passes = averaged_sweeps(layers)
    no_limit = 1 << 63
    return dict(zip(passes, kept_maps(layers, passes, (height, width), 1, no_limit), strict=True))


def plan_sweeps(
    layers: tuple[Layer, ...], height: int, width: int, item_bytes: int, device_bytes: int = 0
) -> Sweeps:
    """The strips whose sweep to the output takes the least memory, and maps to keep where they fit.

    Args:
        height: Rows of the part, a multiple of the alignment.
        width: Its columns.
        device_bytes: What a step may take.
    """
    unit = context_of(layers).alignment_px
    sizes, rows = list[int](), -(-FEWEST_ROWS // unit) * unit
    while not sizes or rows < height:
        sizes.append(rows)
        rows *= 2

    costs = _costs(layers, width, item_bytes)

    def last_peak(strip_rows: int) -> int:
        swept = SweptBackward(layers, height, width, item_bytes, costs)
        return swept.peak(strip_edges(height, strip_rows), keeps_logits=True)

    best = min(sizes, key=last_peak)
    if averaged_sweeps(layers):

        def keeping(strip_rows: int) -> int:
            return trained_bytes(layers, height, width, strip_rows, item_bytes, keeps=True)

        higher = min({best, min(2 * best, sizes[-1])}, key=keeping)
        if keeping(higher) <= SHARE * device_bytes:
            return Sweeps(strip_edges(height, higher), maps_to_keep(layers, height, width))
    return Sweeps(strip_edges(height, best))


@lru_cache(maxsize=256)
def trained_bytes(
    layers: tuple[Layer, ...],
    height: int,
    width: int,
    strip_rows: int,
    item_bytes: int,
    *,
    keeps: bool = False,
) -> int:
    """Most bytes of tensors that live while a part of an image is swept forward and backward.

    Counted are states, gradients of weights and of states, and what a strip's layers keep, with a
    loss that keeps as much as the logits are, and twice that in its backward, as cross-entropy
    does; maps that are kept, with their gradients; neither the image nor weights. Averages of the
    whole image are swept after the rest.

    Args:
        height: Rows of the part.
        width: Its columns.
        strip_rows: Rows of a strip.
        keeps: Whether sweeps hand maps on.
    """
    costs = _costs(layers, width, item_bytes)
    kept = maps_to_keep(layers, height, width) if keeps else {}
    edges, size = strip_edges(height, strip_rows), (height, width)
    found, there = list[_Sweep](), frozenset[int]()
    for stop in (*averaged_sweeps(layers), len(layers)):
        after = kept.get(stop, ())
        swept = SweptBackward(layers[:stop], *size, item_bytes, costs[:stop], there, after)
        peak = swept.peak(edges, keeps_logits=stop == len(layers))
        found.append(_Sweep(swept, peak))
        there = frozenset(after)
    if not keeps:
        weights = found[-1].swept.weight_bytes
        return max(found[-1].peak, *(weights + one.peak for one in found[:-1]), 0)
    return max(_live(found, number) for number in range(len(found)))


def _costs(layers: tuple[Layer, ...], width: int, item_bytes: int) -> tuple[LayerBytes, ...]:
    """Bytes of each layer in a strip of few rows."""
    unit = context_of(layers).alignment_px
    return layer_bytes(layers, -(-FEWEST_ROWS // unit) * unit, width, PRECISIONS[item_bytes])


@dataclass(frozen=True)
class _Sweep:
    """One of the sweeps of a part, and the most bytes that it takes by itself."""

    swept: SweptBackward
    peak: int


def _live(sweeps: list[_Sweep], number: int) -> int:
    """Most bytes while the backward of one of the sweeps runs, where they hand maps on."""
    own = sweeps[number]
    before, after = sweeps[:number], sweeps[number + 1 :]
    saved = frozenset[int]().union(*(one.swept.taken for one in (*before, own)))
    later = frozenset[int]().union(*(one.swept.taken for one in after))
    come = frozenset[int]().union(*(one.swept.keeps for one in (*before, own)))
    maps = [*saved, *own.swept.taken, *(later & come)]  # and gradients
    size = sweeps[-1].swept.map_bytes
    return (
        own.peak
        + sum(one.swept.state_bytes for one in before)
        + sum(one.swept.weight_bytes for one in after)
        + sum(size(one) for one in maps)
    )
