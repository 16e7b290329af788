"""Simulate a step: the times at which each partition computes.

With GPipe, in the order in which torchgpipe issues it, every device runs its share of the forward,
then for each micro-batch from the last to the first its recomputation R, if it is checkpointed, and
its backward B. R waits for nothing but the device, so that it fills the time until the gradient
arrives (torchgpipe's `checkpoint.py`: Recompute precedes Checkpoint's gradient). So it is on GPUs,
since their queues are filled ahead; copies run during the computation, one at a time in each
direction over a boundary.

With one forward, one backward partition j of P begins micro-batches until it has min(most, P − j)
under way, then ends the oldest before it begins another (`pipeline.flow`).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from tilenet.choices import Checkpointing

Kind = Literal["F", "R", "B"]


@dataclass(frozen=True)
class Event:
    """A stretch of work of a partition's device.

    Attributes:
        partition: Number of the partition, from 0.
        micro_batch: Number of the micro-batch, from 0.
        kind: Forward, recomputation or backward.
        start_s: Since the step began, seconds.
        stop_s: Since the step began, seconds.
    """

    partition: int
    micro_batch: int
    kind: Kind
    start_s: float
    stop_s: float


@dataclass(frozen=True)
class Timeline:
    """A step: its events, partition by partition, each in the order of time."""

    num_partitions: int
    events: tuple[Event, ...]

    @cached_property
    def makespan_s(self) -> float:
        """Seconds of the whole step."""
        return max(event.stop_s for event in self.events)

    @cached_property
    def busy_s(self) -> tuple[float, ...]:
        """Seconds that each partition computes, recomputation included."""
        return tuple(
            sum(event.stop_s - event.start_s for event in self.events if event.partition == number)
            for number in range(self.num_partitions)
        )

    @property
    def bubble(self) -> float:
        """Share of the devices' time spent waiting."""
        whole_s = self.num_partitions * self.makespan_s
        return 1 - sum(self.busy_s) / whole_s if whole_s else 0.0


def simulate(
    forward_s: Sequence[float],
    backward_s: Sequence[float],
    transfer_s: Sequence[float],
    micro_batches: int,
    checkpointing: Checkpointing,
) -> Timeline:
    """The timeline of a step.

    Args:
        forward_s: Seconds of each partition's forward of one micro-batch; a recomputation takes as
            long.
        backward_s: Seconds of each partition's backward of one micro-batch.
        transfer_s: Seconds to move a micro-batch's maps, or their gradients, over each boundary:
            one value fewer than there are partitions.
        micro_batches: Number of micro-batches.
        checkpointing: The micro-batches that are recomputed.
    """
    n, m = len(forward_s), micro_batches
    stop = {"always": m, "except_last": m - 1, "never": 0}[checkpointing]
    devices: list[list[Event]] = [[] for _ in range(n)]

    def run(partition: int, batch: int, kind: Kind, ready_s: float, takes_s: float) -> float:
        """Let the device do it as soon as it is free; return when that is done."""
        before = devices[partition]
        start_s = max(ready_s, before[-1].stop_s if before else 0.0)
        before.append(Event(partition, batch, kind, start_s, start_s + takes_s))
        return start_s + takes_s

    arrived_s = [0.0] * m
    for j in range(n):
        left_s = [run(j, i, "F", arrived_s[i], forward_s[j]) for i in range(m)]
        arrived_s = _moved(left_s, transfer_s[j]) if j < n - 1 else left_s
    arrived_s = [devices[-1][-1].stop_s] * m  # the loss is taken; for i = m − 1 … 0
    for j in reversed(range(n)):
        left_s = []
        for i, gradient_s in zip(reversed(range(m)), arrived_s, strict=True):
            if i < stop:
                run(j, i, "R", 0, forward_s[j])
            left_s.append(run(j, i, "B", gradient_s, backward_s[j]))
        arrived_s = _moved(left_s, transfer_s[j - 1]) if j else left_s
    return Timeline(n, tuple(event for events in devices for event in events))


def simulate_flow(
    forward_s: Sequence[float],
    backward_s: Sequence[float],
    transfer_s: Sequence[float],
    micro_batches: int,
    most: int,
    *,
    recompute: bool,
) -> Timeline:
    """The timeline of a step.

    Args:
        micro_batches: Number of micro-batches of the step.
        most: Most of them in the pipeline at once.
        recompute: Whether partitions but the last compute each again in backward.

    Others are as for `simulate`.
    """
    count = len(forward_s)
    works = [
        list(_works(micro_batches, min(most, count - j), recompute=recompute and j < count - 1))
        for j in range(count)
    ]
    arrived_s: dict[tuple[int, Kind, int], float] = {}
    link_s: dict[tuple[int, Kind], float] = {}
    events: list[list[Event]] = [[] for _ in works]
    takes_s = {"F": forward_s, "R": forward_s, "B": backward_s}

    def ready_s(j: int, kind: Kind, number: int) -> float | None:
        """Return the time at which its input is there; None: not known yet."""
        if kind == "R" or (j, kind) in ((0, "F"), (count - 1, "B")):
            return 0.0
        return arrived_s.get((j, kind, number))

    def send(j: int, kind: Kind, number: int, left_s: float) -> None:
        other = j + 1 if kind == "F" else j - 1
        if kind == "R" or not 0 <= other < count:
            return
        begin_s = max(left_s, link_s.get((j, kind), 0.0))
        link_s[j, kind] = arrived_s[other, kind, number] = begin_s + transfer_s[min(j, other)]

    while any(works):
        for j, left in enumerate(works):
            while left:
                kind, number = left[0]
                ready = ready_s(j, kind, number)
                if ready is None:
                    break
                start_s = max(ready, events[j][-1].stop_s if events[j] else 0.0)
                stop_s = start_s + takes_s[kind][j]
                events[j].append(Event(j, number, kind, start_s, stop_s))
                send(j, kind, number, stop_s)
                del left[0]
    return Timeline(count, tuple(event for of_partition in events for event in of_partition))


def _works(micro_batches: int, most: int, *, recompute: bool) -> Iterator[tuple[Kind, int]]:
    """Yield the work of a partition in order."""
    for number in range(micro_batches + most):
        if number >= most:
            if recompute:
                yield "R", number - most
            yield "B", number - most
        if number < micro_batches:
            yield "F", number


def _moved(left_s: list[float], takes_s: float) -> list[float]:
    """Return the times at which maps arrive that leave one after another and share a link."""
    arrived_s: list[float] = []
    for ready_s in left_s:
        arrived_s.append(max([ready_s, *arrived_s[-1:]]) + takes_s)
    return arrived_s
