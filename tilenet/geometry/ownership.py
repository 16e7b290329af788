"""The cells of each layer's map that a rank owns, needs, takes from other ranks and gives to them.

With `halo_mode: exchange` a rank holds its own window of every feature map and nothing else. A cell
belongs to the rank that owns the pixels it stands for, so maps of one grid are shared out alike
however they came about, and a skip meets its own. A layer's input cells follow from its output
cells: the output is shared out first, and `Layer.needs` returns the input cells that it takes.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from itertools import pairwise
from math import ceil

from tilenet.errors import TilenetError
from tilenet.geometry.grid import Grid
from tilenet.geometry.halo import context_of
from tilenet.geometry.layers import Join, Joining, Layer, across, walk
from tilenet.geometry.maps import image_grid
from tilenet.geometry.tiles import Span, Tiling
from tilenet.geometry.windows import Window, overlap


@dataclass(frozen=True)
class AxisShares:
    """A layer's input and output along one axis, shared out over the ranks along it.

    Attributes:
        stride: Distance between neighbouring input cells, in pixels; 0: the input is a whole map.
        cells: Cells of the whole input map.
        edges: Between the ranks' input cells: rank i owns `edges[i]` to `edges[i + 1] − 1`.
        out_edges: Between the ranks' output cells, in the same way.
        needs: First input cell that each rank's output looks at, and the one behind the last; they
            may lie outside of the map, where the layer sees its border.
    """

    stride: Fraction
    cells: int
    edges: tuple[int, ...]
    out_edges: tuple[int, ...]
    needs: tuple[tuple[int, int], ...]

    def inside(self, rank: int) -> tuple[int, int]:
        """The cells of the map itself that a rank needs."""
        first, stop = self.needs[rank]
        return max(first, 0), min(stop, self.cells)


@dataclass(frozen=True)
class LayerHalo:
    """The halo that a rank takes and gives before a layer, in cells.

    Attributes:
        own: The rank's window of the input map.
        need: The part of the map that its output needs; may be smaller than `own`.
        border: Cells that its output looks at outside of the map: above, below, left, right.
        out: The rank's window of the output map.
        takes: The parts of `need` that others own, with their numbers in the grid, row by row.
        gives: The parts of `own` that others need.
    """

    own: Window
    need: Window
    border: tuple[int, int, int, int]
    out: Window
    takes: tuple[tuple[int, Window], ...]
    gives: tuple[tuple[int, Window], ...]


def own_edges(grid: Grid, cells: int, edges_px: Sequence[int]) -> tuple[int, ...]:
    """Edges between ranks on a map of `cells` cells, given those on the image.

    A whole map, which all ranks have, counts as the first one's.
    """
    if grid.whole:
        return (0, *(cells for _ in edges_px[1:]))
    inner = (grid.cells(edge, edge)[0] for edge in edges_px[1:-1])
    return (0, *(min(max(edge, 0), cells) for edge in inner), cells)


@lru_cache(maxsize=64)  # of all passes over an image they are the same
def axis_shares(
    layers: tuple[Layer, ...], pixels: int, edges_px: tuple[int, ...]
) -> tuple[AxisShares, ...]:
    """Share each layer's maps out over ranks along one axis.

    Args:
        pixels: Pixels of the extended image.
        edges_px: Edges between the ranks' own pixels, 0 and `pixels` included.

    Raises:
        TilenetError: A stashed map does not lie on the map that it joins.
    """
    shares = []

    def through(layer: Layer, before: _Map, stashed: tuple[_Map, ...]) -> _Map:
        size = layer.size(before.cells, *(map_.cells for map_ in stashed))
        grid = layer.grid(before.grid, *(map_.grid for map_ in stashed))
        out = _Map(grid, size, own_edges(grid, size, edges_px))
        # All of a whole map is there; a map for which another is taken is not looked at.
        is_take = isinstance(layer, Join) and layer.how == "take"
        if isinstance(layer, Joining):
            joined = stashed if is_take else (*stashed, before)
            edges = {map_.edges for map_ in joined if not map_.grid.whole}
            if len(edges) > 1:
                ends = " and ".join(map(str, sorted(edges, reverse=True)))
                names = ", ".join(layer.names)
                raise TilenetError(
                    f"a skip must be shared out as the map that it joins ({names}: cells end at "
                    f"{ends}); use halo_mode: overlap"
                )
        local = not (before.grid.whole or out.grid.whole or is_take)
        own = pairwise(before.edges)
        needs = (_needs(layer, *span) for span in pairwise(out.edges)) if local else own
        stride = before.grid.stride
        shares.append(AxisShares(stride, before.cells, before.edges, out.edges, tuple(needs)))
        return out

    image = image_grid(layers)
    walk(layers, _Map(image, pixels, own_edges(image, pixels, edges_px)), through)
    return tuple(shares)


@dataclass(frozen=True)
class _Map:
    grid: Grid
    cells: int
    edges: tuple[int, ...]


def tiling_shares(
    layers: tuple[Layer, ...], tiling: Tiling
) -> tuple[tuple[AxisShares, ...], tuple[AxisShares, ...]]:
    """Share each layer's maps out over the owners of tiles, along rows and along columns."""
    rows, cols = (
        axis_shares(line, pixels, (*(span.first for span in spans), pixels))
        for line, pixels, spans in zip(
            (layers, across(layers)), tiling.extended, (tiling.rows, tiling.cols), strict=True
        )
    )
    return rows, cols


def own_cells(rows: AxisShares, cols: AxisShares, tiling: Tiling, number: int) -> Window:
    """The tile's own window of a layer's input, from the first cell on that it computes."""
    row, col = divmod(number, tiling.grid[1])
    own, start = _own(rows, cols, row, col), (0, 0)
    if (
        not tiling.rule.exchanged and rows.stride
    ):  # then it computes a halo too, from where it reads
        spans = tiling.rows[row], tiling.cols[col]
        top, left = own.row - spans[0].start / rows.stride, own.col - spans[1].start / cols.stride
        start = int(top), int(left)
    return Window(*start, own.height, own.width)


def _needs(layer: Layer, first: int, stop: int) -> tuple[int, int]:
    if stop <= first:
        return 0, 0
    low, high = layer.needs(first, stop - 1)
    return low, high + 1


def check_shares(layers: tuple[Layer, ...], spans: tuple[Span, ...], axis: str) -> None:
    """Refuse shares narrower than a halo, which the next neighbour alone could not fill.

    Raises:
        TilenetError: Names the smallest legal share.
    """
    edges = (*(span.first for span in spans), spans[-1].first + spans[-1].own)
    unit = context_of(layers).alignment_px
    layers = layers if axis == "rows" else across(layers)
    least, where = unit, ""
    for index, (layer, shares) in enumerate(
        zip(layers, axis_shares(layers, edges[-1], edges), strict=True)
    ):
        widest = 0
        for rank, (first, stop) in enumerate(shares.needs):
            # Not cut at the map's edge: a wider share, which may be the remedy, reaches further.
            before = shares.edges[rank] - first if rank > 0 else 0
            behind = stop - shares.edges[rank + 1] if rank < len(spans) - 1 else 0
            widest = max(widest, before, behind)
        needed = ceil(widest * shares.stride / unit) * unit
        if needed > least and len(spans) > 1:
            least, where = needed, f"layer {index}, a {layer.kind} with a halo of {widest} cells"
    smallest = min(span.own for span in spans)
    if smallest < least:
        raise TilenetError(
            f"a rank must own at least what its neighbours' halos take from it ({axis}: "
            f"{len(spans)} ranks, the narrowest owns {smallest} px, {where} takes {least} px); the "
            f"smallest legal tile is {least} px: use at most {max(edges[-1] // least, 1)} ranks "
            "along it, or halo_mode: overlap"
        )


def halo_of(rows: AxisShares, cols: AxisShares, place: tuple[int, int]) -> LayerHalo:
    """The halo that the rank at (row, column) of the grid exchanges before a layer."""
    num_rows, num_cols = len(rows.needs), len(cols.needs)
    row, col = place
    own, need = _own(rows, cols, row, col), _need(rows, cols, row, col)
    takes, gives = [], []
    # No rank further away: `check_shares`.
    for other_row in range(max(row - 1, 0), min(row + 2, num_rows)):
        for other_col in range(max(col - 1, 0), min(col + 2, num_cols)):
            if (other_row, other_col) == place:
                continue
            number = other_row * num_cols + other_col
            ours = overlap(need, _own(rows, cols, other_row, other_col))
            theirs = overlap(_need(rows, cols, other_row, other_col), own)
            takes += [(number, ours)] if ours else []
            gives += [(number, theirs)] if theirs else []
    (top, bottom), (left, right) = _border(rows, row), _border(cols, col)
    out = Window(
        rows.out_edges[row],
        cols.out_edges[col],
        rows.out_edges[row + 1] - rows.out_edges[row],
        cols.out_edges[col + 1] - cols.out_edges[col],
    )
    return LayerHalo(own, need, (top, bottom, left, right), out, tuple(takes), tuple(gives))


def _border(shares: AxisShares, rank: int) -> tuple[int, int]:
    first, stop = shares.needs[rank]
    return max(-first, 0), max(stop - shares.cells, 0)


def _own(rows: AxisShares, cols: AxisShares, row: int, col: int) -> Window:
    top, left = rows.edges[row], cols.edges[col]
    return Window(top, left, rows.edges[row + 1] - top, cols.edges[col + 1] - left)


def _need(rows: AxisShares, cols: AxisShares, row: int, col: int) -> Window:
    (top, bottom), (left, right) = rows.inside(row), cols.inside(col)
    return Window(top, left, max(bottom - top, 0), max(right - left, 0))
