"""What a training run swaps: decided once, on rank 0, so that all ranks do the same.

They must where layers exchange halos: what one of them computes again, its neighbours do too.
"""

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cache, reduce
from itertools import chain
from math import inf, prod
from operator import add
from time import perf_counter
from typing import TYPE_CHECKING, Literal

import numpy as np
import torch

from tilenet.errors import TilenetError
from tilenet.geometry.layers import Layer
from tilenet.model.choices import parameter_dtype
from tilenet.model.network import build_network
from tilenet.parallel.health.progress import say
from tilenet.parallel.pipeline.layer_times import measure_layers
from tilenet.parallel.pipeline.pipe import Pipe
from tilenet.parallel.pipeline.skip_store import HostStore
from tilenet.parallel.ranks.comm import agreed
from tilenet.parallel.swap.actions import acting
from tilenet.parallel.swap.copies import HostCopies
from tilenet.parallel.swap.host_pool import FileSlabs, PinnedSlabs, Slabs
from tilenet.parallel.swap.statistics import SwapCounts, SwapStatistics
from tilenet.parallel.swap.swapper import Swapper
from tilenet.planning.machines import machine
from tilenet.planning.memory.layer import LayerBytes, layer_bytes
from tilenet.planning.memory.partition import partition_bytes
from tilenet.planning.swap.plan import Speeds, SwapPlan, plan_swaps, swap_everything
from tilenet.planning.time.roofline import LayerTime
from tilenet.training.config_keys import SwappingKeys
from tilenet.training.setup import RunDevices, RunPlan

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = ["Load", "RunSwaps", "decide_swaps", "say_swaps"]

GIB = 2**30
RESERVE = 0.1  # share of a device for workspaces and fragmentation
TRIAL_BYTES = 32 << 20


@dataclass(frozen=True)
class Load:
    """What a rank computes at a time, at the most.

    Attributes:
        tile: Rows and columns of a micro-batch, of the largest.
        stacked: Tiles in one.
        micro_batches: How many.
    """

    tile: tuple[int, int]
    stacked: int
    micro_batches: int


SwapMode = Literal["off", "auto", "all"] | bool


def decide_swaps(
    mode: SwapMode,
    keys: SwappingKeys,
    plan: RunPlan,
    optimizer: str,
    loads: Sequence[Load],
    devices: RunDevices,
    comm: "MPI.Intracomm",
) -> SwapPlan | None:
    """What to swap; None: nothing. Collective.

    Args:
        mode: Nothing, no more than must be, or all that can be.
        keys: Limits, and where tensors go.
        optimizer: See `partition_bytes`.
        loads: Of this rank, in steps of whatever size: each must fit.

    Raises:
        AgreedError: Nothing makes a step fit.
    """
    if mode == "off":
        return None
    with agreed(comm):
        limit = _limit_bytes(keys.device_gib, devices)
    limit = min(comm.allgather(limit))
    load = _most(list(chain(*comm.allgather(loads))))
    swaps = None
    with agreed(comm):
        if comm.rank == 0:
            if mode == "all":
                swaps = _all(keys, plan, optimizer, load)
            else:
                swaps = _fewest(keys, plan, optimizer, load, devices.partitions, limit)
            say(f"swap: {mode}: {swaps}; {_sentence(swaps, devices.partitions, limit)}")
    decided: SwapPlan = comm.bcast(swaps)
    return decided


def _sentence(swaps: SwapPlan, devices: Sequence[torch.device], limit: int) -> str:
    with_it = _fullest([part.device_bytes for part in swaps.partitions], devices)
    without = _fullest(swaps.without_bytes, devices)
    return (
        f"predicted {_size(with_it)} on the fullest device, without {_size(without)}, there is "
        f"{_size(limit)}"
    )


def _fullest(sizes: Sequence[int], devices: Sequence[torch.device]) -> int:
    """Bytes of the fullest device; several partitions may lie on one."""
    placed = list(zip(sizes, devices, strict=True))
    return max(sum(size for size, other in placed if other == device) for device in devices)


def _size(num_bytes: float) -> str:
    return f"{num_bytes / GIB:.2f} GiB" if num_bytes >= GIB else f"{num_bytes / 2**20:.2f} MiB"


def _most(loads: Sequence[Load]) -> Load:
    # By area: rows of one image with columns of another would be a tile that nobody has.
    tile = max((load.tile for load in loads), key=prod)
    stacked = max(load.stacked for load in loads)
    return Load(tile, stacked, max(load.micro_batches for load in loads))


def _limit_bytes(device_gib: float | None, devices: RunDevices) -> int:
    if device_gib is not None:
        return int(device_gib * GIB)
    if devices.partitions[0].type == "cuda":
        _, total = torch.cuda.mem_get_info(devices.partitions[0])
        return int(total * (1 - RESERVE))
    return int(machine("local").memory_bytes * (1 - RESERVE)) // devices.place.size


def _costs(plan: RunPlan, load: Load) -> tuple[LayerBytes, ...]:
    record = plan.record
    return layer_bytes(record.layers, *load.tile, record.precision, load.stacked, plan.halo_mode)


def _all(keys: SwappingKeys, plan: RunPlan, optimizer: str, load: Load) -> SwapPlan:
    # Bytes are asked for only, and they do not depend on speeds.
    idle = Speeds([LayerTime(0.0, 0.0)] * len(plan.record.layers), inf, keys.min_bytes)
    job = _costs(plan, load), plan.balance, load.micro_batches, plan.checkpointing, optimizer
    return swap_everything(*job, idle)


def _fewest(
    keys: SwappingKeys,
    plan: RunPlan,
    optimizer: str,
    load: Load,
    devices: Sequence[torch.device],
    limit: int,
) -> SwapPlan:
    costs = _costs(plan, load)
    job = costs, plan.balance, load.micro_batches, plan.checkpointing, optimizer
    needed = [part.total for part in partition_bytes(*job)]

    @cache
    def speeds() -> Speeds:
        times = _measured(plan.record.layers, load, plan.record.precision, devices[0])
        return Speeds(times, _bandwidth(keys, devices), keys.min_bytes)

    # What `RunSwaps` lets stay for fetching ahead, where anything goes out.
    slack = _ahead(devices) * max(cost.output for cost in costs)
    if plan.checkpointing != "never" or _fullest(needed, devices) <= limit:
        slack = 0
    for shares in _shares(needed, devices, limit - slack):
        swaps = plan_swaps(*job, shares, speeds)
        if swaps is not None:
            return swaps
    raise TilenetError(
        f"a step must fit its devices, and swapping does not make it fit (needed without: "
        f"{_size(_fullest(needed, devices))} on the fullest, there is: {_size(limit)}); use "
        "smaller tiles, more partitions, "
        "checkpointing: always, or fewer micro_batches"
    )


def _shares(
    needed: Sequence[int], devices: Sequence[torch.device], limit: int
) -> Iterator[list[float]]:
    """Bytes of each partition; what several on one device may use is tried in a few ways.

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


def _measured(
    layers: tuple[Layer, ...], load: Load, precision: str, device: torch.device
) -> tuple[LayerTime, ...]:
    dtype = parameter_dtype(precision)
    network = build_network(layers, dtype=dtype, device=device).train()
    shape = (load.stacked, layers[0].in_channels, *load.tile)
    found = measure_layers(network, torch.randn(shape, dtype=dtype, device=device), precision, 1)
    return tuple(LayerTime(one.forward_s, one.backward_s) for one in found)


def _bandwidth(keys: SwappingKeys, devices: Sequence[torch.device]) -> float:
    """Bytes/s of a copy out and of one back, whichever is slower."""
    copies = HostCopies(_slabs(keys, devices), SwapStatistics())
    storage = torch.zeros(TRIAL_BYTES, dtype=torch.uint8, device=devices[0]).untyped_storage()
    slowest = 0.0
    copy = copies.send(storage)  # the room is reserved, and touched, the first time
    copies.release(copy)
    for _ in range(2):
        began = perf_counter()
        copy = copies.send(storage)
        _wait(devices[0])
        slowest = max(slowest, perf_counter() - began)
        began = perf_counter()
        copies.fetch(copy, devices[0])
        _wait(devices[0])
        slowest = max(slowest, perf_counter() - began)
        copies.release(copy)
    copies.close()
    return TRIAL_BYTES / slowest


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _slabs(keys: SwappingKeys, devices: Sequence[torch.device]) -> Slabs:
    limit = None if keys.host_gib is None else int(keys.host_gib * GIB)
    if devices[0].type == "cuda" and keys.folder is None:
        return PinnedSlabs(limit)
    return FileSlabs(keys.folder or tempfile.gettempdir(), limit)


def _ahead(devices: Sequence[torch.device]) -> int:
    """Storages that are fetched ahead: none where copies are done when they return."""
    return 0 if devices[0].type == "cpu" else 2


class RunSwaps:
    """The swapper of a rank, and its partitions' stores.

    Args:
        keys: Where tensors go, and which are too small.
        plan: What is done.
        devices: Of the partitions.

    Raises:
        TilenetError: The folder is not writable.
    """

    def __init__(self, keys: SwappingKeys, plan: SwapPlan, devices: Sequence[torch.device]) -> None:
        self.plan = plan
        ahead = _ahead(devices)
        room, small = ahead * plan.largest_bytes, keys.min_bytes
        self._swapper = Swapper(room, small, ahead, _slabs(keys, devices))
        self.statistics = self._swapper.statistics
        copies = self._swapper.copies
        self.stores = (
            [HostStore(copies, device, small, min(ahead, 1)) for device in devices]
            if plan.stored
            else None
        )

    @property
    def cells(self) -> list[list[int]]:
        """Layers per module, of each partition."""
        return [[size for size, _ in part.modules] for part in self.plan.partitions]

    def acting(self, pipe: Pipe) -> AbstractContextManager[None]:
        """Let the pipe's cells do as planned."""
        cells = [cell for partition in pipe.partitions for cell in partition]
        actions = [action for part in self.plan.partitions for _, action in part.modules]
        return acting(cells, actions, self._swapper)

    def close(self) -> None:
        """Give host memory or the file back."""
        self._swapper.close()


def say_swaps(comm: "MPI.Intracomm", swaps: SwapCounts, seconds: float) -> None:
    """Say what all ranks swapped, where any did. Collective.

    Args:
        comm: The ranks.
        swaps: Of this rank's steps.
        seconds: Of these steps.
    """
    # All ranks wait for the first, which may be writing a trace: what a run leaves is there when
    # any of them returns.
    ranks = comm.allgather((swaps, seconds))
    total = reduce(add, (of_rank for of_rank, _ in ranks))
    if comm.rank > 0 or total.out_count + total.in_count == 0:
        return
    waited, of_seconds = max((of_rank.wait_seconds, lasted) for of_rank, lasted in ranks)
    say(
        f"swapped: {_bytes_text(total.out_bytes)} out ({total.out_count:,} tensors), "
        f"{_bytes_text(total.in_bytes)} in ({total.in_count:,}); of a rank at most "
        f"{_bytes_text(total.peak_host_bytes)} were out and "
        f"{_bytes_text(total.peak_active_bytes)} waited for "
        f"backward on its devices; {waited:.1f} s waited of {of_seconds:.1f} s"
        + " on the rank that waited longest"
        * (len(ranks) > 1)
    )


def _bytes_text(num_bytes: int) -> str:
    for power, unit in ((30, "GiB"), (20, "MiB")):
        if num_bytes >= 1 << power:
            return f"{num_bytes / (1 << power):.1f} {unit}"
    return f"{num_bytes / 1024:.1f} KiB"
