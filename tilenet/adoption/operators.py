"""What operators of torch are as layers, one entry each.

An operator that is not in the table looks nobody knows how far around itself, so it is refused by
its name and that of the submodule that calls it.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from tilenet.adoption.calls import Call, Noise, Seen, Stack, Weight
from tilenet.adoption.values import Value
from tilenet.geometry.layers import (
    Activation,
    ChannelNorm,
    Conv,
    Dropout,
    Expand,
    GlobalPool,
    Join,
    Layer,
    Norm,
    Pool,
    Scale,
    TransposedConv,
    Upsample,
)

__all__ = ["OPERATORS"]


Arguments = list[Any]
OPERATORS: dict[str, Callable[[Call, Arguments], Any]] = {}


def _operator(*names: str) -> Callable[[Any], Any]:
    def keep(function: Any) -> Any:
        OPERATORS.update(dict.fromkeys(names, function))
        return function

    return keep


def _filled(arguments: Arguments, *defaults: Any) -> Arguments:
    """Arguments, and the defaults of those that are not given."""
    return [*arguments, *defaults[len(arguments) :]]


@_operator("conv2d")
def _conv(call: Call, given: Arguments) -> Seen:
    x, weight, bias, stride, padding, dilation, groups = _filled(
        given, None, None, None, [1, 1], [0, 0], [1, 1], 1
    )
    value = call.map_of(x, padded=True)
    before, behind = x.zeros
    if isinstance(padding, str):
        reach = call.square(dilation) * (call.square(weight.shape[2:]) - 1)
        padding = [0 if padding == "valid" else reach // 2]
        behind += (reach % 2) if padding != [0] else 0
    both = call.square(padding)
    if behind < before:
        raise call.refused("more zeros are padded above than below")
    layer = Conv(
        value.channels,
        weight.shape[0],
        call.square(weight.shape[2:]),
        call.square(stride),
        call.square(dilation),
        both + before,
        bias is not None,
        groups,
        behind - before,
    )
    return Seen(call.made(layer, value, weights={"weight": weight, "bias": bias}))


@_operator("conv_transpose2d")
def _transposed(call: Call, given: Arguments) -> Seen:
    x, weight, bias, stride, padding, extra, groups, dilation = _filled(
        given, None, None, None, [1, 1], [0, 0], [0, 0], 1, [1, 1]
    )
    if call.square(dilation) != 1:
        raise call.refused("a transposed convolution is dilated")
    value = call.map_of(x)
    layer = TransposedConv(
        value.channels,
        weight.shape[1] * groups,
        call.square(weight.shape[2:]),
        call.square(stride),
        call.square(padding),
        call.square(extra),
        bias is not None,
        groups,
    )
    return Seen(call.made(layer, value, weights={"weight": weight, "bias": bias}))


@_operator("linear")
def _linear(call: Call, given: Arguments) -> Seen:
    x, weight, bias = _filled(given, None, None, None)
    value = call.map_of(x, last=True)
    layer = Conv(value.channels, weight.shape[0], kernel=1, bias=bias is not None)
    batch, rows, cols, channels = call.shape
    there = replace(call, shape=(batch, channels, rows, cols))
    return Seen(there.made(layer, value, weights={"weight": weight, "bias": bias}), last=True)


@_operator("pad")
def _pad(call: Call, given: Arguments) -> Seen:
    x, sides, mode, fill = _filled(given, None, None, "constant", 0.0)
    value = call.map_of(x)
    left, right, top, bottom = [*sides, 0, 0, 0, 0][:4]
    if mode != "constant" or fill or (left, right) != (top, bottom) or min(sides) < 0:
        raise call.refused("a map is padded other than with zeros alike on rows and columns")
    return Seen(value, zeros=(left, right))


@_operator("batch_norm")
def _batch_norm(call: Call, given: Arguments) -> Seen:
    x, weight, bias, mean, variance, _, momentum, epsilon, _ = given
    value = call.map_of(x)
    if mean is None:
        raise call.refused("batch norm keeps no running statistics, which maps are made with")
    if (weight is None) != (bias is None):
        raise call.refused("a norm has a weight or a bias alone")
    layer = Norm(
        value.channels,
        value.channels,
        "batch",
        "frozen" if call.batch_norm == "frozen" else "image",
        affine=weight is not None,
        epsilon=epsilon,
        momentum=momentum,
    )
    parts = {"weight": weight, "bias": bias, "running_mean": mean, "running_var": variance}
    counter = mean.name.removesuffix("running_mean") + "num_batches_tracked"
    parts["num_batches_tracked"] = Weight(counter, (), trained=False)
    return Seen(call.made(layer, value, weights=parts))


@_operator("group_norm", "instance_norm")
def _group_norm(call: Call, given: Arguments) -> Seen:
    if call.operator == "instance_norm":
        x, weight, bias, mean, _, _, _, epsilon, _ = given
        kind, groups = "instance", 1
        if mean is not None:
            raise call.refused("instance norm keeps running statistics")
    else:
        x, groups, weight, bias, epsilon, _ = _filled(given, None, 1, None, None, 1e-5, True)
        kind = "group"
    value = call.map_of(x)
    layer = Norm(
        value.channels,
        value.channels,
        "group" if kind == "group" else "instance",
        groups=groups,
        affine=weight is not None,
        epsilon=epsilon,
    )
    return Seen(call.made(layer, value, weights={"weight": weight, "bias": bias}))


@_operator("layer_norm")
def _layer_norm(call: Call, given: Arguments) -> Seen:
    x, shape, weight, bias, epsilon, _ = _filled(given, None, None, None, None, 1e-5, True)
    value = call.map_of(x, last=True)
    if list(shape) != [value.channels] or (weight is None) != (bias is None):
        raise call.refused("layer norm takes more than a cell's channels", values=f" {shape}")
    layer = ChannelNorm(value.channels, value.channels, weight is not None, epsilon)
    batch, rows, cols, channels = call.shape
    there = replace(call, shape=(batch, channels, rows, cols))
    return Seen(there.made(layer, value, weights={"weight": weight, "bias": bias}), last=True)


FUNCTIONS = {
    "relu": "relu", "relu6": "relu6", "elu": "elu", "silu": "silu", "hardswish": "hardswish",
    "hardsigmoid": "hardsigmoid", "sigmoid": "sigmoid", "tanh": "tanh", "mish": "mish",
    "softplus": "softplus", "leaky_relu": "leaky_relu", "gelu": "gelu", "hardtanh": "relu6",
}  # fmt: skip


@_operator(*FUNCTIONS)
def _activation(call: Call, given: Arguments) -> Seen:
    x, *more = given
    function, slope = FUNCTIONS[call.operator], 0.01
    if function == "leaky_relu" and more:
        slope, more = more[0], []
    if call.operator == "hardtanh":
        if more not in ([0, 6], [0.0, 6.0]):
            raise call.refused("of bounded functions only relu6 is known", values=f" {more}")
        more = []
    if function == "gelu":
        function, more = ("gelu_tanh" if more == ["tanh"] else "gelu"), []
    if more and (function, more) not in (("elu", [1.0]), ("softplus", [1.0, 20.0])):
        raise call.refused("of this function only the usual form is known", values=f" {more}")
    value = call.map_of(x, last=isinstance(x, Seen) and x.last)
    layer = Activation(value.channels, value.channels, slope, function)  # type: ignore[arg-type]
    return Seen(_alike(value, layer), last=x.last)


def _alike(value: Value, layer: Layer, weights: dict[str, str] | None = None) -> Value:
    """What a layer that keeps shapes makes of a map."""
    return replace(value, layer=layer, inputs=(value,), weights=weights or {}, like=None)


@_operator("softmax")
def _softmax(call: Call, given: Arguments) -> Seen:
    x, dim = given[:2]
    value = call.map_of(x)
    if dim not in (1, -3):
        raise call.refused("softmax over cells looks at all of them", values=f" of dimension {dim}")
    layer = Activation(value.channels, value.channels, function="channel_softmax")
    return Seen(_alike(value, layer))


@_operator("max_pool2d")
def _max_pool(call: Call, given: Arguments) -> Seen:
    x, kernel, stride, padding, dilation, ceil = _filled(given, None, None, [], [0], [1], False)
    if call.square(dilation) != 1:
        raise call.refused("a pool is dilated")
    return _pool(call, x, kernel, stride, padding, ceil=ceil, mode="max")


@_operator("avg_pool2d")
def _avg_pool(call: Call, given: Arguments) -> Seen:
    x, kernel, stride, padding, ceil, counts, divisor = _filled(
        given, None, None, [], [0], False, True, None
    )
    if divisor is not None or ceil or (call.square(padding) and not counts):
        raise call.refused("an average does not count zeros around the map")
    return _pool(call, x, kernel, stride, padding, ceil=False, mode="average")


def _pool(
    call: Call, x: Any, kernel: Any, stride: Any, padding: Any, *, ceil: bool, mode: Any
) -> Seen:
    value = call.map_of(x)
    width, both = call.square(kernel), call.square(padding)
    step = call.square(stride) if stride else width
    layer = Pool(value.channels, value.channels, width, step, both, mode)
    if ceil:
        # As far as the last window reaches over sizes that the stride divides.
        extra = next(e for e in range(width) if not (step * width + 2 * both + e - width) % step)
        layer = replace(layer, extra=extra)
    return Seen(call.made(layer, value))


@_operator("adaptive_avg_pool2d")
def _adaptive_pool(call: Call, given: Arguments) -> Seen:
    x, bins = given
    value = call.map_of(x)
    layer = GlobalPool(value.channels, value.channels, call.square(bins))
    return Seen(call.made(layer, value))


@_operator("mean")
def _mean(call: Call, given: Arguments) -> Seen:
    x, dims, keep = _filled(given, None, None, False)
    value = call.map_of(x)
    if sorted(d % 4 for d in dims) != [2, 3] or not keep:
        raise call.refused("a mean is taken over other dimensions than rows and columns")
    return Seen(call.made(GlobalPool(value.channels, value.channels, 1), value))


@_operator("upsample_nearest2d", "upsample_bilinear2d")
def _upsample(call: Call, given: Arguments) -> Seen:
    mode: Any = "nearest" if call.operator == "upsample_nearest2d" else "bilinear"
    corners = bool(given[2]) if mode == "bilinear" else False
    value = call.map_of(given[0])
    size = call.shape[2], call.shape[3]
    if value.whole:
        like = next(
            (one for one in reversed(call.maps) if one.size == size and not one.whole), None
        )
        if like is None:
            raise call.refused("an average of the image is enlarged to a size that no map has")
        layer = Expand(value.channels, value.channels, "", mode, corners)
        return Seen(replace(call.made(layer, value), like=like))
    factors = {size[0] / value.size[0], size[1] / value.size[1]}
    factor = next(iter(factors))
    if len(factors) > 1 or factor != int(factor):
        raise call.refused(
            "maps are enlarged by whole numbers only", values=f" {value.size} to {size}"
        )
    if factor == 1:
        return Seen(value)
    return Seen(
        call.made(Upsample(value.channels, value.channels, int(factor), mode, corners), value)
    )


@_operator("cat")
def _cat(call: Call, given: Arguments) -> Seen:
    maps, dim = _filled(given, None, 0)
    values = tuple(value for one in maps if (value := call.map_of(one)).channels)
    if dim not in (1, -3):
        raise call.refused("maps are put together along rows or columns")
    if len(values) == 1:
        return Seen(values[0])
    return Seen(call.made(Join(0, sum(v.channels for v in values)), *values))


@_operator("stack")
def _stack(call: Call, given: Arguments) -> Stack:
    maps, dim = _filled(given, None, 0)
    if dim != 0:
        raise call.refused("maps are stacked in another dimension than the first")
    return Stack(tuple(maps))


@_operator("sum")
def _sum(call: Call, given: Arguments) -> Seen:
    x, dims = _filled(given, None, None)[:2]
    if not isinstance(x, Stack) or list(dims or []) != [0]:
        raise call.refused("a sum is taken over cells")
    return _joined(call, "add", [call.map_of(one) for one in x.maps])


def _joined(call: Call, how: Any, values: list[Value]) -> Seen:
    channels = max(value.channels for value in values)
    made = call.made(Join(0, channels, how=how), *values)
    return Seen(made)


@_operator("add", "sub")
def _add(call: Call, given: Arguments) -> Any:
    x, other = given[:2]
    sign = -1 if call.operator == "sub" else 1
    if len(given) > 2 and given[2] != 1:
        raise call.refused("a sum has a factor")
    if isinstance(x, Noise) or isinstance(other, Noise):
        noise, number = (x, other) if isinstance(x, Noise) else (other, x)
        return replace(noise, keep=float(number))
    if isinstance(x, int | float) and sign == 1:
        x, other = other, x
    if isinstance(other, int | float):
        value = call.map_of(x, last=x.last)
        layer = Scale(value.channels, value.channels, offset=float(sign * other))
        return Seen(_alike(value, layer), last=x.last)
    if isinstance(other, Weight) and sign == 1:
        return _with_weight(call, x, other, "bias")
    if sign == -1:
        raise call.refused("maps are subtracted")
    if isinstance(x, Seen) and isinstance(other, Seen) and x.last and other.last:
        batch, rows, cols, channels = call.shape
        there = replace(call, shape=(batch, channels, rows, cols))
        return replace(_joined(there, "add", [x.value, other.value]), last=True)
    return _joined(call, "add", [call.map_of(x), call.map_of(other)])


@_operator("mul")
def _multiply(call: Call, given: Arguments) -> Any:
    x, other = given[:2]
    if isinstance(x, int | float | Weight | Noise):
        x, other = other, x
    if isinstance(other, Noise):
        return _drop_path(call, x, other)
    if isinstance(other, int | float):
        value = call.map_of(x, last=x.last)
        layer = Scale(value.channels, value.channels, factor=float(other))
        return Seen(_alike(value, layer), last=x.last)
    if isinstance(other, Weight):
        return _with_weight(call, x, other, "weight")
    return _joined(call, "multiply", [call.map_of(x), call.map_of(other)])


@_operator("div")
def _divide(call: Call, given: Arguments) -> Any:
    x, other = given[:2]
    if isinstance(x, Noise):
        return replace(x, scaled=True)
    if not isinstance(other, int | float):
        raise call.refused("a map is divided by another")
    return _multiply(call, [x, 1 / other])


def _with_weight(call: Call, x: Any, weight: Weight, part: str) -> Seen:
    value = call.map_of(x, last=x.last)
    # A number for each channel, wherever the channels stand.
    shape = (value.channels,) if x.last else (value.channels, 1, 1)
    wanted = tuple(n for n in weight.shape if n != 1)
    if wanted != (value.channels,) or weight.shape[-len(shape) :] != shape:
        raise call.refused("a weight is not one number for each channel")
    is_weight = part == "weight"
    layer = Scale(
        value.channels,
        value.channels,
        weight=is_weight,
        bias=not is_weight,
        trained=weight.trained,
    )
    return Seen(_alike(value, layer, {part: weight.name}), last=x.last)


def _drop_path(call: Call, x: Any, noise: Noise) -> Seen:
    value = call.map_of(x)
    if noise.keep is None:
        raise call.refused("random numbers are used for something else than drop path")
    if not noise.scaled:
        # x was divided by the probability before.
        layer = value.layer
        if not isinstance(layer, Scale) or abs(layer.factor * noise.keep - 1) > 1e-9:
            raise call.refused("drop path does not divide what it keeps by the probability")
        value = value.inputs[0]
    channels = value.channels
    return Seen(_alike(value, Dropout(channels, channels, 1 - noise.keep, "samples")))


@_operator("rand", "empty", "new_empty")
def _noise(call: Call, given: Arguments) -> Noise | Seen | None:
    shape = given[-1] if call.operator == "new_empty" else given[0]
    if len(shape) == 4 and shape[1] == 0:  # a map without channels, to be put with others
        return Seen(Value(0, (shape[2], shape[3])))
    return Noise() if len(shape) == 4 and list(shape[1:]) == [1, 1, 1] else None


@_operator("bernoulli")
def _bernoulli(call: Call, given: Arguments) -> Noise:
    return Noise(keep=float(given[1]))


@_operator("floor")
def _floor(call: Call, given: Arguments) -> Noise:
    if not isinstance(given[0], Noise):
        raise call.refused("numbers are rounded")
    return given[0]


@_operator("dropout", "feature_dropout")
def _dropout(call: Call, given: Arguments) -> Seen:
    x, probability, _ = given
    value = call.map_of(x, last=isinstance(x, Seen) and x.last)
    if not probability:
        return Seen(value, last=x.last)
    drops: Any = "cells" if call.operator == "dropout" else "channels"
    layer = Dropout(value.channels, value.channels, float(probability), drops)
    return Seen(_alike(value, layer), last=x.last)


@_operator("permute")
def _permute(call: Call, given: Arguments) -> Seen:
    x, order = given
    if isinstance(x, Seen) and x.zeros == (0, 0):
        if list(order) == [0, 2, 3, 1] and not x.last:
            return replace(x, last=True)
        if list(order) == [0, 3, 1, 2] and x.last:
            return replace(x, last=False)
    raise call.refused("dimensions change their places")


@_operator("reshape", "view", "unsqueeze")
def _reshape(call: Call, given: Arguments) -> Weight:
    if not isinstance(given[0], Weight):
        raise call.refused("a map is reshaped, so that cells change their places")
    return replace(given[0], shape=call.shape)


@_operator("detach")
def _detach(call: Call, given: Arguments) -> Weight:
    if not isinstance(given[0], Weight):
        raise call.refused("a map passes no gradient on")
    return given[0]


@_operator("contiguous", "clone", "alias", "to", "_assert_tensor_metadata")
def _same(call: Call, given: Arguments) -> Any:
    return given[0]
