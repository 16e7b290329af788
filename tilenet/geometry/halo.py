"""How many pixels of context a stack of layers needs, and how tiles must be aligned.

The walk goes backwards through the layers: an interval of output cells needs an interval of input
cells, layer by layer; a skip adds what the stashed map was needed for. It is exact for every layer
of `tilenet.geometry.layers` and knows nothing of U-Nets. The paper's formula, `epsilon_px`, does.

Three numbers that are easily confused (P poolings; here P=4, two convolutions a level, nearest):

- `context_formula_px` 92: the unpadded network's loss per side;
- `context_aligned_px` 94: what an aligned tile needs, so that its own pixels are exact;
- `context_any_pixel_px` 107: what the worst single pixel looks at.

`halo_px` 96 is the aligned context rounded up to the alignment, so that windows start on the grid
of the deepest pooling.

Sizes of the feature maps between a network's layers.
"""

from dataclasses import dataclass
from functools import lru_cache
from math import lcm
from typing import Literal

from tilenet.errors import TilenetError
from tilenet.geometry.layers import Grid, Layer, Norm, Pop, Stash

__all__ = [
    "Context",
    "MapShape",
    "context_of",
    "epsilon_px",
    "fewest_cells",
    "input_interval",
    "map_shapes",
    "norm_context",
    "output_size",
]

NormContext = Literal["none", "tile", "image"]


@dataclass(frozen=True)
class Context:
    """What a network asks of the tiles that it runs on; all in input pixels.

    Attributes:
        alignment_px: Tile origins and own sizes are multiples of this, the total stride.
        offset_px: Output cell 0 stands on this pixel of the read window (0 with *same* padding).
        context_aligned_px: Pixels needed on the worse side of an aligned own window.
        context_any_pixel_px: Pixels needed on the worse side of the worst single pixel.
        halo_px: Pixels read before an own window.
        valid: Whether the network is unpadded, so that its output is smaller than its input.
    """

    alignment_px: int
    offset_px: int
    context_aligned_px: int
    context_any_pixel_px: int
    halo_px: int
    valid: bool


def epsilon_px(levels: int, convolutions: int, kernel: int = 3) -> int:
    """The paper's halo per side: ε = (3·2^(L−2) − 1)·d·n_c, with the unpadded loss d = K − 1.

    Source: "Toward Large-Scale Image Segmentation On Summit" (ICPP 2020), slide on tiling.

    Raises:
        TilenetError: Fewer than two levels.
    """
    if levels < 2:
        raise TilenetError(
            f"the formula counts levels from 2 on, one pooling (levels: {levels}); nearest: 2"
        )
    return (3 * (1 << (levels - 2)) - 1) * (kernel - 1) * convolutions


def norm_context(layers: tuple[Layer, ...]) -> NormContext:
    """Over what the network's normalisations take their statistics while training."""
    scopes = {layer.scope for layer in layers if isinstance(layer, Norm)}
    if not scopes:
        return "none"
    return "image" if "image" in scopes else "tile"


def output_size(layers: tuple[Layer, ...], cells: int, *, exact: bool = False) -> int:
    """Output cells for an input of `cells` pixels along an axis.

    Args:
        exact: Refuse sizes where a layer would drop a remainder or cut a skip unevenly.

    Returns:
        The number of cells, 0 where a layer has nothing left to work on or `exact` is broken.
    """
    stashed: dict[str, int] = {}
    for layer in layers:
        if exact and not layer.divides(cells):
            return 0
        cells = layer.size(cells)
        if isinstance(layer, Stash):
            stashed[layer.name] = cells
        elif isinstance(layer, Pop):
            other = stashed.pop(layer.name)
            if exact and (other - cells) % 2:
                return 0
            cells = other if layer.fit == "pad" else min(cells, other)
        if cells < 1:
            return 0
    return cells


def fewest_cells(layers: tuple[Layer, ...], height: int, width: int) -> int:
    """Cells of the smallest map that a normalisation works on; 0 where there is none."""
    cells: list[int] = []
    sizes: dict[str, tuple[int, int]] = {}
    for layer in layers:
        height, width = layer.size(height), layer.size(width)
        if isinstance(layer, Stash):
            sizes[layer.name] = height, width
        elif isinstance(layer, Pop) and layer.fit == "pad":
            height, width = sizes[layer.name]
        elif isinstance(layer, Norm):
            cells.append(height * width)
    return min(cells, default=0)


def input_interval(layers: tuple[Layer, ...], first: int, last: int) -> tuple[int, int]:
    """First and last input pixel that the output cells `first` to `last` look at.

    Pixels and cells are counted from the start of the read window; the answer may lie outside.
    """
    shifts = _shifts(layers)
    waiting: dict[str, tuple[int, int]] = {}
    for layer in reversed(layers):
        if isinstance(layer, Pop):
            shift = shifts[layer.name]
            waiting[layer.name] = first + shift, last + shift
        elif isinstance(layer, Stash):
            low, high = waiting.pop(layer.name)
            first, last = min(first, low), max(last, high)
        first, last = layer.needs(first, last)
    return first, last


def _grids(layers: tuple[Layer, ...]) -> list[Grid]:
    """Where the cells of each layer's output lie, the input's first."""
    grids = [Grid()]
    for layer in layers:
        grids.append(layer.grid(grids[-1]))
    return grids


@lru_cache(maxsize=16)
def _shifts(layers: tuple[Layer, ...]) -> dict[str, int]:
    """By how many cells each popped map lies inside the map stashed under its name."""
    stashed: dict[str, Grid] = {}
    shifts: dict[str, int] = {}
    for layer, grid in zip(layers, _grids(layers), strict=False):
        if isinstance(layer, Stash):
            stashed[layer.name] = grid
        elif isinstance(layer, Pop):
            skip = stashed[layer.name]
            shift = (grid.center - skip.center) / skip.stride
            if grid.stride != skip.stride or shift.denominator != 1:
                raise TilenetError(
                    f"a skip must lie on the grid of the map that it joins ({layer.name}: "
                    f"strides {skip.stride} and {grid.stride}, shift {shift} cells)"
                )
            shifts[layer.name] = int(shift)
    return shifts


@lru_cache(maxsize=16)
def context_of(layers: tuple[Layer, ...]) -> Context:
    """Walk the layers and say what tiles they need.

    Raises:
        TilenetError: The network's output is not on its input's pixel grid.
    """
    grids = _grids(layers)
    alignment = lcm(*(grid.stride.numerator for grid in grids))
    end = grids[-1]
    if end.stride != 1 or end.center.denominator != 1:
        raise TilenetError(
            f"a network must give one cell per input pixel (stride: {end.stride}, first cell at "
            f"pixel {end.center})"
        )
    offset = int(end.center)
    valid = offset > 0
    halo = _valid_halo(layers, alignment, offset) if valid else 0
    inset = halo - offset  # of an own window's first cell in the output, valid networks only

    # Far inside, so that no interval meets 0, yet on the grid of own windows.
    start = inset if valid else 0
    first, last = input_interval(layers, start, start + alignment - 1)
    before, after = start + offset - first, last - (start + offset + alignment - 1)
    aligned = max(before, after)
    if not valid:
        halo = -(-aligned // alignment) * alignment

    worst = 0
    for phase in range(start, start + alignment):
        first, last = input_interval(layers, phase, phase)
        worst = max(worst, phase + offset - first, last - phase - offset)
    return Context(alignment, offset, aligned, worst, halo, valid)


def _valid_halo(layers: tuple[Layer, ...], alignment: int, offset: int) -> int:
    """Fewest pixels to read before an own window of a valid network.

    Usually the loss per side itself; bilinear enlargement clamps at the edge of each map, so there
    the first output cells are not used and a little more is read.
    """
    for more in range(alignment * 4):
        if input_interval(layers, more, more + alignment - 1)[0] >= 0:
            return offset + more
    raise TilenetError(
        f"the network's output has no cell that is free of its edge (looked at {alignment * 4} px)"
    )


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


def map_shapes(layers: tuple[Layer, ...], height: int, width: int) -> tuple[MapShape, ...]:
    """The network's input, then each layer's output: one more than there are layers."""
    shapes = [MapShape(layers[0].in_channels, height, width)]
    stashed: dict[str, MapShape] = {}
    for layer in layers:
        before = shapes[-1]
        rows, cols = layer.size(before.rows), layer.size(before.cols)
        if isinstance(layer, Stash):
            stashed[layer.name] = before
        elif isinstance(layer, Pop) and layer.fit == "pad":
            rows, cols = stashed[layer.name].rows, stashed[layer.name].cols
        shapes.append(MapShape(layer.out_channels, rows, cols))
    return tuple(shapes)
