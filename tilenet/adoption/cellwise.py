"""Operators that make each cell of the same cells of maps, and of weights and numbers."""

from dataclasses import replace
from typing import Any

import torch

from tilenet.adoption.calls import BATCH, Call, Noise, Seen, Stack, Weight, operator
from tilenet.adoption.values import Value
from tilenet.geometry.layers import Activation, Dropout, Join, Layer, Scale

__all__ = ["channels_first", "with_weight"]


def channels_first(call: Call) -> Call:
    batch, rows, cols, channels = call.shape
    return replace(call, shape=(batch, channels, rows, cols))


@operator(
    "relu", "relu6", "elu", "silu", "hardswish", "hardsigmoid", "sigmoid", "tanh", "mish",
    "softplus",
)  # fmt: skip
def _activation(call: Call, x: Any) -> Seen:
    return _function(call, x, call.operator)


def _function(call: Call, x: Any, function: Any, slope: float = 0.01) -> Seen:
    seen = call.seen(x)
    channels = seen.value.channels
    return replace(seen, value=_alike(seen.value, Activation(channels, channels, slope, function)))


@operator("leaky_relu")
def _leaky_relu(call: Call, x: Any, negative_slope: float) -> Seen:
    return _function(call, x, "leaky_relu", float(negative_slope))


@operator("hardtanh")
def _hardtanh(call: Call, x: Any, min_val: float, max_val: float) -> Seen:
    if (min_val, max_val) != (0, 6):
        raise call.refused(
            "of bounded functions only relu6 is known", values=f" {min_val} {max_val}"
        )
    return _function(call, x, "relu6")


@operator("gelu")
def _gelu(call: Call, x: Any, approximate: str) -> Seen:
    return _function(call, x, "gelu_tanh" if approximate == "tanh" else "gelu")


def _alike(value: Value, layer: Layer, weights: dict[str, str] | None = None) -> Value:
    """What a layer that keeps shapes makes of a map."""
    return replace(value, layer=layer, inputs=(value,), weights=weights or {}, like=None)


@operator("softmax")
def _softmax(call: Call, x: Any, dim: int) -> Seen:
    value = call.map_of(x)
    if dim not in (1, -3):
        raise call.refused("softmax over cells looks at all of them", values=f" of dimension {dim}")
    layer = Activation(value.channels, value.channels, function="channel_softmax")
    return Seen(_alike(value, layer))


@operator("cat")
def _cat(call: Call, tensors: list[Any], dim: int) -> Seen:
    values = tuple(value for one in tensors if (value := call.map_of(one)).channels)
    if dim not in (1, -3):
        raise call.refused("maps are put together along rows or columns")
    if len(values) == 1:
        return Seen(values[0])
    return Seen(call.made(Join(0, sum(v.channels for v in values)), *values))


@operator("stack")
def _stack(call: Call, tensors: list[Any], dim: int) -> Stack:
    if dim != 0:
        raise call.refused("maps are stacked in another dimension than the first")
    return Stack(tuple(tensors))


@operator("sum")
def _sum(call: Call, x: Any, dim: list[int] | None = None) -> Seen:
    if not isinstance(x, Stack) or list(dim or []) != [0]:
        raise call.refused("a sum is taken over cells")
    return _joined(call, "add", x.maps)


def _joined(call: Call, how: Any, maps: Any) -> Seen:
    """Maps that are added or multiplied, all of them with the channels in the same place."""
    last = all(isinstance(one, Seen) and one.last for one in maps)
    values = [call.map_of(one, last=last) for one in maps]
    layer = Join(0, max(value.channels for value in values), how=how)
    return Seen((channels_first(call) if last else call).made(layer, *values), last=last)


@operator("add", "sub")
def _add(call: Call, x: Any, other: Any) -> Any:
    x, other = _number(x), _number(other)
    sign = -1 if call.operator == "sub" else 1
    if sign == 1 and not isinstance(x, Seen | Noise):  # b + x is x + b
        x, other = other, x
    if isinstance(x, Noise):
        if x.stage != "uniform" or not isinstance(other, int | float):
            raise call.refused("random numbers are used for something else than drop path")
        return replace(x, stage="shifted", keep=float(sign * other))
    if not isinstance(x, Seen | Stack):
        raise call.refused("a weight is computed in forward")
    if isinstance(other, int | float):
        seen = call.seen(x)
        layer = Scale(seen.value.channels, seen.value.channels, offset=float(sign * other))
        return replace(seen, value=_alike(seen.value, layer))
    if sign == -1:
        raise call.refused("maps are subtracted")
    if isinstance(other, Weight):
        return with_weight(call, x, other, "bias")
    return _joined(call, "add", [x, other])


@operator("mul")
def _multiply(call: Call, x: Any, other: Any) -> Any:
    x, other = _number(x), _number(other)
    if not isinstance(x, Seen):
        x, other = other, x
    if not isinstance(x, Seen | Stack):
        raise call.refused("a weight is computed in forward")
    if isinstance(other, Noise):
        return _drop_path(call, x, other)
    if isinstance(other, int | float):
        seen = call.seen(x)
        layer = Scale(seen.value.channels, seen.value.channels, factor=float(other))
        return replace(seen, value=_alike(seen.value, layer))
    if isinstance(other, Weight):
        return with_weight(call, x, other, "weight")
    return _joined(call, "multiply", [x, other])


def _number(x: Any) -> Any:
    return x if not isinstance(x, Weight) or x.number is None else x.number


@operator("div")
def _divide(call: Call, x: Any, other: Any) -> Any:
    other = _number(other)
    if not isinstance(other, int | float):
        raise call.refused("a map is divided by another")
    if isinstance(x, Noise):
        if x.stage != "mask" or x.scaled or x.keep != other:
            raise call.refused("drop path does not divide what it keeps by the probability")
        return replace(x, scaled=True)
    return _multiply(call, x, 1 / other)


def with_weight(call: Call, x: Any, weight: Weight, part: str) -> Seen:
    seen, weight = call.seen(x), call.weight(weight)
    channels = seen.value.channels
    # A number for each channel, wherever the channels stand.
    shape = (channels,) if seen.last else (channels, 1, 1)
    alone = all(n == 1 for n in weight.shape[: -len(shape)])
    if weight.shape[-len(shape) :] != shape or not alone:
        raise call.refused("a weight is not one number for each channel")
    layer = Scale(
        channels,
        channels,
        weight=part == "weight",
        bias=part == "bias",
        trained=weight.trained,
    )
    return replace(seen, value=_alike(seen.value, layer, {part: weight.name}))


def _drop_path(call: Call, x: Any, noise: Noise) -> Seen:
    seen = call.seen(x)
    value = seen.value
    if noise.stage != "mask" or not 0 < noise.keep <= 1:
        raise call.refused("random numbers are used for something else than drop path")
    if not noise.scaled and noise.keep != 1:
        # x was divided by the probability before.
        layer = value.layer
        factor = layer.factor if isinstance(layer, Scale) else 1.0
        plain = Scale(value.channels, value.channels, factor=factor)
        if layer != plain or abs(factor * noise.keep - 1) > 1e-9:
            raise call.refused("drop path does not divide what it keeps by the probability")
        value = value.inputs[0]
    channels = value.channels
    return replace(
        seen, value=_alike(value, Dropout(channels, channels, 1 - noise.keep, "samples"))
    )


@operator("rand", "empty", "new_empty")
def _noise(call: Call, x: Any, size: Any = None, dtype: Any = None) -> Noise | Seen | None:
    if len(call.shape) == 4 and call.shape[1] == 0:  # a map without channels, for a cat
        return Seen(Value(0, (call.shape[2], call.shape[3])))
    if call.shape == (BATCH, 1, 1, 1):
        return Noise("uniform" if call.operator == "rand" else "empty")
    raise call.refused("random numbers are used for something else than drop path")


@operator("bernoulli")
def _bernoulli(call: Call, x: Any, p: float) -> Noise:
    if not isinstance(x, Noise):
        raise call.refused("random numbers are used for something else than drop path")
    return replace(x, stage="mask", keep=float(p), scaled=False)


@operator("floor")
def _floor(call: Call, x: Any) -> Noise:
    if not isinstance(x, Noise) or x.stage != "shifted":
        raise call.refused("numbers are rounded")
    return replace(x, stage="mask")


@operator("dropout", "feature_dropout")
def _dropout(call: Call, x: Any, p: float, train: bool) -> Seen:
    if not train or not p:
        return _same(call, x)  # type: ignore[no-any-return]
    if p == 1:
        raise call.refused("everything is dropped")
    seen = call.seen(x)
    drops: Any = "cells" if call.operator == "dropout" else "channels"
    if drops == "channels" and seen.last:
        raise call.refused("rows are dropped where channels come last")
    layer = Dropout(seen.value.channels, seen.value.channels, float(p), drops)
    return replace(seen, value=_alike(seen.value, layer))


@operator("permute")
def _permute(call: Call, x: Any, dims: list[int]) -> Seen:
    order = [d % 4 for d in dims]
    seen = call.seen(x)
    if order == [0, 2, 3, 1] and not seen.last:
        return replace(seen, last=True)
    if order == [0, 3, 1, 2] and seen.last:
        return replace(seen, last=False)
    raise call.refused("dimensions change their places")


@operator("reshape", "view", "unsqueeze")
def _reshape(call: Call, x: Any, shape: Any = None, size: Any = None, dim: Any = None) -> Weight:
    if not isinstance(x, Weight):
        raise call.refused("a map is reshaped, so that cells change their places")
    return replace(x, shape=call.shape)


@operator("detach")
def _detach(call: Call, x: Any) -> Weight:
    if not isinstance(x, Weight):
        raise call.refused("a map passes no gradient on")
    if x.trained:
        raise call.refused("a weight passes no gradient on", values=f" of {x.name}")
    return x


@operator("contiguous", "clone", "alias", "to", "lift_fresh_copy")
def _same(call: Call, x: Any, dtype: Any = None, other: Any = None) -> Any:
    if dtype not in (None, torch.float32):
        raise call.refused("numbers change their type", values=f" {dtype}")
    return x
