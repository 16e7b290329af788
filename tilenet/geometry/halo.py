"""Compute the pixels of context that layers need, and the alignment of tiles.

The walk goes backwards through the layers: an interval of output cells needs an interval of input
cells, layer by layer; at a stash, the cells that the skip needs are added. It is exact for every
layer of `tilenet.geometry.layers` and knows nothing of U-Nets. The paper's formula, `epsilon_px`,
does.

Three numbers that are easily confused (P poolings; here P=4, two convolutions a level, nearest):

- `context_formula_px` 92: the unpadded network's loss per side;
- `context_aligned_px` 94: context of an aligned tile, so that its own pixels are exact;
- `context_any_pixel_px` 107: context of the worst single pixel.

`halo_px` 96 is the aligned context rounded up to the alignment, so that windows start on the grid
of the deepest pooling.
"""

from dataclasses import dataclass, replace
from functools import lru_cache
from math import lcm
from typing import Literal

from tilenet.errors import TilenetError
from tilenet.geometry.layers import (
    Expand,
    GlobalPool,
    Joining,
    Layer,
    Norm,
    Stash,
    across,
)
from tilenet.geometry.maps import _shifts, map_grids
from tilenet.geometry.opaque import opaque_of

NormContext = Literal["none", "tile", "image"]


@dataclass(frozen=True)
class Context:
    """The alignment and the context of a network's tiles, in input pixels.

    Attributes:
        alignment_px: Tile origins and own sizes are multiples of this, the total stride.
        offset_px: Output cell 0 stands on this pixel of the read window (0 with *same* padding).
        context_aligned_px: Pixels needed on the worse side of an aligned own window, for its output
            and for its cells' share of averages and statistics of the whole image.
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

    @property
    def px(self) -> int:
        """`halo_px`, in short."""
        return self.halo_px


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
    """Return what the network's normalisations take statistics over in training."""
    scopes = {layer.scope for layer in layers if isinstance(layer, Norm)}
    if not scopes - {"frozen"}:
        return "none"
    return "image" if "image" in scopes else "tile"


Interval = tuple[int, int] | None  # first and last cell; None: no cell


def summed_cells(layers: tuple[Layer, ...]) -> tuple[int, ...]:
    """Numbers of the layers that sum over each tile's own cells of their input.

    These are averages of the whole image and statistics of norms. Sums of a whole map are the same
    on all tiles.
    """
    return tuple(
        number
        for number, (layer, grid) in enumerate(zip(layers, map_grids(layers), strict=False))
        if not grid.whole
        and (isinstance(layer, GlobalPool) or (isinstance(layer, Norm) and layer.scope == "image"))
    )


def input_interval(
    layers: tuple[Layer, ...], first: int, last: int, own_px: tuple[int, int] | None = None
) -> tuple[int, int]:
    """Return the first and last input pixel that the output cells `first` to `last` look at.

    Pixels and cells are counted from the start of the read window; the answer may lie outside.
    Cells under a whole map are not counted: it is a sum over all tiles.

    Args:
        own_px: First pixel of a tile's own window and the pixel after its last: cells on it must
            be right wherever they are summed (`summed_cells`); None: sums are left out.

    Raises:
        TilenetError: The output looks at averages alone.
    """
    interval = reached(layers, first, last, own_px)
    if interval is None:
        raise TilenetError(
            "a network must look at the pixels around each pixel (only averages of the whole image "
            "reach the output); use another network"
        )
    return interval


def reached(
    layers: tuple[Layer, ...],
    first: int,
    last: int,
    own_px: tuple[int, int] | None = None,
    stop: int | None = None,
) -> Interval:
    """Return what `input_interval` does, or None if the output looks at averages alone.

    Args:
        stop: Number of layers that make the output; stashed maps that these do not take are left
            out.
    """
    interval: Interval = (first, last)
    waiting: dict[str, Interval] = {}
    sums = frozenset(summed_cells(layers)) if own_px else frozenset()
    grids = map_grids(layers) if own_px else []
    for number, shifts in reversed(list(enumerate(_shifts(layers)))[:stop]):
        layer = layers[number]
        if isinstance(layer, Joining | Expand):
            own, *stashed = shifts
            waiting |= {
                n: _moved(interval, shift) for n, shift in zip(layer.names, stashed, strict=True)
            }
            interval = _moved(interval, own)
        elif isinstance(layer, Stash):
            interval = _both(interval, waiting.pop(layer.name, None))
        elif isinstance(layer, GlobalPool):
            interval = None
        elif interval is not None:
            interval = layer.needs(*interval)
        if number in sums:
            assert own_px is not None
            interval = _both(interval, grids[number].cells(*own_px))
    return interval


def _moved(interval: Interval, shift: int | None) -> Interval:
    if interval is None or shift is None:
        return None
    return interval[0] + shift, interval[1] + shift


def _both(a: Interval, b: Interval) -> Interval:
    if a is None or b is None:
        return a or b
    return min(a[0], b[0]), max(a[1], b[1])


@lru_cache(maxsize=16)
def context_of(layers: tuple[Layer, ...]) -> Context:
    """Walk the layers to find alignment and context of tiles, the same along rows and columns.

    Of an opaque module it is known only that no pixel looks further than a window.

    Raises:
        TilenetError: The network's output is not on its input's pixel grid.
    """
    if (opaque := opaque_of(layers)) is not None:
        far = opaque.window_px
        return Context(opaque.unit_px, 0, far, far, opaque.step_px, valid=False)
    rows, cols = _along_an_axis(layers), across(layers)
    if cols is layers:
        return rows
    other = _along_an_axis(cols)
    return replace(
        rows,
        context_aligned_px=max(rows.context_aligned_px, other.context_aligned_px),
        context_any_pixel_px=max(rows.context_any_pixel_px, other.context_any_pixel_px),
        halo_px=max(rows.halo_px, other.halo_px),
    )


def _along_an_axis(layers: tuple[Layer, ...]) -> Context:
    grids = map_grids(layers)
    alignment = lcm(*(grid.stride.numerator for grid in grids if not grid.whole))
    end = grids[-1]
    if end.stride != 1 or end.origin.denominator != 1:
        raise TilenetError(
            f"a network must give one cell per input pixel (stride: {end.stride}, first cell at "
            f"pixel {end.origin})"
        )
    offset = int(end.origin)
    valid = offset > 0
    halo = _valid_halo(layers, alignment, offset) if valid else 0
    inset = halo - offset  # of an own window's first cell in the output, valid networks only

    # Far inside, so that no interval meets 0, yet on the grid of own windows.
    start = inset if valid else 0
    own_px = None if valid else (0, alignment)
    first, last = input_interval(layers, start, start + alignment - 1, own_px)
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
