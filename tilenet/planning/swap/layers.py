"""Bytes that each layer of a partition saves for backward, its seconds and its peaks."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from tilenet.planning.memory.layer_cost import LayerBytes
from tilenet.planning.memory.skips import find_skips
from tilenet.planning.memory.walk import Walk
from tilenet.planning.time.layer_time import LayerTime

NO_LAYER = 1 << 30  # as a number, beyond that of any layer


@dataclass(frozen=True)
class SavingLayer:
    """A layer that keeps or swaps its saved tensors; figures are those of one micro-batch.

    Attributes:
        saved_bytes: Bytes that stay for backward where it keeps; a map counts at the first layer
            that keeps it.
        swapped_bytes: Part of these in storages that are large enough to be swapped.
        forward_bytes: Peak of forward, above the bytes that the layers before leave if all keep.
        backward_bytes: Peak of backward, above the same bytes; `saved_bytes` is included.
        input_bytes: Bytes of the input map; 0 where it is saved and too small to be swapped.
        input_keeper: Number of the layer that counts the input among its saved bytes; the
            partition's first is 0.
        needs_input: Whether backward needs the input.
        weight_bytes: Bytes of the gradients of its weights.
        between_bytes: Of the last layer, bytes of its gradient, and of the gradients of skips of
            the micro-batch before, which may leave to other partitions only after that has come.
        held: Numbers of the stashes before that hold their input while this layer runs forward:
            their pops come later.
    """

    forward_s: float
    backward_s: float
    saved_bytes: int
    swapped_bytes: int
    forward_bytes: int
    backward_bytes: int
    input_bytes: int = 0
    input_keeper: int = NO_LAYER
    needs_input: bool = False
    weight_bytes: int = 0
    between_bytes: int = 0
    held: tuple[int, ...] = ()


def saving_layers(
    costs: Sequence[LayerBytes], times: Sequence[LayerTime], start: int, stop: int, min_bytes: int
) -> tuple[SavingLayer, ...]:
    """The layers [start, stop).

    With all kept, their peak is `partition_bytes(…).activations` without checkpointing. Maps that
    come over the boundary are not included: `partition_bytes(…).inputs` counts them, and they stay.

    Args:
        costs: Costs of the whole network, from `layer_bytes`.
        times: Seconds of each layer of the whole network.
        min_bytes: Smaller storages are not swapped.
    """
    # The input may not be overwritten: it is of another partition, or one of several images.
    walk = Walk.along(costs, start, copied=True)
    block, count = [costs[start].first or costs[start], *costs[start + 1 : stop]], stop - start
    pinned, popping, pops = _skips(costs, start, stop)
    leaving = [s.gradient for s in find_skips(costs) if s.stash < start <= s.pop < stop]
    backward = walk.saved[:count] + walk.backward[:count] + pinned
    backward[-1] += walk.last[count - 1] - walk.backward[count - 1]
    layers = []
    for number, (cost, (root, out_root)) in enumerate(
        zip(block, pairwise(walk.roots[: count + 1]), strict=True)
    ):
        size, keeper = walk.sizes[root], walk.keepers.get(root, stop) - start
        saves = [walk.sizes[map_] for map_, by in walk.keepers.items() if by - start == number]
        layers.append(
            SavingLayer(
                times[start + number].forward_s,
                times[start + number].backward_s,
                saved_bytes=int(walk.saved[number]),
                swapped_bytes=sum(part for part in [cost.saved, *saves] if part >= min_bytes),
                forward_bytes=int(walk.forward[number] + popping[number]),
                backward_bytes=int(backward[number]),
                input_bytes=size if size >= min_bytes or keeper >= count else 0,
                input_keeper=keeper if keeper < count else NO_LAYER,
                needs_input=cost.keeps_input or (cost.keeps_output and out_root == root),
                weight_bytes=cost.parameters,
                between_bytes=(sum(leaving) + cost.output) * (number == count - 1),
                held=tuple(n for n, pop in pops.items() if n < number - 1 and number <= pop),
            )
        )
    return tuple(layers)


def _skips(
    costs: Sequence[LayerBytes], start: int, stop: int
) -> tuple[NDArray[np.int64], NDArray[np.int64], dict[int, int]]:
    """Return the bytes that skips add to the layers [start, stop).

    Gradients wait from the pop's backward to the stash's, or for the whole partition where one of
    the two is elsewhere; maps of other partitions' stashes wait for their pop, and maps that are
    popped elsewhere until this partition is done.

    Returns:
        Bytes that wait during each layer's backward, bytes that wait during its forward, and the
        pop of each stash, or the partition's end before it; layers are counted from `start`.
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
            pinned[stash + 1 :] += skip.map_bytes
            pops[stash] = stop - start
    return pinned, popping, pops
