"""Layers as JSON, and whether a list of them is a network: what a file holds may be anything.

What is refused here would end in an error of torch, in endless memory, or in a wait without end.
"""

from dataclasses import Field, asdict, fields
from math import isfinite, lcm
from typing import Any, get_args

from tilenet.errors import TilenetError
from tilenet.geometry.grid import Grid
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
    Stash,
    TransposedConv,
    Upsample,
    walk,
)

__all__ = ["KINDS", "POP", "check_grids", "check_layers", "layer_from_json", "layer_to_json"]

KINDS: dict[str, type[Layer]] = {
    kind.kind: kind
    for kind in (
        Conv, TransposedConv, Pool, Upsample, Norm, ChannelNorm, Scale, Dropout, Activation,
        Stash, Join, GlobalPool, Expand,
    )
}  # fmt: skip


POP = "pop"  # how a join of the map with one kept map behind it is written


def layer_to_json(layer: Layer) -> dict[str, Any]:
    """The layer as a plain dictionary; `kind` names its class.

    A join of the map with one kept map behind it is a `pop`, as in checkpoints before there were
    other joins: programs that read these go on reading U-Nets.
    """
    match layer:
        case Join(wide, out, (name,), "concatenate", 0, fit):
            channels = {"in_channels": wide, "out_channels": out}
            return {"kind": POP, **channels, "name": name, "fit": fit}
    return {"kind": layer.kind, **asdict(layer)}


def layer_from_json(entry: dict[str, Any]) -> Layer:
    """The layer that `layer_to_json` wrote, also before a kind had all of its fields.

    Raises:
        TilenetError: The entry is not a layer that this version knows.
    """
    values: dict[str, Any] = {key: value for key, value in entry.items() if key != "kind"}
    if entry.get("kind") == POP and "name" in values:
        entry, values["kept"] = {"kind": "join"}, [values.pop("name")]
    kind = KINDS.get(str(entry.get("kind")))
    required = {"in_channels", "out_channels"}
    if kind is None or not required <= set(values) <= {field.name for field in fields(kind)}:
        raise TilenetError(
            f"a layer must have a known kind and that kind's fields (got {_short(entry)}); "
            f"known kinds: {', '.join(KINDS)}"
        )
    values = {key: tuple(v) if isinstance(v, list) else v for key, v in values.items()}
    return kind(**values)


MOST_LAYERS = 10_000
MOST_CHANNELS = 2**24
MAY_BE_ZERO = ("padding", "output_padding", "extra", "place")
MOST_CELLS = 2**12  # of a kernel, a stride, a padding, a dilation
MOST_ALIGNMENT_PX = 2**15  # that of 10 poolings is 2¹⁰
MOST_HALO_PX = 2**20
MOST_STEPS = 2**18  # layers times alignment: a second or two
MOST_SAID = 200


def check_layers(layers: tuple[Layer, ...], bands: int, classes: int) -> None:
    """Refuse layers that do not follow on one another.

    Raises:
        TilenetError: There are none or too many; a value has the wrong type or size; a layer takes
            other channels than the one before gives, or a kept map that nobody stashed.
    """
    if not 0 < len(layers) <= MOST_LAYERS:
        raise TilenetError(
            f"a network has 1 to {MOST_LAYERS} layers (network.json: {len(layers)}); use another "
            "checkpoint"
        )
    kept: dict[str, int] = {}
    channels = bands
    for number, layer in enumerate(layers):
        wrong = next((f.name for f in fields(layer) if not _is_sound(layer, f)), None)
        if wrong is None and layer.in_channels != channels:
            wrong = "in_channels"
        if wrong is None and not _fits(layer, kept):
            wrong = "out_channels"
        if wrong is not None:
            raise TilenetError(
                f"layers must follow on one another (layer {number} of network.json, {layer.kind}: "
                f"{wrong} is {_short(getattr(layer, wrong))}, it is given {channels} channels); "
                "use another checkpoint"
            )
        if isinstance(layer, Stash):
            kept[layer.name] = 0 if layer.sizes else layer.out_channels
        channels = layer.out_channels
    if channels != classes or kept:
        raise TilenetError(
            f"a network gives one channel per class and takes every map that it keeps "
            f"(network.json: {channels} channels, {classes} classes, kept to the end: "
            f"{_short(list(kept)) if kept else 'none'}); use another checkpoint"
        )


def check_grids(layers: tuple[Layer, ...]) -> None:
    """Refuse sound layers whose tiles would take endless time to work out.

    `halo.context_of` walks the layers once for each pixel of the alignment.

    Raises:
        TilenetError: Their strides make the alignment too large, or cells too dense or too far off.
    """
    most = min(MOST_ALIGNMENT_PX, MOST_STEPS // len(layers))
    alignment = 1

    def through(layer: Layer, grid: Grid, kept: tuple[Grid, ...]) -> Grid:
        nonlocal alignment
        out = layer.grid(grid, *kept)
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


def _short(value: object) -> str:
    """A value of a file for a sentence."""
    text = repr(value)
    return text if len(text) <= MOST_SAID else f"{text[:MOST_SAID]}…"


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
    if kind == tuple[str, ...]:
        return isinstance(value, tuple) and all(isinstance(name, str) for name in value)
    return isinstance(value, str) and (kind is str or value in get_args(kind))


def _fits(layer: Layer, kept: dict[str, int]) -> bool:
    """Whether a layer whose values are sound can be built; takes the kept maps that it wants."""
    same = layer.in_channels == layer.out_channels
    match layer:
        case Conv() | TransposedConv():
            padded = isinstance(layer, Conv) or layer.output_padding < layer.stride
            grouped = not (layer.in_channels % layer.groups or layer.out_channels % layer.groups)
            return padded and grouped and layer.num_parameters < 2**50
        case Pool():
            return same and 2 * layer.padding <= layer.kernel
        case Norm():
            frozen = layer.scope != "frozen" or layer.norm == "batch"
            return same and frozen and layer.out_channels % layer.groups == 0
        case Dropout():
            return same and 0 <= layer.probability <= 1
        case Stash():
            return same and layer.name not in kept
        case Expand():
            return same and kept.pop(layer.name, None) == 0
        case Join():
            return _joins(layer, [kept.pop(name, 0) for name in layer.names])
    return same


def _joins(layer: Join, channels: list[int]) -> bool:
    """Whether the maps that a join takes, of these channels, give what it says."""
    if 0 in channels or not 0 <= layer.place <= len(channels) or not channels:
        return False
    match layer.how:
        case "concatenate":
            return layer.out_channels == layer.in_channels + sum(channels)
        case "take":
            return [layer.out_channels] == channels
    # A map of one channel counts for all.
    given = {layer.in_channels, *channels}
    return layer.out_channels == max(given) and given <= {1, layer.out_channels}
