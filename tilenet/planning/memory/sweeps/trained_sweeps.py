"""Plan the sweeps of a tile in training: strips, maps that sweeps hand on, and their memory.

A network is swept once for each average of the whole image, then for its output. Where sweeps hand
maps on, no layer is computed in two of them; the maps and their gradients are held whole, and the
states of all sweeps at one time are those of a single one, in parts. Where these maps do not fit,
some sweeps begin at maps before them, or at the image, and compute layers again.
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import lru_cache, partial

from tilenet.geometry.halo import context_of, summed_cells
from tilenet.geometry.layers import GlobalPool, Layer
from tilenet.geometry.maps import map_shapes
from tilenet.geometry.sweep import Sweeps, maps_before, strip_edges
from tilenet.planning.kept_maps import kept_maps
from tilenet.planning.memory.layer import layer_bytes
from tilenet.planning.memory.layer_cost import LayerBytes
from tilenet.planning.memory.sweeps.swept_training import SweptBackward
from tilenet.planning.memory.sweeps.tall_parts import SweepBytes, bytes_of_height

FEWEST_ROWS = 64  # of a strip
ALL_CELLS = 1 << 63
TRIES = 3  # of sets of maps, since each takes seconds for a network with many averages
FEWEST_CELLS = 1 << 22  # of maps that are worth keeping
PRECISIONS = {2: "float16", 4: "float32", 8: "float64"}
# Of a device for a step's tensors with maps that are kept; convolutions reorder theirs besides.
SHARE = 0.5


def averaged_sweeps(layers: tuple[Layer, ...]) -> tuple[int, ...]:
    """Return the numbers of the layers that average the whole image and need a sweep for it."""
    averages = (n for n in summed_cells(layers) if isinstance(layers[n], GlobalPool))
    return tuple(number for number in averages if number)


def maps_to_keep(
    layers: tuple[Layer, ...], height: int, width: int, most_cells: int = ALL_CELLS
) -> dict[int, Collection[int]]:
    """The maps with which fewest layers are computed in two sweeps, as `Sweeps.kept_maps`.

    Args:
        most_cells: Most cells of the maps that one sweep takes and keeps.
    """
    passes = averaged_sweeps(layers)
    sets = kept_maps(layers, passes, (height, width), 1, most_cells)
    return dict(zip(passes, sets, strict=True))


@lru_cache(maxsize=256)  # a run asks for each tile of each step
def plan_sweeps(
    layers: tuple[Layer, ...], height: int, width: int, item_bytes: int, device_bytes: int = 0
) -> Sweeps:
    """Choose the strips of least memory in the sweep to the output, and maps to keep if they fit.

    Args:
        height: Rows of the part, a multiple of the alignment.
        device_bytes: Most bytes of a step.
    """
    unit = context_of(layers).alignment_px
    sizes, rows = list[int](), -(-FEWEST_ROWS // unit) * unit
    while not sizes or rows < height:
        sizes.append(rows)
        rows *= 2

    costs = strip_costs(layers, width, item_bytes)
    make = partial(SweptBackward, layers, item_bytes=item_bytes, costs=costs)

    def last_peak(strip_rows: int) -> int:
        walk = partial(_walk, make, width, strip_rows, keeps_logits=True)
        return bytes_of_height(walk, layers, height, strip_rows).peak

    best, room = min(sizes, key=last_peak), int(SHARE * device_bytes)
    heights = {best, min(2 * best, sizes[-1])}  # higher ones take less where maps are kept
    for most_cells in _limits(layers, height, width, room // item_bytes):
        taken = partial(trained_bytes, layers, height, width, most_cells=most_cells)
        num_bytes, rows = min((taken(rows, item_bytes), rows) for rows in heights)
        heights = {rows}
        if num_bytes <= room:
            return Sweeps(
                strip_edges(height, rows), maps_to_keep(layers, height, width, most_cells)
            )
    return Sweeps(strip_edges(height, best))


def _limits(layers: tuple[Layer, ...], height: int, width: int, room: int) -> list[int]:
    """Limits of cells with which different maps are kept, the one with the least work first.

    Args:
        room: Cells of maps that may be kept; their gradients come besides.
    """
    shapes = map_shapes(layers, height, width)
    cells = [shape.num_elements for shape in shapes]
    pixels = [shape.rows * shape.cols for shape in shapes]
    # Each of a layer's weights is multiplied once per cell of its map.
    weights = [max(layer.num_parameters, 1) for layer in layers]
    work = [0, *(number * at for number, at in zip(weights, pixels[1:], strict=True))]
    limits, limit = dict[tuple[Collection[int], ...], tuple[int, int]](), ALL_CELLS
    while limit >= FEWEST_CELLS:
        by_sweep = maps_to_keep(layers, height, width, limit)
        sets = tuple(by_sweep.values())
        whole = sum(cells[number] for number in frozenset().union(*sets))
        if any(sets) and sets not in limits and whole <= room:
            computed, stored = 0, frozenset[int]()
            for stop in (*by_sweep, len(layers)):
                computed += sum(work[number] for number in maps_before(layers, [stop], stored)[0])
                stored = frozenset(by_sweep.get(stop, ()))
            limits[sets] = computed, limit
        limit = min(limit // 2, sum(cells))
    return [limit for _, limit in sorted(limits.values())[:TRIES]]


@lru_cache(maxsize=256)
def trained_bytes(
    layers: tuple[Layer, ...],
    height: int,
    width: int,
    strip_rows: int,
    item_bytes: int,
    most_cells: int = 0,
) -> int:
    """Most bytes of tensors that live while a part of an image is swept forward and backward.

    Counted are states, gradients of weights and of states, and tensors that a strip's layers keep,
    with a loss that keeps logarithms in float32 at least, and labels, and takes twice the
    logarithms in its backward, as cross-entropy does; maps that are kept, with their gradients;
    neither the image nor weights. Averages of the whole image are swept after the rest.

    Args:
        most_cells: See `maps_to_keep`; 0: sweeps hand no maps on.
    """
    costs = strip_costs(layers, width, item_bytes)
    by_sweep = maps_to_keep(layers, height, width, most_cells) if most_cells else {}
    sweeps, stored = list[_Sweep](), frozenset[int]()
    for stop in (*averaged_sweeps(layers), len(layers)):
        after = by_sweep.get(stop, ())
        make = partial(
            SweptBackward,
            layers[:stop],
            item_bytes=item_bytes,
            costs=costs[:stop],
            stored=stored,
            keeps=after,
        )
        walk = partial(_walk, make, width, strip_rows, keeps_logits=stop == len(layers))
        num_bytes = bytes_of_height(walk, layers, height, strip_rows)
        sweeps.append(_Sweep(make((height, width)), num_bytes.peak, num_bytes.states))
        stored = frozenset(after)
    if not any(by_sweep.values()):
        weights = sweeps[-1].swept.weight_bytes
        return max(sweeps[-1].peak, *(weights + other.peak for other in sweeps[:-1]), 0)
    return max(_live(sweeps, number) for number in range(len(sweeps)))


def strip_costs(layers: tuple[Layer, ...], width: int, item_bytes: int) -> tuple[LayerBytes, ...]:
    """Bytes of each layer in a strip of few rows."""
    unit = context_of(layers).alignment_px
    return layer_bytes(layers, -(-FEWEST_ROWS // unit) * unit, width, PRECISIONS[item_bytes])


def _walk(
    make: Callable[[tuple[int, int]], SweptBackward],
    width: int,
    strip_rows: int,
    rows: int,
    *,
    keeps_logits: bool,
) -> SweepBytes:
    swept = make((rows, width))
    return swept.walk(strip_edges(rows, strip_rows), keeps_logits=keeps_logits)


@dataclass(frozen=True)
class _Sweep:
    """One of the sweeps of a part, the most bytes that it takes by itself, and of its states."""

    swept: SweptBackward
    peak: int
    states: int


def _live(sweeps: list[_Sweep], number: int) -> int:
    """Most bytes while the backward of one of the sweeps runs, where they hand maps on."""
    own = sweeps[number]
    before, after = sweeps[:number], sweeps[number + 1 :]
    saved = frozenset[int]().union(*(sweep.swept.taken for sweep in (*before, own)))
    later = frozenset[int]().union(*(sweep.swept.taken for sweep in after))
    come = frozenset[int]().union(*(sweep.swept.keeps for sweep in (*before, own)))
    maps = [*saved, *own.swept.taken, *(later & come)]  # and gradients
    size = sweeps[-1].swept.map_bytes
    return (
        own.peak
        + sum(sweep.states for sweep in before)
        + sum(sweep.swept.weight_bytes for sweep in after)
        + sum(size(map_) for map_ in maps)
    )
