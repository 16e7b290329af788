"""The skips of a network: maps that go from a stash to its pop, and their gradients back."""

from collections.abc import Sequence
from dataclasses import dataclass

from tilenet.geometry.layers import Stash
from tilenet.planning.memory.layer_cost import LayerBytes

__all__ = ["Skip", "find_skips"]


@dataclass(frozen=True)
class Skip:
    """A map that goes from a stash to its pop.

    Attributes:
        stash: Number of the layer that stashes.
        pop: Number of the layer that pops.
        map_bytes: Bytes of the map.
        gradient: Storage that its gradient holds, from the pop's backward to the stash's.
    """

    stash: int
    pop: int
    map_bytes: int
    gradient: int


def find_skips(costs: Sequence[LayerBytes]) -> list[Skip]:
    """The skips of a network, in the order of their pops."""
    stashes: dict[str, int] = {}
    skips = []
    for index, cost in enumerate(costs):
        if isinstance(cost.layer, Stash):
            stashes[cost.layer.name] = index
        taken = [stashes[name] for name in cost.layer.names]
        for stash, (size, storage) in zip(taken, cost.skip_gradients, strict=True):
            # Gradients of one storage wait for the last of them, that of the first stash.
            sharing = [
                other
                for other, (_, number) in zip(taken, cost.skip_gradients, strict=True)
                if number == storage
            ]
            layer = costs[stash].layer
            map_bytes = 0 if isinstance(layer, Stash) and layer.sizes else costs[stash].input
            skips.append(Skip(stash, index, map_bytes, size if stash == min(sharing) else 0))
    return skips
