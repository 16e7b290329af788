"""Bytes that each of consecutive layers makes in forward, leaves for backward and frees there.

A map that several layers keep counts once, at the first that keeps it.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tilenet.geometry.layers import Join, Stash
from tilenet.planning.memory.layer_cost import LayerBytes


@dataclass(frozen=True)
class Walk:
    """A walk over the layers from the first of a block on; arrays over the layers.

    Attributes:
        saved: Bytes that each layer leaves for backward, a map at the first layer that keeps it.
        forward: Most bytes in forward, above the saved bytes of the layers before.
        waiting: Stashed maps, besides, that no layer has saved and that wait for their pop.
        backward: Most bytes in backward, above the saved bytes of layers up to this one, without
            the gradients of skips.
        last: `backward` as the block's last layer.
        last_held: `last` with the gradient held by the caller.
        outputs: Bytes of the layer's output.
        output_until: Last layer that finds the output alive in backward, since it is saved anyway.
        input_from: First layer that keeps the block's input (n: no layer does).
        roots: Map that holds each layer's input, and last that of the output: the number of the
            first layer with this map as its input.
        sizes: Sizes of these maps; the block's input counts elsewhere, and is 0 here.
        keepers: First layer that keeps each; maps that no layer keeps are left out.
    """

    saved: NDArray[np.int64]
    forward: NDArray[np.int64]
    waiting: NDArray[np.int64]
    backward: NDArray[np.int64]
    last: NDArray[np.int64]
    last_held: NDArray[np.int64]
    outputs: NDArray[np.int64]
    output_until: NDArray[np.int64]
    input_from: int
    roots: list[int]
    sizes: dict[int, int]
    keepers: dict[int, int]

    @classmethod
    def along(cls, costs: Sequence[LayerBytes], start: int, copied: bool) -> "Walk":
        """Walk from a layer to the network's end.

        Args:
            copied: Whether the block's input may not be written into.
        """
        count = len(costs)
        first = costs[start].first if copied else None
        block = [first or costs[start], *costs[start + 1 :]]
        roots, sizes, keeper = _maps(block, start)
        saved = [cost.saved for cost in block]
        for root, index in keeper.items():
            saved[index - start] += sizes[root]
        forward, backward, last, last_held, until = [], [], [], [], []
        stashed: dict[str, int] = {}
        waiting = []
        for index, cost in enumerate(block, start):
            root = roots[index - start]
            keeper_of_input = keeper.get(root, count)
            forward.append(cost.forward + (sizes[root] if keeper_of_input >= index else 0))
            waiting_roots = {*stashed.values()} - {root}
            waiting.append(sum(sizes[r] for r in waiting_roots if keeper.get(r, count) >= index))
            if isinstance(cost.layer, Stash) and not cost.layer.sizes:
                stashed[cost.layer.name] = root
            stashed = {name: r for name, r in stashed.items() if name not in cost.layer.names}
            held = keeper_of_input < index or root == start
            grows = cost.input if isinstance(cost.layer, Stash) else 0
            behind = block[index - start + 1] if index + 1 < count else None
            shared = behind is not None and behind.shares_gradient
            gradient = cost.output if behind is None else behind.gradient
            inner = cost.backward[2 + held] if shared else cost.backward[held] + gradient
            backward.append(inner + grows)
            last.append(cost.backward[held] + cost.output + grows)
            last_held.append(cost.backward[2 + held] + cost.output + grows)
            out_root = roots[index - start + 1]
            until.append(keeper.get(out_root, count) if out_root != start else -1)
        return cls(
            np.array(saved),
            np.array(forward),
            np.array(waiting),
            np.array(backward),
            np.array(last),
            np.array(last_held),
            np.array([cost.output for cost in block]),
            np.array(until),
            keeper.get(start, count),
            roots,
            sizes,
            keeper,
        )


def _maps(
    block: Sequence[LayerBytes], start: int
) -> tuple[list[int], dict[int, int], dict[int, int]]:
    """`Walk.roots`, `Walk.sizes` and `Walk.keepers` of the layers from `start` on."""
    roots, sizes = [start], {start: 0}  # the block's input counts elsewhere
    keepers: dict[int, int] = {}
    stashed: dict[str, int] = {}
    for index, cost in enumerate(block, start):
        if cost.keeps_input:
            keepers.setdefault(roots[-1], index)
        layer = cost.layer
        if isinstance(layer, Stash):
            stashed[layer.name] = roots[-1]
        # In-place layers and stashes hand theirs on; who takes a kept map has that map.
        if isinstance(layer, Join) and layer.how == "take" and layer.kept[0] in stashed:
            roots.append(stashed[layer.kept[0]])
        elif cost.in_place:
            roots.append(roots[-1])
        else:
            roots.append(index + 1)
            sizes[index + 1] = cost.output
        if cost.keeps_output:
            keepers.setdefault(roots[-1], index)
    return roots, sizes, keepers
