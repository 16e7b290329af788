"""What each partition of a pipeline does so that a step fits its devices, and what that costs.

Where activations are computed again, what lives long are inputs and skips, which then wait on the
host (`pipeline.skip_store`); of the one micro-batch under way, cells may be computed again once
more. Where they are kept, each cell keeps, swaps or is computed again (`policy.py`).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

from tilenet.model.choices import Checkpointing
from tilenet.parallel.pipeline.layer_times import LayerTime
from tilenet.planning.memory.layer import LayerBytes
from tilenet.planning.memory.partition import (
    PartitionBytes,
    find_skips,
    partition_bytes,
)
from tilenet.planning.swap.fill import cell_sizes, cells_of
from tilenet.planning.swap.policy import ALL, Action, Choice, choose, predict

__all__ = ["MIN_BYTES", "PartitionSwaps", "Speeds", "SwapPlan", "plan_swaps", "swap_everything"]

MIN_BYTES = 1 << 20
SAID: dict[Action, str] = {
    "swap": "swapped",
    "checkpoint": "computed again",
    "both": "computed again from swapped inputs",
}


@dataclass(frozen=True)
class Speeds:
    """What decides between computing again and swapping.

    Attributes:
        times: Seconds of all layers, for one micro-batch.
        bandwidth: Between a device and where its tensors go, bytes/s in each direction.
        min_bytes: Smaller tensors stay: a copy takes a while however short it is.
    """

    times: Sequence[LayerTime]
    bandwidth: float
    min_bytes: int = MIN_BYTES


@dataclass(frozen=True)
class PartitionSwaps:
    """One partition's.

    Attributes:
        cells: Layers per cell.
        actions: One per cell.
        device_bytes: Predicted peak.
        swapped_bytes: Bytes that leave its device in a mini-batch.
        forward_s: Seconds that a micro-batch's forward takes longer.
        backward_s: Seconds that a micro-batch's backward takes longer.
    """

    cells: tuple[int, ...]
    actions: tuple[Action, ...]
    device_bytes: int
    swapped_bytes: int = 0
    forward_s: float = 0.0
    backward_s: float = 0.0

    @property
    def modules(self) -> tuple[tuple[int, Action], ...]:
        """Layers and action of each of the partition's modules.

        A cell that is computed again is one; of the others each layer is, so that its input goes as
        soon as the next layer has it.
        """
        found: list[tuple[int, Action]] = []
        for size, action in zip(self.cells, self.actions, strict=True):
            one = action in ("checkpoint", "both")
            found.extend([(size, action)] if one else [(1, action)] * size)
        return tuple(found)

    @property
    def acts(self) -> bool:
        """Whether any cell does not just keep."""
        return any(action != "keep" for action in self.actions)


@dataclass(frozen=True)
class SwapPlan:
    """What a rank swaps.

    Attributes:
        stored: Whether skips between partitions and inputs of checkpoints wait on the host.
        partitions: One each.
        largest_bytes: Bytes of the largest of the network's maps.
        without_bytes: Predicted peak of each partition without all this.
    """

    stored: bool
    partitions: tuple[PartitionSwaps, ...]
    largest_bytes: int
    without_bytes: tuple[int, ...]

    @property
    def idle(self) -> bool:
        """Whether nothing is done, since everything fits."""
        return not self.stored and not any(part.acts for part in self.partitions)

    @property
    def swapped_bytes(self) -> int:
        """That leave all devices in a mini-batch, and lie on the host at the most."""
        return sum(part.swapped_bytes for part in self.partitions)

    def __str__(self) -> str:
        """`inputs and skips on the host, 3 of 8 cells computed again`."""
        actions = [action for part in self.partitions for action in part.actions]
        parts = ["inputs and skips on the host"] * self.stored
        for action, what in SAID.items():
            if count := actions.count(action):
                parts.append(f"{count} of {len(actions)} cells {what}")
        return ", ".join(parts) or "nothing: it fits"


def plan_swaps(
    costs: Sequence[LayerBytes],
    balance: Sequence[int],
    micro_batches: int,
    checkpointing: Checkpointing,
    optimizer: str,
    limits: Sequence[float],
    speeds: Callable[[], Speeds],
) -> SwapPlan | None:
    """The fastest that fits; None: nothing does.

    Args:
        costs: Costs of all layers, from `layer_bytes`.
        limits: Bytes of each partition.
        speeds: Asked only where not everything fits: to measure them takes a while.
    """
    plain = partition_bytes(costs, balance, micro_batches, checkpointing, optimizer)
    without = tuple(part.total for part in plain)
    edges = list(pairwise([0, *accumulate(balance)]))
    if all(part.total <= limit for part, limit in zip(plain, limits, strict=True)):
        parts = (_kept(costs, *edge, part) for edge, part in zip(edges, plain, strict=True))
        return SwapPlan(False, tuple(parts), _largest(costs), without)
    again = checkpointing != "never"
    sizes = partition_bytes(costs, balance, micro_batches, checkpointing, optimizer, stored=again)
    known = speeds()
    found = {}
    # The fullest first: if it cannot be made to fit, the others need not be looked at.
    for place in sorted(range(len(sizes)), key=lambda j: sizes[j].total / limits[j], reverse=True):
        edge, size = edges[place], sizes[place]
        part: PartitionSwaps | None = _kept(costs, *edge, size)
        if size.total > limits[place]:
            part = _chosen(costs, known, *edge, size, again, micro_batches, limits[place])
        if part is None:
            return None
        found[place] = _with_store(costs, known, edge, part, micro_batches) if again else part
    parts = (found[place] for place in range(len(sizes)))
    return SwapPlan(again, tuple(parts), _largest(costs), without)


def swap_everything(
    costs: Sequence[LayerBytes],
    balance: Sequence[int],
    micro_batches: int,
    checkpointing: Checkpointing,
    optimizer: str,
    speeds: Speeds,
) -> SwapPlan:
    """All that is large enough goes, whether it must or not."""
    again = checkpointing != "never"
    sizes, plain = (
        partition_bytes(costs, balance, micro_batches, checkpointing, optimizer, stored=waits)
        for waits in (again, False)
    )
    without = tuple(part.total for part in plain)
    found = []
    for edge, size in zip(pairwise([0, *accumulate(balance)]), sizes, strict=True):
        if again:
            part = _with_store(costs, speeds, edge, _kept(costs, *edge, size), micro_batches)
        else:
            cells = cells_of(costs, speeds.times, *edge, speeds.min_bytes)
            actions: list[Action] = ["keep", "swap"]
            kept, every = (
                predict(cells, [action] * len(cells), speeds.bandwidth, micro_batches)
                for action in actions
            )
            part = _acting(costs, edge, size.total - kept.peak_bytes, kept, every, micro_batches)
        found.append(part)
    return SwapPlan(again, tuple(found), _largest(costs), without)


def _largest(costs: Sequence[LayerBytes]) -> int:
    return max(cost.output for cost in costs)


def _kept(
    costs: Sequence[LayerBytes], start: int, stop: int, size: PartitionBytes
) -> PartitionSwaps:
    cells = cell_sizes([cost.layer for cost in costs[start:stop]])
    actions: list[Action] = ["keep"] * len(cells)
    return PartitionSwaps(cells, tuple(actions), size.total)


def _chosen(
    costs: Sequence[LayerBytes],
    speeds: Speeds,
    start: int,
    stop: int,
    size: PartitionBytes,
    again: bool,
    micro_batches: int,
    limit: float,
) -> PartitionSwaps | None:
    """The actions of one partition whose peak is too high."""
    cells = cells_of(costs, speeds.times, start, stop, speeds.min_bytes)
    many = 1 if again else micro_batches
    kept = predict(cells, ["keep"] * len(cells), speeds.bandwidth, many)
    # Besides what cells hold there are terms that no action changes.
    rest = size.total - kept.peak_bytes
    # Of a micro-batch that is computed again nothing lives long enough to be swapped.
    allowed: Sequence[Action] = ("keep", "checkpoint") if again else ALL
    choice: Choice | None = choose(cells, limit - rest, speeds.bandwidth, many, allowed)
    if choice is None:
        return None
    return _acting(costs, (start, stop), rest, kept, choice, many)


def _acting(
    costs: Sequence[LayerBytes],
    edge: tuple[int, int],
    rest: int,
    kept: Choice,
    choice: Choice,
    micro_batches: int,
) -> PartitionSwaps:
    """A partition that does as chosen, besides what no action changes."""
    return PartitionSwaps(
        cells=cell_sizes([cost.layer for cost in costs[slice(*edge)]]),
        actions=choice.actions,
        device_bytes=rest + choice.peak_bytes,
        swapped_bytes=choice.swapped_bytes,
        backward_s=max(0.0, choice.seconds - kept.seconds) / micro_batches,
    )


def _with_store(
    costs: Sequence[LayerBytes],
    speeds: Speeds,
    edge: tuple[int, int],
    part: PartitionSwaps,
    micro_batches: int,
) -> PartitionSwaps:
    """The partition, with what its store moves."""
    start, stop = edge
    arrives = costs[start].input if start else 0
    skips = find_skips(costs)
    leaving = sum(s.map_bytes for s in skips if start <= s.stash < stop <= s.pop)
    coming = sum(s.map_bytes for s in skips if s.stash < start <= s.pop < stop)
    times = speeds.times[start:stop]
    forward_s = sum(time.forward_s for time in times)
    backward_s = forward_s + sum(time.backward_s for time in times)
    # Each way has a lane of its own, and waits for the other only where it is the slower one.
    forward_way_s = max(arrives + leaving, coming) / speeds.bandwidth
    backward_way_s = (arrives + coming) / speeds.bandwidth
    return replace(
        part,
        swapped_bytes=micro_batches * (arrives + leaving),
        forward_s=part.forward_s + max(0.0, forward_way_s - forward_s),
        backward_s=part.backward_s + max(0.0, backward_way_s - backward_s),
    )
