"""Predict the bytes of partitions through which micro-batches flow: one forward, one backward.

Partition j of P begins m_j = min(most, P − j) micro-batches before it ends one (`pipeline.flow`),
and is counted as a partition of GPipe with m_j. Where it is the slowest, there wait besides, of a
map that goes from partition a to b:

    in b    m_a − m_b times the map, which a has begun and b has not
    in a    m_a − m_b times its gradient, which b ends before it needs the map that a begins next

While a step ends, and nothing is begun any more, gradients of all but the one under way may wait,
of m_j − 1 micro-batches.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate

from tilenet.choices import Checkpointing
from tilenet.planning.memory.layer_cost import LayerBytes
from tilenet.planning.memory.partition import PartitionBytes, partition_bytes
from tilenet.planning.memory.skips import find_skips


def flow_bytes(
    costs: Sequence[LayerBytes],
    balance: Sequence[int],
    most: int,
    checkpointing: Checkpointing,
    optimizer: str = "adamw",
    sharers: int = 1,
) -> tuple[PartitionBytes, ...]:
    """Bytes that each partition needs on its device, without a reserve.

    Args:
        most: Most micro-batches in the pipeline at once.
        checkpointing: `always` or `never`; the last partition computes nothing again.

    Others are as for `partition_bytes`.
    """
    count = len(balance)
    begun = [min(most, count - number) for number in range(count)]
    stops = list(accumulate(balance))
    place = [number for number, size in enumerate(balance) for _ in range(size)]
    # Of each map that goes to another partition: from which, to which, its bytes.
    routes = [(number - 1, number, costs[stops[number - 1]].input) for number in range(1, count)]
    routes += [
        (place[skip.stash], place[skip.pop], skip.map_bytes)
        for skip in find_skips(costs)
        if place[skip.stash] != place[skip.pop]
    ]

    def of_partition(number: int, under_way: int, *, drains: bool) -> PartitionBytes:
        mode: Checkpointing = "never" if number == count - 1 else checkpointing
        parts = partition_bytes(
            costs, balance, under_way, mode, optimizer, sharers=sharers, apart=True
        )
        part = parts[number]
        waits = [(begun[a] - begun[b]) * size for a, b, size in routes if b == number]
        gradients = [
            (under_way - 1 if drains else begun[a] - begun[b]) * size
            for a, b, size in routes
            if a == number
        ]
        skips = part.skips + (0 if drains else sum(waits))
        return replace(part, skips=skips, skip_gradients=sum(gradients))

    return tuple(
        max(
            of_partition(number, begun[number], drains=False),
            of_partition(number, max(1, begun[number] - 1), drains=True),
            key=lambda part: part.total,
        )
        for number in range(count)
    )
