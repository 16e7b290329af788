"""Layer groups of a partition, and what each one's seconds and bytes are.

A group is a convolution with what follows it (norm, dropout, activation), so that an activation,
which writes over its input, is computed again together with what made that. Stashes and pops stand
alone: they are not computed again, since their maps belong to others, too.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import numpy as np
from numpy.typing import NDArray

from tilenet.geometry.layers import (
    Activation,
    Conv,
    GlobalPool,
    Layer,
    Pool,
    Stash,
    TransposedConv,
    Upsample,
)
from tilenet.parallel.pipeline.layer_times import LayerTime
from tilenet.planning.memory.layer import LayerBytes
from tilenet.planning.memory.partition import Walk, find_skips

__all__ = ["LayerGroup", "group_sizes", "layer_groups"]


@dataclass(frozen=True)
class LayerGroup:
    """Consecutive layers that share one action; figures are those of one micro-batch.

    Attributes:
        forward_s: Seconds of forward.
        backward_s: Seconds of backward.
        input_bytes: Bytes of the input map, which stays where the group is computed again.
        saved_bytes: Bytes that stay for backward where the group keeps; a map counts at the first
            group that keeps it.
        swapped_bytes: Part of these in storages that are large enough to be swapped.
        forward_bytes: Peak of forward, above what the groups before have left when all keep.
        backward_bytes: Peak of backward, above the same; `saved_bytes` is included.
        may_checkpoint: Whether it may be computed again.
        again_bytes: Peak from its recomputation to the end of its backward, above the same, where
            this is more than the two others.
        input_from: Distance to the earlier group whose saved bytes include this one's input; 0:
            there is no such group.
        needs_input: Whether backward needs the input even when the group keeps.
        may_swap_input: Whether the input is large enough to be swapped.
        held_groups: Number of following groups that run forward while the input is held, from a
            stash to its pop.
    """

    forward_s: float
    backward_s: float
    input_bytes: int
    saved_bytes: int
    swapped_bytes: int
    forward_bytes: int
    backward_bytes: int
    may_checkpoint: bool = True
    again_bytes: int = 0
    input_from: int = 0
    needs_input: bool = False
    may_swap_input: bool = True
    held_groups: int = 0


def group_sizes(layers: Sequence[Layer]) -> tuple[int, ...]:
    """Number of layers in each group of a partition."""
    sizes: list[int] = []
    alone = True
    for layer in layers:
        starts = isinstance(layer, Conv | TransposedConv | Pool | Upsample | GlobalPool | Stash)
        if alone or starts or layer.names:
            sizes.append(1)
        else:
            sizes[-1] += 1
        alone = isinstance(layer, Stash) or bool(layer.names)
    return tuple(sizes)


def layer_groups(
    costs: Sequence[LayerBytes], times: Sequence[LayerTime], start: int, stop: int, min_bytes: int
) -> tuple[LayerGroup, ...]:
    """The groups of the layers [start, stop).

    With all kept, their peak is `partition_bytes(…).activations` without checkpointing. What comes
    over the boundary is not included: `partition_bytes(…).inputs` counts it, and it stays.

    Args:
        costs: Of the whole network, from `layer_bytes`.
        times: Seconds of each layer of the whole network.
        min_bytes: Smaller storages are not swapped.
    """
    # What comes in is somebody else's, or one of several micro-batches: it may not be overwritten.
    walk = Walk.along(costs, start, copied=True)
    layers = [costs[start].first or costs[start], *costs[start + 1 : stop]]
    own, count, roots = times[start:stop], stop - start, walk.roots
    pinned, popping, pops = _skips(costs, start, stop)
    before = np.concatenate([[0], np.cumsum(walk.saved[:count])])
    forward = before[:-1] + walk.forward[:count]
    backward = before[1:] + walk.backward[:count] + pinned
    backward[-1] += walk.last[count - 1] - walk.backward[count - 1]
    at_end = before[1:] + walk.last_held[:count] + pinned
    edges = list(accumulate(group_sizes([cost.layer for cost in costs[start:stop]]), initial=0))
    group_of = np.repeat(np.arange(len(edges) - 1), np.diff(edges))
    found = []
    for number, (first, behind) in enumerate(pairwise(edges)):
        part, last = slice(first, behind), behind - 1
        root, output = roots[first], int(walk.outputs[last])
        keeper = walk.keepers.get(root, stop) - start
        input_bytes = walk.sizes[root]
        if root == start > 0 and keeper >= count:  # kept only where the group is computed again
            input_bytes = costs[start].input
        saves = [cost.saved for cost in layers[part]]
        saves += [walk.sizes[r] for r, by in walk.keepers.items() if first <= by - start < behind]
        # The recomputed output and its gradient are held until the group's backward is done.
        lives = walk.output_until[last] > np.arange(start + first, start + behind)
        again = np.append(backward[first:last] + output, at_end[last]) + output * lives
        forward_again = forward[part].max() + output + pinned[part].max()
        saved = int(before[first])
        found.append(
            LayerGroup(
                forward_s=sum(time.forward_s for time in own[part]),
                backward_s=sum(time.backward_s for time in own[part]),
                input_bytes=input_bytes,
                saved_bytes=int(before[behind]) - saved,
                swapped_bytes=sum(size for size in saves if size >= min_bytes),
                forward_bytes=int((forward + popping)[part].max()) - saved,
                backward_bytes=int(backward[part].max()) - saved,
                may_checkpoint=_may_checkpoint(layers[part]),
                again_bytes=int(max(again.max(), forward_again)) - saved,
                input_from=number - int(group_of[keeper]) if keeper < first else 0,
                needs_input=_needs(layers[part], roots[first : behind + 1]),
                may_swap_input=input_bytes >= max(min_bytes, 1),
                held_groups=int(group_of[pops[first]]) - number if first in pops else 0,
            )
        )
    return tuple(found)


def _needs(layers: Sequence[LayerBytes], roots: Sequence[int]) -> bool:
    """Whether backward of the layers needs the map that comes in: the first of their roots."""
    return any(
        (layer.keeps_input and before == roots[0]) or (layer.keeps_output and behind == roots[0])
        for layer, (before, behind) in zip(layers, pairwise(roots), strict=True)
    )


def _may_checkpoint(layers: Sequence[LayerBytes]) -> bool:
    """Whether nobody else has a part in what the layers make, and their input stays as it was."""
    if any(isinstance(cost.layer, Stash) or cost.layer.names for cost in layers):
        return False
    return not (isinstance(layers[0].layer, Activation) and layers[0].in_place)


def _skips(
    costs: Sequence[LayerBytes], start: int, stop: int
) -> tuple[NDArray[np.int64], NDArray[np.int64], dict[int, int]]:
    """What skips add to the layers [start, stop).

    Gradients wait from the pop's backward to the stash's, or for the whole partition where one of
    the two is elsewhere; maps of other partitions' stashes wait for their pop.

    Returns:
        Bytes that wait during each layer's backward, bytes that wait during its forward, and the
        pop of each stash whose pop is here, too; layers are counted from `start`.
    """
    pinned, popping = np.zeros((2, stop - start), np.int64)
    pops: dict[int, int] = {}
    for skip in find_skips(costs):
        stash, pop = skip.stash - start, skip.pop - start
        if start <= skip.pop < stop:
            pinned[max(stash, 0) : pop] += skip.gradient
            if stash < 0:
                popping[: pop + 1] += skip.map_bytes
            else:
                pops[stash] = pop
        elif start <= skip.stash < stop:
            pinned[stash:] += skip.map_bytes
    return pinned, popping, pops
