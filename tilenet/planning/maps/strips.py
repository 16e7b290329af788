"""Choose the strips of a sweep: as high as memory allows and as pays, in how many columns."""

from contextlib import suppress
from dataclasses import replace
from functools import partial
from math import prod

from tilenet.errors import TilenetError
from tilenet.geometry.bands import read_ratio
from tilenet.geometry.halo_rule import HaloRule
from tilenet.geometry.layers import Norm
from tilenet.geometry.ownership import check_shares
from tilenet.geometry.tiles import Cut, Tiling, cut
from tilenet.planning.maps.passes import choose_kept_maps, largest_strip, swept_work
from tilenet.planning.maps.question import MapPlan, MapQuestion
from tilenet.planning.memory.map_limits import countable
from tilenet.planning.memory.sweeps.swept_maps import swept_bytes

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


def plan_sweep(question: MapQuestion) -> MapPlan | None:
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
        rows, cols = largest_strip(tiling)
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
    kept_after = choose_kept_maps(of_rank, tiling)
    overhead = question.strip_overhead_px / prod(largest_strip(tiling))
    return ratio * (1 + overhead) * swept_work(question, tiling.extended, kept_after)
