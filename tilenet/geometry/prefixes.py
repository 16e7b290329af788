"""The first layers of a network: what they look at, and how tiles must overlap for them.

Statistics of a norm are those of its input, for which only the layers before it run. They look less
far around themselves than the whole network, so their tiles read less.
"""

from tilenet.geometry.halo import context_of, input_interval
from tilenet.geometry.layers import Grid, Layer, Pop, Stash
from tilenet.geometry.shares import own_edges

__all__ = ["prefix_halo_px", "unpopped"]


def unpopped(layers: tuple[Layer, ...], stop: int) -> frozenset[int]:
    """Numbers of the stashes among the first `stop` layers that none of these pops."""
    waiting: dict[str, int] = {}
    for index, layer in enumerate(layers[:stop]):
        if isinstance(layer, Stash):
            waiting[layer.name] = index
        elif isinstance(layer, Pop):
            del waiting[layer.name]
    return frozenset(waiting.values())


def prefix_halo_px(layers: tuple[Layer, ...], stop: int) -> int:
    """Pixels to read around own windows so that own cells are right behind `stop` layers.

    The halo is a multiple of the network's alignment: read windows begin where own windows may.
    """
    unit = context_of(layers).alignment_px
    useless = unpopped(layers, stop)
    prefix = tuple(layer for index, layer in enumerate(layers[:stop]) if index not in useless)
    grid = Grid()
    for layer in prefix:
        grid = layer.grid(grid)
    # The cells of an own window of one unit, in the middle of three.
    cells = int(3 * unit / grid.stride)
    edges = own_edges(grid, cells, (0, unit, 2 * unit, 3 * unit))
    first, last = input_interval(prefix, edges[1], edges[2] - 1)
    context = max(unit - first, last - (2 * unit - 1), 0)
    return -(-context // unit) * unit
