"""The maps of a graph, and the flat list of layers that computes them one after another.

A graph lets any map be used anywhere. In a list each layer takes the map of the layer before; so a
map that is used later, or twice, is stashed under a name for each such use, and taken again by the
join that needs it, or by a join that takes it in place of the map at hand.
"""

from collections import defaultdict
from dataclasses import dataclass, field, replace

from tilenet.geometry.layers import Cellwise, Expand, Join, Layer, Stash


@dataclass(frozen=True, eq=False)
class Value:
    """A map of the graph, and the layer that computes it.

    Attributes:
        size: Height and width in the recorded graph.
        whole: Whether it is a whole map (see `geometry.layers`).
        layer: The layer that computes it, without names of stashed maps; None: it is the input.
        inputs: The maps that the layer takes.
        weights: Names of the layer's weights in the module, by their names in the layer.
        like: Map of the size to which an `Expand` enlarges.
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
        layers: The layers in the order in which they run.
        names: Name in the module of each weight and buffer of the list's network.
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
        place = next((i for i, x in enumerate(value.inputs) if x is at_hand), 0)
        first, before = value.inputs[place], []
        if first is not at_hand:
            name = name_of(_Use(first))
            before.append(Join(at_hand.channels, first.channels, (name,), "take"))
        layer = value.layer
        if isinstance(layer, Join | Cellwise):
            stashed = [x for i, x in enumerate(value.inputs) if i != place]
            names = tuple(name_of(_Use(x)) for x in stashed)
            layer = replace(layer, in_channels=first.channels, kept=names, place=place)
            if isinstance(layer, Cellwise):
                layer = replace(layer, channels=tuple(x.channels for x in stashed))
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
    for value, added in [(image, []), *steps]:
        layers += added
        names |= {
            name_of(len(layers) - 1, layers[-1], own): name for own, name in value.weights.items()
        }
        width = value.channels
        layers += [Stash(width, width, name, sizes) for name, sizes in uses[id(value)]]
    return Linear(tuple(layers), names)


def name_of(number: int, layer: Layer, weight: str) -> str:
    """Name of a layer's weight in the network.

    Where a cellwise layer takes stashed maps, it is a part of torchgpipe's wrapper.
    """
    part = "module." if isinstance(layer, Cellwise) and layer.kept else ""
    return f"{number}.{part}{weight}"


def maps_before(output: Value) -> list[Value]:
    """Return a map and all maps that lead to it, each after the maps it is computed from."""
    order: dict[int, Value] = {}
    waiting = [(output, False)]
    while waiting:
        value, ready = waiting.pop()
        if id(value) in order:
            continue
        if ready:
            order[id(value)] = value
            continue
        waiting.append((value, True))
        needed = value.inputs if value.like is None else (value.like, *value.inputs)
        waiting += [(x, False) for x in reversed(needed)]
    return list(order.values())
