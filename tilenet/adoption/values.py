"""The maps of a graph, and the flat list of layers that computes them one after another.

A graph lets any map be used anywhere. In a list each layer takes the map of the layer before; so a
map that is used later, or twice, is stashed under a name for each such use, and taken again by the
join that needs it, or by a join that takes it in place of the map at hand.
"""

from collections import defaultdict
from dataclasses import dataclass, field, replace

from tilenet.geometry.layers import Cellwise, Expand, Join, Layer, Stash

__all__ = ["Linear", "Value", "linearise", "maps_before", "name_of"]


@dataclass(frozen=True, eq=False)
class Value:
    """A map of the graph, and what computes it.

    Attributes:
        channels: Its channels.
        size: Height and width for the input at which the graph was recorded.
        whole: Whether it is a whole map (see `geometry.layers`).
        layer: The layer that computes it, without names of kept maps; None: it is the input.
        inputs: The maps that the layer takes.
        weights: Names that the layer's weights have in the module, by their names in the layer.
        like: Of an `Expand`: a map of the size that it enlarges to.
    """

    channels: int
    size: tuple[int, int]
    whole: bool = False
    layer: Layer | None = None
    inputs: "tuple[Value, ...]" = ()
    weights: dict[str, str] = field(default_factory=dict)
    like: "Value | None" = None


@dataclass(frozen=True)
class Linear:
    """A network as a list.

    Attributes:
        layers: In the order in which they run.
        names: For each weight and buffer of the list's network its name in the module.
    """

    layers: tuple[Layer, ...]
    names: dict[str, str]


@dataclass(frozen=True)
class _Use:
    """A map that is not the one at hand when it is needed."""

    value: Value
    sizes: bool = False


def linearise(output: Value) -> Linear:
    """The layers that compute a map, in an order of its graph."""
    order = maps_before(output)
    uses: dict[int, list[tuple[str, bool]]] = defaultdict(list)  # of each map's id: names, sizes
    steps: list[tuple[Value, list[Layer]]] = []
    at_hand = order[0]

    def name_of(use: _Use) -> str:
        known = uses[id(use.value)]
        known.append((f"{order.index(use.value)}.{len(known)}", use.sizes))
        return known[-1][0]

    for value in order[1:]:
        assert value.layer is not None
        place = next((i for i, one in enumerate(value.inputs) if one is at_hand), 0)
        first, before = value.inputs[place], []
        if first is not at_hand:
            name = name_of(_Use(first))
            before.append(Join(at_hand.channels, first.channels, (name,), "take"))
        layer = value.layer
        if isinstance(layer, Join | Cellwise):
            others = [one for i, one in enumerate(value.inputs) if i != place]
            kept = tuple(name_of(_Use(one)) for one in others)
            layer = replace(layer, in_channels=first.channels, kept=kept, place=place)
            if isinstance(layer, Cellwise):
                layer = replace(layer, channels=tuple(one.channels for one in others))
        elif isinstance(layer, Expand):
            assert value.like is not None
            layer = replace(layer, name=name_of(_Use(value.like, sizes=True)))
        steps.append((value, [*before, layer]))
        at_hand = value
    return _listed(order[0], steps, uses)


def _listed(
    image: Value,
    steps: list[tuple[Value, list[Layer]]],
    uses: dict[int, list[tuple[str, bool]]],
) -> Linear:
    layers: list[Layer] = []
    names: dict[str, str] = {}
    for value, made in [(image, []), *steps]:
        layers += made
        names |= {
            name_of(len(layers) - 1, layers[-1], own): name for own, name in value.weights.items()
        }
        width = value.channels
        layers += [Stash(width, width, name, sizes) for name, sizes in uses[id(value)]]
    return Linear(tuple(layers), names)


def name_of(number: int, layer: Layer, weight: str) -> str:
    """Name of a layer's weight in the network.

    Where a cellwise layer takes kept maps, torchgpipe's wrapper has it as a part.
    """
    part = "module." if isinstance(layer, Cellwise) and layer.kept else ""
    return f"{number}.{part}{weight}"


def maps_before(output: Value) -> list[Value]:
    """The map and all that it needs, each behind what it is computed of; the input first."""
    found: dict[int, Value] = {}
    waiting = [(output, False)]
    while waiting:
        value, ready = waiting.pop()
        if id(value) in found:
            continue
        if ready:
            found[id(value)] = value
            continue
        waiting.append((value, True))
        needed = value.inputs if value.like is None else (value.like, *value.inputs)
        waiting += [(one, False) for one in reversed(needed)]
    return list(found.values())
