"""Whether a list of layers is a network at all: what is read from a file may be anything.

What is refused here would end in an error of torch, in endless memory, or in a wait without end.
"""

from dataclasses import Field, fields
from math import isfinite
from typing import Any, get_args

from tilenet.errors import TilenetError
from tilenet.geometry.layers import Conv, Dropout, Layer, Norm, Pool, Pop, Stash, TransposedConv

__all__ = ["check_layers"]

MOST_LAYERS = 10_000
MOST_CHANNELS = 2**24
MOST_CELLS = 2**12  # of a kernel, a stride, a padding, a dilation


def check_layers(layers: tuple[Layer, ...], bands: int, classes: int) -> None:
    """Refuse layers that do not follow on one another.

    Raises:
        TilenetError: There are none or too many; a value has the wrong type or size; a layer takes
            other channels than the one before gives, or a skip is popped that nobody stashed.
    """
    if not 0 < len(layers) <= MOST_LAYERS:
        raise TilenetError(
            f"a network has 1 to {MOST_LAYERS} layers (network.json: {len(layers)}); use another "
            "checkpoint"
        )
    skips: dict[str, int] = {}
    channels = bands
    for number, layer in enumerate(layers):
        wrong = next((f.name for f in fields(layer) if not _is_sound(layer, f)), None)
        if wrong is None and layer.in_channels != channels:
            wrong = "in_channels"
        if wrong is None and not _fits(layer, skips):
            wrong = "out_channels"
        if wrong is not None:
            raise TilenetError(
                f"layers must follow on one another (layer {number} of network.json, {layer.kind}: "
                f"{wrong} is {getattr(layer, wrong)!r}, it is given {channels} channels); use "
                "another checkpoint"
            )
        if isinstance(layer, Stash):
            skips[layer.name] = layer.out_channels
        channels = layer.out_channels
    if channels != classes or skips:
        raise TilenetError(
            f"a network gives one channel per class and pops every skip (network.json: {channels} "
            f"channels, {classes} classes, skips left: {', '.join(skips) or 'none'}); use another "
            "checkpoint"
        )


def _is_sound(layer: Layer, part: "Field[Any]") -> bool:
    """Whether a value has the type and a size of its field."""
    value, kind = getattr(layer, part.name), part.type
    if kind is int:
        most = MOST_CHANNELS if "channels" in part.name or part.name == "groups" else MOST_CELLS
        return type(value) is int and ("padding" not in part.name) <= value <= most
    if kind is float:
        return type(value) in (int, float) and isfinite(value) and abs(value) < 1e6
    if kind is bool:
        return type(value) is bool
    return isinstance(value, str) and (kind is str or value in get_args(kind))


def _fits(layer: Layer, skips: dict[str, int]) -> bool:
    """Whether a layer whose values are sound can be built; takes the skip that it pops."""
    same = layer.in_channels == layer.out_channels
    match layer:
        case Conv() | TransposedConv():
            padded = isinstance(layer, Conv) or layer.output_padding < layer.stride
            return padded and layer.num_parameters < 2**50
        case Pool():
            return same and 2 * layer.padding <= layer.kernel
        case Norm():
            return same and layer.out_channels % layer.groups == 0
        case Dropout():
            return same and 0 <= layer.probability < 1
        case Stash():
            return same and layer.name not in skips
        case Pop():
            return layer.out_channels == layer.in_channels + skips.pop(layer.name, -1)
    return same
