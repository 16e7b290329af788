"""What each partition of a pipeline does so that a step fits its devices, and what that costs.

Where activations are computed again, what lives long are inputs and skips, which then wait on the
host (`pipeline.skip_store`); of the one micro-batch under way, layer groups may be computed again
once more. Where they are kept, each group keeps, swaps or is computed again (`choose.py`).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

from tilenet.model.choices import Checkpointing
from tilenet.parallel.pipeline.layer_times import LayerTime
from tilenet.parallel.swap.actions import Action
from tilenet.planning.memory.layer import LayerBytes
from tilenet.planning.memory.partition import find_skips, partition_bytes
from tilenet.planning.swap.choose import ACTIONS, choose, predict
from tilenet.planning.swap.groups import group_sizes, layer_groups

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
        bandwidth: Bytes/s between a device and where its tensors go, in each direction.
        min_bytes: Smaller tensors stay: a copy takes a while however short it is.
    """

    times: Sequence[LayerTime]
    bandwidth: float
    min_bytes: int = MIN_BYTES


@dataclass(frozen=True)
class PartitionSwaps:
    """What one partition does.

    Attributes:
        groups: Number of layers of each group.
        actions: One per group.
        device_bytes: Predicted peak.
        in_flight_bytes: Bytes of copies out that may be under way: what its limit leaves.
        swapped_bytes: Bytes that leave the device in a mini-batch.
        forward_s: Seconds that a micro-batch's forward takes longer.
        backward_s: Seconds that a micro-batch's backward takes longer.
    """

    groups: tuple[int, ...]
    actions: tuple[Action, ...]
    device_bytes: int
    in_flight_bytes: float = 0.0
    swapped_bytes: int = 0
    forward_s: float = 0.0
    backward_s: float = 0.0

    @property
    def modules(self) -> tuple[tuple[int, Action], ...]:
        """Number of layers and action of each of the partition's modules.

        A group that is computed again is one; of the others each layer is, so that its input goes
        as soon as the next layer has it.
        """
        found: list[tuple[int, Action]] = []
        for size, action in zip(self.groups, self.actions, strict=True):
            one = action in ("checkpoint", "both")
            found.extend([(size, action)] if one else [(1, action)] * size)
        return tuple(found)

    @property
    def acts(self) -> bool:
        """Whether any group does not just keep."""
        return any(action != "keep" for action in self.actions)


@dataclass(frozen=True)
class SwapPlan:
    """What a rank swaps.

    Attributes:
        stored: Whether skips between partitions and inputs of checkpoints wait on the host.
        partitions: One each.
        largest_bytes: Largest map of the network.
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
        """Bytes that leave all devices in a mini-batch, and lie on the host at the most."""
        return sum(part.swapped_bytes for part in self.partitions)

    def __str__(self) -> str:
        """`inputs and skips on the host, 3 of 8 layer groups computed again`."""
        actions = [action for part in self.partitions for action in part.actions]
        parts = ["inputs and skips on the host"] * self.stored
        for action, what in SAID.items():
            if count := actions.count(action):
                parts.append(f"{count} of {len(actions)} layer groups {what}")
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
    without = [part.total for part in plain]
    blocks = list(pairwise(accumulate(balance, initial=0)))
    if all(size <= limit for size, limit in zip(without, limits, strict=True)):
        parts = [_kept(costs, *block) for block in zip(blocks, without, limits, strict=True)]
        return _plan(costs, False, parts, without)
    stored = checkpointing != "never"
    sizes = partition_bytes(costs, balance, micro_batches, checkpointing, optimizer, stored=stored)
    known = speeds()
    found: dict[int, PartitionSwaps] = {}
    # The fullest first: if it cannot be made to fit, the others need not be looked at.
    for place in sorted(range(len(sizes)), key=lambda j: sizes[j].total / limits[j], reverse=True):
        block, size, limit = blocks[place], sizes[place].total, limits[place]
        # Of a micro-batch that is computed again nothing lives long enough to be swapped.
        asked = (1, ("checkpoint",)) if stored else (micro_batches, ACTIONS)
        part = (
            _kept(costs, block, size, limit)
            if size <= limit
            else _acting(costs, known, block, size, limit, *asked)
        )
        if part is None:
            return None
        found[place] = _storing(costs, known, block, part, micro_batches) if stored else part
    return _plan(costs, stored, [found[place] for place in range(len(sizes))], without)


def swap_everything(
    costs: Sequence[LayerBytes],
    balance: Sequence[int],
    micro_batches: int,
    checkpointing: Checkpointing,
    optimizer: str,
    limits: Sequence[float],
    speeds: Speeds,
) -> SwapPlan:
    """All that is large enough goes, whether it must or not; for arguments see `plan_swaps`.

    Where not all of a partition fits its limit, computing waits for each copy.
    """
    plain = partition_bytes(costs, balance, micro_batches, checkpointing, optimizer)
    stored = checkpointing != "never"
    sizes = partition_bytes(costs, balance, micro_batches, checkpointing, optimizer, stored=stored)
    parts = []
    blocks = pairwise(accumulate(balance, initial=0))
    for block, size, limit in zip(blocks, sizes, limits, strict=True):
        if stored:
            kept = _kept(costs, block, size.total, limit)
            parts.append(_storing(costs, speeds, block, kept, micro_batches))
        else:
            part = _acting(costs, speeds, block, size.total, limit, micro_batches, None)
            assert part is not None, "all swap, whether that fits or not"
            parts.append(part)
    return _plan(costs, stored, parts, [part.total for part in plain])


def _plan(
    costs: Sequence[LayerBytes],
    stored: bool,
    parts: Sequence[PartitionSwaps],
    without: Sequence[int],
) -> SwapPlan:
    return SwapPlan(stored, tuple(parts), max(cost.output for cost in costs), tuple(without))


def _kept(
    costs: Sequence[LayerBytes], block: tuple[int, int], size: int, limit: float
) -> PartitionSwaps:
    groups = group_sizes([cost.layer for cost in costs[slice(*block)]])
    actions: list[Action] = ["keep"] * len(groups)
    return PartitionSwaps(groups, tuple(actions), size, max(0.0, limit - size))


def _acting(
    costs: Sequence[LayerBytes],
    speeds: Speeds,
    block: tuple[int, int],
    size: int,
    limit: float,
    micro_batches: int,
    allowed: Sequence[Action] | None = ACTIONS,
) -> PartitionSwaps | None:
    """A partition that keeps a limit; None: it cannot.

    Args:
        size: Bytes that it needs when all groups keep.
        micro_batches: Number of these that are kept at a time.
        allowed: Actions besides keep; None: all groups swap.
    """
    groups = layer_groups(costs, speeds.times, *block, speeds.min_bytes)
    step = speeds.bandwidth, micro_batches
    kept = predict(groups, ["keep"] * len(groups), *step)
    # Besides what groups hold there are terms that no action changes.
    rest = size - kept.peak_bytes
    choice = (
        predict(groups, ["swap"] * len(groups), *step, limit - rest)
        if allowed is None
        else choose(groups, limit - rest, *step, allowed)
    )
    if choice is None:
        return None
    return replace(
        _kept(costs, block, rest + choice.peak_bytes, limit),
        in_flight_bytes=choice.in_flight_bytes,
        actions=choice.actions,
        swapped_bytes=choice.swapped_bytes,
        backward_s=max(0.0, choice.seconds - kept.seconds) / micro_batches,
    )


def _storing(
    costs: Sequence[LayerBytes],
    speeds: Speeds,
    block: tuple[int, int],
    part: PartitionSwaps,
    micro_batches: int,
) -> PartitionSwaps:
    """The partition, with what its store moves."""
    start, stop = block
    arrives = costs[start].input if start else 0
    skips = find_skips(costs)
    leaving = sum(s.map_bytes for s in skips if start <= s.stash < stop <= s.pop)
    coming = sum(s.map_bytes for s in skips if s.stash < start <= s.pop < stop)
    forward_s = sum(time.forward_s for time in speeds.times[start:stop])
    backward_s = forward_s + sum(time.backward_s for time in speeds.times[start:stop])
    # Each way has a lane of its own, and waits for the other only where it is the slower one.
    late_s = max(arrives + leaving, coming) / speeds.bandwidth - forward_s
    late_back_s = (arrives + coming) / speeds.bandwidth - backward_s
    return replace(
        part,
        swapped_bytes=micro_batches * (arrives + leaving),
        forward_s=max(0.0, late_s),
        backward_s=part.backward_s + max(0.0, late_back_s),
    )
