"""How an image is mapped: swept, tile after tile, shared out over the ranks, or in several passes.

A sweep computes each pixel once per rank that looks at it, and is taken wherever it computes less
than tiles do.

Instance and group norm with `scope: image` need the statistics of the whole image at their layer,
global pools its averages. Where each rank's share of the image fits its memory, the ranks hold it
all at once and exchange halos: one pass, no redundant work. Else the image is read strip by strip
or tile after tile, once for each such layer and once more to map, with bounded memory.
"""

from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from typing import Literal

from tilenet.errors import TilenetError
from tilenet.geometry.bands import read_ratio
from tilenet.geometry.halo import context_of, prefix_halo_px, summed_cells
from tilenet.geometry.layers import Cellwise, Conv, Layer, Norm, TransposedConv
from tilenet.geometry.maps import fewest_cells, map_shapes
from tilenet.geometry.ownership import check_shares
from tilenet.geometry.sweep import maps_before
from tilenet.geometry.tiles import Cut, HaloRule, Tiling, check_cells, cut
from tilenet.planning.kept_maps import kept_maps
from tilenet.planning.memory.layer import countable
from tilenet.planning.memory.partition import inference_bytes
from tilenet.planning.memory.swept_maps import swept_bytes
from tilenet.planning.mesh import choose_mesh

__all__ = ["GPU_STRIP_PX", "MapPlan", "MapQuestion", "choose_map", "plan_passes"]

# Ranks that are looked through for a number that would hold the image.
MOST_RANKS = 4096
# As many times its budget a tile may take that owns less than twice its halo.
WIDE_HALO = 4
# Rows of the deepest maps in a strip, the best first: of fewer, their neighbours are copied more
# often than they are computed. Rows of the image are at least so many.
STRIP_CELLS, STRIP_PX = (4, 2, 1), 64
# A strip costs a GPU as much as so many pixels before it computes one: on an H200 11 ms, against
# 43 ns per pixel of the preset small. A CPU has caches, which low strips suit.
GPU_STRIP_PX = 1 << 18
STEADY_RANKS = 4  # that strips suit, where any number of ranks may go on with them
MOST_COLUMNS = 16  # of tiles that are looked through for one rank
# Ranks exchange halos where they compute so much less: tiles that do not are the same to the last
# bit on any number of ranks, these to rounding.
ENOUGH_LESS = 0.9


@dataclass(frozen=True)
class MapQuestion:
    """What is to be mapped, and on what.

    Attributes:
        layers: The network.
        size: Height and width of the image.
        rule: The halo that was asked for.
        halo_asked: Whether that was another than the exact one.
        tile_px: Largest own size that was asked for; None: as much as memory allows.
        num_ranks: Ranks that map together.
        item_bytes: Bytes of a cell.
        budget_bytes: What feature maps may take on a rank.
        most_px: Largest own size of a tile that is chosen here; twice the halo if that is more.
        at_once: Tiles of a rank that share its memory.
        sweep_bytes: What feature maps of a sweep may take on a rank; 0: there is none.
        steady: Whether another number of ranks may go on with the map, so that its tiles may not
            depend on it.
        exchanges: Whether ranks that sweep may exchange halos.
        strip_overhead_px: Pixels that are computed in the time that a strip takes beyond its own.
        turned: Whether turned images are mapped with it, which takes tiles.
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
        """Numbers of the layers that need something of the whole image."""
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
    """What was chosen.

    Attributes:
        method: `sweep`: bands of the image, strip after strip; `tiles`: one pass, tile after tile;
            `exchange`: each rank holds its window of the image; `passes`: tile after tile, after
            one pass for each norm's statistics; `windows`: tile after tile, each of the windows of
            a module as it is that touch it.
        tiling: Tiling of the pass that maps; of a sweep, rows of tiles are its strips.
        passes: For each layer that needs something of the whole image its number, and the tiles of
            the pass that finds it.
        why: Said of passes.
        work: Arithmetic of all passes, in multiples of the one that maps.
        ratio: Pixels that a sweep reads on all ranks, or that windows compute, per pixel of the
            image; None: as many as tiles read.
        kept: Numbers of the maps that a sweep keeps whole after each pass, which those after it
            begin from.
    """

    method: Literal["sweep", "tiles", "exchange", "passes", "windows"]
    tiling: Tiling
    passes: tuple[tuple[int, Tiling], ...] = ()
    why: str = ""
    work: float = 1.0
    ratio: float | None = None
    kept: tuple[frozenset[int], ...] = ()

    @property
    def work_ratio(self) -> float:
        """Pixels that are read, per pixel of the image."""
        return self.tiling.work_ratio if self.ratio is None else self.ratio


def choose_map(asked: MapQuestion) -> MapPlan:
    """Choose.

    Raises:
        TilenetError: The tiles are impossible, or a norm has a single cell to work on.
    """
    if not asked.of_whole_image:
        size_px = _tile_px(asked) if asked.tile_px is None else asked.tile_px
        tiles = _tile_by_tile(asked, cut(*asked.size, Cut(size_px=size_px), asked.rule))
        swept = _swept(asked)
        return swept if swept and _less_work(asked, swept, tiles) else tiles
    whole = cut(*asked.size, Cut(grid=(1, 1)), asked.rule)
    _check_image(asked, whole)
    if asked.rule.valid_layers:
        if asked.tile_px is not None and asked.tile_px < max(whole.extended):
            raise TilenetError(
                f"an unpadded network takes its statistics over the whole image in one tile "
                f"(padding: valid, norm_scope: image, tile_px: {asked.tile_px}, image: "
                f"{asked.size[0]} × {asked.size[1]} px); leave the tile's size out, or train with "
                "network.padding: same"
            )
        return _tile_by_tile(asked, whole)
    if asked.tile_px is not None:
        tiling = cut(*asked.size, Cut(size_px=asked.tile_px), asked.rule)
        return plan_passes(asked, tiling, _why_tiles(asked))
    fits_one = asked.fits(*whole.extended)
    if asked.num_ranks > 1 and not asked.halo_asked and not asked.turned:
        shared_out = _shares(asked, asked.num_ranks)
        if shared_out is not None and _share_fits(asked, shared_out):
            return MapPlan("exchange", shared_out)
    if fits_one:
        return _tile_by_tile(asked, whole)
    if swept := _swept(asked):
        return plan_passes(asked, swept.tiling, _why(asked), swept.ratio)
    tiling = cut(*asked.size, Cut(size_px=_tile_px(asked)), asked.rule)
    return plan_passes(asked, tiling, _why(asked))


def _swept(asked: MapQuestion) -> MapPlan | None:
    """The sweep of least work that fits; None: there is none."""
    tile_norms = any(
        isinstance(layer, Norm) and layer.scope == "tile" and layer.norm != "batch"
        for layer in asked.layers
    )
    rule = asked.rule
    if not asked.sweep_bytes or asked.tile_px is not None or asked.halo_asked or tile_norms:
        return None
    if rule.valid_layers or not rule.exact:
        return None
    height, width = cut(*asked.size, Cut(grid=(1, 1)), rule).extended
    found, num_cols, ranks = [], 1, 1 if asked.steady else asked.num_ranks
    while num_cols <= min(width // asked.unit_px, max(ranks, MOST_COLUMNS)):
        strips = _strips(asked, height, width, num_cols, rule.halo_px)
        if strips is not None:
            tiling = _as_tall_as_pays(asked, strips, num_cols, rule)
            found.append(MapPlan("sweep", tiling, ratio=read_ratio(tiling, asked.num_ranks)))
            if ranks == 1:
                break  # more columns read more
        num_cols += max(1, num_cols // 2)
    best = min(found, key=lambda plan: _cost(asked, plan.tiling), default=None)
    columns = _columns(asked, height, width) if asked.exchanges and ranks > 1 else None
    if columns is None or (best and columns.work_ratio > ENOUGH_LESS * best.work_ratio):
        return best
    return columns


def _columns(asked: MapQuestion, height: int, width: int) -> MapPlan | None:
    """A sweep of one column of the image per rank, which exchange halos; None: there is none."""
    num_ranks = asked.num_ranks
    strips = _strips(asked, height, width, num_ranks, halo_px=0)
    if strips is None:
        return None
    try:
        rule = replace(asked.rule, exchanged=True)
        tiling = _as_tall_as_pays(asked, strips, num_ranks, rule)
        check_shares(asked.layers, tiling.cols, "columns")
    except TilenetError:
        return None
    return MapPlan("sweep", tiling, ratio=read_ratio(tiling, num_ranks))


def _strips(asked: MapQuestion, height: int, width: int, num_cols: int, halo_px: int) -> int | None:
    """Number of strips, as few rows of the deepest maps as are computed well; None: none fits."""
    unit = asked.unit_px
    read = min(width, -(-width // num_cols // unit) * unit + 2 * halo_px)
    for cells in STRIP_CELLS:
        rows = max(cells * unit, STRIP_PX // unit * unit)
        if _strip_fits(asked, height, rows, read):
            return -(-height // rows)
    return None


def _strip_fits(asked: MapQuestion, height: int, rows: int, cols: int) -> bool:
    need = swept_bytes(asked.layers, height, cols, rows, asked.item_bytes)
    return need <= asked.sweep_bytes and countable(asked.layers, rows, cols)


def _as_tall_as_pays(asked: MapQuestion, strips: int, num_cols: int, rule: HaloRule) -> Tiling:
    """So many strips, or a half, a quarter … of them: those that take a rank the least time."""
    found = [cut(*asked.size, Cut(grid=(strips, num_cols)), rule)]
    while asked.strip_overhead_px and (strips := -(-strips // 2)) > 1:
        tiling = cut(*asked.size, Cut(grid=(strips, num_cols)), rule)
        rows, cols = _largest(tiling)
        # What is read at once is no more than of the largest tile.
        if rows * cols > asked.most_px**2 or not _strip_fits(asked, tiling.extended[0], rows, cols):
            break
        found.append(tiling)
    return min(found, key=lambda one: _cost(asked, one))


def _cost(asked: MapQuestion, tiling: Tiling) -> float:
    """Time of a sweep's slowest rank, over that of its part of the pixels."""
    ratio = read_ratio(tiling, STEADY_RANKS if asked.steady else asked.num_ranks)
    if not asked.strip_overhead_px:
        return ratio
    kept = _kept(replace(asked, num_ranks=1) if asked.steady else asked, tiling)
    overhead = asked.strip_overhead_px / prod(_largest(tiling))
    return ratio * (1 + overhead) * _swept_work(asked, tiling.extended, kept)


def _largest(tiling: Tiling) -> tuple[int, int]:
    """Rows of the highest strip, and columns of the widest one."""
    return max(span.own for span in tiling.rows), max(span.read for span in tiling.cols)


def _less_work(asked: MapQuestion, swept: MapPlan, tiles: MapPlan) -> bool:
    """Whether a rank computes fewer pixels in a sweep than with tiles; one tile repeats nothing."""
    count, ranks = len(tiles.tiling.tiles), 1 if asked.steady else asked.num_ranks
    uneven = -(-count // ranks) * ranks / count
    return count > 1 and read_ratio(swept.tiling, ranks) < tiles.work_ratio * uneven


def _check_image(asked: MapQuestion, whole: Tiling) -> None:
    height, width = whole.extended
    if fewest_cells(asked.layers, height, width, images=None) == 1:
        raise TilenetError(
            f"statistics over the whole image need more than one cell of it on every level (image: "
            f"{asked.size[0]} × {asked.size[1]} px, {height} × {width} px with its extension leave "
            "the deepest one cell); map a larger image or use a network with fewer poolings"
        )


def _tile_by_tile(asked: MapQuestion, tiling: Tiling) -> MapPlan:
    check_cells(asked.layers, tiling.tiles[0].read, images=None)
    return MapPlan("tiles", tiling)


def _tile_px(asked: MapQuestion) -> int:
    """Largest own size whose feature maps fit."""
    unit, halo_px = asked.unit_px, asked.rule.halo_px
    # An own size below the halo would compute each pixel nine times and more.
    best = least = max(unit, -(-halo_px // unit) * unit)
    for own in range(least, max(asked.most_px, 2 * halo_px) + 1, unit):
        # With twice the halo it is four times, which is worth memory.
        times = asked.at_once / (WIDE_HALO if own <= 2 * halo_px else 1)
        if not asked.fits(own + 2 * halo_px, own + 2 * halo_px, times):
            break
        best = own
    return best


def _shares(asked: MapQuestion, num_ranks: int) -> Tiling | None:
    """One window per rank, on a grid as square as halos allow; None where they allow none."""
    rows = choose_mesh(num_ranks, 1).rows
    sides = [side for side in range(1, num_ranks + 1) if num_ranks % side == 0]
    for side in sorted(sides, key=lambda side: abs(side - rows)):
        rule = HaloRule(0, asked.unit_px, exchanged=True)
        try:
            tiling = cut(*asked.size, Cut(grid=(side, num_ranks // side)), rule)
            check_shares(asked.layers, tiling.rows, "rows")
            check_shares(asked.layers, tiling.cols, "columns")
        except TilenetError:
            continue
        return tiling
    return None


def _share_fits(asked: MapQuestion, tiling: Tiling) -> bool:
    return asked.fits(max(s.own for s in tiling.rows), max(s.own for s in tiling.cols))


def plan_passes(
    asked: MapQuestion, tiling: Tiling, why: str, swept: float | None = None
) -> MapPlan:
    """One pass per layer that needs the whole image, and the one that maps; of one tile that.

    Args:
        swept: `ratio` of `MapPlan`, of a sweep.

    Raises:
        TilenetError: The tiles do not start on the network's grid.
    """
    if tiling.grid == (1, 1):
        return _tile_by_tile(asked, tiling)
    if tiling.rule.alignment_px != asked.unit_px:
        raise TilenetError(
            f"statistics over the whole image need tiles that start on the network's grid (halo: "
            f"epsilon, tiles: {tiling.grid[0]} × {tiling.grid[1]}, total stride: {asked.unit_px} "
            "px); use halo: exact or a multiple of the stride"
        )
    passes = tuple(
        (index, _for_prefix(asked, tiling, min(halo, tiling.rule.halo_px)))
        for index in asked.of_whole_image
        for halo in [prefix_halo_px(asked.layers, index)]
    )
    if swept is None:
        once = _operations(asked.layers, tiling)
        every = once + sum(_operations(asked.layers[:index], tiles) for index, tiles in passes)
        return MapPlan("passes", tiling, passes, why, every / max(once, 1))
    kept = _kept(asked, tiling)
    work = _swept_work(asked, tiling.extended, kept)
    return MapPlan("sweep", tiling, passes, why, work, swept, kept)


def _kept(asked: MapQuestion, tiling: Tiling) -> tuple[frozenset[int], ...]:
    """The maps that passes hand on, where each rank sweeps all rows of all or of its columns."""
    num_cols = asked.num_ranks if tiling.rule.exchanged else 1
    (strip, cols), item, height = _largest(tiling), asked.item_bytes, tiling.extended[0]
    room = asked.sweep_bytes - swept_bytes(asked.layers, height, cols, strip, item)
    if tiling.grid[1] != num_cols or asked.num_ranks != num_cols or room < 0:
        return (frozenset(),) * len(asked.of_whole_image)
    cells = room // item if item else 0
    return kept_maps(asked.layers, asked.of_whole_image, tiling.extended, num_cols, cells)


def _for_prefix(asked: MapQuestion, tiling: Tiling, halo_px: int) -> Tiling:
    """The same own windows with a smaller halo."""
    rule = replace(tiling.rule, halo_px=halo_px)
    return cut(*asked.size, Cut(grid=tiling.grid), rule)


def _operations(layers: tuple[Layer, ...], tiling: Tiling) -> int:
    """Multiplications of the convolutions for all tiles."""
    read = tiling.tiles[0].read
    return sum(_by_layer(layers, (read.height, read.width))) * len(tiling.tiles)


def _swept_work(
    asked: MapQuestion, size: tuple[int, int], kept: tuple[frozenset[int], ...]
) -> float:
    """Multiplications of all sweeps, over those of the whole network."""
    layers = asked.layers
    each, total, there = _by_layer(layers, size), 0, frozenset[int]()
    for stop, left in zip((*asked.of_whole_image, len(layers)), (*kept, there), strict=True):
        computed, _ = maps_before(layers, [stop], there)
        total += sum(each[map_ - 1] for map_ in computed)
        there = left
    return total / max(sum(each), 1)


def _by_layer(layers: tuple[Layer, ...], size: tuple[int, int]) -> list[int]:
    """Multiplications of each convolution of an image; of another layer 0."""
    shapes = map_shapes(layers, *size) if layers else []
    found = []
    for layer, before, after in zip(layers, shapes, shapes[1:], strict=False):
        cells = before if isinstance(layer, TransposedConv) else after
        counts = isinstance(layer, Cellwise | Conv | TransposedConv)
        found.append(layer.num_parameters * cells.rows * cells.cols if counts else 0)
    return found


def _why_tiles(asked: MapQuestion) -> str:
    plan = choose_map(replace(asked, tile_px=None))
    rest = "" if plan.passes else "; without it one pass would do"
    return f"a tile's size was asked for{rest}"


def _why(asked: MapQuestion) -> str:
    if asked.halo_asked:
        return "a halo other than the exact one was asked for"
    if asked.turned:
        return "turned images are mapped tile by tile"
    budget = f"{asked.num_ranks} × {asked.budget_bytes / 2**20:.0f} MiB do not hold the image"
    if asked.num_ranks == 1:
        budget = f"{asked.budget_bytes / 2**20:.0f} MiB do not hold the image"
    enough = _enough_ranks(asked)
    return budget + (f"; {enough} ranks would need one pass" if enough else "")


def _enough_ranks(asked: MapQuestion) -> int | None:
    """A number of ranks that would hold the image, nearly the smallest."""
    whole = cut(*asked.size, Cut(grid=(1, 1)), asked.rule).extended
    bytes_ = inference_bytes(asked.layers, *whole, asked.item_bytes)
    num_ranks = max(asked.num_ranks + 1, -(-bytes_ // asked.budget_bytes))
    while num_ranks <= MOST_RANKS:
        tiling = _shares(asked, num_ranks)
        if tiling is not None and _share_fits(asked, tiling):
            return num_ranks
        num_ranks += max(1, num_ranks // 16)
    return None
