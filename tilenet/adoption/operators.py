"""What operators of torch are as layers, one entry each; here those that look around cells.

A function takes its operator's first argument, and those that it understands by their names in the
operator's schema. Any other argument must hold the schema's default (see `export`).

An operator that is not in the table looks nobody knows how far around itself, so it is refused by
its name and that of the submodule that calls it.
"""

from dataclasses import replace
from typing import Any

from tilenet.adoption.calls import OPERATORS, Call, Seen, Weight, operator
from tilenet.adoption.cellwise import channels_first, with_weight
from tilenet.adoption.values import Value
from tilenet.geometry.layers import (
    ChannelNorm,
    Conv,
    Expand,
    GlobalPool,
    Norm,
    Pool,
    TransposedConv,
    Upsample,
)

__all__ = ["OPERATORS"]


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
) -> Seen:
    before, behind = x.zeros if isinstance(x, Seen) else (0, 0)
    value = call.map_of(replace(x, zeros=(0, 0)) if isinstance(x, Seen) else x)
    kernel = call.square(call.weight(weight).shape[2:])
    both = 0
    if padding == "same":
        reach = call.square(dilation) * (kernel - 1)
        both, behind = reach // 2, behind + reach % 2
    elif padding != "valid":
        both = call.square(padding)
    if behind < before:
        raise call.refused("more zeros are padded above than below")
    layer = Conv(
        value.channels,
        weight.shape[0],
        kernel,
        call.square(stride),
        call.square(dilation),
        both + before,
        bias is not None,
        groups,
        behind - before,
    )
    return Seen(call.made(layer, value, weights={"weight": weight, "bias": bias}))


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
) -> Seen:
    value = call.map_of(x)
    layer = TransposedConv(
        value.channels,
        call.weight(weight).shape[1] * groups,
        call.square(weight.shape[2:]),
        call.square(stride),
        call.square(padding),
        call.square(output_padding),
        bias is not None,
        groups,
    )
    return Seen(call.made(layer, value, weights={"weight": weight, "bias": bias}))


@operator("linear")
def _linear(call: Call, x: Any, weight: Any, bias: Any) -> Seen:
    value = call.map_of(x, last=True)
    layer = Conv(value.channels, call.weight(weight).shape[0], kernel=1, bias=bias is not None)
    weights = {"weight": weight, "bias": bias}
    return Seen(channels_first(call).made(layer, value, weights=weights), last=True)


@operator("pad")
def _pad(call: Call, x: Any, pad: list[int], mode: str, value: float | None) -> Seen:
    before, behind = x.zeros if isinstance(x, Seen) else (0, 0)
    there = call.map_of(replace(x, zeros=(0, 0)) if isinstance(x, Seen) else x)
    left, right, top, bottom, *more = [*pad, 0, 0, 0, 0][: max(4, len(pad))]
    if any(more):
        raise call.refused("channels or samples are padded", values=f" {pad}")
    if mode != "constant" or value or (left, right) != (top, bottom) or min(pad) < 0:
        raise call.refused(
            "a map is padded other than with zeros alike on rows and columns",
            values=f" {pad} {mode}",
        )
    return Seen(there, zeros=(before + left, behind + right))


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
) -> Seen:
    value = call.map_of(x)
    if running_mean is None:
        raise call.refused("batch norm keeps no running statistics, which maps are made with")
    if not call.weight(running_mean).name.endswith("running_mean"):
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
    return _normed(call, Seen(value), layer, weight, bias, parts)


def _normed(
    call: Call,
    x: Seen,
    layer: Norm | ChannelNorm,
    weight: Any,
    bias: Any,
    parts: dict[str, Weight | None] | None = None,
) -> Seen:
    """A norm with its weight and bias, or with one of them in a layer of its own."""
    parts = parts or {}
    if weight is not None and bias is not None:
        parts, layer = {**parts, "weight": weight, "bias": bias}, replace(layer, affine=True)
    y = replace(x, value=call.made(layer, x.value, weights=parts))
    if (weight is None) == (bias is None):
        return y
    # A number for each channel, as with_weight takes it.
    part = "weight" if bias is None else "bias"
    one = call.weight(weight if bias is None else bias)
    shape = one.shape if x.last else (*one.shape, 1, 1)
    return with_weight(call, y, replace(one, shape=shape), part)


@operator("group_norm")
def _group_norm(call: Call, x: Any, num_groups: int, weight: Any, bias: Any, eps: float) -> Seen:
    channels = call.map_of(x).channels
    layer = Norm(channels, channels, "group", groups=num_groups, epsilon=eps)
    return _normed(call, x, layer, weight, bias)


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
) -> Seen:
    channels = call.map_of(x).channels
    if running_mean is not None or not use_input_stats:
        raise call.refused("instance norm keeps running statistics")
    return _normed(call, x, Norm(channels, channels, "instance", epsilon=eps), weight, bias)


@operator("layer_norm")
def _layer_norm(
    call: Call, x: Any, normalized_shape: list[int], weight: Any, bias: Any, eps: float
) -> Seen:
    channels = call.map_of(x, last=True).channels
    if list(normalized_shape) != [channels]:
        raise call.refused(
            "layer norm takes more than a cell's channels", values=f" {normalized_shape}"
        )
    layer = ChannelNorm(channels, channels, affine=False, epsilon=eps)
    return _normed(channels_first(call), x, layer, weight, bias)


@operator("max_pool2d")
def _max_pool(
    call: Call, x: Any, kernel_size: Any, stride: Any, padding: Any, ceil_mode: bool
) -> Seen:
    value = call.map_of(x)
    width, both = call.square(kernel_size), call.square(padding)
    step = call.square(stride) if stride else width
    extra = 0
    if ceil_mode:
        # As far as the last window reaches over sizes that the stride divides.
        extra = next(e for e in range(width) if not (step * width + 2 * both + e - width) % step)
    layer = Pool(value.channels, value.channels, width, step, both, "max", extra)
    return Seen(call.made(layer, value))


@operator("avg_pool2d")
def _avg_pool(
    call: Call, x: Any, kernel_size: Any, stride: Any, padding: Any, count_include_pad: bool
) -> Seen:
    value = call.map_of(x)
    width, both = call.square(kernel_size), call.square(padding)
    if both and not count_include_pad:
        raise call.refused("an average does not count zeros around the map")
    step = call.square(stride) if stride else width
    layer = Pool(value.channels, value.channels, width, step, both, "average")
    return Seen(call.made(layer, value))


@operator("adaptive_avg_pool2d")
def _adaptive_pool(call: Call, x: Any, output_size: Any) -> Seen:
    value = call.map_of(x)
    return Seen(
        call.made(GlobalPool(value.channels, value.channels, call.square(output_size)), value)
    )


@operator("mean")
def _mean(call: Call, x: Any, dim: list[int] | None = None, keepdim: bool = False) -> Seen:
    value = call.map_of(x)
    if sorted(d % 4 for d in dim or []) != [2, 3] or not keepdim:
        raise call.refused("a mean is taken over other dimensions than rows and columns")
    return Seen(call.made(GlobalPool(value.channels, value.channels, 1), value))


@operator("upsample_nearest2d", "upsample_bilinear2d")
def _upsample(
    call: Call,
    x: Any,
    output_size: Any,
    scale_factors: Any = None,
    align_corners: bool = False,
) -> Seen:
    mode: Any = "nearest" if call.operator == "upsample_nearest2d" else "bilinear"
    value = call.map_of(x)
    size = call.shape[2], call.shape[3]
    if value.whole:
        expand = Expand(value.channels, value.channels, "", mode, align_corners)
        return Seen(replace(call.made(expand, value), like=_like(call, value, size)))
    factors = {size[0] / value.size[0], size[1] / value.size[1], *(scale_factors or [])}
    factor = next(iter(factors))
    if len(factors) > 1 or factor != int(factor):
        raise call.refused(
            "maps are enlarged by whole numbers only", values=f" {value.size} to {size}"
        )
    if factor == 1:
        return Seen(value)
    layer = Upsample(value.channels, value.channels, int(factor), mode, align_corners)
    return Seen(call.made(layer, value))


def _like(call: Call, value: Value, size: tuple[int, int]) -> Value:
    """A map of a size, of those that a value is made of if there is one: it is computed anyway."""
    waiting = [value]
    while waiting:
        one = waiting.pop(0)
        if one.size == size and not one.whole:
            return one
        waiting += one.inputs
    for one in reversed(call.maps):
        if one.size == size and not one.whole:
            return one
    raise call.refused("an average of the image is enlarged to a size that no map has")
