"""Predict the bytes that a network needs.

A partition under GPipe holds, for m micro-batches,

    M = parameters + gradients + optimizer states
        + m·boundary input + (m − 1)·skips that come from other partitions
        + activations of one micro-batch, its own skips, skips' gradients and transients among them
        + (min(m, b − a + 1) − 1)·(gradients of skips stashed in a = this one, popped in b)

and without checkpointing what all micro-batches have saved. With stores (`parallel.pipeline_store`)
the second line has two boundary inputs at most, and no skips. The activations are put together from
`layer_bytes`, layer by layer, as autograd makes and frees them.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tilenet.geometry.layers import Layer, Pop, Stash
from tilenet.geometry.shapes import map_shapes
from tilenet.planning.block_walk import Checkpointing, blocks_from, find_skips
from tilenet.planning.layer_bytes import LayerBytes

__all__ = [
    "OPTIMIZER_STATES",
    "PartitionBytes",
    "block_bytes",
    "inference_bytes",
    "partition_bytes",
]


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


OPTIMIZER_STATES = {"adamw": 2, "sgd-momentum": 1, "sgd": 0}


@dataclass(frozen=True)
class PartitionBytes:
    """Most bytes that a partition's device holds during a training step, by what they are.

    Attributes:
        parameters: Trained values and running statistics.
        gradients: The flat buffer.
        optimizer: Its states.
        inputs: What comes over the boundary, of all micro-batches that keep it.
        skips: Maps popped here that come from other partitions, of the micro-batches that wait.
        activations: What lives for backward, and the highest transient on top of it.
        skip_gradients: Gradients that wait here for the backward of a stash.
        outputs: Logits of one micro-batch; only on the last partition.
        loss: Labels, and the logits' gradients of the others; only on the last partition.
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
    stored: bool = False,
) -> tuple[PartitionBytes, ...]:
    """Bytes that each partition needs on its device, without a reserve.

    Micro-batches are alike. Where partitions lie on one device, their bytes add up. `except_last`
    has the peak of `always`.

    Args:
        costs: From `layer_bytes`.
        optimizer: `adamw`, `sgd-momentum` or `sgd`.
        stored: Skips between partitions and inputs of checkpoints wait on the host.
    """
    ends = np.cumsum(balance)
    place = np.repeat(np.arange(len(balance)), balance)
    many = micro_batches
    steps = _step_bytes(costs, optimizer)
    skips = find_skips(costs)
    found = []
    for j, (size, stop) in enumerate(zip(balance, ends, strict=True)):
        start = int(stop) - size
        block = blocks_from(costs, start, many, checkpointing, stored)
        waiting = sum(
            _others_waiting(many, int(place[skip.pop] - j)) * skip.map_bytes
            for skip in skips
            if start <= skip.stash < stop <= skip.pop
        )
        at = int(stop) - start - 1
        found.append(
            PartitionBytes(
                *_fixed(costs[start:stop], optimizer),
                inputs=int(block["inputs"][at]),
                skips=int(block["skips"][at]),
                activations=int(block["activations"][at]),
                skip_gradients=waiting,
                outputs=int(block["outputs"][at]),
                loss=int(block["loss"][at]),
                step=max(steps[start:stop]),
            )
        )
    return tuple(found)


def block_bytes(
    costs: Sequence[LayerBytes],
    micro_batches: int,
    checkpointing: Checkpointing,
    optimizer: str = "adamw",
    num_partitions: int | None = None,
    stored: bool = False,
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
    found = np.zeros((count + 1, count + 1))
    stops = np.arange(1, count + 1)
    item_states = 2 + OPTIMIZER_STATES[optimizer]
    parameters = np.array([cost.parameters for cost in costs])
    buffers = np.array([cost.buffers for cost in costs])
    steps = np.array(_step_bytes(costs, optimizer))
    for start in range(count):
        block = blocks_from(costs, start, micro_batches, checkpointing, stored)
        work = sum(block.values())
        for skip in skips:
            if skip.stash >= start:
                far = _others_waiting(micro_batches, (num_partitions or count) - 1)
                outside = (stops[start:] > skip.stash) & (stops[start:] <= skip.pop)
                work = work + outside * far * skip.map_bytes
        fixed = np.cumsum(parameters[start:] * item_states + buffers[start:])
        step = np.maximum.accumulate(steps[start:])
        found[start, start + 1 :] = fixed + np.maximum(work, step)
    return found


def _others_waiting(many: int, distance: int) -> int:
    """Micro-batches, beside the one under way, whose skip gradient waits for the stash.

    The partition that pops is `distance` partitions ahead in backward.
    """
    return min(many, distance + 1) - 1


def _fixed(costs: Sequence[LayerBytes], optimizer: str) -> tuple[int, int, int]:
    """Bytes of parameters and running statistics, of gradients, and of the optimizer's states."""
    parameters = sum(cost.parameters for cost in costs)
    buffers = sum(cost.buffers for cost in costs)
    return parameters + buffers, parameters, parameters * OPTIMIZER_STATES[optimizer]


def _step_bytes(costs: Sequence[LayerBytes], optimizer: str) -> list[int]:
    """Transients of the optimizer's step at each layer."""
    if optimizer != "adamw":
        return [0] * len(costs)
    # It makes two temporaries, parameter by parameter, of which the last lives on into the next.
    found, before = [], 0
    for cost in costs:
        found.append(2 * cost.parameters + before if cost.parameters else 0)
        before = cost.parameters or before
    return found
