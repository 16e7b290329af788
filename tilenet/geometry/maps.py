"""The maps between a network's layers: their grids, and their sizes for an image."""

from dataclasses import dataclass
from functools import lru_cache
from math import lcm

from tilenet.errors import TilenetError
from tilenet.geometry.grid import Grid
from tilenet.geometry.layers import (
    Conv,
    Expand,
    Join,
    Joining,
    Layer,
    Norm,
    walk,
)
from tilenet.geometry.windows import Window

MANY = 2**20  # more than any halo has units


@lru_cache(maxsize=1024)
def output_size(layers: tuple[Layer, ...], cells: int, *, exact: bool = False) -> int:
    """Output cells for an input of `cells` pixels along an axis.

    Args:
        exact: Refuse sizes where a layer would drop a remainder or cut a stashed map unevenly.

    Returns:
        The number of cells, 0 where a layer has nothing left to work on or `exact` is broken.
    """

    def through(layer: Layer, cells: int, stashed: tuple[int, ...]) -> int:
        if cells < 1 or (exact and not layer.divides(cells)):
            return 0
        if exact and any((other - cells) % 2 for other in stashed if isinstance(layer, Join)):
            return 0
        return max(layer.size(cells, *stashed), 0)

    sizes = walk(layers, cells, through)
    return sizes[-1] if min(sizes) > 0 else 0


def fewest_cells(layers: tuple[Layer, ...], height: int, width: int, images: int | None = 1) -> int:
    """Fewest values that a normalisation takes its statistics of; 0: no normalisation takes any.

    Args:
        images: Images of a step, over which batch norm takes them; None: in evaluation, where it
            takes none.
    """
    shapes = map_shapes(layers, height, width)
    cells = []
    for layer, shape in zip(layers, shapes, strict=False):
        if not isinstance(layer, Norm) or layer.scope == "frozen":
            continue
        if layer.norm != "batch":
            channels = layer.in_channels // layer.groups if layer.norm == "group" else 1
            cells.append(shape.rows * shape.cols * channels)
        elif images is not None:
            times = images if layer.scope == "image" else 1
            cells.append(shape.rows * shape.cols * times)
    return min(cells, default=0)


@lru_cache(maxsize=64)  # passes over an image ask for the same again and again
def map_grids(layers: tuple[Layer, ...]) -> tuple[Grid, ...]:
    """Return the grid of the input and of each layer's output."""
    start = image_grid(layers)
    return tuple(walk(layers, start, lambda layer, *grids: layer.grid(grids[0], *grids[1])))


@lru_cache(maxsize=16)
def image_grid(layers: tuple[Layer, ...]) -> Grid:
    """The grid of the input, from which those of all maps follow.

    Maps are centred, unless the output is as large as the input and yet begins elsewhere, or maps
    that are joined lie between each other's cells: then crops, or more zeros on one side, join
    cells of one number, and maps lie on each other by their first cells.
    """
    apart = False

    def through(layer: Layer, grid: Grid, stashed: tuple[Grid, ...]) -> Grid:
        nonlocal apart
        out = layer.grid(grid, *stashed)
        if isinstance(layer, Join) and layer.how != "take":
            apart |= any(x != out for x in (grid, *stashed) if not (x.whole or out.whole))
        return out

    grids = walk(layers, Grid(), through)
    large = MANY * lcm(*(grid.stride.numerator for grid in grids if not grid.whole))
    moved = apart or grids[-1] != Grid()
    return Grid(centred=not (moved and output_size(layers, large) == large))


Shifts = tuple[int | None, ...]


@lru_cache(maxsize=16)
def _shifts(layers: tuple[Layer, ...]) -> tuple[Shifts, ...]:
    """Return by how many cells the output of each joining layer lies inside each joined map.

    The layer's input comes first, then the stashed maps; None: the output looks at none of a map's
    cells, since the map is whole or not used. Other layers have no entries.
    """
    shifts: list[Shifts] = []

    def through(layer: Layer, grid: Grid, stashed: tuple[Grid, ...]) -> Grid:
        out = layer.grid(grid, *stashed)
        if isinstance(layer, Expand):
            shifts.append((None, None))
        elif isinstance(layer, Joining):
            is_take = isinstance(layer, Join) and layer.how == "take"
            used = (None if is_take else grid, *stashed)
            names = ("the map before", *layer.names)
            shifts.append(tuple(_shift(*pair, out) for pair in zip(names, used, strict=True)))
        else:
            shifts.append(())
        return out

    walk(layers, image_grid(layers), through)
    return tuple(shifts)


def _shift(name: str, grid: Grid | None, out: Grid) -> int | None:
    if grid is None or grid.whole or out.whole:
        return None
    shift = (out.origin - grid.origin) / grid.stride
    if grid.stride != out.stride or shift.denominator != 1:
        raise TilenetError(
            f"a skip must lie on the grid of the map that it joins ({name}: strides {grid.stride} "
            f"and {out.stride}, shift {shift} cells)"
        )
    return int(shift)


@dataclass(frozen=True)
class MapShape:
    """A feature map of one sample, (C, H, W)."""

    channels: int
    rows: int
    cols: int

    @property
    def num_elements(self) -> int:
        """Cells times channels."""
        return self.channels * self.rows * self.cols


@lru_cache(maxsize=1024)  # a planner asks for the same tiles again and again
def map_shapes(layers: tuple[Layer, ...], height: int, width: int) -> tuple[MapShape, ...]:
    """The network's input, then each layer's output: one more than there are layers."""
    start = MapShape(layers[0].in_channels, height, width)

    def through(layer: Layer, before: MapShape, stashed: tuple[MapShape, ...]) -> MapShape:
        rows = layer.size(before.rows, *(shape.rows for shape in stashed))
        cols = layer.size(before.cols, *(shape.cols for shape in stashed))
        return MapShape(layer.out_channels, rows, cols)

    return tuple(walk(layers, start, through))


def check_cells(layers: tuple[Layer, ...], read: Window, images: int | None = 1) -> None:
    """Refuse tiles that leave a norm a single cell, or too few cells to reflect at an edge.

    Args:
        images: See `fewest_cells`.

    Raises:
        TilenetError: Names the tile.
    """
    if fewest_cells(layers, read.height, read.width, images) == 1:
        raise TilenetError(
            f"normalisation needs more than one cell on every level (tile: {read.height} × "
            f"{read.width} px leave one cell to a norm); make tiles larger, use norm: none, or for "
            "batch norm a larger batch_size"
        )
    for layer, shape in zip(layers, map_shapes(layers, read.height, read.width), strict=False):
        if isinstance(layer, Conv) and layer.edge == "reflect":
            least = max(layer.padding, layer.along_cols.padding) + 1
            if min(shape.rows, shape.cols) < least:
                raise TilenetError(
                    f"a map that is padded by reflection has more cells than are padded (tile: "
                    f"{read.height} × {read.width} px leave {shape.rows} × {shape.cols} cells, "
                    f"needed: {least}); make tiles larger"
                )
