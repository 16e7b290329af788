"""Whether a list of layers is a network: a file may hold anything.

A list that is refused here would end in an error of torch, fill the memory, or never end.
"""

import re
from dataclasses import Field, fields, replace
from math import isfinite, lcm
from typing import Any, get_args, get_origin

from tilenet.errors import TilenetError
from tilenet.geometry.coordinates import Coordinates
from tilenet.geometry.grid import Grid
from tilenet.geometry.layers import (
    Cellwise,
    Conv,
    Dropout,
    Expand,
    GlobalPool,
    Join,
    Layer,
    Norm,
    Pool,
    Stash,
    TransposedConv,
    Upsample,
    walk,
)
from tilenet.geometry.opaque import Opaque

MOST_LAYERS = 10_000
MOST_CHANNELS = 2**24
MAY_BE_ZERO = ("padding", "output_padding", "extra", "place")
MOST_CELLS = 2**12  # of a kernel, a stride, a padding, a dilation
MOST_ALIGNMENT_PX = 2**15  # that of 10 poolings is 2¹⁰
MOST_HALO_PX = 2**20
MOST_STEPS = 2**18  # layers times alignment: a second or two
WEIGHT = re.compile(r"weight|bias|w\d{1,4}")  # names of a cellwise layer's weights
MOST_PARTS, MOST_NUMBER = 2**12, 2**63


def check_layers(layers: tuple[Layer, ...], bands: int, classes: int) -> None:
    """Refuse layers that do not follow on one another.

    Raises:
        TilenetError: There are too few layers or too many; a value has the wrong type or size; a
            layer takes other channels than the one before gives, or a map that no layer stashed.
    """
    if not 0 < len(layers) <= MOST_LAYERS:
        raise TilenetError(
            f"a network has 1 to {MOST_LAYERS} layers (network.json: {len(layers)}); use another "
            "checkpoint"
        )
    if len(layers) > 1 and any(isinstance(layer, Opaque) for layer in layers):
        raise TilenetError(
            f"an opaque module has no layers besides it (network.json: {len(layers)}); use "
            "another checkpoint"
        )
    stashed: dict[str, int] = {}
    channels = bands
    for number, layer in enumerate(layers):
        wrong = next((f.name for f in fields(layer) if not _is_sound(layer, f)), None)
        if wrong is None and layer.in_channels != channels:
            wrong = "in_channels"
        if wrong is None and not _fits(layer, stashed):
            wrong = "out_channels"
        if wrong is not None:
            raise TilenetError(
                f"layers must follow on one another (layer {number} of network.json, {layer.kind}: "
                f"{wrong} is {getattr(layer, wrong)!r:.200}, it is given {channels} channels); "
                "use another checkpoint"
            )
        if isinstance(layer, Stash):
            stashed[layer.name] = 0 if layer.sizes else layer.out_channels
        channels = layer.out_channels
    if channels != classes or stashed:
        raise TilenetError(
            f"a network gives one channel per class and takes every map that it keeps "
            f"(network.json: {channels} channels, {classes} classes, kept to the end: "
            f"{list(stashed) if stashed else 'none'!s:.200}); use another checkpoint"
        )


def check_grids(layers: tuple[Layer, ...]) -> None:
    """Refuse sound layers for which working out the tiles would take endless time.

    `halo.context_of` walks the layers once for each pixel of the alignment.

    Raises:
        TilenetError: Their strides make the alignment too large, or cells too dense or too far off.
    """
    most = min(MOST_ALIGNMENT_PX, MOST_STEPS // len(layers))
    alignment = 1

    def through(layer: Layer, grid: Grid, stashed: tuple[Grid, ...]) -> Grid:
        nonlocal alignment
        out = layer.grid(grid, *stashed)
        alignment = lcm(alignment, out.stride.numerator or 1)
        dense = max(out.stride.denominator, out.origin.denominator)
        if alignment > most or dense > MOST_ALIGNMENT_PX or abs(out.origin) > MOST_HALO_PX:
            raise TilenetError(
                f"a network of {len(layers)} layers has tiles that are multiples of {most} px at "
                f"the most, and cells of 1/{MOST_ALIGNMENT_PX} px at the least that begin within "
                f"{MOST_HALO_PX} px (network.json: {alignment} px, 1/{dense} px, "
                f"{float(out.origin):.0f} px after a {layer.kind}); use another checkpoint"
            )
        return out

    walk(layers, Grid(), through)


def _is_sound(layer: Layer, part: "Field[Any]") -> bool:
    """Whether a value has the type and a size of its field."""
    value, kind = getattr(layer, part.name), part.type
    if kind is int:
        most = MOST_CHANNELS if "channels" in part.name or part.name == "groups" else MOST_CELLS
        return type(value) is int and (part.name not in MAY_BE_ZERO) <= value <= most
    if kind is float:
        return type(value) in (int, float) and isfinite(value) and abs(value) < 1e6
    if kind is bool:
        return type(value) is bool
    if get_origin(kind) is tuple:
        return isinstance(value, tuple) and _is_plain(value)
    return isinstance(value, str) and (kind is str or value in get_args(kind))


def _is_plain(value: Any) -> bool:
    """Whether a value consists of words, numbers that a file can hold, and tuples of these."""
    if isinstance(value, tuple):
        return len(value) <= MOST_PARTS and all(_is_plain(part) for part in value)
    if isinstance(value, int | float):
        return isfinite(value) and abs(value) <= MOST_NUMBER
    return value is None or isinstance(value, str)


def _fits(layer: Layer, stashed: dict[str, int]) -> bool:
    """Whether a layer with sound values can be built; removes its stashed maps from `stashed`."""
    same = layer.in_channels == layer.out_channels
    match layer:
        case Conv(cols=cols) if cols and not _is_rectangle(layer):
            return False
        case Conv() | TransposedConv():
            padded = (
                _steps_fit(layer, 0) if isinstance(layer, Conv)
                else layer.output_padding < layer.stride
            )  # fmt: skip
            grouped = not (layer.in_channels % layer.groups or layer.out_channels % layer.groups)
            return padded and grouped and layer.num_parameters < 2**50
        case Opaque():
            return layer.window_px % 2 == 0
        case GlobalPool():
            fits = layer.bins == 1 or layer.takes == "mean"
            return same and fits and (layer.takes == "maximum" or not layer.shared)
        case Upsample(mode="shuffle"):
            return layer.in_channels == layer.out_channels * layer.factor**2
        case Pool(mode="corners"):
            return same and replace(layer, kernel=layer.stride, padding=0, extra=0) == layer
        case Pool():
            return same and 2 * layer.padding <= layer.kernel
        case Norm():
            frozen = layer.scope != "frozen" or layer.norm == "batch"
            return same and frozen and layer.out_channels % layer.groups == 0
        case Dropout():
            return same and 0 <= layer.probability <= 1
        case Stash():
            return same and layer.name not in stashed
        case Coordinates():
            numbers = all(type(n) in (int, float) for n in layer.numbers)
            return numbers and len(layer.numbers) == 3 * layer.out_channels and layer.epsilon >= 0
        case Expand():
            return same and stashed.pop(layer.name, None) == 0
        case Join() if all(isinstance(name, str) for name in layer.names):
            return _joins(layer, [stashed.pop(name, 0) for name in layer.names])
        case Cellwise() if all(isinstance(name, str) for name in layer.names):
            return _computes(layer, tuple(stashed.pop(name, 0) for name in layer.names))
        case Join() | Cellwise():
            return False
    return same


def _is_rectangle(layer: Conv) -> bool:
    """Whether a kernel that is not square gives maps of the same grid along both axes."""
    if len(layer.cols) != 3 or not all(type(n) is int for n in layer.cols):
        return False
    kernel, dilation, padding = layer.cols
    sound = 0 < kernel <= MOST_CELLS and 0 < dilation <= MOST_CELLS and 0 <= padding <= MOST_CELLS
    across = layer.along_cols
    return sound and 2 * padding - across.reach == 2 * layer.padding - layer.reach


def _computes(layer: Cellwise, channels: tuple[int, ...]) -> bool:
    """Whether a cellwise layer takes maps of these channels, and its steps use existing values.

    The results of its operators are checked where they are known, in `model.cellwise`.
    """
    maps = len(channels) + 1
    if channels != layer.channels or 0 in channels or not 0 <= layer.place < maps:
        return False
    sound = set(layer.single) <= set(range(maps)) and bool(layer.steps)
    return sound and _steps_fit(layer, maps) and layer.num_parameters < 2**50


def _steps_fit(layer: Cellwise | Conv, maps: int) -> bool:
    """Whether weights have the form that they must, and steps take values that there are."""
    for weight in layer.weights:
        match weight:
            case (str(name), tuple(shape), bool()) if WEIGHT.fullmatch(name):
                if not all(type(n) is int and 0 < n <= MOST_CHANNELS for n in shape):
                    return False
            case _:
                return False
    num_values = maps + len(layer.weights)
    for number, step in enumerate(layer.steps):
        match step:
            case (str(), *arguments) if all(_refers(x, num_values + number) for x in arguments):
                continue
        return False
    return bool(layer.steps) or not layer.weights


def _refers(argument: Any, num_values: int) -> bool:
    """Whether an argument of a step has a known form, and takes values that there are."""
    match argument:
        case ("value", int(number)):
            return 0 <= number < num_values
        case ("size", int(number), str(letters)):
            return 0 < number <= MOST_CHANNELS and set(letters) <= set("BHW")
        case ("list", *arguments):
            return all(_refers(argument, num_values) for argument in arguments)
        case ("named", str(), part):
            return _refers(part, num_values)
    return not isinstance(argument, tuple)


def _joins(layer: Join, channels: list[int]) -> bool:
    """Whether a join of maps with these channels has the channels that the layer declares."""
    if 0 in channels or not 0 <= layer.place <= len(channels) or not channels:
        return False
    match layer.how:
        case "concatenate":
            return layer.out_channels == layer.in_channels + sum(channels)
        case "take":
            return [layer.out_channels] == channels
    # A map of one channel counts for all.
    widths = {layer.in_channels, *channels}
    return layer.out_channels == max(widths) and widths <= {1, layer.out_channels}
