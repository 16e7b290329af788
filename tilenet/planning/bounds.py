"""Lower bounds of a layout's plans: seconds and bytes, without measuring its tile's layers.

Measuring a network takes a fifth of a second a tile size, a second with autocast, these bounds a
millisecond, so that a search measures only the few sizes that can still win.

Seconds: a device of a pipeline computes forward and backward of m micro-batches, and waits for the
first to come through the partitions before it, and through those behind it and back. So a
mini-batch takes at least one micro-batch's time through all partitions and m − 1 times that of the
slowest.

Bytes: those of a block are a maximum over sums of maps and weights, and maps grow with the tile's
pixels. Maxima of straight lines bend upwards only: the line through two small tiles lies below.
"""

from collections.abc import Sequence
from functools import cached_property, lru_cache
from itertools import accumulate, pairwise
from math import inf, isqrt

import numpy as np
from numpy.typing import NDArray

from tilenet.choices import Checkpointing
from tilenet.geometry.halo import context_of
from tilenet.planning.balance import block_seconds, least_time
from tilenet.planning.estimate import Estimator
from tilenet.planning.memory.layer_cost import LayerBytes
from tilenet.planning.memory.partition import block_bytes
from tilenet.planning.memory.states import states_kept
from tilenet.planning.micro_batches import mini_batch_sizes
from tilenet.planning.plan import Layout
from tilenet.planning.time.layer_time import LayerTime

__all__ = ["Bounds"]

Shape = tuple[int, int, int]
Matrix = NDArray[np.float64]


class Bounds:
    """Lower bounds for the layouts of a question.

    Args:
        shapes: Tiles, rows and columns of micro-batches, of all layouts there are.
    """

    def __init__(self, estimator: Estimator, shapes: Sequence[Shape]) -> None:
        self.estimator = estimator
        self.question = estimator.question
        self.context = context_of(estimator.layers)
        self.unit_px = self.context.alignment_px
        self.small = self._two_small_tiles(shapes)
        self.busy = lru_cache(maxsize=None)(self._busy)
        self.through_s = lru_cache(maxsize=None)(self._through_s)
        self.num_bytes = lru_cache(maxsize=None)(self._num_bytes)
        self.slowest_s = lru_cache(maxsize=None)(self._slowest_s)

    def seconds(self, layout: Layout) -> float:
        """Seconds of a step that no plan with this layout beats, if memory were endless."""
        return self._step_s(layout, None)

    def seconds_that_fit(self, layout: Layout) -> float:
        """Return a lower bound of seconds for plans that fit their devices; infinite: none do."""
        # With one forward, one backward it holds one micro-batch.
        return self._step_s(layout, 1 if layout.flows else layout.micro_batches)

    def _step_s(self, layout: Layout, micro_batches: int | None) -> float:
        shape = self.estimator.shape(layout)
        total = self.estimator.micro_batches(layout.grid, layout.partitions)
        drains = 1 if layout.flows else len(mini_batch_sizes(total, layout.micro_batches))
        # With one forward, one backward the last partition computes nothing again.
        again = layout.checkpointing != "never" and not layout.flows
        swap = layout.swap
        slowest_s = self.slowest_s(shape, layout.partitions, micro_batches, again, swap)
        if slowest_s == inf:
            return inf
        pipeline_s = drains * self.through_s(shape) + (total - drains) * slowest_s
        step_s = pipeline_s + self.estimator.least_rest_s(layout.partitions)
        return max(step_s, self.estimator.read_s(layout))

    def _through_s(self, shape: Shape) -> float:
        times = self.estimator.times(shape)
        return sum(time.forward_s + time.backward_s for time in times)

    def _busy(self, shape: Shape, again: bool) -> Matrix:
        """Seconds that each block computes per micro-batch."""
        return block_seconds(
            [
                LayerTime(time.forward_s, time.backward_s + again * time.forward_s)
                for time in self.estimator.times(shape)
            ]
        )

    def _slowest_s(
        self, shape: Shape, partitions: int, micro_batches: int | None, again: bool, swap: bool
    ) -> float:
        """Seconds of the slowest partition per micro-batch, at least.

        Args:
            micro_batches: Number of micro-batches that must fit; None: memory is endless.
            again: Whether they are computed again in backward.
        """
        busy, question = self.busy(shape, again), self.question
        if micro_batches is None:
            room = np.zeros_like(busy)
        elif swap:
            room = self._bytes_of_layers(shape)
        else:
            room = self._bytes_of_batch(shape, micro_batches, again)
        if question.balance is not None:
            balances = [question.balance]
        else:
            balances = least_time(busy, partitions, room, question.limit_bytes, few=1)
        edges = [list(pairwise([0, *accumulate(balance)])) for balance in balances]
        fitting = [blocks for blocks in edges if self._fit(room, blocks)]
        return min((max(float(busy[block]) for block in blocks) for blocks in fitting), default=inf)

    def _fit(self, room: Matrix, blocks: Sequence[tuple[int, int]]) -> bool:
        return all(room[block] <= self.question.limit_bytes for block in blocks)

    def _bytes_of_batch(self, shape: Shape, micro_batches: int, again: bool) -> Matrix:
        """Bytes that each block needs at least."""
        if self.small is None:
            return np.zeros((len(self.estimator.layers) + 1,) * 2)
        # Pixels beyond whole alignment units only add: maps, and copies that pad them.
        units = self._units(shape)
        few, more = self.small
        low = self.num_bytes(few, micro_batches, again)
        high = self.num_bytes(more, micro_batches, again)
        line = high + (high - low) * ((units - more**2) / (more**2 - few**2))
        return np.maximum(line, self.at_least)

    def _bytes_of_layers(self, shape: Shape) -> Matrix:
        """Return the bytes that each block needs at least, if all that waits is elsewhere.

        They hold its weights, their gradients and states, and the tensors of its largest layer.
        """
        single = np.diagonal(self._bytes_of_batch(shape, 1, True), 1)
        fixed = (2 + self.states) * self.estimator.parameter_bytes
        sums, count = np.cumsum([0, *fixed]), len(fixed)
        num_bytes = np.zeros((count + 1, count + 1))
        for start in range(count):
            most = np.maximum.accumulate(single[start:] - fixed[start:])
            num_bytes[start, start + 1 :] = sums[start + 1 :] - sums[start] + np.maximum(most, 0)
        return num_bytes

    def _num_bytes(self, side: int, micro_batches: int, again: bool) -> Matrix:
        """Bytes that each block needs for a square tile of `side` alignment units.

        Without the transients of the optimizer's step, which hide how maps grow with small tiles.
        """
        size_px = side * self.unit_px
        mode: Checkpointing = "always" if again else "never"
        costs = self.estimator.costs((1, size_px, size_px))
        # Two partitions: no fewer gradients of skips wait than from one to the next.
        return self._block_bytes(costs, micro_batches, mode)

    def _block_bytes(
        self, costs: Sequence[LayerBytes], micro_batches: int, mode: Checkpointing
    ) -> Matrix:
        plain = block_bytes(costs, micro_batches, mode, "sgd", 2)
        sums = np.cumsum([0, *(cost.parameters for cost in costs)])
        optimizer: Matrix = self.states * np.triu(sums[None, :] - sums[:, None])
        return plain + optimizer

    @property
    def states(self) -> float:
        """Values that a rank keeps per parameter, at least."""
        sharers = self.estimator.sharers(self.question.partitions or 1)  # more partitions: fewer
        shared, whole = states_kept(self.question.optimizer)
        return shared / sharers + whole

    @cached_property
    def at_least(self) -> Matrix:
        """Bytes that each block needs for any of the micro-batches."""
        assert self.small is not None
        size_px = self.small[1] * self.unit_px
        costs = self.estimator.costs((1, size_px, size_px))
        return self._block_bytes(costs, 1, "always")

    def _units(self, shape: Shape) -> int:
        """Whole alignment units in a micro-batch."""
        stacked, rows, cols = shape
        return stacked * (rows // self.unit_px) * (cols // self.unit_px)

    def _two_small_tiles(self, shapes: Sequence[Shape]) -> tuple[int, int] | None:
        """Sides of two square tiles, in alignment units, no larger than any micro-batch asked for.

        None where nothing is gained: there is one size only, or one that is too small; or where
        maps are no multiple of the pixels: the halos that a rank gets from its neighbours.
        """
        sizes = {(stacked, *sorted(size)) for stacked, *size in shapes}
        exchanged = self.question.halo_mode == "exchange"
        if len(sizes) < 3 or exchanged or self.context.valid:
            return None
        more = isqrt(min(map(self._units, shapes)))
        return (more - 1, more) if more > 2 else None
