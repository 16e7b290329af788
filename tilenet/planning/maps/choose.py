"""Choose how an image is mapped: in a sweep, tile by tile, by exchange of halos, or in passes.

A sweep computes each pixel once per rank that looks at it, and is chosen where it computes less
than tiles do.

Instance and group norms with `scope: image` need the statistics of the whole image at their layer,
global pools its averages. Where each rank's share of the image fits its memory, the ranks hold the
whole image and exchange halos: one pass, no redundant work. Else the image is read strip by strip
or tile by tile, once for each such layer and once more to map, with bounded memory.
"""

from contextlib import suppress
from dataclasses import replace

from tilenet.errors import TilenetError
from tilenet.geometry.bands import read_ratio
from tilenet.geometry.halo_rule import HaloRule
from tilenet.geometry.maps import fewest_cells
from tilenet.geometry.ownership import check_shares
from tilenet.geometry.tiles import Cut, Tiling, cut
from tilenet.planning.maps.passes import plan_passes, plan_tiles
from tilenet.planning.maps.question import MapPlan, MapQuestion
from tilenet.planning.maps.strips import plan_sweep
from tilenet.planning.memory.inference import inference_bytes
from tilenet.planning.mesh import choose_mesh

# Largest number of ranks that is tried for one that would hold the image.
MOST_RANKS = 4096
# A tile that owns less than twice its halo may take this many times its budget.
WIDE_HALO = 4


def choose_map(question: MapQuestion) -> MapPlan:
    """Choose how an image is mapped.

    Raises:
        TilenetError: The tiles are impossible, or a norm has a single cell to work on.
    """
    if not question.of_whole_image:
        size_px = _tile_px(question) if question.tile_px is None else question.tile_px
        tiles = plan_tiles(question, cut(*question.size, Cut(size_px=size_px), question.rule))
        swept = plan_sweep(question)
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
        return plan_tiles(question, whole)
    if question.tile_px is not None:
        tiling = cut(*question.size, Cut(size_px=question.tile_px), question.rule)
        return plan_passes(question, tiling, _why_tiles(question))
    if question.num_ranks > 1 and not question.halo_asked and not question.turned:
        shared_out = _shares(question, question.num_ranks)
        if shared_out is not None and question.fits(*shared_out.largest_own):
            return MapPlan("exchange", shared_out)
    if question.fits(*whole.extended):
        return plan_tiles(question, whole)
    if swept := plan_sweep(question):
        return plan_passes(question, swept.tiling, _why(question), swept.ratio)
    tiling = cut(*question.size, Cut(size_px=_tile_px(question)), question.rule)
    return plan_passes(question, tiling, _why(question))


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
        if tiling is not None and question.fits(*tiling.largest_own):
            return num_ranks
        num_ranks += max(1, num_ranks // 16)
    return None
