"""Choose the maps that sweeps for an image's statistics keep whole, to compute none twice.

A network with averages of the whole image is swept once for each, up to its layer. The sweep's
results that others need are a few maps behind strides: those that the layers to come read.
"""

from collections.abc import Sequence
from itertools import pairwise

from tilenet.geometry.layers import Layer
from tilenet.geometry.maps import map_shapes
from tilenet.geometry.sweep import maps_before


def kept_maps(
    layers: tuple[Layer, ...],
    passes: Sequence[int],
    size: tuple[int, int],
    num_cols: int,
    most_cells: int,
) -> tuple[frozenset[int], ...]:
    """Numbers of the maps that are kept after each pass, the image being 0.

    Where not all fit that save computing, those are kept that the passes to come need.

    Args:
        passes: Numbers of the layers to which the image is swept, in order.
        size: Rows and columns of the image, extended to a multiple of the alignment.
        num_cols: Ranks that hold columns of them.
        most_cells: Most cells that a rank keeps of maps, of the pass at hand and the one before.
    """
    shapes = map_shapes(layers, *size)
    cells = [shape.channels * shape.rows * -(-shape.cols // num_cols) for shape in shapes]
    at_hand, sets = frozenset[int](), []
    for place, layer in enumerate(passes):
        computed, _ = maps_before(layers, [layer], at_hand)
        later = passes[place + 1 :]
        for ends in [[*later, len(layers)], *([later] if later else [])]:
            _, needed = maps_before(layers, ends, computed | at_hand)
            if sum(cells[number] for number in (needed | at_hand) - {0}) <= most_cells:
                at_hand = needed - {0}
                break
        sets.append(at_hand)
    return tuple(sets)


def kept_cells(
    layers: tuple[Layer, ...], sets: Sequence[frozenset[int]], size: tuple[int, int]
) -> int:
    """Most cells of kept maps that a rank holds at one time, if it holds all columns."""
    shapes = map_shapes(layers, *size)
    together = (before | after for before, after in pairwise((frozenset(), *sets)))
    return max(
        (sum(shapes[number].num_elements for number in maps) for maps in together), default=0
    )
