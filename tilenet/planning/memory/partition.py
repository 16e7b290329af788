"""Predict the bytes that a network needs.

A partition under GPipe holds, for m micro-batches,

    M = parameters + gradients + optimizer states
        + m·boundary input + (m − 1)·skips that come from other partitions
        + activations of one micro-batch, its own skips, skips' gradients and transients among them
        + (min(m, b − a + 1) − 1)·(gradients of skips stashed in a = this one, popped in b)

and without checkpointing what all micro-batches have saved. With stores (`pipeline.host_store`)
the second line has two boundary inputs at most, and no skips. The activations are put together from
`layer_bytes`, layer by layer, as autograd makes and frees them.

Put the costs of single layers together: what consecutive layers hold at their peak.

Forward makes the maps that backward needs, and backward frees them in reverse; a map that several
layers keep counts once, at the first that keeps it. All blocks with the same first layer are
computed at one time, since a planner asks for all of them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from tilenet.geometry.layers import Join, Layer, Stash
from tilenet.geometry.maps import map_shapes
from tilenet.model.choices import Checkpointing
from tilenet.planning.memory.layer import LayerBytes
from tilenet.planning.memory.states import state_bytes, states_kept

__all__ = [
    "PartitionBytes", "Skip", "Walk", "block_bytes", "blocks_from", "find_skips",
    "inference_bytes", "partition_bytes",
]  # fmt: skip


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


def blocks_from(
    costs: Sequence[LayerBytes],
    start: int,
    micro_batches: int,
    checkpointing: Checkpointing,
    stored: bool = False,
) -> dict[str, NDArray[np.int64]]:
    """Terms of the blocks [start, b) for b = start + 1, …, n: arrays of that length.

    Args:
        stored: Under checkpointing, inputs and skips of micro-batches that wait are on the host,
            but for the next input, which is fetched ahead.
    """
    again = checkpointing != "never"
    stored = stored and again
    # A tuple is what a planner asks about again and again, with other numbers of micro-batches.
    alone = _cached_alone if isinstance(costs, tuple) else _alone
    block = alone(_Same(costs), start, start > 0 or micro_batches > 1, again)
    before, peak, stops = block.before, block.peak, block.stops
    num_inputs = np.where((block.input_from < stops) | again | (start == 0), micro_batches, 1)
    if stored and start > 0:  # images wait where they are
        num_inputs = np.minimum(num_inputs, 2)
    earlier = before[1:] * (0 if again else micro_batches - 1)
    is_last = stops == len(costs)
    # While the loss is taken only what was not checkpointed is there.
    idle = 0 if checkpointing == "always" else int(before[-1])
    return {
        "inputs": num_inputs * costs[start].input,
        "skips": block.incoming * (micro_batches - 1 if again and not stored else 0),
        "activations": peak + earlier,
        "outputs": is_last * _softmax_bytes(costs[-1]),
        "loss": is_last * _loss_bytes(costs[-1], micro_batches, int(peak[-1]) - idle),
    }


class _Same:
    """Costs that are equal where they are one object: a key that need not look into them."""

    def __init__(self, costs: Sequence[LayerBytes]) -> None:
        self.costs = costs

    def __hash__(self) -> int:
        return id(self.costs)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self.costs is other.costs


@dataclass(frozen=True)
class _Alone:
    """The blocks that begin with one layer, whatever the micro-batches; arrays over their ends.

    Attributes:
        stops: Number of the layer behind each block.
        before: Bytes that the layers before each have saved, and all of them.
        peak: Most bytes of the micro-batch under way.
        incoming: Maps popped in the block that come from other partitions.
        input_from: First layer that keeps the block's input.
    """

    stops: NDArray[np.int64]
    before: NDArray[np.int64]
    peak: NDArray[np.int64]
    incoming: NDArray[np.int64]
    input_from: int


def _alone(same: _Same, start: int, copied: bool, again: bool) -> _Alone:
    """Walk over the blocks from `start` on.

    Args:
        copied: Whether the block's input may not be written into.
        again: Whether activations are computed again in backward.
    """
    costs = same.costs
    walk = Walk.along(costs, start, copied)
    count = len(costs) - start
    stops = np.arange(start + 1, len(costs) + 1)
    layers = np.arange(start, len(costs))
    before = np.concatenate([[0], np.cumsum(walk.saved)])
    # Gradients of skips wait from the pop's backward to the stash's, or to the block's end where
    # the stash is elsewhere: the portal holds them.
    pinned = np.zeros((count, count), np.int64)
    popping = np.zeros((count, count), np.int64)
    incoming = np.zeros(count, np.int64)
    arrived = np.zeros(count, np.int64)
    for skip in find_skips(costs):
        waits = (layers >= skip.stash) & (layers < skip.pop)
        inner = stops > skip.pop
        if again and skip.gradient == costs[skip.pop].output:
            inner = stops > skip.pop + 1  # as the last layer's gradient, the block holds it anyway
        pinned += skip.gradient * np.outer(waits, inner)
        if skip.stash < start <= skip.pop:
            # This micro-batch's own goes as soon as it is concatenated.
            popping += skip.map_bytes * np.outer(layers <= skip.pop, stops > skip.pop)
            incoming += skip.map_bytes * (stops > skip.pop)
        if skip.stash >= start:
            outer = (stops > skip.stash) & (stops <= skip.pop)
            pinned += skip.map_bytes * np.outer(layers >= skip.stash, outer)
            arrived += skip.map_bytes * outer
    reached = layers[:, None] < stops[None, :]
    forward = (before[:-1] + walk.forward + walk.waiting)[:, None] + popping
    forward = np.where(reached, forward, 0).max(axis=0)
    backward = (before[1:] + walk.backward)[:, None] + pinned
    last = before[1:] + (walk.last_held if again else walk.last)
    last = last + np.diagonal(pinned)
    inside = layers[:, None] < stops[None, :] - 1
    if again:
        # The recomputed output and its gradient are held until the block is done; skips' gradients
        # are there before recomputation begins.
        held = walk.output_until[None, :] > layers[:, None]
        backward = backward + walk.outputs[None, :] + held * walk.outputs[None, :]
        last = last + (walk.output_until > layers) * walk.outputs
        forward = forward + walk.outputs + arrived
    backward = np.where(inside, backward, 0).max(axis=0)
    peak = np.maximum(forward, np.maximum(backward, last))
    return _Alone(stops, before, peak, incoming, walk.input_from)


_cached_alone = lru_cache(maxsize=8192)(_alone)


def _loss_bytes(head: LayerBytes, micro_batches: int, transients: int) -> int:
    """What the loss adds: labels, and gradients of all logits or, where more, its own transients.

    The logits of each micro-batch go as its loss is taken, and its softmax stays instead; backward
    runs through all losses first, so that the gradients of all logits wait for the pipeline.
    """
    softmax = _softmax_bytes(head)
    labels = head.elements // head.layer.out_channels * 8
    waiting = (micro_batches - 1) * head.output
    return micro_batches * labels + max(waiting, (micro_batches + 2) * softmax - transients)


def _softmax_bytes(head: LayerBytes) -> int:
    """Bytes of one micro-batch, in the parameters' dtype, which the loss is taken in."""
    return head.elements * max(4, head.output // head.elements)


@dataclass(frozen=True)
class Walk:
    """A walk over the layers from the first of a block on; arrays over the layers.

    Attributes:
        saved: Bytes that each layer leaves for backward, a map at the first layer that keeps it.
        forward: Most bytes in forward, above what the layers before have saved.
        waiting: Stashed maps, besides, that no layer has saved and that wait for their pop.
        backward: Most bytes in backward, above what layers up to this one have saved, without
            the gradients of skips.
        last: The same, as the block's last layer.
        last_held: The same, with the gradient held by the caller.
        outputs: The layer's output.
        output_until: Last layer in whose backward the output lives, since it is saved anyway.
        input_from: First layer that keeps the block's input (n: no layer does).
        roots: Map that each layer's input lies in, and the last one's output: the number of the
            layer whose input it is first.
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


def inference_bytes(layers: tuple[Layer, ...], height: int, width: int, item_bytes: int) -> int:
    """Most bytes of feature maps that live at one time while one image runs forward.

    Counted are a layer's input and output, and the stashed maps; not the convolution's workspace.
    """
    shapes = map_shapes(layers, height, width)
    stashed: dict[str, int] = {}
    most = 0
    for layer, before, after in zip(layers, shapes, shapes[1:], strict=False):
        padded = 0
        if isinstance(layer, Stash):
            stashed[layer.name] = 0 if layer.sizes else after.num_elements
        elif layer.names and (before.rows, before.cols) != (after.rows, after.cols):
            padded = after.rows * after.cols * layer.in_channels
        most = max(most, before.num_elements + padded + after.num_elements + sum(stashed.values()))
        for name in layer.names:
            del stashed[name]
    return most * item_bytes


@dataclass(frozen=True)
class PartitionBytes:
    """Most bytes that a partition's device holds during a training step, by what they are.

    Attributes:
        parameters: Trained values and running statistics.
        gradients: The flat buffer.
        optimizer: States of the optimizer, and the average of weights.
        inputs: Maps that come over the boundary, of all micro-batches that keep them.
        skips: Maps popped here that come from other partitions, of the micro-batches that wait.
        activations: Tensors that live for backward, and the highest transient on top of them.
        skip_gradients: Gradients that wait here for the backward of a stash.
        outputs: Logits of one micro-batch; only on the last partition.
        loss: Labels, and the logits' gradients of the others; only on the last partition.
    """

    parameters: int
    gradients: int
    optimizer: int
    inputs: int
    skips: int
    activations: int
    skip_gradients: int
    outputs: int
    loss: int

    @property
    def fixed(self) -> int:
        """All but the activations."""
        work = self.inputs + self.skips + self.skip_gradients + self.outputs + self.loss
        return self.parameters + self.gradients + self.optimizer + work

    @property
    def total(self) -> int:
        """The peak."""
        return self.fixed + self.activations


def partition_bytes(
    costs: Sequence[LayerBytes],
    balance: Sequence[int],
    micro_batches: int,
    checkpointing: Checkpointing,
    optimizer: str = "adamw",
    stored: bool = False,
    sharers: int = 1,
) -> tuple[PartitionBytes, ...]:
    """Bytes that each partition needs on its device, without a reserve.

    Micro-batches are alike. `except_last` has the peak of `always`.

    Args:
        costs: Costs of the layers, from `layer_bytes`.
        optimizer: `adamw`, `sgd-momentum` or `sgd`.
        stored: Skips between partitions and inputs of checkpoints wait on the host.
        sharers: Ranks that share out the optimizer's states.
    """
    ends = np.cumsum(balance)
    place = np.repeat(np.arange(len(balance)), balance)
    skips = find_skips(costs)
    parts = []
    for j, (size, stop) in enumerate(zip(balance, ends, strict=True)):
        start = int(stop) - size
        block = blocks_from(costs, start, micro_batches, checkpointing, stored)
        waiting = sum(
            _waiting_gradients(micro_batches, int(place[skip.pop] - j)) * skip.map_bytes
            for skip in skips
            if start <= skip.stash < stop <= skip.pop
        )
        at = int(stop) - start - 1
        parts.append(
            PartitionBytes(
                *_fixed(costs[start:stop], optimizer, sharers),
                inputs=int(block["inputs"][at]),
                skips=int(block["skips"][at]),
                activations=int(block["activations"][at]),
                skip_gradients=waiting,
                outputs=int(block["outputs"][at]),
                loss=int(block["loss"][at]),
            )
        )
    return tuple(parts)


def block_bytes(
    costs: Sequence[LayerBytes],
    micro_batches: int,
    checkpointing: Checkpointing,
    optimizer: str = "adamw",
    num_partitions: int | None = None,
    stored: bool = False,
    sharers: int = 1,
) -> NDArray[np.float64]:
    """Bytes of each partition that could be: entry (a, b) is that of the layers a to b − 1.

    Equals `partition_bytes(…).total`, but for blocks whose stashes are popped outside of them: how
    many of those gradients wait depends on the partitions between, and the most that
    `num_partitions` allow is taken.

    Returns:
        Shape (n + 1, n + 1); 0 where b ≤ a.
    """
    count = len(costs)
    skips = find_skips(costs)
    num_bytes = np.zeros((count + 1, count + 1))
    stops = np.arange(1, count + 1)
    parameters = np.array([cost.parameters for cost in costs])
    buffers = np.array([cost.buffers for cost in costs])
    for start in range(count):
        block = blocks_from(costs, start, micro_batches, checkpointing, stored)
        work = sum(block.values())
        for skip in skips:
            if skip.stash >= start:
                far = _waiting_gradients(micro_batches, (num_partitions or count) - 1)
                outside = (stops[start:] > skip.stash) & (stops[start:] <= skip.pop)
                work = work + outside * far * skip.map_bytes
        weights = np.cumsum(parameters[start:])
        fixed = 2 * weights + np.cumsum(buffers[start:])
        shared, whole = states_kept(optimizer)
        states = shared * -(-weights // sharers) + whole * weights
        num_bytes[start, start + 1 :] = fixed + states + work
    return num_bytes


def _waiting_gradients(micro_batches: int, distance: int) -> int:
    """Micro-batches, besides the one under way, whose skip gradient waits for the stash.

    The partition that pops is `distance` partitions ahead in backward.
    """
    return min(micro_batches, distance + 1) - 1


def _fixed(costs: Sequence[LayerBytes], optimizer: str, sharers: int) -> tuple[int, int, int]:
    """Bytes of parameters and running statistics, of gradients, and of the optimizer's states."""
    parameters = sum(cost.parameters for cost in costs)
    buffers = sum(cost.buffers for cost in costs)
    return parameters + buffers, parameters, state_bytes(optimizer, parameters, sharers)
