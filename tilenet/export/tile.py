"""Windows that other programs run an exported network on: their sizes, and how they overlap."""

from dataclasses import dataclass

from tilenet.errors import TilenetError
from tilenet.geometry.halo import Context
from tilenet.geometry.layers import Layer
from tilenet.geometry.maps import check_cells, map_shapes, output_size
from tilenet.geometry.opaque import Opaque
from tilenet.geometry.windows import Window

LEAST_PX = 512  # smallest tile that is chosen without --tile
MOST_PERCENT = 99  # largest overlap that Deepness takes


@dataclass(frozen=True)
class ExportTile:
    """A square window with its halo.

    Attributes:
        overlap_percent: Share of its side that it has in common with the next window: at least the
            halos of both.
        on_grid: Whether windows with this overlap begin on the network's grid, as tiles of maps do.
    """

    px: int
    overlap_percent: int
    on_grid: bool


def decide_least_px(layers: tuple[Layer, ...], alignment_px: int, tile_px: int) -> int:
    """Least side, `tile_px` at most, of windows that a network takes where sizes are left open.

    Torch traces sizes of one alignment, and maps of one cell, for themselves: they are left open
    from two on.
    """
    first = min(2 * alignment_px + tile_px % alignment_px, tile_px)
    sizes = range(first, tile_px, alignment_px)
    return next((px for px in sizes if _is_taken(layers, px, tile_px)), tile_px)


def _is_taken(layers: tuple[Layer, ...], px: int, tile_px: int) -> bool:
    if output_size(layers, px) < 1:
        return False
    shapes = (map_shapes(layers, side, side) for side in (px, tile_px))
    if any(map_.rows == 1 < of_tile.rows for map_, of_tile in zip(*shapes, strict=True)):
        return False
    try:
        check_cells(layers, Window(0, 0, px, px), None)
    except TilenetError:
        return False
    return True


def decide_tile(context: Context, opaque: Opaque | None, tile_px: int | None) -> ExportTile:
    """The window's size, and the least overlap in whole percents that keeps own pixels exact.

    Args:
        opaque: The network's only layer, where the network is an opaque module.
        tile_px: The size; None: at least four halos, such that 4 % of it is a multiple of the
            alignment.

    Raises:
        TilenetError: The network does not take windows of `tile_px`.
    """
    if opaque is not None:
        if tile_px not in (None, opaque.window_px):
            raise TilenetError(
                f"a network of windows takes windows of one size (--tile: {tile_px}, window_px: "
                f"{opaque.window_px}); leave --tile out"
            )
        return ExportTile(opaque.window_px, 50, on_grid=True)
    alignment, both_px = context.alignment_px, 2 * context.halo_px
    rest = both_px % alignment  # 0, except for unpadded networks
    unit = 25 * alignment
    px = -(-max(LEAST_PX, 2 * both_px) // unit) * unit + rest if tile_px is None else tile_px
    least = -(-100 * both_px // max(px, 1))
    if px < 1 or px % alignment != rest or least > MOST_PERCENT:
        more = f" and {rest}" * (rest > 0)
        raise TilenetError(
            f"a tile is a multiple of the network's alignment{more}, and wider than its halos on "
            f"both sides (--tile: {px}, alignment: {alignment} px, halo: {context.halo_px} px); "
            "give another --tile, or leave it out"
        )
    for percent in range(least, MOST_PERCENT + 1):
        if (px - px * percent // 100) % alignment == 0:
            return ExportTile(px, percent, on_grid=True)
    return ExportTile(px, least, on_grid=False)
