"""The first layers of a network alone: their halo and their open stashes, for maps in passes."""

from tilenet.geometry.halo import context_of, reached
from tilenet.geometry.layers import Layer, Stash, across
from tilenet.geometry.maps import map_grids


def unjoined(layers: tuple[Layer, ...], stop: int) -> frozenset[int]:
    """Return the numbers of the stashes of the first `stop` layers that none of these takes."""
    waiting: dict[str, int] = {}
    for index, layer in enumerate(layers[:stop]):
        if isinstance(layer, Stash):
            waiting[layer.name] = index
        for name in layer.names:
            del waiting[name]
    return frozenset(waiting.values())


def prefix_halo_px(layers: tuple[Layer, ...], stop: int) -> int:
    """Pixels to read around own windows so that own cells are right behind `stop` layers.

    The halo is a multiple of the network's alignment: read windows begin where own windows may.
    Sums on the way are those of earlier passes, so that no tile's cells count for them.
    """
    unit = context_of(layers).alignment_px
    first, last = map_grids(layers)[stop].cells(0, unit)
    lines = layers, across(layers)
    intervals = [interval for line in lines if (interval := reached(line, first, last, stop=stop))]
    if not intervals:  # an average that was enlarged: no tile looks at its own pixels for it
        return 0
    context = max(0, *(max(-low, high - (unit - 1)) for low, high in intervals))
    return -(-context // unit) * unit
