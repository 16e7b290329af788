"""Passes over an image: one for each layer that needs all of it, and one that maps."""

from dataclasses import replace

from tilenet.errors import TilenetError
from tilenet.geometry.layers import Cellwise, Conv, Layer, TransposedConv
from tilenet.geometry.maps import check_cells, map_shapes
from tilenet.geometry.prefix import prefix_halo_px
from tilenet.geometry.sweep import maps_before
from tilenet.geometry.tiles import Cut, Tiling, cut
from tilenet.planning.kept_maps import kept_maps
from tilenet.planning.maps.question import MapPlan, MapQuestion
from tilenet.planning.memory.sweeps.swept_maps import swept_bytes


def plan_passes(
    question: MapQuestion, tiling: Tiling, why: str, swept: float | None = None
) -> MapPlan:
    """Plan one pass per layer that needs the whole image, and one that maps; one tile is one pass.

    Args:
        swept: `ratio` of the `MapPlan` if the passes are sweeps; None: they go tile by tile.

    Raises:
        TilenetError: The tiles do not start on the network's grid.
    """
    if tiling.grid == (1, 1):
        return plan_tiles(question, tiling)
    if tiling.rule.alignment_px != question.unit_px:
        raise TilenetError(
            f"statistics over the whole image need tiles that start on the network's grid (halo: "
            f"epsilon, tiles: {tiling.grid[0]} × {tiling.grid[1]}, total stride: "
            f"{question.unit_px} px); use halo: exact or a multiple of the stride"
        )
    passes = tuple(
        (index, cut(*question.size, Cut(grid=tiling.grid), replace(tiling.rule, halo_px=halo_px)))
        for index in question.of_whole_image
        for halo_px in [min(prefix_halo_px(question.layers, index), tiling.rule.halo_px)]
    )
    if swept is None:
        once = _operations(question.layers, tiling)
        every = once + sum(_operations(question.layers[:index], tiles) for index, tiles in passes)
        return MapPlan("passes", tiling, passes, why, every / max(once, 1))
    kept_after = choose_kept_maps(question, tiling)
    work = swept_work(question, tiling.extended, kept_after)
    return MapPlan("sweep", tiling, passes, why, work, swept, kept_after)


def plan_tiles(question: MapQuestion, tiling: Tiling) -> MapPlan:
    check_cells(question.layers, tiling.tiles[0].read, images=None)
    return MapPlan("tiles", tiling)


def choose_kept_maps(question: MapQuestion, tiling: Tiling) -> tuple[frozenset[int], ...]:
    """The maps to keep after each pass: none unless each rank sweeps all rows of its columns."""
    num_cols = question.num_ranks if tiling.rule.exchanged else 1
    (strip, cols), item, height = largest_strip(tiling), question.item_bytes, tiling.extended[0]
    room = question.sweep_bytes - swept_bytes(question.layers, height, cols, strip, item)
    if tiling.grid[1] != num_cols or question.num_ranks != num_cols or room < 0:
        return (frozenset(),) * len(question.of_whole_image)
    cells = room // item if item else 0
    return kept_maps(question.layers, question.of_whole_image, tiling.extended, num_cols, cells)


def largest_strip(tiling: Tiling) -> tuple[int, int]:
    """Rows of the highest strip, and columns of the widest one."""
    return tiling.largest_own[0], tiling.largest_read[1]


def swept_work(
    question: MapQuestion, size: tuple[int, int], kept_after: tuple[frozenset[int], ...]
) -> float:
    """Return the multiplications of all sweeps, per multiplication of the whole network."""
    layers = question.layers
    operations, total = _by_layer(layers, size), 0
    stops = (*question.of_whole_image, len(layers))
    for stop, maps in zip(stops, (frozenset[int](), *kept_after), strict=True):
        computed, _ = maps_before(layers, [stop], maps)
        total += sum(operations[map_ - 1] for map_ in computed)
    return total / max(sum(operations), 1)


def _operations(layers: tuple[Layer, ...], tiling: Tiling) -> int:
    """Multiplications of the convolutions for all tiles."""
    read = tiling.tiles[0].read
    return sum(_by_layer(layers, (read.height, read.width))) * len(tiling.tiles)


def _by_layer(layers: tuple[Layer, ...], size: tuple[int, int]) -> list[int]:
    """Multiplications of each layer on an image of this size; 0 but for convolutions."""
    shapes = map_shapes(layers, *size) if layers else []
    operations = []
    for layer, before, after in zip(layers, shapes, shapes[1:], strict=False):
        cells = before if isinstance(layer, TransposedConv) else after
        counts = isinstance(layer, Cellwise | Conv | TransposedConv)
        operations.append(layer.num_parameters * cells.rows * cells.cols if counts else 0)
    return operations
