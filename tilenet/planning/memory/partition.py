"""Predict the bytes that each partition of a network needs.

A partition under GPipe holds, for m micro-batches,

    M = parameters + gradients + optimizer states
        + m·boundary input + (m − 1)·skips that come from other partitions
        + activations of one micro-batch, its own skips, skips' gradients and transients among them
        + (min(m, b − a + 1) − 1)·(gradients of skips stashed in a = this one, popped in b)

and without checkpointing the saved tensors of all micro-batches, and the gradients of weights that
wait for those of other micro-batches. With stores (`pipeline.host_store`) the second line has two
boundary inputs at most, and no skips. The activations are put together from
`layer_bytes`, layer by layer, as autograd makes and frees them (`block.py`).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tilenet.choices import Checkpointing
from tilenet.planning.memory.block import blocks_from
from tilenet.planning.memory.layer_cost import LayerBytes
from tilenet.planning.memory.skips import find_skips
from tilenet.planning.memory.states import state_bytes

Costs = Sequence[LayerBytes]
"""Costs of a network's layers, in order."""


@dataclass(frozen=True)
class PartitionBytes:
    """Most bytes that a partition's device holds during a training step, by kind.

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
    costs: Costs,
    balance: Sequence[int],
    micro_batches: int,
    checkpointing: Checkpointing,
    optimizer: str = "adamw",
    stored: bool = False,
    sharers: int = 1,
    apart: bool = False,
) -> tuple[PartitionBytes, ...]:
    """Bytes that each partition needs on its device, without a reserve.

    Micro-batches are alike. `except_last` has the peak of `always`, less a gradient of logits.

    Args:
        costs: Costs of the layers, from `layer_bytes`.
        optimizer: `adamw`, `sgd-momentum` or `sgd`.
        stored: Skips between partitions and inputs of checkpoints wait on the host.
        sharers: Ranks that share out the optimizer's states.
        apart: Whether each micro-batch goes back by itself.
    """
    ends = np.cumsum(balance)
    place = np.repeat(np.arange(len(balance)), balance)
    skips = find_skips(costs)
    parts = []
    for j, (size, stop) in enumerate(zip(balance, ends, strict=True)):
        start = int(stop) - size
        block = blocks_from(costs, start, micro_batches, checkpointing, stored, apart)
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
    costs: Costs,
    micro_batches: int,
    checkpointing: Checkpointing,
    optimizer: str = "adamw",
    num_partitions: int | None = None,
    stored: bool = False,
    sharers: int = 1,
) -> NDArray[np.float64]:
    """Return the bytes of each possible partition: entry (a, b) is that of the layers a to b − 1.

    They equal `partition_bytes(…).total`, but for blocks with stashes that are popped outside of
    them: the number of those gradients that wait depends on the partitions between, and the most
    that `num_partitions` allow is taken.

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
        fixed = 2 * weights + np.cumsum(buffers[start:]) + state_bytes(optimizer, weights, sharers)
        num_bytes[start, start + 1 :] = fixed + work
    return num_bytes


def _waiting_gradients(micro_batches: int, distance: int) -> int:
    """Return the number of other micro-batches with a skip gradient that waits for the stash.

    The partition that pops is `distance` partitions ahead in backward.
    """
    return min(micro_batches, distance + 1) - 1


def _fixed(costs: Costs, optimizer: str, sharers: int) -> tuple[int, int, int]:
    """Bytes of parameters and running statistics, of gradients, and of the optimizer's states."""
    parameters = sum(cost.parameters for cost in costs)
    buffers = sum(cost.buffers for cost in costs)
    return parameters + buffers, parameters, state_bytes(optimizer, parameters, sharers)
