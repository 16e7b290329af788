"""What a training run swaps: decided once, on rank 0, so that all ranks do the same.

They must where layers exchange halos: what one of them computes again, its neighbours do too.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import chain
from math import inf, prod
from typing import TYPE_CHECKING, Literal

import numpy as np
import torch

from tilenet.errors import TilenetError
from tilenet.model.choices import parameter_dtype
from tilenet.model.network import build_network
from tilenet.parallel.health.progress import say
from tilenet.parallel.pipeline.layer_times import LayerTime, measure_layers
from tilenet.parallel.pipeline.swaps import PipeSwaps, fetched_ahead
from tilenet.parallel.ranks.comm import agreed
from tilenet.parallel.ranks.layout import RunDevices
from tilenet.parallel.swap.copies import measure_bandwidth
from tilenet.planning.machines import machine
from tilenet.planning.memory.layer import LayerBytes, layer_bytes
from tilenet.planning.memory.partition import partition_bytes
from tilenet.planning.swap.plan import Speeds, SwapPlan, plan_swaps, swap_everything
from tilenet.storage.network_json import NetworkRecord
from tilenet.training.config.keys import SwappingKeys
from tilenet.training.setup import RunPlan

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = ["Load", "SwapRequest", "decide_swaps", "device_bytes", "pipe_swaps"]

GIB = 2**30
RESERVE = 0.1  # share of a device for workspaces and fragmentation


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


@dataclass(frozen=True)
class SwapRequest:
    """What a step shall swap, and what it must hold.

    Attributes:
        mode: Nothing, no more than must be, or all that can be.
        keys: Limits, and where tensors go.
        optimizer: What it keeps of each parameter, see `partition_bytes`.
        loads: Loads of this rank, in steps of whatever size: each must fit.
    """

    mode: SwapMode = "off"
    keys: SwappingKeys = field(default_factory=SwappingKeys)
    optimizer: str = "sgd"
    loads: Sequence[Load] = ()


def decide_swaps(
    request: SwapRequest, plan: RunPlan, devices: RunDevices, comm: "MPI.Intracomm"
) -> SwapPlan | None:
    """What to swap; None: nothing. Collective.

    Raises:
        AgreedError: Nothing makes a step fit.
    """
    mode, keys, optimizer = request.mode, request.keys, request.optimizer
    if mode == "off":
        return None
    limit = device_bytes(keys, devices, comm)
    load = _most(list(chain(*comm.allgather(request.loads))))
    swaps = None
    with agreed(comm):
        if comm.rank == 0:
            if mode == "all":
                swaps = _all(keys, plan, optimizer, load, devices.partitions, limit)
            else:
                swaps = _fewest(keys, plan, optimizer, load, devices.partitions, limit)
            say(f"swap: {mode}: {swaps}; {_sentence(swaps, devices.partitions, limit)}")
    decided: SwapPlan = comm.bcast(swaps)
    return decided


def pipe_swaps(plan: SwapPlan, keys: SwappingKeys, devices: Sequence[torch.device]) -> PipeSwaps:
    """What carries a plan out.

    Raises:
        TilenetError: Swapped tensors have nowhere to go.
    """
    return PipeSwaps(
        [part.modules for part in plan.partitions],
        devices,
        keys.slabs(devices[0]),
        stored=plan.stored,
        largest_bytes=plan.largest_bytes,
        min_bytes=keys.min_bytes,
        in_flight=[part.in_flight_bytes for part in plan.partitions],
    )


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


def device_bytes(keys: SwappingKeys, devices: RunDevices, comm: "MPI.Intracomm") -> int:
    """Bytes that a step may take on every device. Collective."""
    with agreed(comm):
        limit = _limit_bytes(keys.device_gib, devices)
    least: int = min(comm.allgather(limit))
    return least


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


def _all(
    keys: SwappingKeys,
    plan: RunPlan,
    optimizer: str,
    load: Load,
    devices: Sequence[torch.device],
    limit: int,
) -> SwapPlan:
    # Bytes are asked for only, and they do not depend on speeds.
    idle = Speeds([LayerTime(0.0, 0.0)] * len(plan.record.layers), inf, keys.min_bytes)
    costs = _costs(plan, load)
    job = costs, plan.balance, load.micro_batches, plan.checkpointing, optimizer
    needed = [part.total for part in partition_bytes(*job)]
    limit -= _slack(costs, plan, devices)
    return swap_everything(*job, next(_shares(needed, devices, limit)), idle)


def _slack(costs: Sequence[LayerBytes], plan: RunPlan, devices: Sequence[torch.device]) -> int:
    """Bytes that `PipeSwaps` lets stay for fetching ahead, where anything goes out."""
    if plan.checkpointing != "never":
        return 0
    return fetched_ahead(devices[0]) * max(cost.output for cost in costs)


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
        times = _times(plan.record, load, devices[0])
        return Speeds(times, measure_bandwidth(keys.slabs(devices[0]), devices[0]), keys.min_bytes)

    slack = _slack(costs, plan, devices) if _fullest(needed, devices) > limit else 0
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


def _times(record: NetworkRecord, load: Load, device: torch.device) -> tuple[LayerTime, ...]:
    dtype = parameter_dtype(record.precision)
    network = build_network(record.layers, dtype=dtype).train()
    image = torch.randn((load.stacked, len(record.bands), *load.tile), dtype=dtype, device=device)
    return measure_layers(network, image, record.precision, 1)
