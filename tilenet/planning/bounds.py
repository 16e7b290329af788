"""Lower bounds of the seconds of a layout's plans, without measuring the bytes of its layers.

Measuring a network takes a fifth of a second a tile size, a second with autocast, these bounds a
millisecond, so that a search measures only the few sizes that can still win.

A device of a pipeline computes forward and backward of m micro-batches, and waits for the
first to come through the partitions before it, and through those behind it and back. So a
mini-batch takes at least one micro-batch's time through all partitions and m − 1 times that of the
slowest.
"""

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from tilenet.planning.balance import block_seconds, blocks_of, least_time
from tilenet.planning.estimate import Estimator, Shape
from tilenet.planning.micro_batches import mini_batch_sizes
from tilenet.planning.plan import Layout
from tilenet.planning.time.layer_time import LayerTime


class Bounds:
    """Lower bounds for the layouts of a question."""

    def __init__(self, estimator: Estimator) -> None:
        self.estimator = estimator
        self.busy = lru_cache(maxsize=None)(self._busy)
        self.through_s = lru_cache(maxsize=None)(self._through_s)
        self.slowest_s = lru_cache(maxsize=None)(self._slowest_s)

    def seconds(self, layout: Layout) -> float:
        """Seconds of a step that no plan with this layout beats, if memory were endless."""
        shape = self.estimator.shape(layout)
        total = self.estimator.micro_batches(layout.grid, layout.partitions)
        # With one forward, one backward the last partition computes nothing again.
        again = layout.checkpointing != "never" and not layout.flows
        slowest_s = self.slowest_s(shape, layout.partitions, again)
        if layout.flows:  # the slowest computes others while one goes through the rest
            pipeline_s = max(self.through_s(shape), total * slowest_s)
        else:
            drains = len(mini_batch_sizes(total, layout.micro_batches))
            pipeline_s = drains * self.through_s(shape) + (total - drains) * slowest_s
        step_s = pipeline_s + self.estimator.least_rest_s(layout.partitions)
        return max(step_s, self.estimator.read_s(layout))

    def _through_s(self, shape: Shape) -> float:
        times = self.estimator.times(shape)
        return sum(time.forward_s + time.backward_s for time in times)

    def _busy(self, shape: Shape, again: bool) -> NDArray[np.float64]:
        """Seconds that each block computes per micro-batch."""
        return block_seconds(
            [
                LayerTime(time.forward_s, time.backward_s + again * time.forward_s)
                for time in self.estimator.times(shape)
            ]
        )

    def _slowest_s(self, shape: Shape, partitions: int, again: bool) -> float:
        """Seconds of the slowest partition per micro-batch, at least.

        Args:
            again: Whether micro-batches are computed again in backward.
        """
        busy, fixed = self.busy(shape, again), self.estimator.question.balance
        balance = fixed or least_time(busy, partitions, few=1)[0]
        return max(float(busy[block]) for block in blocks_of(balance))
