"""Cut a partition's layers into cells, and fill in what the swap policy asks of each.

A cell is a convolution with what follows it (norm, dropout, activation), so that an activation,
which writes over its input, is computed again together with what made that. Stashes and pops stand
alone: they are not computed again, since their maps belong to others, too.
"""

from collections.abc import Sequence
from itertools import accumulate, pairwise

import numpy as np
from numpy.typing import NDArray

from tilenet.geometry.layers import (
    Activation,
    Conv,
    Layer,
    Pool,
    Pop,
    Stash,
    TransposedConv,
    Upsample,
)
from tilenet.parallel.pipeline.layer_times import LayerTime
from tilenet.planning.memory.layer import LayerBytes
from tilenet.planning.memory.partition import Skip, Walk, find_skips
from tilenet.planning.swap.policy import Cell

__all__ = ["cell_sizes", "cells_of"]


def cell_sizes(layers: Sequence[Layer]) -> tuple[int, ...]:
    """Number of layers in each cell of a partition."""
    sizes: list[int] = []
    alone = True
    for layer in layers:
        begins = isinstance(layer, Conv | TransposedConv | Pool | Upsample | Stash | Pop)
        if begins or alone:
            sizes.append(1)
        else:
            sizes[-1] += 1
        alone = isinstance(layer, Stash | Pop)
    return tuple(sizes)


def cells_of(
    costs: Sequence[LayerBytes],
    times: Sequence[LayerTime],
    start: int,
    stop: int,
    min_bytes: int,
) -> tuple[Cell, ...]:
    """The cells of the layers [start, stop), for one micro-batch.

    With all kept, their peak is `partition_bytes(…).activations` without checkpointing. What comes
    over the boundary is not among it: `partition_bytes(…).inputs` counts it, and it stays.

    Args:
        costs: Costs of the whole network, from `layer_bytes`.
        times: Seconds of each layer of the whole network.
        min_bytes: Smaller storages are not swapped.
    """
    sizes = cell_sizes([cost.layer for cost in costs[start:stop]])
    edges = list(accumulate(sizes, initial=start))
    block = _Block(costs, start, stop)
    place = np.repeat(np.arange(len(sizes)), sizes)  # of each layer's cell
    held = {
        int(place[skip.stash - start]): int(place[skip.pop - start] - place[skip.stash - start])
        for skip in find_skips(costs)
        if start <= skip.stash and skip.pop < stop
    }
    found = []
    for number, (first, behind) in enumerate(pairwise(edges)):
        root = block.walk.roots[first - start]
        keeper = block.walk.keepers.get(root, stop)
        input_bytes = block.walk.sizes[root]
        if root == start > 0 and keeper >= stop:
            # Kept by nobody, unless the cell is computed again; images are their caller's.
            input_bytes = costs[start].input
        found.append(
            Cell(
                forward_s=sum(time.forward_s for time in times[first:behind]),
                backward_s=sum(time.backward_s for time in times[first:behind]),
                input_bytes=input_bytes,
                saved_bytes=int(block.saved_before(behind) - block.saved_before(first)),
                swapped_bytes=block.swapped(first, behind, min_bytes),
                forward_bytes=block.forward(first, behind),
                backward_bytes=block.backward(first, behind),
                may_checkpoint=block.may_checkpoint(first, behind),
                again_bytes=block.again(first, behind),
                input_from=number - int(place[keeper - start]) if keeper < first else 0,
                needs_input=block.needs(first, behind, root),
                may_swap_input=input_bytes >= max(min_bytes, 1),
                held_cells=held.get(number, 0),
            )
        )
    return tuple(found)


class _Block:
    """Layers [start, stop) of one partition; its methods ask about [first, behind) of these."""

    def __init__(self, costs: Sequence[LayerBytes], start: int, stop: int) -> None:
        self.start, self.stop = start, stop
        # What comes in is somebody else's, or one of several micro-batches.
        self.walk = Walk.along(costs, start, copied=True)
        self.layers = [costs[start].first or costs[start], *costs[start + 1 : stop]]
        self.pinned, self.popping = _of_skips(find_skips(costs), start, stop)
        self._before = np.concatenate([[0], np.cumsum(self.walk.saved)])

    def saved_before(self, layer: int) -> int:
        """What the block's layers before one have saved."""
        return int(self._before[layer - self.start])

    def forward(self, first: int, behind: int) -> int:
        """Most bytes in forward."""
        part = slice(first - self.start, behind - self.start)
        most = self._before[:-1][part] + self.walk.forward[part] + self.popping[part]
        return int(most.max()) - self.saved_before(first)

    def backward(self, first: int, behind: int) -> int:
        """Most bytes in backward."""
        part = slice(first - self.start, behind - self.start)
        above = self.walk.backward[part].copy()
        if behind == self.stop:
            above[-1] = self.walk.last[behind - 1 - self.start]
        most = self._before[1:][part] + above + self.pinned[part]
        return int(most.max()) - self.saved_before(first)

    def again(self, first: int, behind: int) -> int:
        """Most bytes while it is computed again and in its backward.

        The recomputed output and its gradient are held until that is done.
        """
        part = slice(first - self.start, behind - self.start)
        output = int(self.walk.outputs[part][-1])
        is_saved = self.walk.output_until[part][-1] <= np.arange(first, behind)
        above = self.walk.backward[part] + output
        above[-1] = self.walk.last_held[part][-1]
        backward = self._before[1:][part] + above + output * ~is_saved + self.pinned[part]
        forward = self._before[:-1][part] + self.walk.forward[part]
        waits = output + int(self.pinned[part].max())
        return int(max(backward.max(), forward.max() + waits)) - self.saved_before(first)

    def swapped(self, first: int, behind: int, min_bytes: int) -> int:
        """What it saves in storages that are large enough."""
        own = [cost.saved for cost in self.layers[first - self.start : behind - self.start]]
        keepers = self.walk.keepers.items()
        maps = [self.walk.sizes[root] for root, layer in keepers if first <= layer < behind]
        return sum(size for size in (*own, *maps) if size >= min_bytes)

    def may_checkpoint(self, first: int, behind: int) -> bool:
        """Whether nobody else has a part in what it makes, and its input stays as it was."""
        layers = self.layers[first - self.start : behind - self.start]
        if any(isinstance(cost.layer, Stash | Pop) for cost in layers):
            return False
        return not (isinstance(layers[0].layer, Activation) and layers[0].in_place)

    def needs(self, first: int, behind: int, root: int) -> bool:
        """Whether its backward needs the map that comes in."""
        roots = self.walk.roots
        return any(
            (cost.keeps_input and roots[layer - self.start] == root)
            or (cost.keeps_output and roots[layer + 1 - self.start] == root)
            for layer, cost in enumerate(self.layers, self.start)
            if first <= layer < behind
        )


def _of_skips(
    skips: Sequence[Skip], start: int, stop: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Gradients of skips that wait during each layer's backward, and maps during its forward.

    Gradients wait from the pop's backward to the stash's, or for the whole block where one of the
    two is elsewhere; maps of other partitions' stashes wait for their pop.
    """
    pinned = np.zeros(stop - start, np.int64)
    popping = np.zeros(stop - start, np.int64)
    for skip in skips:
        stash, pop = skip.stash - start, skip.pop - start
        if start <= skip.pop < stop:
            pinned[max(stash, 0) : pop] += skip.gradient
            if stash < 0:
                popping[: pop + 1] += skip.map_bytes
        elif start <= skip.stash < stop:
            pinned[stash:] += skip.map_bytes
    return pinned, popping
