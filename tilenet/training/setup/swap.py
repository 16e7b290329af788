"""Decide what a training run swaps: once, on rank 0, so that all ranks do the same."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import chain
from math import inf, prod
from typing import Literal

import torch

from tilenet.errors import TilenetError
from tilenet.model.dtypes import parameter_dtype
from tilenet.model.network import build_network
from tilenet.mpi import Intracomm
from tilenet.parallel.health.progress import say
from tilenet.parallel.pipeline.swaps import PipeSwaps, fetched_ahead
from tilenet.parallel.ranks.comm import agreed
from tilenet.parallel.ranks.layout import RunDevices
from tilenet.parallel.swap.copies import measure_bandwidth
from tilenet.parallel.swap.host_pool import Slabs, open_slabs
from tilenet.planning.machines.read import machine
from tilenet.planning.memory.layer import layer_bytes
from tilenet.planning.swap.plan import Demand, Speeds, SwapPlan, plan_swaps
from tilenet.planning.time.layer_time import LayerTime
from tilenet.planning.time.measured import measure_layers
from tilenet.storage.network_json import NetworkRecord
from tilenet.training.config.keys import SwappingKeys
from tilenet.training.setup.run_plan import RunPlan

GIB = 2**30
RESERVE = 0.1  # share of a device that is left for workspaces and fragmentation

SwapMode = Literal["off", "auto", "all"] | bool


@dataclass(frozen=True)
class Load:
    """The largest work of a rank in a step.

    Attributes:
        tile: Rows and columns of the largest tile.
        stacked: Number of tiles in a micro-batch.
        micro_batches: Number of micro-batches in a step.
    """

    tile: tuple[int, int]
    stacked: int
    micro_batches: int


@dataclass(frozen=True)
class SwapRequest:
    """Which swapping a run asks for, and the loads that must fit.

    Attributes:
        mode: `off`; `auto`: no more than needed to fit; `all`: every tensor that can be swapped.
        keys: Limits of memory, and where swapped tensors go.
        optimizer: Kind of the optimizer by its states, see `partition_bytes`.
        loads: One load of this rank for each size of a step; all must fit.
        sharers: Number of ranks that share out the optimizer's states.
    """

    mode: SwapMode = "off"
    keys: SwappingKeys = field(default_factory=SwappingKeys)
    optimizer: str = "sgd"
    loads: Sequence[Load] = ()
    sharers: int = 1


def decide_swaps(
    request: SwapRequest, plan: RunPlan, devices: RunDevices, comm: Intracomm
) -> SwapPlan | None:
    """Decide what to swap; None: nothing. Collective.

    Raises:
        AgreedError: A step does not fit even with swapping.
    """
    mode, keys = request.mode, request.keys
    if mode == "off":
        return None
    limit = device_bytes(keys, devices, comm)
    load = _largest(list(chain(*comm.allgather(request.loads))))
    swaps = None
    with agreed(comm):
        if comm.rank == 0:
            swaps = _plan(request, plan, load, devices.partitions, limit)
            say(
                f"swap: {mode}: {swaps}; predicted {_size(swaps.device_bytes)} on the fullest "
                f"device, without {_size(swaps.without_bytes)}, there is {_size(limit)}"
            )
    decided: SwapPlan = comm.bcast(swaps)
    return decided


def pipe_swaps(plan: SwapPlan, keys: SwappingKeys, devices: Sequence[torch.device]) -> PipeSwaps:
    """The hooks that carry out a swap plan.

    Raises:
        TilenetError: The folder for swapped tensors is not writable.
    """
    return PipeSwaps(
        [part.layers for part in plan.partitions],
        devices,
        _slabs(keys, devices[0]),
        stored=plan.stored,
        largest_bytes=plan.largest_bytes,
        min_bytes=keys.min_bytes,
        in_flight=[part.in_flight_bytes for part in plan.partitions],
    )


def _size(num_bytes: float) -> str:
    return f"{num_bytes / GIB:.2f} GiB" if num_bytes >= GIB else f"{num_bytes / 2**20:.2f} MiB"


def _largest(loads: Sequence[Load]) -> Load:
    # The tile of largest area: rows of one image and columns of another are a tile of no rank.
    tile = max((load.tile for load in loads), key=prod)
    stacked = max(load.stacked for load in loads)
    return Load(tile, stacked, max(load.micro_batches for load in loads))


def device_bytes(keys: SwappingKeys, devices: RunDevices, comm: Intracomm) -> int:
    """Bytes that a step may take on each device, the least over all ranks. Collective."""
    with agreed(comm):
        limit = _limit_bytes(keys.device_gib, devices)
    least: int = min(comm.allgather(limit))
    return least


def _limit_bytes(device_gib: float | None, devices: RunDevices) -> int:
    if device_gib is not None:
        return int(device_gib * GIB)
    first = devices.partitions[0]
    if first.type == "cpu":
        return int(machine("local").memory_bytes * (1 - RESERVE)) // devices.place.size
    _, total = torch.get_device_module(first).mem_get_info(first)
    return int(total * (1 - RESERVE))


def _plan(
    request: SwapRequest,
    plan: RunPlan,
    load: Load,
    devices: Sequence[torch.device],
    limit: int,
) -> SwapPlan:
    record, keys, everything = plan.record, request.keys, request.mode == "all"
    costs = layer_bytes(record.layers, *load.tile, record.precision, load.stacked, plan.halo_mode)
    demand = Demand(
        costs,
        plan.balance,
        load.micro_batches,
        plan.checkpointing,
        request.optimizer,
        devices,
        request.sharers,
    )

    @cache
    def speeds() -> Speeds:
        if everything:  # bytes do not depend on speeds
            return Speeds([LayerTime(0.0, 0.0)] * len(costs), inf, keys.min_bytes)
        times = _times(record, load, devices[0])
        bandwidth = measure_bandwidth(_slabs(keys, devices[0]), devices[0])
        return Speeds(times, bandwidth, keys.min_bytes)

    ahead = fetched_ahead(devices[0])
    swaps = plan_swaps(demand, limit, speeds, everything=everything, ahead=ahead)
    if swaps is None:
        checkpointing = "" if plan.checkpointing == "always" else "checkpointing: always, "
        raise TilenetError(
            "a step must fit its devices, and swapping does not make it fit (needed without: "
            f"{_size(demand.peak)} on the fullest, there is: {_size(limit)}); use smaller tiles, "
            f"more partitions, {checkpointing}or fewer micro_batches"
        )
    return swaps


def _times(record: NetworkRecord, load: Load, device: torch.device) -> tuple[LayerTime, ...]:
    dtype = parameter_dtype(record.precision)
    network = build_network(record.layers, dtype=dtype).train()
    image = torch.randn((load.stacked, len(record.bands), *load.tile), dtype=dtype, device=device)
    return measure_layers(network, image, record.precision, 1)


def _slabs(keys: SwappingKeys, device: torch.device) -> Slabs:
    """Host memory or files for the swapped tensors of a device.

    Raises:
        TilenetError: The folder is not writable.
    """
    limit = None if keys.host_gib is None else int(keys.host_gib * GIB)
    return open_slabs(keys.folder, limit, pinned=device.type != "cpu")
