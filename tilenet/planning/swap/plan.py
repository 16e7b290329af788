"""Plan the swaps of each partition of a pipeline, so that a step fits its devices, and their cost.

Where activations are computed again, the long-lived tensors are inputs and skips, which then wait
on the host (`pipeline.host_store`). Where they are kept, the first layers of a partition swap
(`threshold.py`).
"""

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from tilenet.choices import Checkpointing
from tilenet.planning.balance import blocks_of
from tilenet.planning.memory.device import device_bytes
from tilenet.planning.memory.layer_cost import LayerBytes
from tilenet.planning.memory.partition import PartitionBytes, partition_bytes
from tilenet.planning.memory.skips import find_skips
from tilenet.planning.swap.layers import saving_layers
from tilenet.planning.swap.threshold import choose, simulate
from tilenet.planning.time.layer_time import LayerTime

MIN_BYTES = 1 << 20


@dataclass(frozen=True)
class Demand:
    """A rank's mini-batch, and where it runs.

    Attributes:
        costs: Costs of all layers, from `layer_bytes`.
        balance: Layers of each partition.
        micro_batches: Number of micro-batches under way.
        checkpointing: The micro-batches that are computed again.
        optimizer: Name of the optimizer, see `partition_bytes`.
        devices: One device per partition; several partitions may lie on one.
        sharers: Ranks that share out the optimizer's states.
    """

    costs: Sequence[LayerBytes]
    balance: Sequence[int]
    micro_batches: int
    checkpointing: Checkpointing
    optimizer: str
    devices: Sequence[Hashable]
    sharers: int = 1

    @property
    def largest_bytes(self) -> int:
        """Bytes of the network's largest map."""
        return max(cost.output for cost in self.costs)

    @property
    def peak(self) -> int:
        """Bytes of the fullest device where nothing is swapped."""
        return max(self.peaks(self.parts()).values())

    def parts(self, stored: bool = False) -> tuple[PartitionBytes, ...]:
        """Bytes of each partition, see `partition_bytes`."""
        return partition_bytes(
            self.costs,
            self.balance,
            self.micro_batches,
            self.checkpointing,
            self.optimizer,
            stored,
            self.sharers,
        )

    def peaks(self, parts: Sequence[PartitionBytes]) -> dict[Hashable, int]:
        """Bytes of each device with such partitions."""
        return device_bytes(parts, self.devices, self.checkpointing)


@dataclass(frozen=True)
class Speeds:
    """Speeds of computing and of copies, which decide how much is swapped.

    Attributes:
        times: Seconds of all layers, for one micro-batch.
        bandwidth: Bytes/s between a device and the host or file, in each direction.
        min_bytes: Smaller tensors stay: a copy takes a while however short it is.
    """

    times: Sequence[LayerTime]
    bandwidth: float
    min_bytes: int = MIN_BYTES


@dataclass(frozen=True)
class PartitionSwaps:
    """The swaps of one partition.

    Attributes:
        layers: Number of layers that swap, from the first on; the others keep.
        device_bytes: Predicted peak.
        in_flight_bytes: Most bytes of copies out under way, as many as its limit leaves.
        swapped_bytes: Bytes that leave the device in a mini-batch.
        forward_s: Seconds that a micro-batch's forward takes longer.
        backward_s: Seconds that a micro-batch's backward takes longer.
    """

    layers: int
    device_bytes: int
    in_flight_bytes: float = 0.0
    swapped_bytes: int = 0
    forward_s: float = 0.0
    backward_s: float = 0.0


@dataclass(frozen=True)
class SwapPlan:
    """The swaps of a rank.

    Attributes:
        layers: Number of layers of the network.
        without_bytes: Predicted peak of the fullest device without all this.
        largest_bytes: Largest map of the network.
        device_bytes: Predicted peak of the fullest device.
        stored: Whether skips between partitions and inputs of checkpoints wait on the host.
        partitions: The swaps of each partition.
    """

    layers: int
    without_bytes: int
    largest_bytes: int
    device_bytes: int
    stored: bool
    partitions: Sequence[PartitionSwaps]

    @property
    def idle(self) -> bool:
        """Whether nothing is done, since everything fits."""
        return not self.stored and not self.swapped_layers

    @property
    def swapped_layers(self) -> int:
        """Number of layers that swap their saved tensors."""
        return sum(part.layers for part in self.partitions)

    @property
    def swapped_bytes(self) -> int:
        """Bytes that leave all devices in a mini-batch, and lie on the host at the most."""
        return sum(part.swapped_bytes for part in self.partitions)

    def __str__(self) -> str:
        """`inputs and skips on the host` or `12 of 40 layers swapped`."""
        if self.stored:
            return "inputs and skips on the host"
        if self.swapped_layers:
            return f"{self.swapped_layers} of {self.layers} layers swapped"
        return "nothing: it fits"


def plan_swaps(
    demand: Demand,
    limit: float,
    speeds: Callable[[], Speeds],
    *,
    everything: bool = False,
    ahead: int = 0,
) -> SwapPlan | None:
    """The fastest plan that fits; None: nothing fits.

    Args:
        limit: Bytes of each device.
        speeds: Asked only where something swaps: to measure them takes a while.
        everything: All that is large enough goes, whether it must or not, and whether it fits:
            where it does not, computing waits for each copy.
        ahead: Largest maps that room is left for, where layers swap.
    """
    plain, without = demand.parts(), demand.peak
    plan = partial(SwapPlan, len(demand.costs), without, demand.largest_bytes)
    if not everything and without <= limit:
        return plan(without, False, [PartitionSwaps(0, part.total) for part in plain])
    if demand.checkpointing != "never":
        stored = demand.parts(stored=True)
        most = max(demand.peaks(stored).values())
        if not everything and most > limit:
            return None
        return plan(most, True, _storing(demand, stored, limit, speeds()))
    limit -= ahead * demand.largest_bytes
    for shares in _shares([part.total for part in plain], demand.devices, limit):
        parts = _swapping(demand, plain, shares, speeds(), everything)
        if parts is not None:
            rest = zip(plain, parts, strict=True)
            swapped = [replace(p, activations=s.device_bytes - p.fixed) for p, s in rest]
            return plan(max(demand.peaks(swapped).values()), False, parts)
    return None


def _swapping(
    demand: Demand,
    plain: Sequence[PartitionBytes],
    shares: Sequence[float],
    speeds: Speeds,
    everything: bool,
) -> list[PartitionSwaps] | None:
    """Partitions that keep their shares of the limits; None: one of them cannot."""
    bandwidth, micro_batches, partitions = speeds.bandwidth, demand.micro_batches, []
    for block, size, share in zip(blocks_of(demand.balance), plain, shares, strict=True):
        layers = saving_layers(demand.costs, speeds.times, *block, speeds.min_bytes)
        room = share - size.fixed
        chosen = (
            simulate(layers, len(layers), bandwidth, micro_batches, room)
            if everything
            else choose(layers, room, bandwidth, micro_batches)
        )
        if chosen is None:
            return None
        computing = sum(layer.forward_s + layer.backward_s for layer in layers)
        partitions.append(
            PartitionSwaps(
                chosen.layers,
                size.fixed + chosen.peak_bytes,
                chosen.in_flight_bytes,
                chosen.swapped_bytes,
                backward_s=max(0.0, chosen.seconds / micro_batches - computing),
            )
        )
    return partitions


def _shares(
    needed: Sequence[int], devices: Sequence[Hashable], limit: float
) -> Iterator[list[float]]:
    """Yield limits of the partitions in bytes; a device with several is divided in a few ways.

    As each would fill it; as much for each, those with less leave the rest to the others; between.
    """
    sizes = np.array(needed, dtype=np.float64)
    even, filled = np.full(len(sizes), float(limit)), np.full(len(sizes), float(limit))
    for device in set(devices):
        here = np.array([other == device for other in devices])
        filled[here] *= sizes[here] / sizes[here].sum()
        left, open_ = float(limit), int(here.sum())
        for place in np.flatnonzero(here)[np.argsort(sizes[here])]:
            even[place] = min(sizes[place], left / open_) if open_ > 1 else left
            left, open_ = left - even[place], open_ - 1
    for share in (0.0, 1.0, 0.5, 0.25, 0.75) if len(set(devices)) < len(devices) else (0.0,):
        yield (share * even + (1 - share) * filled).tolist()


def _storing(
    demand: Demand, sizes: Sequence[PartitionBytes], limit: float, speeds: Speeds
) -> list[PartitionSwaps]:
    """Return the swaps of partitions that let skips and inputs wait in stores."""
    skips, peaks, partitions = find_skips(demand.costs), demand.peaks(sizes), []
    blocks = blocks_of(demand.balance)
    for (start, stop), size, device in zip(blocks, sizes, demand.devices, strict=True):
        arrives = demand.costs[start].input if start else 0
        leaving = sum(s.map_bytes for s in skips if start <= s.stash < stop <= s.pop)
        coming = sum(s.map_bytes for s in skips if s.stash < start <= s.pop < stop)
        forward_s = sum(time.forward_s for time in speeds.times[start:stop])
        backward_s = forward_s + sum(time.backward_s for time in speeds.times[start:stop])
        # Each way has a lane of its own, and waits for the other only where it is the slower one.
        late_s = max(arrives + leaving, coming) / speeds.bandwidth - forward_s
        late_back_s = (arrives + coming) / speeds.bandwidth - backward_s
        partitions.append(
            PartitionSwaps(
                0,
                size.total,
                max(0.0, limit - peaks[device]) / list(demand.devices).count(device),
                demand.micro_batches * (arrives + leaving),
                max(0.0, late_s),
                max(0.0, late_back_s),
            )
        )
    return partitions
