"""Operators of torch as layers, one function each; here those that look around cells.

A function takes its operator's first argument, and others under their names in the operator's
schema. Any other argument must hold the schema's default (see `export`). It returns
NotImplemented for calls that may act on cells alone (`cellwise`).
"""

from dataclasses import replace
from typing import Any

import torch

from tilenet.adoption.calls import OPERATORS as OPERATORS  # with the functions below
from tilenet.adoption.calls import OTHER_NOISE, Call, Moved, Noise, Places, operator
from tilenet.adoption.cells import Cells, Weight, applied, cells_of, numbers_of
from tilenet.adoption.cellwise import reshaped, to_map
from tilenet.adoption.dropping import drop_path
from tilenet.adoption.edges import middles, parted, settled
from tilenet.adoption.over_cells import over_cells
from tilenet.adoption.values import Value
from tilenet.geometry.layers import (
    Activation,
    Cellwise,
    Conv,
    Expand,
    GlobalPool,
    Join,
    Norm,
    Pool,
    TransposedConv,
    Upsample,
)
from tilenet.model.cellwise import CONVERT


@operator("conv2d")
def _conv(
    call: Call,
    x: Any,
    weight: Any,
    bias: Any,
    stride: Any,
    padding: Any,
    dilation: Any,
    groups: int,
) -> Any:
    x = x if isinstance(x, Moved) and x.pads_evenly else settled(call, x)
    if isinstance(x, Cells) and not (x.is_map or x.size):
        return NotImplemented  # numbers for each image, in rows of their own
    before, behind, edge = (*x.rows[:2], x.edge) if isinstance(x, Moved) else (0, 0, "zeros")
    value, kernel = call.map_of(x.cells if isinstance(x, Moved) else x), call.kernel(weight)
    kernels, dilations = kernel.shape[2:], call.pair(dilation)
    reaches = [d * (k - 1) for d, k in zip(dilations, kernels, strict=True)]
    pads = (0, 0)
    if padding == "same":
        pads = reaches[0] // 2, reaches[1] // 2
        behind += call.square([reach % 2 for reach in reaches])
    elif padding != "valid":
        pads = call.pair(padding)
    if 2 * pads[0] - reaches[0] != 2 * pads[1] - reaches[1]:
        raise call.refused(
            "a map loses other cells above than on the left", values=f" {kernels} pads {pads}"
        )
    if edge != "zeros" and (any(pads) or 2 * before > min(reaches)):
        raise call.refused("more cells than a kernel reaches over are padded", values=f" {edge}")
    if edge == "zeros" and any(pad + before > r for pad, r in zip(pads, reaches, strict=True)):
        # No row of a layer may see its border alone, as a sweep goes.
        above, left = ((pad + before, pad + behind, 1) for pad in pads)
        padded = settled(call, Moved(x.cells if isinstance(x, Moved) else x, above, left))
        return _conv(call, padded, weight, bias, stride, 0, dilation, groups)
    rows, cols = zip(kernels, dilations, (pad + before for pad in pads), strict=True)
    width, dilation, pad = rows
    layer = Conv(
        value.channels, kernel.shape[0], width, call.square(stride), dilation, pad,
        bias is not None, groups, behind - before, () if rows == cols else cols, edge,
        **kernel.computed,
    )  # fmt: skip
    return call.add_layer(layer, value, weights={**kernel.weights, "bias": bias})


@operator("conv_transpose2d")
def _transposed(
    call: Call,
    x: Any,
    weight: Any,
    bias: Any,
    stride: Any,
    padding: Any,
    output_padding: Any,
    groups: int,
) -> Cells:
    value, weight = call.map_of(x), call.weight(weight)
    layer = TransposedConv(
        value.channels,
        weight.shape[1] * groups,
        call.square(weight.shape[2:]),
        call.square(stride),
        call.square(padding),
        call.square(output_padding),
        bias is not None,
        groups,
    )
    return call.add_layer(layer, value, weights={"weight": weight, "bias": bias})


@operator("batch_norm")
def _batch_norm(
    call: Call,
    x: Any,
    weight: Any,
    bias: Any,
    running_mean: Any,
    running_var: Any,
    training: bool,
    momentum: float,
    eps: float,
) -> Cells:
    value = call.map_of(x)
    if running_mean is None:
        raise call.refused("batch norm keeps no running statistics, which maps are made with")
    running_mean = call.weight(running_mean)
    if not running_mean.name.endswith("running_mean"):
        raise call.refused("running statistics belong to no batch norm", values=" in forward")
    step = training and call.batch_norm == "step"
    counter = running_mean.name.removesuffix("running_mean") + "num_batches_tracked"
    layer = Norm(
        value.channels,
        value.channels,
        "batch",
        "image" if step else "frozen",
        epsilon=eps,
        momentum=momentum,
    )
    parts = {
        "running_mean": running_mean,
        "running_var": running_var,
        "num_batches_tracked": Weight(counter, (), trained=False),
    }
    return _normed(call, value, layer, weight, bias, parts)


def _normed(
    call: Call,
    value: Value,
    layer: Norm,
    weight: Any,
    bias: Any,
    parts: dict[str, Any] | None = None,
) -> Cells:
    """A norm with its weight and bias, or with one of them in a layer of its own."""
    parts = parts or {}
    if weight is not None and bias is not None:
        parts, layer = {**parts, "weight": weight, "bias": bias}, replace(layer, affine=True)
    y = call.add_layer(layer, value, weights=parts)
    if (weight is None) == (bias is None):
        return y
    name = "weight" if bias is None else "bias"
    single = call.weight(weight if bias is None else bias)
    steps = (
        ("reshape.default", ("value", 1), ("list", *single.shape, 1, 1)),
        ("mul.Tensor" if bias is None else "add.Tensor", ("value", 0), ("value", 2)),
    )
    held_weights = ((name, single.shape, single.trained),)
    scale = Cellwise(value.channels, value.channels, weights=held_weights, steps=steps)
    return call.add_layer(scale, call.map_of(y), weights={name: single})


@operator("group_norm")
def _group_norm(call: Call, x: Any, num_groups: int, weight: Any, bias: Any, eps: float) -> Cells:
    value = call.map_of(x)
    layer = Norm(value.channels, value.channels, "group", groups=num_groups, epsilon=eps)
    return _normed(call, value, layer, weight, bias)


@operator("instance_norm")
def _instance_norm(
    call: Call,
    x: Any,
    weight: Any,
    bias: Any,
    running_mean: Any,
    use_input_stats: bool,
    eps: float,
    running_var: Any = None,
    momentum: float = 0.0,
) -> Cells:
    value = call.map_of(x)
    if running_mean is not None or not use_input_stats:
        raise call.refused("instance norm keeps running statistics")
    layer = Norm(value.channels, value.channels, "instance", epsilon=eps)
    return _normed(call, value, layer, weight, bias)


@operator("max_pool2d")
def _max_pool(
    call: Call, x: Any, kernel_size: Any, stride: Any, padding: Any, ceil_mode: bool
) -> Any:
    value = call.map_of(x)
    if value.size == tuple(kernel_size) and not any(call.pair(padding)):  # whatever its size
        return over_cells(call, call.cells(x), [2, 3], keep=True, takes="maximum")
    width, both = call.square(kernel_size), call.square(padding)
    step = call.square(stride) if stride else width
    extra = 0
    if ceil_mode:
        # The last window reaches this far over the map.
        over = {(width - 2 * both - cells) % step for cells in value.size}
        if len(over) > 1:
            raise call.refused("windows reach further over rows than over columns")
        extra = min(over) if min(over) < width else 0
    layer = Pool(value.channels, value.channels, width, step, both, "max", extra)
    return call.add_layer(layer, value)


@operator("max_pool2d_with_indices")
def _max_pool_and_places(
    call: Call, x: Any, kernel_size: Any, stride: Any, padding: Any, ceil_mode: bool
) -> list[Any]:
    pooling = replace(call, shape=call.shape[0])  # type: ignore[arg-type]
    largest = _max_pool(pooling, x, kernel_size, stride, padding, ceil_mode)
    side_by_side = len({*kernel_size, *(stride or kernel_size)}) == 1 and not any(padding)
    refusal = call.refused("the place of a maximum is taken")
    return [largest, Places(refusal, call.map_of(x), kernel_size[0] if side_by_side else None)]


@operator("max_unpool2d")
def _unpooled(call: Call, x: Any, indices: Places, output_size: Any) -> Cells:
    """Values put back to where a pool found maxima, the first of each window or the last NaN."""
    value, pooled, width = call.map_of(x), indices.pooled, indices.width or 0
    size = tuple(cells * width for cells in value.size)
    if not pooled.channels == value.channels or not pooled.size == call.sizes[2:] == size:
        raise call.refused("values are put back to places of windows that overlap, or of others")
    images, wide, *spatial = cells_of(value).dims
    alone, windows = (images, wide, (), *spatial), (images, wide, (width * width,), *spatial)
    blocks = reshaped(parted(call, pooled, width), windows)
    first = applied("argmax.default", blocks, blocks, 2, dims=cells_of(value).dims, floats=False)
    numbers = numbers_of(torch.arange(float(width * width)).view(-1, 1, 1), (1, 1, 1))
    # A pool takes the last NaN, where `argmax` takes the first.
    is_number = applied("eq.Tensor", blocks, blocks, blocks, floats=False)
    last = applied("masked_fill.Scalar", blocks, numbers, is_number, -1.0)
    last = applied("amax.default", blocks, last, ("list", 2), dims=cells_of(value).dims)
    first = applied(CONVERT, first, first, floats=True)
    all_numbers = applied("lt.Scalar", last, last, 0.0, floats=False)
    place = cells_of(call.map_of(applied("where.self", last, all_numbers, first, last)))
    elsewhere = applied("ne.Tensor", blocks, reshaped(place, alone), numbers, floats=False)
    values = reshaped(cells_of(value), alone)
    spread = to_map(applied("masked_fill.Scalar", blocks, values, elsewhere, 0.0))
    layer = Upsample(spread.shape[1], value.channels, width, "shuffle")
    return call.add_layer(layer, call.map_of(spread))


@operator("avg_pool2d")
def _avg_pool(
    call: Call,
    x: Any,
    kernel_size: Any,
    stride: Any,
    padding: Any,
    ceil_mode: bool,
    count_include_pad: bool,
) -> Cells:
    value = call.map_of(x)
    if value.size == tuple(kernel_size) and not any(padding):  # all of it, whatever its size
        return call.add_layer(GlobalPool(value.channels, value.channels, 1), value)
    width, both = call.square(kernel_size), call.square(padding)
    step = call.square(stride) if stride else width
    if ceil_mode and any((cells + 2 * both - width) % step for cells in value.size):
        raise call.refused("an average is taken of windows that reach over the map's edge")
    counts = count_include_pad or not both
    layer = Pool(
        value.channels, value.channels, width, step, both, "average", counts_padding=counts
    )
    return call.add_layer(layer, value)


@operator("adaptive_avg_pool2d")
def _adaptive_pool(call: Call, x: Any, output_size: Any) -> Cells:
    value = call.map_of(x)
    if value.size == call.sizes[2:]:
        return cells_of(value)
    return call.add_layer(
        GlobalPool(value.channels, value.channels, call.square(output_size)), value
    )


@operator("upsample_nearest2d", "upsample_bilinear2d", "upsample_bicubic2d")
def _upsample(
    call: Call,
    x: Any,
    output_size: Any,
    scale_factors: Any = None,
    align_corners: bool = False,
) -> Cells:
    mode: Any = call.operator.removeprefix("upsample_").removesuffix("2d")
    value = call.map_of(x)
    size = call.sizes[2], call.sizes[3]
    smaller = size[0] < value.size[0]
    if mode == "bicubic" and (value.whole or smaller or align_corners):
        raise call.refused("maps are enlarged bicubically, no averages, not by align_corners")
    if value.whole:
        return _expanded(call, value, mode, corners=align_corners)
    if smaller:
        return _reduced(call, value, mode, corners=align_corners)
    factors = {size[0] / value.size[0], size[1] / value.size[1], *(scale_factors or [])}
    factor = next(iter(factors))
    if len(factors) > 1 or factor != int(factor):
        raise call.refused(
            "maps are enlarged by whole numbers only", values=f" {value.size} to {size}"
        )
    if factor == 1:
        return cells_of(value)
    layer = Upsample(value.channels, value.channels, int(factor), mode, align_corners)
    return call.add_layer(layer, value)


def _expanded(call: Call, value: Value, mode: Any, *, corners: bool = False) -> Cells:
    """A whole map enlarged to the size of another map."""
    like = _like(call, value, (call.sizes[2], call.sizes[3]))
    expand = Expand(value.channels, value.channels, "", mode, corners)
    return cells_of(call.entered(replace(call.layer(expand, value), like=like)))


def _reduced(call: Call, value: Value, mode: str, *, corners: bool) -> Cells:
    """Make a map smaller: keep every nth cell, or take the middle or the average of each block."""
    steps = {old / new for old, new in zip(value.size, call.sizes[2:], strict=True)}
    step = int(next(iter(steps)))
    if steps != {step}:
        raise call.refused(
            "maps are made smaller by whole numbers only",
            values=f" {value.size} to {call.sizes[2:]}",
        )
    if mode == "bilinear" and not corners and step > 2:
        return middles(call, value, step)
    kernel = 1 if mode == "nearest" else step
    way: Any = "corners" if corners else "average"
    return call.add_layer(Pool(value.channels, value.channels, kernel, step, mode=way), value)


@operator("pixel_shuffle")
def _shuffled(call: Call, x: Any, upscale_factor: int) -> Cells:
    value = call.map_of(x)
    return call.add_layer(Upsample(value.channels, call.sizes[1], upscale_factor, "shuffle"), value)


@operator("expand", "expand_as")
def _repeated(call: Call, x: Any, **_: Any) -> Any:
    """An average that is given to each cell."""
    cells = call.cells(x)
    if cells.size or not cells.is_map or len(call.sizes) != 4 or max(call.sizes[2:]) == 1:
        return NotImplemented
    value = call.map_of(cells)
    if value.channels != call.sizes[1]:
        return NotImplemented
    return _expanded(call, value, "nearest")


def _like(call: Call, value: Value, size: tuple[int, int]) -> Value:
    """Return a map of a size, if possible one that a value is computed from: it exists anyway."""
    waiting = [value]
    while waiting:
        candidate = waiting.pop(0)
        if candidate.size == size and not candidate.whole:
            return candidate
        waiting += candidate.inputs
    for candidate in reversed(call.maps):
        if candidate.size == size and not candidate.whole:
            return candidate
    raise call.refused("an average of the image is enlarged to a size that no map has")


@operator("relu", "relu6", "leaky_relu", "hardtanh")
def _rectified(
    call: Call, x: Any, negative_slope: float = 0.01, min_val: float = 0, max_val: float = 6
) -> Any:
    if not call.cells(x).is_map or (call.operator == "hardtanh" and (min_val, max_val) != (0, 6)):
        return NotImplemented
    value = call.map_of(x)
    function: Any = "relu6" if call.operator == "hardtanh" else call.operator
    slope = float(negative_slope)
    return call.add_layer(Activation(value.channels, value.channels, slope, function), value)


@operator("cat")
def _cat(call: Call, tensors: list[Any], dim: int) -> Any:
    parts = [part for part in tensors if not (isinstance(part, Cells) and 0 in part.shape)]
    maps = [call.cells(part) for part in parts]
    alike = all(x.is_map for x in maps) and len({x.size for x in maps}) == 1
    if dim not in (1, -3) or not alike:
        return NotImplemented
    values = [call.map_of(x) for x in maps]
    if len(values) == 1:
        return maps[0]
    return call.add_layer(Join(0, sum(value.channels for value in values)), *values)


@operator("sum")
def _sum(call: Call, x: Any, dim: list[int] | None = None, keepdim: bool = False) -> Any:
    """Sum over all cells, or over maps that were stacked in a dimension of their own."""
    if not isinstance(x, Cells) or x.operator != "stack.default" or keepdim:
        return over_cells(call, call.cells(x), dim or [], keep=keepdim, takes="sum")
    (_, *maps), *place = x.arguments
    return _joined(call, "add", maps) if list(dim or []) == (place or [0]) else NotImplemented


def _joined(call: Call, how: Any, maps: list[Any]) -> Any:
    """Maps that are added or multiplied; a map of one channel, or of one cell, counts for all."""
    cells = [x for x in maps if isinstance(x, Cells) and x.is_map]
    channels = {x.shape[1] for x in cells}
    alike = len({x.size for x in cells} - {None}) < 2 and len(channels - {1}) < 2
    if len(cells) < len(maps) or not alike:
        return NotImplemented
    values = [call.map_of(x) for x in cells]
    return call.add_layer(Join(0, max(channels), how=how), *values)


@operator("add", "sub")
def _add(call: Call, x: Any, other: Any) -> Any:
    if isinstance(x, Noise):
        if x.stage != "uniform" or not isinstance(other, int | float):
            raise call.refused(OTHER_NOISE)
        return replace(x, stage="shifted", keep=float(-other if call.operator == "sub" else other))
    if isinstance(other, Noise):
        return _add(call, other, x)
    return NotImplemented if call.operator == "sub" else _joined(call, "add", [x, other])


@operator("mul")
def _multiply(call: Call, x: Any, other: Any) -> Any:
    if isinstance(x, Noise):
        x, other = other, x
    if isinstance(other, Noise):
        return drop_path(call, x, other)
    return _joined(call, "multiply", [x, other])


@operator("div")
def _divide(call: Call, x: Any, other: Any) -> Any:
    if not isinstance(x, Noise):
        return NotImplemented
    if x.stage != "mask" or x.scaled or x.keep != other:
        raise call.refused("drop path does not divide what it keeps by the probability")
    scaled = replace(x, scaled=True, thinned=None)
    return scaled if x.thinned is None else drop_path(call, x.thinned, scaled)


@operator("detach")
def _detach(call: Call, x: Any) -> Any:
    """Return a weight that is not trained unchanged."""
    is_fixed = isinstance(x, Cells) and isinstance(x.source, Weight) and not x.source.trained
    return x if is_fixed else NotImplemented
