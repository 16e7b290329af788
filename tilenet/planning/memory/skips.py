"""The skips of a network: maps that go from a stash to its pop, and their gradients back."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from tilenet.geometry.layers import Stash
from tilenet.planning.memory.layer_cost import LayerBytes, SameCosts


@dataclass(frozen=True)
class Skip:
    """A map that goes from a stash to its pop.

    Attributes:
        stash: Number of the layer that stashes.
        pop: Number of the layer that pops.
        gradient: Bytes that its gradient holds from the pop's backward to the stash's.
    """

    stash: int
    pop: int
    map_bytes: int
    gradient: int


def find_skips(costs: Sequence[LayerBytes]) -> Sequence[Skip]:
    """The skips of a network, in the order of their pops."""
    return _find_skips(SameCosts(costs))


@lru_cache(maxsize=64)
def _find_skips(same: SameCosts) -> tuple[Skip, ...]:
    costs = same.costs
    stashes: dict[str, int] = {}
    skips = []
    for index, cost in enumerate(costs):
        if isinstance(cost.layer, Stash):
            stashes[cost.layer.name] = index
        popped = [stashes[name] for name in cost.layer.names]
        # Gradients in one storage wait for the last of them, that of the first stash.
        first_stash: dict[int, int] = {}
        for stash, (_, storage) in zip(popped, cost.skip_gradients, strict=True):
            first_stash[storage] = min(stash, first_stash.get(storage, stash))
        for stash, (size, storage) in zip(popped, cost.skip_gradients, strict=True):
            layer = costs[stash].layer
            map_bytes = 0 if isinstance(layer, Stash) and layer.sizes else costs[stash].input
            gradient = size if stash == first_stash[storage] else 0
            skips.append(Skip(stash, index, map_bytes, gradient))
    return tuple(skips)
