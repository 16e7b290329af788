"""Choose how an image is mapped: in a sweep, tile by tile, by exchange of halos, or in passes.

A sweep computes each pixel once per rank that looks at it, and is chosen where it computes less
than tiles do.

Instance and group norms with `scope: image` need the statistics of the whole image at their layer,
global pools its averages. Where each rank's share of the image fits its memory, the ranks hold the
whole image and exchange halos: one pass, no redundant work. Else the image is read strip by strip
or tile by tile, once for each such layer and once more to map, with bounded memory.
"""

from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property, partial
from math import prod
from typing import Literal

from tilenet.errors import TilenetError
from tilenet.geometry.bands import read_ratio
from tilenet.geometry.halo import context_of, summed_cells
from tilenet.geometry.halo_rule import HaloRule
from tilenet.geometry.layers import Cellwise, Conv, Layer, Norm, TransposedConv
from tilenet.geometry.maps import check_cells, fewest_cells, map_shapes
from tilenet.geometry.ownership import check_shares
from tilenet.geometry.prefix import prefix_halo_px
from tilenet.geometry.sweep import maps_before
from tilenet.geometry.tiles import Cut, Tiling, cut
from tilenet.planning.kept_maps import kept_maps
from tilenet.planning.memory.inference import inference_bytes
from tilenet.planning.memory.map_limits import countable
from tilenet.planning.memory.swept_maps import swept_bytes
from tilenet.planning.mesh import choose_mesh

__all__ = ["GPU_STRIP_PX", "MapPlan", "MapQuestion", "choose_map", "plan_passes"]

# Largest number of ranks that is tried for one that would hold the image.
MOST_RANKS = 4096
# A tile that owns less than twice its halo may take this many times its budget.
WIDE_HALO = 4
# Rows of the deepest maps in a strip, the best first: with fewer rows their neighbours are copied
# more often than they are computed. STRIP_PX is the fewest rows of the image.
STRIP_CELLS, STRIP_PX = (4, 2, 1), 64
# Starting a strip costs a GPU as much time as this many pixels: on an H200 11 ms, against 43 ns per
# pixel of the preset small. A CPU has caches, which low strips suit.
GPU_STRIP_PX = 1 << 18
STEADY_RANKS = 4  # strips are chosen for this number where any number may go on with the map
MOST_COLUMNS = 16  # largest number of columns of tiles that is tried for one rank
# Columns exchange halos only if ranks then read at most this share of the pixels: with exchange a
# map is the same on any number of ranks to rounding only, without it to the last bit.
ENOUGH_LESS = 0.9


@dataclass(frozen=True)
class MapQuestion:
    """An image to map, and the ranks and memory to map it with.

    Attributes:
        layers: The network's layers.
        size: Height and width of the image.
        rule: Halo and alignment of the tiles.
        halo_asked: Whether the user chose another halo than the exact one.
        tile_px: Largest own size of a tile; None: as much as memory allows.
        num_ranks: Number of ranks that map together.
        item_bytes: Bytes of a cell.
        budget_bytes: Most bytes of feature maps on a rank.
        most_px: Largest own size of a tile that is chosen here, or twice the halo if that is more.
        at_once: Number of tiles that share a rank's memory.
        sweep_bytes: Most bytes of feature maps of a sweep on a rank; 0: do not sweep.
        steady: Whether another number of ranks may go on with the map, so that tiles must not
            depend on `num_ranks`.
        exchanges: Whether ranks that sweep may exchange halos.
        strip_overhead_px: Overhead of a strip, as the number of pixels computed in that time; 0:
            strips are as low as they can be.
        turned: Whether turned copies of the image are mapped too, which requires tiles.
    """

    layers: tuple[Layer, ...]
    size: tuple[int, int]
    rule: HaloRule
    halo_asked: bool = False
    tile_px: int | None = None
    num_ranks: int = 1
    item_bytes: int = 4
    budget_bytes: int = 0
    most_px: int = 0
    at_once: int = 1
    sweep_bytes: int = 0
    steady: bool = False
    exchanges: bool = False
    strip_overhead_px: int = 0
    turned: bool = False

    @cached_property
    def of_whole_image(self) -> tuple[int, ...]:
        """Numbers of the layers that need statistics or averages of the whole image."""
        return tuple(
            index
            for index in summed_cells(self.layers)
            if not (isinstance(norm := self.layers[index], Norm) and norm.norm == "batch")
        )

    @property
    def unit_px(self) -> int:
        """The network's alignment."""
        return context_of(self.layers).alignment_px

    def fits(self, height: int, width: int, times: float = 1) -> bool:
        """Whether the maps of a window are countable and fit memory, several times over."""
        need = inference_bytes(self.layers, height, width, self.item_bytes)
        return need * times <= self.budget_bytes and countable(self.layers, height, width)


@dataclass(frozen=True)
class MapPlan:
    """The method, the tiles and the passes of a map.

    Attributes:
        method: `sweep`: bands of the image, strip by strip; `tiles`: one pass, tile by tile;
            `exchange`: each rank holds its window of the image; `passes`: tile by tile, after a
            pass for each layer's statistics; `windows`: tile by tile, each from the windows of an
            opaque module that touch it.
        tiling: Tiling of the pass that maps; in a sweep, rows of tiles are its strips.
        passes: Numbers of the layers that need the whole image, with the tiling of the pass that
            computes their statistics.
        why: Reason for passes, for messages.
        work: Arithmetic of all passes, in multiples of the pass that maps.
        ratio: Pixels that a sweep reads on all ranks, or that windows compute, per pixel of the
            image; None: as many as tiles read.
        kept_maps: Numbers of the maps that a sweep keeps whole after each pass; later passes begin
            from them.
    """

    method: Literal["sweep", "tiles", "exchange", "passes", "windows"]
    tiling: Tiling
    passes: tuple[tuple[int, Tiling], ...] = ()
    why: str = ""
    work: float = 1.0
    ratio: float | None = None
    kept_maps: tuple[frozenset[int], ...] = ()

    @property
    def work_ratio(self) -> float:
        """Pixels that are read, per pixel of the image."""
        return self.tiling.work_ratio if self.ratio is None else self.ratio


def choose_map(question: MapQuestion) -> MapPlan:
    """Choose how an image is mapped.

    Raises:
        TilenetError: The tiles are impossible, or a norm has a single cell to work on.
    """
    if not question.of_whole_image:
        size_px = _tile_px(question) if question.tile_px is None else question.tile_px
        tiles = _tile_by_tile(question, cut(*question.size, Cut(size_px=size_px), question.rule))
        swept = _swept(question)
        return swept if swept and _less_work(question, swept, tiles) else tiles
    whole = cut(*question.size, Cut(grid=(1, 1)), question.rule)
    _check_image(question, whole)
    if question.rule.valid_layers:
        if question.tile_px is not None and question.tile_px < max(whole.extended):
            raise TilenetError(
                f"an unpadded network takes its statistics over the whole image in one tile "
                f"(padding: valid, norm_scope: image, tile_px: {question.tile_px}, image: "
                f"{question.size[0]} × {question.size[1]} px); leave the tile's size out, or train "
                "with network.padding: same"
            )
        return _tile_by_tile(question, whole)
    if question.tile_px is not None:
        tiling = cut(*question.size, Cut(size_px=question.tile_px), question.rule)
        return plan_passes(question, tiling, _why_tiles(question))
    if question.num_ranks > 1 and not question.halo_asked and not question.turned:
        shared_out = _shares(question, question.num_ranks)
        if shared_out is not None and _share_fits(question, shared_out):
            return MapPlan("exchange", shared_out)
    if question.fits(*whole.extended):
        return _tile_by_tile(question, whole)
    if swept := _swept(question):
        return plan_passes(question, swept.tiling, _why(question), swept.ratio)
    tiling = cut(*question.size, Cut(size_px=_tile_px(question)), question.rule)
    return plan_passes(question, tiling, _why(question))


def _swept(question: MapQuestion) -> MapPlan | None:
    """The sweep of least work that fits; None: no sweep does."""
    rule = question.rule
    if not question.sweep_bytes or question.tile_px is not None or question.halo_asked:
        return None
    if rule.valid_layers or not rule.exact:
        return None
    for layer in question.layers:
        if isinstance(layer, Norm) and layer.scope == "tile" and layer.norm != "batch":
            return None
    height, width = cut(*question.size, Cut(grid=(1, 1)), rule).extended
    plans, num_cols, ranks = [], 1, 1 if question.steady else question.num_ranks
    while num_cols <= min(width // question.unit_px, max(ranks, MOST_COLUMNS)):
        strips = _strips(question, height, width, num_cols, rule.halo_px)
        if strips is not None:
            tiling = _merge_strips(question, strips, num_cols, rule)
            plans.append(MapPlan("sweep", tiling, ratio=read_ratio(tiling, question.num_ranks)))
            if ranks == 1:
                break  # more columns read more
        num_cols += max(1, num_cols // 2)
    best = min(plans, key=lambda plan: _cost(question, plan.tiling), default=None)
    columns = _columns(question, height, width) if question.exchanges and ranks > 1 else None
    if columns is None or (best and columns.work_ratio > ENOUGH_LESS * best.work_ratio):
        return best
    return columns


def _columns(question: MapQuestion, height: int, width: int) -> MapPlan | None:
    """Return the sweep of one column per rank with exchanged halos; None: it does not fit."""
    num_ranks = question.num_ranks
    strips = _strips(question, height, width, num_ranks, halo_px=0)
    if strips is None:
        return None
    with suppress(TilenetError):
        rule = replace(question.rule, exchanged=True)
        tiling = _merge_strips(question, strips, num_ranks, rule)
        check_shares(question.layers, tiling.cols, "columns")
        return MapPlan("sweep", tiling, ratio=read_ratio(tiling, num_ranks))
    return None


def _strips(
    question: MapQuestion, height: int, width: int, num_cols: int, halo_px: int
) -> int | None:
    """Number of strips of the best height that fits; None: none fits."""
    unit = question.unit_px
    read = min(width, -(-width // num_cols // unit) * unit + 2 * halo_px)
    for cells in STRIP_CELLS:
        rows = max(cells * unit, STRIP_PX // unit * unit)
        if _strip_fits(question, height, rows, read):
            return -(-height // rows)
    return None


def _strip_fits(question: MapQuestion, height: int, rows: int, cols: int) -> bool:
    need = swept_bytes(question.layers, height, cols, rows, question.item_bytes)
    return need <= question.sweep_bytes and countable(question.layers, rows, cols)


def _merge_strips(question: MapQuestion, strips: int, num_cols: int, rule: HaloRule) -> Tiling:
    """A tiling with this number of strips, or a half, a quarter …: the one of least time."""
    tilings = [cut(*question.size, Cut(grid=(strips, num_cols)), rule)]
    while question.strip_overhead_px and (strips := -(-strips // 2)) > 1:
        tiling = cut(*question.size, Cut(grid=(strips, num_cols)), rule)
        rows, cols = _largest(tiling)
        # A strip of a band is read as a whole, and may be no larger than the largest tile.
        fits = _strip_fits(question, tiling.extended[0], rows, cols)
        if rows * cols > question.most_px**2 or not fits:
            break
        tilings.append(tiling)
    return min(tilings, key=partial(_cost, question))


def _cost(question: MapQuestion, tiling: Tiling) -> float:
    """Time of a sweep's slowest rank, relative to that of an even share without any overhead."""
    ratio = read_ratio(tiling, STEADY_RANKS if question.steady else question.num_ranks)
    if not question.strip_overhead_px:
        return ratio
    of_rank = replace(question, num_ranks=1) if question.steady else question
    kept_after = _choose_kept_maps(of_rank, tiling)
    overhead = question.strip_overhead_px / prod(_largest(tiling))
    return ratio * (1 + overhead) * _swept_work(question, tiling.extended, kept_after)


def _largest(tiling: Tiling) -> tuple[int, int]:
    """Rows of the highest strip, and columns of the widest one."""
    return max(span.own for span in tiling.rows), max(span.read for span in tiling.cols)


def _less_work(question: MapQuestion, swept: MapPlan, tiles: MapPlan) -> bool:
    """Whether a rank computes fewer pixels in a sweep than in tiles; False for one tile."""
    count, ranks = len(tiles.tiling.tiles), 1 if question.steady else question.num_ranks
    uneven = -(-count // ranks) * ranks / count
    return count > 1 and read_ratio(swept.tiling, ranks) < tiles.work_ratio * uneven


def _check_image(question: MapQuestion, whole: Tiling) -> None:
    height, width = whole.extended
    if fewest_cells(question.layers, height, width, images=None) == 1:
        raise TilenetError(
            f"statistics over the whole image need more than one cell of it on every level (image: "
            f"{question.size[0]} × {question.size[1]} px, {height} × {width} px with its extension "
            "leave the deepest one cell); map a larger image or use a network with fewer poolings"
        )


def _tile_by_tile(question: MapQuestion, tiling: Tiling) -> MapPlan:
    check_cells(question.layers, tiling.tiles[0].read, images=None)
    return MapPlan("tiles", tiling)


def _tile_px(question: MapQuestion) -> int:
    """Return the largest own size of a tile with feature maps that fit."""
    unit, halo_px = question.unit_px, question.rule.halo_px
    # With an own size below the halo each pixel would be computed nine times or more.
    best = least = max(unit, -(-halo_px // unit) * unit)
    for own in range(least, max(question.most_px, 2 * halo_px) + 1, unit):
        # With twice the halo it is computed four times, which more memory than the budget may save.
        times = question.at_once / (WIDE_HALO if own <= 2 * halo_px else 1)
        if not question.fits(own + 2 * halo_px, own + 2 * halo_px, times):
            break
        best = own
    return best


def _shares(question: MapQuestion, num_ranks: int) -> Tiling | None:
    """One window per rank, on a grid as square as halos allow; None: no grid is possible."""
    rows = choose_mesh(num_ranks, 1).rows
    sides = [side for side in range(1, num_ranks + 1) if num_ranks % side == 0]
    for side in sorted(sides, key=lambda side: abs(side - rows)):
        rule = HaloRule(0, question.unit_px, exchanged=True)
        with suppress(TilenetError):
            tiling = cut(*question.size, Cut(grid=(side, num_ranks // side)), rule)
            check_shares(question.layers, tiling.rows, "rows")
            check_shares(question.layers, tiling.cols, "columns")
            return tiling
    return None


def _share_fits(question: MapQuestion, tiling: Tiling) -> bool:
    return question.fits(max(s.own for s in tiling.rows), max(s.own for s in tiling.cols))


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
        return _tile_by_tile(question, tiling)
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
    kept_after = _choose_kept_maps(question, tiling)
    work = _swept_work(question, tiling.extended, kept_after)
    return MapPlan("sweep", tiling, passes, why, work, swept, kept_after)


def _choose_kept_maps(question: MapQuestion, tiling: Tiling) -> tuple[frozenset[int], ...]:
    """The maps to keep after each pass: none unless each rank sweeps all rows of its columns."""
    num_cols = question.num_ranks if tiling.rule.exchanged else 1
    (strip, cols), item, height = _largest(tiling), question.item_bytes, tiling.extended[0]
    room = question.sweep_bytes - swept_bytes(question.layers, height, cols, strip, item)
    if tiling.grid[1] != num_cols or question.num_ranks != num_cols or room < 0:
        return (frozenset(),) * len(question.of_whole_image)
    cells = room // item if item else 0
    return kept_maps(question.layers, question.of_whole_image, tiling.extended, num_cols, cells)


def _operations(layers: tuple[Layer, ...], tiling: Tiling) -> int:
    """Multiplications of the convolutions for all tiles."""
    read = tiling.tiles[0].read
    return sum(_by_layer(layers, (read.height, read.width))) * len(tiling.tiles)


def _swept_work(
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


def _by_layer(layers: tuple[Layer, ...], size: tuple[int, int]) -> list[int]:
    """Multiplications of each layer on an image of this size; 0 but for convolutions."""
    shapes = map_shapes(layers, *size) if layers else []
    operations = []
    for layer, before, after in zip(layers, shapes, shapes[1:], strict=False):
        cells = before if isinstance(layer, TransposedConv) else after
        counts = isinstance(layer, Cellwise | Conv | TransposedConv)
        operations.append(layer.num_parameters * cells.rows * cells.cols if counts else 0)
    return operations


def _why_tiles(question: MapQuestion) -> str:
    plan = choose_map(replace(question, tile_px=None))
    rest = "" if plan.passes else "; without it one pass would do"
    return f"a tile's size was asked for{rest}"


def _why(question: MapQuestion) -> str:
    if question.halo_asked:
        return "a halo other than the exact one was asked for"
    if question.turned:
        return "turned images are mapped tile by tile"
    ranks = f"{question.num_ranks} × " * (question.num_ranks > 1)
    budget = f"{ranks}{question.budget_bytes / 2**20:.0f} MiB do not hold the image"
    enough = _enough_ranks(question)
    return budget + (f"; {enough} ranks would need one pass" if enough else "")


def _enough_ranks(question: MapQuestion) -> int | None:
    """A number of ranks that would hold the image, nearly the smallest."""
    whole = cut(*question.size, Cut(grid=(1, 1)), question.rule).extended
    bytes_ = inference_bytes(question.layers, *whole, question.item_bytes)
    num_ranks = max(question.num_ranks + 1, -(-bytes_ // question.budget_bytes))
    while num_ranks <= MOST_RANKS:
        tiling = _shares(question, num_ranks)
        if tiling is not None and _share_fits(question, tiling):
            return num_ranks
        num_ranks += max(1, num_ranks // 16)
    return None
