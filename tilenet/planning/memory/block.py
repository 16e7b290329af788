"""Bytes of consecutive layers at their peak.

Forward makes the maps that backward needs, and backward frees them in reverse. All blocks with the
same first layer are computed at one time, since a planner asks for all of them.

Where one backward goes through several micro-batches, autograd adds up a weight's gradients of all
of them before it hands over the sum. So from the first micro-batch that goes back to the last one
these sums wait, next to the buffer that they go to. Micro-batches that are computed again go back
one by one.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from tilenet.choices import Checkpointing
from tilenet.planning.memory.layer_cost import LayerBytes, SameCosts
from tilenet.planning.memory.skips import find_skips
from tilenet.planning.memory.walk import Walk


def blocks_from(
    costs: Sequence[LayerBytes],
    start: int,
    micro_batches: int,
    checkpointing: Checkpointing,
    stored: bool = False,
    apart: bool = False,
) -> dict[str, NDArray[np.int64]]:
    """Terms of the blocks [start, b) for b = start + 1, …, n: arrays of that length.

    Args:
        apart: Whether each micro-batch goes back by itself, whatever the checkpointing.
        stored: Under checkpointing, inputs and skips of micro-batches that wait are on the host,
            but for the next input, which is fetched ahead.
    """
    again = checkpointing != "never"
    stored = stored and again
    # A planner passes the same costs again and again, with other numbers of micro-batches.
    block = _walk_blocks(SameCosts(costs), start, start > 0 or micro_batches > 1, again, apart)
    before, stops = block.before, block.stops
    num_inputs = np.where((block.input_from < stops) | again | (start == 0), micro_batches, 1)
    if stored and start > 0:  # images wait where they are
        num_inputs = np.minimum(num_inputs, 2)
    activations = block.peak if again else _all_kept(block, micro_batches, apart)
    is_last = stops == len(costs)
    # Others' gradients of logits. Where the first that goes back computes nothing again, it holds
    # no output, and later ones find one gradient less.
    waiting = micro_batches - 1 - (checkpointing == "except_last" and micro_batches > 1)
    # While the loss is taken only tensors that were not checkpointed are there.
    idle = 0 if checkpointing == "always" else int(before[-1]) * (1 if again else micro_batches)
    return {
        "inputs": num_inputs * costs[start].input,
        "skips": block.incoming * (micro_batches - 1 if again and not stored else 0),
        "activations": activations,
        "outputs": is_last * _softmax_bytes(costs[-1]),
        "loss": is_last
        * _loss_bytes(costs[-1], micro_batches, waiting, int(activations[-1]) - idle),
    }


def _all_kept(block: "_Blocks", micro_batches: int, apart: bool) -> NDArray[np.int64]:
    """Most bytes of activations, and of gradients that wait for those of other micro-batches."""
    kept_bytes = block.before[1:]
    if apart or micro_batches == 1:
        return (micro_batches - 1) * kept_bytes + block.peak
    first = (micro_batches - 1) * kept_bytes + block.peak_of_first
    # Gradients of skips may leave only once the next micro-batch's gradient has come.
    behind = (micro_batches - 1) * kept_bytes + block.weights + block.between
    activations: NDArray[np.int64] = np.maximum.reduce([first, block.peak_of_last, behind])
    if micro_batches > 2:
        between = (micro_batches - 2) * kept_bytes + block.peak + block.weights
        np.maximum(activations, between, out=activations)
    return activations


@dataclass(frozen=True)
class _Blocks:
    """The blocks that begin with one layer, for one micro-batch; arrays over their ends.

    Attributes:
        stops: Number of the layer behind each block.
        before: Bytes that the layers before each layer have saved, and last those of all layers.
        weights: Bytes of the gradients of all weights.
        peak: Most bytes of the micro-batch under way.
        peak_of_first: Peak of the first micro-batch that goes back, with gradients that wait since.
        peak_of_last: Peak of the last one, with gradients that wait until then.
        between: Gradients that one micro-batch leaves to other partitions, and the next one's.
        incoming: Maps popped in the block that come from other partitions.
        input_from: First layer that keeps the block's input.
    """

    stops: NDArray[np.int64]
    before: NDArray[np.int64]
    weights: NDArray[np.int64]
    peak: NDArray[np.int64]
    peak_of_first: NDArray[np.int64]
    peak_of_last: NDArray[np.int64]
    between: NDArray[np.int64]
    incoming: NDArray[np.int64]
    input_from: int


@lru_cache(maxsize=8192)
def _walk_blocks(same: SameCosts, start: int, copied: bool, again: bool, apart: bool) -> _Blocks:
    """Walk over the blocks from `start` on.

    Args:
        copied: Whether the block's input may not be written into.
        again: Whether activations are computed again in backward.
        apart: See `blocks_from`.
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
    incoming, leaving = np.zeros((2, count), np.int64)
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
            leaving += skip.gradient * (stops > skip.pop)
        if skip.stash >= start:
            outer = (stops > skip.stash) & (stops <= skip.pop)
            # To the one that comes from elsewhere the stash's other gradient is added, in place
            # where backward goes on from partition to partition by itself.
            held = layers >= skip.stash if apart else layers > skip.stash
            pinned += skip.map_bytes * np.outer(held, outer)
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
    weights = np.cumsum([cost.parameters for cost in costs[start:]])
    peaks = _peaks(forward, backward, last, inside, weights)
    between = leaving + walk.outputs
    return _Blocks(stops, before, weights, *peaks, between, incoming, walk.input_from)


def _peaks(
    forward: NDArray[np.int64],
    backward: NDArray[np.int64],
    last: NDArray[np.int64],
    inside: NDArray[np.bool_],
    weights: NDArray[np.int64],
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """`_Blocks.peak`, `peak_of_first` and `peak_of_last`.

    Args:
        forward: Peak of each block's forward.
        backward: Peak of each layer's backward by block.
        last: Peak of the backward of each block's last layer.
        inside: Whether a layer is within a block, and not its last.
        weights: Gradients of the layers up to each one.
    """
    behind = weights[None, :] - weights[:, None]

    def most(backward: NDArray[np.int64], last: NDArray[np.int64]) -> NDArray[np.int64]:
        of_layers: NDArray[np.int64] = np.where(inside, backward, 0).max(axis=0)
        return np.maximum(of_layers, last)

    return (
        np.maximum(forward, most(backward, last)),
        np.maximum(forward, most(backward + behind, last)),
        most(backward + weights[:, None], last + weights),
    )


def _loss_bytes(head: LayerBytes, micro_batches: int, waiting: int, transients: int) -> int:
    """Return the loss's bytes: labels, and gradients of all logits or its transients, if larger.

    The logits of each micro-batch go as its loss is taken, and its softmax stays instead; backward
    runs through all losses first, so that the gradients of all logits wait for the pipeline.
    """
    softmax = _softmax_bytes(head)
    labels = head.elements // head.layer.out_channels * 8
    gradients = waiting * head.output
    return micro_batches * labels + max(gradients, (micro_batches + 2) * softmax - transients)


def _softmax_bytes(head: LayerBytes) -> int:
    """Bytes of one micro-batch, in the parameters' dtype, which the loss is taken in."""
    return head.elements * max(4, head.output // head.elements)
