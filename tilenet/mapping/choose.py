"""How an image is mapped on the memory that the ranks have: decided alike on all of them."""

from typing import TYPE_CHECKING

import torch

from tilenet.geometry.opaque import Opaque
from tilenet.geometry.tiles import HaloRule
from tilenet.mapping.blended import tiles_of_windows, window_ratio
from tilenet.parallel.ranks.comm import agreed
from tilenet.planning.maps import GPU_STRIP_PX, MapPlan, MapQuestion, choose_map
from tilenet.planning.memory.layer import check_map_sizes
from tilenet.storage.network_json import NetworkRecord

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = ["decide_map"]

# Feature maps of a tile may take this much on a CPU; on a GPU, a quarter of what is free. Measured
# peaks are about twice as high: convolutions reorder their input and output.
CPU_BYTES = 256 << 20
# Larger tiles save little work (at a halo of 96 px 1.4× the pixels are read, at 4096 1.1×) but
# cost memory that a GPU has to spare and a node with many CPU ranks has not.
CPU_TILE_PX, GPU_TILE_PX = 1024, 4096
# A sweep keeps whole rows. Columns of tiles would need less, but compute their halos twice.
SWEEP_TIMES = 8


def decide_map(
    record: NetworkRecord,
    size: tuple[int, int],
    rule: HaloRule,
    device: torch.device,
    dtype: torch.dtype,
    comm: "MPI.Intracomm",
    *,
    halo_asked: bool = False,
    tile_px: int | None = None,
    at_once: int = 1,
    sweeps: bool = False,
    steady: bool = False,
    exchanges: bool = False,
    later_bytes: int = 0,
) -> MapPlan:
    """Decide. Collective.

    Args:
        record: The network.
        size: Height and width of the image.
        rule: The halo.
        device: The rank's first.
        dtype: Dtype of feature maps.
        comm: The ranks that map together.
        halo_asked: Whether another halo than the exact one was asked for.
        tile_px: Largest own size that was asked for; None: as much as memory allows.
        at_once: Tiles of a rank that are in the pipeline at a time.
        sweeps: Whether a sweep would do: on one device, for most of each row of the image.
        steady: As in `MapQuestion`.
        exchanges: As in `MapQuestion`.
        later_bytes: Bytes of the device that are free now, but will not be when the map is made.

    Raises:
        AgreedError: The image cannot be mapped so.
    """
    layer = record.opaque
    # Ranks that chose for themselves could choose differently.
    budget, most_px = min(comm.allgather(_memory(device, later_bytes)))
    with agreed(comm):
        asked = MapQuestion(
            layers=record.layers,
            size=size,
            rule=rule,
            halo_asked=halo_asked,
            tile_px=tile_px,
            num_ranks=comm.size,
            item_bytes=dtype.itemsize,
            budget_bytes=budget,
            most_px=most_px,
            at_once=at_once,
            steady=steady,
            exchanges=exchanges,
            strip_overhead_px=GPU_STRIP_PX if device.type == "cuda" else 0,
            sweep_bytes=budget * (1 if device.type == "cuda" else SWEEP_TIMES) if sweeps else 0,
        )
        plan = _of_windows(asked, layer) if layer is not None else choose_map(asked)
        read, strip = plan.tiling.tiles[0].read, plan.tiling.rows[0].own
        check_map_sizes(record.layers, strip if plan.method == "sweep" else read.height, read.width)
    return plan


def _of_windows(asked: MapQuestion, layer: Opaque) -> MapPlan:
    """The tiles of windows; smaller ones where no sweep would do, since little is wanted."""
    few, tile_px = not asked.sweep_bytes, asked.tile_px
    budget = asked.budget_bytes
    tiling = tiles_of_windows(layer, asked.size, asked.rule, budget, tile_px=tile_px, few=few)
    return MapPlan("windows", tiling, ratio=window_ratio(layer, tiling))


def _memory(device: torch.device, later_bytes: int) -> tuple[int, int]:
    """Bytes for feature maps, and the largest own size of a tile."""
    if device.type == "cuda":
        free = torch.cuda.mem_get_info(device)[0]
        # What torch keeps for later is free for us.
        kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return max(free + kept - later_bytes, 0) // 4, GPU_TILE_PX
    return CPU_BYTES, CPU_TILE_PX
