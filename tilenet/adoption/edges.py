"""Operators that move cells as a whole: pads, crops, strides, and blocks that become channels.

Each is a convolution with a single 1 in each kernel, so that its geometry is known.
"""

from dataclasses import replace
from math import gcd
from typing import Any

import torch

from tilenet.adoption.calls import NO_MAP, Call, Moved, Noise, operator
from tilenet.adoption.cells import (
    COLS,
    IMAGES,
    ROWS,
    Cells,
    applied,
    cells_of,
    kernel_of,
    numbers_of,
)
from tilenet.adoption.cellwise import from_map, reshaped
from tilenet.adoption.values import Value
from tilenet.geometry.layers import Conv

EDGES: Any = {"constant": "zeros", "replicate": "replicate", "reflect": "reflect"}


def settled(call: Call, argument: Any) -> Any:
    """Moved cells as a map, for an operator that does not take `Moved`."""
    if isinstance(argument, list):
        return [settled(call, part) for part in argument]
    if isinstance(argument, Noise) and argument.thinned is not None:
        raise call.refused("drop path does not divide what it keeps by the probability")
    if not isinstance(argument, Moved):
        return argument
    if not argument.settled:
        argument.settled.append(cells_of(call.entered(_moved(call, argument))))
    return argument.settled[0]


def _moved(call: Call, x: Moved) -> Value:
    if x.edge != "zeros":
        raise call.refused("cells at the edge are padded for another operator than a convolution")
    value, sides = call.map_of(x.cells), (x.rows, x.cols)
    steps = {step for *_, step in sides}
    if len(steps) > 1 or x.cells.size is None:
        raise call.refused("rows and columns are treated differently", values=f" {sides}")
    (step,) = steps
    if step > 1:
        first = [-before for before, _, _ in sides]
        whole = all(cells % step == 0 for cells in value.size)
        if not (whole and all(0 <= n < step for n in first)) or any(b for _, b, _ in sides):
            raise call.refused("every nth cell is taken of a part of a map", values=f" {sides}")
        taps = torch.zeros(1, 1, max(first) + 1, max(first) + 1)
        taps[0, 0, first[0], first[1]] = 1
        layer = Conv(value.channels, value.channels, max(first) + 1, step)
        return _convolved(value, layer, taps, x.size)
    lost = [-cells for side in sides for cells in side[:2]]
    if 0 < (even := min(lost)) < max(lost):
        # One kernel for both would have as many cells as are lost.
        alike = settled(call, Moved(x.cells, (-even, -even, 1), (-even, -even, 1)))
        rows, cols = ((before + even, behind + even, 1) for before, behind, _ in sides)
        return _moved(call, Moved(alike, rows, cols))
    axes = [_tap(before, behind) for before, behind, _ in sides]
    rows, cols = ((reach // by + 1, by, pad) for reach, _, by, pad, _ in axes)
    if len({(2 * pad - reach, extra) for reach, _, _, pad, extra in axes}) > 1:
        raise call.refused("rows and columns are treated differently", values=f" {sides}")
    taps = torch.zeros(1, 1, rows[0], cols[0])
    taps[0, 0, axes[0][1] // rows[1], axes[1][1] // cols[1]] = 1
    kernel, dilation, padding = rows
    layer = Conv(
        value.channels, value.channels, kernel, 1, dilation, padding,
        extra=axes[0][4], cols=() if rows == cols else cols,
    )  # fmt: skip
    return _convolved(value, layer, taps, x.size)


def _tap(before: int, behind: int) -> tuple[int, int, int, int, int]:
    """Reach of a kernel, the cell of it that is 1, its dilation, padding and extra zeros.

    The reach is such that a kernel that writes zeros also looks at a cell of the map, which a sweep
    needs.
    """
    more, fewer = max(behind, 0), max(-behind, 0)
    if before >= 0:
        reach, tap, padding, extra = before + more + fewer, more, before + more, 0
    elif fewer:
        reach, tap, padding, extra = fewer - before, -before, 0, 0
    else:
        reach = tap = max(-before, more)
        padding, extra = max(more + before, 0), min(-before, more)
    return reach, tap, gcd(reach, tap) or 1, padding, extra


def _convolved(value: Value, layer: Conv, taps: torch.Tensor, size: tuple[int, int]) -> Value:
    """A map whose cells are moved alike in each channel, see `taps_of`."""
    wide = value.channels
    computed = kernel_of(numbers_of(taps.bool(), (wide, 1, 1, 1)))
    assert computed is not None
    layer = replace(layer, groups=wide, **computed[1])
    return Value(layer.out_channels, size, value.whole, layer, (value,))


@operator("pad")
def _pad(call: Call, x: Any, pad: list[int], mode: str, value: float | None) -> Any:
    if not any(pad):
        return x
    left, right, top, bottom, *more = [*pad, 0, 0, 0, 0][: max(4, len(pad))]
    edge = EDGES.get(mode)
    if mode == "constant" and not any(pad[:4]):
        return NotImplemented  # channels
    if edge is None or any(more) or value:
        raise call.refused(
            "a map is padded other than with zeros or its edge", values=f" {pad} {mode} {value}"
        )
    if edge != "zeros" and (min(pad) < 0 or len({left, right, top, bottom}) > 1):
        raise call.refused(
            "a map's edge is padded other than alike on all sides", values=f" {pad} {mode}"
        )
    x = x if isinstance(x, Moved) else Moved(call.cells(x))
    if edge != "zeros":
        x = Moved(settled(call, x)) if x != Moved(x.cells) else x
        return replace(x, rows=(top, bottom, 1), cols=(left, right, 1), edge=edge, settled=[])
    for name, both in (("rows", (top, bottom)), ("cols", (left, right))):
        before, behind, step = getattr(x, name)
        if any(both) and (x.edge != "zeros" or step > 1 or min(before, behind) < 0):
            x = Moved(settled(call, x))
            before, behind, step = 0, 0, 1
        x = replace(x, **{name: (before + both[0], behind + both[1], step)}, settled=[])
    return x


@operator("slice")
def _sliced(
    call: Call, x: Any, dim: int = 0, start: Any = None, end: Any = None, step: int = 1
) -> Any:
    cells = x.cells if isinstance(x, Moved) else x
    if not isinstance(cells, Cells) or not cells.is_map or not cells.size or cells.whole:
        return NotImplemented
    name = {ROWS: "rows", COLS: "cols"}.get("".join(map(str, cells.dims[dim])))
    if name is None:
        return NotImplemented
    moved = x if isinstance(x, Moved) else Moved(cells)
    num_cells = moved.size[name == "cols"]
    first, last, _ = slice(start, end, step).indices(num_cells)
    if (first, last, step) == (0, num_cells, 1):
        return x
    before, behind, by = getattr(moved, name)
    if moved.edge != "zeros" or by > 1 or (step > 1 and (before, behind) != (0, 0)):
        moved = Moved(settled(call, moved))
        before, behind = 0, 0
    axis: Any = {name: (before - first, behind - (num_cells - last), step)}
    return replace(moved, **axis, settled=[])


@operator("pixel_unshuffle")
def _unshuffled(call: Call, x: Any, downscale_factor: int) -> Cells:
    return parted(call, call.map_of(x), downscale_factor)


@operator("view", "reshape")
def _viewed(call: Call, x: Any, **_: Any) -> Any:
    """Blocks of cells as dimensions of their own: (B, C, H / n, n, W / n, n)."""
    cells = call.cells(x)
    if len(call.sizes) != 6 or not cells.is_map or not cells.size or cells.whole:
        return NotImplemented
    images, wide, *both = call.sizes
    step, parts = both[1], [cells.size[0] // both[1], both[1], cells.size[1] // both[1], both[1]]
    if step == 1 or (images, wide) != (IMAGES, cells.shape[1]) or both != parts:
        return NotImplemented
    blocks = parted(call, call.map_of(cells), step)
    channels = (wide,) if wide > 1 else ()
    return from_map(blocks, (cells.dims[0], channels, (ROWS,), (step,), (COLS,), (step,)))


def parted(call: Call, value: Value, step: int) -> Cells:
    """The cells of each block as channels, those of a channel one after another."""
    if any(cells % step for cells in value.size):
        raise call.refused("every nth cell is taken of a part of a map", values=f" {value.size}")
    taps = torch.eye(step * step).reshape(-1, 1, step, step)
    layer = Conv(value.channels, value.channels * step * step, step, step)
    size = value.size[0] // step, value.size[1] // step
    return cells_of(call.entered(_convolved(value, layer, taps, size)))


def middles(call: Call, value: Value, step: int) -> Cells:
    """The middle of each block of cells: the mean of two by two, or one and 0 times the others."""
    width = (step - 1) // 2 + 2
    each = torch.eye(width * width).view(width, width, 1, width, width)
    layer = Conv(value.channels, value.channels * 4, width, step)
    few = _convolved(value, layer, each[-2:, -2:].flatten(0, 1), (call.sizes[2], call.sizes[3]))
    images, wide, *spatial = cells_of(value).dims
    cells = reshaped(cells_of(call.entered(few)), (images, wide, (4,), *spatial))
    shares = torch.tensor([1.0, 0.0] if step % 2 else [0.5, 0.5])
    numbers = numbers_of(shares.outer(shares).view(4, 1, 1), (1, 1, 1))
    shared = applied("mul.Tensor", cells, cells, numbers)
    return applied("sum.dim_IntList", shared, shared, ("list", 2), dims=(images, wide, *spatial))


@operator("zeros", "ones", "full", "new_zeros", "new_ones", "new_full")
def _filled(call: Call, x: Any, fill_value: float | None = None, **_: Any) -> Any:
    """Equal numbers, as a map of the size of another one, or for all cells."""
    number = fill_value
    if number is None:
        number = float("ones" in call.operator)
    if not isinstance(number, int | float) or not call.floats:
        raise call.refused(NO_MAP)
    if len(call.sizes) == 4 and call.sizes[0] == IMAGES:
        like = next((value for value in reversed(call.maps) if value.size == call.sizes[2:]), None)
        if like is None or like.whole:
            raise call.refused(NO_MAP)
        cells = cells_of(like)
        narrow = (cells.dims[0], (), *cells.dims[2:])
        channel = applied("slice.Tensor", cells, cells, 1, 0, 1, dims=narrow)
        filled = applied("full_like.default", channel, channel, number)
        wide = call.sizes[1]
        dims = (cells.dims[0], (wide,) if wide > 1 else (), *cells.dims[2:])
        return applied("repeat.default", filled, filled, ("list", 1, wide, 1, 1), dims=dims)
    if len(set(call.sizes)) < 2 and (not call.sizes or call.sizes[0] == 1):
        return float(number)
    if any(call.sizes[place:][:2] in {value.size for value in call.maps} for place in range(3)):
        raise call.refused(NO_MAP)  # it is one of cells, computed
    few = torch.full([1] * len(call.sizes), float(number), dtype=torch.float64)
    return numbers_of(few, call.sizes)
