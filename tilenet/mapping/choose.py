"""How an image is mapped on the memory that the ranks have: decided alike on all of them."""

from dataclasses import replace

import torch

from tilenet.geometry.opaque import Opaque
from tilenet.mapping.blended import tiles_of_windows, window_ratio
from tilenet.mpi import Intracomm
from tilenet.parallel.ranks.comm import agreed
from tilenet.planning.maps.choose import choose_map
from tilenet.planning.maps.question import MapPlan, MapQuestion
from tilenet.planning.maps.strips import GPU_STRIP_PX
from tilenet.planning.memory.map_limits import check_map_sizes

# Feature maps of a tile may take this much on a CPU; on a GPU, a quarter of what is free. Measured
# peaks are about twice as high: convolutions reorder their input and output.
CPU_BYTES = 256 << 20
# Larger tiles save little work (at a halo of 96 px 1.4× the pixels are read, at 4096 1.1×) but
# cost memory that a GPU has to spare and a node with many CPU ranks has not.
CPU_TILE_PX, GPU_TILE_PX = 1024, 4096
# A sweep keeps whole rows. Columns of tiles would need less, but compute their halos twice.
SWEEP_TIMES = 8


def decide_map(
    question: MapQuestion,
    layer: Opaque | None,
    device: torch.device,
    comm: Intracomm,
    *,
    sweeps: bool = False,
    later_bytes: int = 0,
) -> MapPlan:
    """Decide. Collective.

    Args:
        question: Of the map; ranks and their memory are filled in here.
        layer: Of a network that is mapped by windows; None: it is a list of layers.
        device: The rank's first.
        comm: The ranks that map together.
        sweeps: Whether a sweep would do: on one device, for most of each row of the image.
        later_bytes: Bytes of the device that are free now, but will not be when the map is made.

    Raises:
        AgreedError: The image cannot be mapped so.
    """
    # Ranks that chose for themselves could choose differently.
    budget, most_px = min(comm.allgather(_memory(device, later_bytes)))
    on_gpu = device.type != "cpu"
    with agreed(comm):
        question = replace(
            question,
            num_ranks=comm.size,
            budget_bytes=budget,
            most_px=most_px,
            strip_overhead_px=GPU_STRIP_PX if on_gpu else 0,
            sweep_bytes=budget * (1 if on_gpu else SWEEP_TIMES) if sweeps else 0,
        )
        plan = _plan_windows(question, layer) if layer is not None else choose_map(question)
        read = plan.tiling.tiles[0].read
        rows = plan.tiling.rows[0].own if plan.method == "sweep" else read.height
        check_map_sizes(question.layers, rows, read.width)
    return plan


def _plan_windows(question: MapQuestion, layer: Opaque) -> MapPlan:
    """The tiles of windows; smaller ones where no sweep would do, since little is wanted."""
    tiling = tiles_of_windows(
        layer,
        question.size,
        question.rule,
        question.budget_bytes,
        tile_px=question.tile_px,
        few=not question.sweep_bytes,
    )
    return MapPlan("windows", tiling, ratio=window_ratio(layer, tiling))


def _memory(device: torch.device, later_bytes: int) -> tuple[int, int]:
    """Bytes for feature maps, and the largest own size of a tile."""
    if device.type == "cpu":
        return CPU_BYTES, CPU_TILE_PX
    gpu = torch.get_device_module(device)
    free = gpu.mem_get_info(device)[0]
    # What torch has cached is free for us.
    cached = gpu.memory_reserved(device) - gpu.memory_allocated(device)
    return max(free + cached - later_bytes, 0) // 4, GPU_TILE_PX
