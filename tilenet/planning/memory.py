"""Predict the bytes that a network needs.

A partition under GPipe holds, for m micro-batches,

    M = parameters + gradients + optimizer states
        + m·(boundary input + skips that come from other partitions)
        + activations of one micro-batch, transients among them
        + min(m, b − a + 1)·(gradients of skips stashed in partition a = this one, popped in b)

and without checkpointing what all micro-batches have saved. The activations are put together from
`layer_bytes`, layer by layer, as autograd makes and frees them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from tilenet.geometry.layers import Layer, Pop, Stash
from tilenet.geometry.shapes import map_shapes
from tilenet.planning.layer_bytes import LayerBytes

__all__ = ["PartitionBytes", "block_bytes", "inference_bytes", "partition_bytes"]


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
            stashed[layer.name] = after.num_elements
        elif isinstance(layer, Pop) and (before.rows, before.cols) != (after.rows, after.cols):
            padded = after.rows * after.cols * layer.in_channels
        most = max(most, before.num_elements + padded + after.num_elements + sum(stashed.values()))
        if isinstance(layer, Pop):
            del stashed[layer.name]
    return most * item_bytes


Checkpointing = Literal["always", "except_last", "never"]
OPTIMIZER_STATES = {"adamw": 2, "sgd-momentum": 1, "sgd": 0}


@dataclass(frozen=True)
class PartitionBytes:
    """Most bytes that a partition's device holds during a training step, by what they are.

    Attributes:
        parameters: Trained values and running statistics.
        gradients: The flat buffer.
        optimizer: Its states.
        inputs: What comes over the boundary, of all micro-batches that keep it.
        skips: Maps popped here that come from other partitions, likewise.
        activations: What lives for backward, and the highest transient on top of it.
        skip_gradients: Gradients that wait here for the backward of a stash.
        outputs: Logits, of all micro-batches; only on the last partition.
        loss: What the loss adds; only on the last partition.
        step: Transients of the optimizer's step, when all but the first three are gone.
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
    step: int

    @property
    def total(self) -> int:
        """The peak."""
        work = self.inputs + self.skips + self.activations
        work += self.skip_gradients + self.outputs + self.loss
        return self.parameters + self.gradients + self.optimizer + max(work, self.step)


def partition_bytes(
    costs: Sequence[LayerBytes],
    balance: Sequence[int],
    micro_batches: int,
    checkpointing: Checkpointing,
    optimizer: str = "adamw",
) -> tuple[PartitionBytes, ...]:
    """Bytes that each partition needs on its device, without a reserve.

    Micro-batches are alike. Where partitions lie on one device, their bytes add up. `except_last`
    has the peak of `always`.

    Args:
        costs: From `layer_bytes`.
        optimizer: `adamw`, `sgd-momentum` or `sgd`.
    """
    ends = np.cumsum(balance)
    place = np.repeat(np.arange(len(balance)), balance)
    many = micro_batches
    skips = _skips(costs)
    found = []
    for j, (size, stop) in enumerate(zip(balance, ends, strict=True)):
        start = int(stop) - size
        block = _blocks_from(costs, skips, start, many, checkpointing)
        waiting = sum(
            min(many, int(place[skip.pop] - j) + 1) * skip.map_bytes
            for skip in skips
            if start <= skip.stash < stop <= skip.pop
        )
        fixed = _fixed(costs[start:stop], optimizer)
        at = int(stop) - start - 1
        found.append(
            PartitionBytes(
                *fixed[:3],
                inputs=int(block["inputs"][at]),
                skips=int(block["skips"][at]),
                activations=int(block["activations"][at]),
                skip_gradients=waiting,
                outputs=int(block["outputs"][at]),
                loss=int(block["loss"][at]),
                step=fixed[3],
            )
        )
    return tuple(found)


def block_bytes(
    costs: Sequence[LayerBytes],
    micro_batches: int,
    checkpointing: Checkpointing,
    optimizer: str = "adamw",
    num_partitions: int | None = None,
) -> NDArray[np.float64]:
    """Bytes of each partition that could be: entry (a, b) is that of the layers a to b − 1.

    Equals `partition_bytes(…).total`, but for blocks whose stashes are popped outside of them: how
    many of those gradients wait depends on the partitions between, and the most that
    `num_partitions` allow is taken.

    Returns:
        Shape (n + 1, n + 1); 0 where b ≤ a.
    """
    count = len(costs)
    skips = _skips(costs)
    found = np.zeros((count + 1, count + 1))
    stops = np.arange(1, count + 1)
    item_states = 2 + OPTIMIZER_STATES[optimizer]
    parameters = np.array([cost.parameters for cost in costs])
    buffers = np.array([cost.buffers for cost in costs])
    steps = np.array([_step_bytes(cost, optimizer) for cost in costs])
    for start in range(count):
        block = _blocks_from(costs, skips, start, micro_batches, checkpointing)
        work = sum(block.values())
        for skip in skips:
            if skip.stash >= start:
                between = num_partitions or micro_batches
                outside = (stops[start:] > skip.stash) & (stops[start:] <= skip.pop)
                work = work + outside * min(micro_batches, between) * skip.map_bytes
        fixed = np.cumsum(parameters[start:] * item_states + buffers[start:])
        step = np.maximum.accumulate(steps[start:])
        found[start, start + 1 :] = fixed + np.maximum(work, step)
    return found


@dataclass(frozen=True)
class _Skip:
    stash: int
    pop: int
    map_bytes: int
    gradient: int


def _skips(costs: Sequence[LayerBytes]) -> list[_Skip]:
    stashes: dict[str, int] = {}
    found = []
    for index, cost in enumerate(costs):
        if isinstance(cost.layer, Stash):
            stashes[cost.layer.name] = index
        elif isinstance(cost.layer, Pop):
            stash = stashes[cost.layer.name]
            found.append(_Skip(stash, index, costs[stash].input, cost.skip_gradient))
    return found


def _fixed(costs: Sequence[LayerBytes], optimizer: str) -> tuple[int, int, int, int]:
    """Bytes of parameters, gradients and optimizer, and of the optimizer's transients."""
    parameters = sum(cost.parameters for cost in costs)
    buffers = sum(cost.buffers for cost in costs)
    step = max(_step_bytes(cost, optimizer) for cost in costs)
    return parameters + buffers, parameters, parameters * OPTIMIZER_STATES[optimizer], step


def _step_bytes(cost: LayerBytes, optimizer: str) -> int:
    # AdamW makes two temporaries (the square root, and its quotient), parameter by parameter.
    return 2 * cost.parameters if optimizer == "adamw" else 0


def _blocks_from(
    costs: Sequence[LayerBytes],
    skips: Sequence[_Skip],
    start: int,
    many: int,
    checkpointing: Checkpointing,
) -> dict[str, NDArray[np.int64]]:
    """Terms of the blocks [start, b) for b = start + 1, …, n: arrays of that length."""
    walk = _Walk.along(costs, start)
    count = len(costs) - start
    stops = np.arange(start + 1, len(costs) + 1)
    layers = np.arange(start, len(costs))
    outputs = walk.outputs
    before = np.concatenate([[0], np.cumsum(walk.saved)])
    # Gradients of skips wait from the pop's backward to the stash's (to the block's end, where the
    # stash is elsewhere: the portal holds them).
    pinned = np.zeros((count, count), np.int64)
    for skip in skips:
        waits = (layers >= skip.stash) & (layers < skip.pop)
        pinned += skip.gradient * np.outer(waits, stops > skip.pop)
    forward = before[:-1] + walk.forward
    backward = (before[1:] + walk.backward)[:, None] + pinned
    last = before[1:] + (walk.last_held if checkpointing != "never" else walk.last)
    inside = layers[:, None] < stops[None, :] - 1
    if checkpointing != "never":
        # The recomputed output and its gradient are held until the block is done.
        held = walk.output_until[None, :] > layers[:, None]
        backward = backward + walk.gradients[None, :] + held * outputs[None, :]
        last = last + (walk.output_until > layers) * outputs
    backward = np.where(inside, backward, 0).max(axis=0)
    peak = np.maximum(np.maximum.accumulate(forward), np.maximum(backward, last))
    if checkpointing != "never":
        peak = np.maximum(peak, np.maximum.accumulate(forward) + walk.gradients)
    external = np.zeros(count, np.int64)
    for skip in skips:
        if skip.stash < start <= skip.pop:
            external += (stops > skip.pop) * skip.map_bytes
    kept = many if checkpointing != "never" or start == 0 else None
    inputs = np.full(count, costs[start].input)
    inputs = inputs * (np.where(walk.input_from < stops, many, 1) if kept is None else many)
    is_last = stops == len(costs)
    terms = {
        "inputs": inputs,
        # Without checkpointing a skip is needed until it is concatenated.
        "skips": external * (many if checkpointing != "never" else 1),
        "activations": peak + (before[1:] * (many - 1) if checkpointing == "never" else 0),
        "outputs": is_last * outputs * many,
    }
    terms["loss"] = is_last * _loss_bytes(costs[-1], many, int(terms["activations"][-1]))
    return terms


def _loss_bytes(head: LayerBytes, many: int, activations: int) -> int:
    """What the loss adds to `activations`: gradients of all logits, or its own transients."""
    labels = head.output // head.layer.out_channels * 2
    whole = head.output
    return many * labels + max((many - 1) * head.output, (many + 3) * whole - activations)


@dataclass(frozen=True)
class _Walk:
    """A walk over the layers from the first of a block on; arrays over the layers.

    Attributes:
        saved: What each layer leaves for backward; a map counts at the first layer that keeps it.
        forward: Most bytes in forward, above what the layers before have saved.
        backward: Most bytes in backward, above what layers up to this one have saved, without
            the gradients of skips.
        last: The same, as the block's last layer.
        last_held: The same, with the gradient held by the caller.
        outputs: The layer's output.
        output_until: Up to which layer's backward the output lives that is saved anyway.
        gradients: Of the layer's output.
        input_from: First layer that keeps the block's input (n: none does).
    """

    saved: NDArray[np.int64]
    forward: NDArray[np.int64]
    backward: NDArray[np.int64]
    last: NDArray[np.int64]
    last_held: NDArray[np.int64]
    outputs: NDArray[np.int64]
    output_until: NDArray[np.int64]
    gradients: NDArray[np.int64]
    input_from: int

    @classmethod
    def along(cls, costs: Sequence[LayerBytes], start: int) -> "_Walk":
        count = len(costs)
        block = [costs[start].first or costs[start], *costs[start + 1 :]]
        # Which map each layer's input lies in: in-place layers and stashes hand theirs on.
        roots = [start]
        sizes = {start: 0}  # the block's input counts elsewhere
        keeper: dict[int, int] = {}
        for index, cost in enumerate(block, start):
            if cost.keeps_input:
                keeper.setdefault(roots[-1], index)
            if cost.in_place:
                roots.append(roots[-1])
            else:
                roots.append(index + 1)
                sizes[index + 1] = cost.output
            if cost.keeps_output:
                keeper.setdefault(roots[-1], index)
        saved = [cost.saved for cost in block]
        for root, index in keeper.items():
            saved[index - start] += sizes[root]
        forward, backward, last, last_held, until = [], [], [], [], []
        for index, cost in enumerate(block, start):
            root = roots[index - start]
            kept = keeper.get(root, count)
            forward.append(cost.forward + (sizes[root] if kept >= index else 0))
            held = kept < index or root == start
            grows = cost.input if isinstance(cost.layer, Stash) else 0
            behind = block[index - start + 1] if index + 1 < count else None
            shared = behind is not None and behind.shares_gradient
            given = cost.output if behind is None else behind.gradient
            inner = cost.backward[2 + held] if shared else cost.backward[held] + given
            backward.append(inner + grows)
            last.append(cost.backward[held] + cost.output + grows)
            last_held.append(cost.backward[2 + held] + cost.output + grows)
            out_root = roots[index - start + 1]
            until.append(keeper.get(out_root, count) if out_root != start else -1)
        return cls(
            np.array(saved),
            np.array(forward),
            np.array(backward),
            np.array(last),
            np.array(last_held),
            np.array([cost.output for cost in block]),
            np.array(until),
            np.array([cost.output for cost in block]),
            keeper.get(start, count),
        )
