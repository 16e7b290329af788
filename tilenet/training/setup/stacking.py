"""Equal crops of a step in one batch, where a device computes them faster so.

On a GPU each operation takes time to begin, however small its map is: 8 crops of 256² one after
another took 0.20 s, in one batch 0.05 (preset `small` on an H200, TF32). On a CPU larger maps leave
the caches, and one batch took 1.3 times as long.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch

from tilenet.geometry.layers import Norm
from tilenet.mpi import Intracomm
from tilenet.planning.memory.layer import layer_bytes
from tilenet.planning.memory.map_limits import countable
from tilenet.planning.memory.partition import partition_bytes
from tilenet.planning.mesh import most_tiles
from tilenet.planning.micro_batches import most_micro_batches, most_stacked
from tilenet.training.config.keys import OptimizerKeys
from tilenet.training.setup.run_plan import RunPlan
from tilenet.training.states import sharers_of

ENOUGH_PX = 1 << 21  # pixels of a batch that keep a GPU busy
ROOM = 0.75  # share of free memory for maps, weights and states; the rest is for workspaces


def stack_crops(
    plan: RunPlan,
    crops: int,
    sizes: Sequence[tuple[int, int]],
    optimizer: OptimizerKeys,
    devices: Sequence[torch.device],
    comm: Intracomm,
) -> RunPlan:
    """The plan with as many micro-batches in one as pay and fit. Collective.

    Args:
        plan: The plan, in which each micro-batch is computed by itself.
        crops: Number of crops of a step.
        sizes: Heights and widths of the images.
        devices: Devices of this rank.
    """
    # Ranks that wait for one another need the same micro-batches.
    limit = min(comm.allgather(_limit_bytes(devices)))
    ranks = sharers_of(optimizer, plan.record, comm.size)
    return replace(plan, merged=most_together(plan, crops, sizes, optimizer.kind, limit, ranks))


def most_together(
    plan: RunPlan,
    crops: int,
    sizes: Sequence[tuple[int, int]],
    optimizer: str,
    limit: int,
    ranks: int = 1,
) -> int:
    """How many micro-batches of crops are computed as one.

    Args:
        optimizer: See `partition_bytes`, and `sharers` for `ranks`.
        limit: Bytes that a device has for a step; 0: micro-batches are not stacked.
    """
    side, layers = plan.crop_px, plan.record.layers
    if not limit or side is None or min(map(min, sizes)) < side or len(plan.balance) > 1:
        return 1
    # Batch norm takes its statistics over a batch: a larger one would change them.
    batch_norm = any(
        isinstance(layer, Norm) and layer.norm == "batch" and layer.scope != "frozen"
        for layer in layers
    )
    if plan.swept or plan.record.opaque is not None or batch_norm:
        return 1
    tiling = plan.tiling(side, side)
    tiles, images = most_tiles(plan.mesh, tiling.grid), -(-crops // plan.mesh.replicas)
    count, each = most_micro_batches(layers, tiles, images), most_stacked(layers, tiles, 1)
    rows, cols = tiling.largest_read

    def fits(together: int) -> bool:
        batch, at_once = together * each, min(plan.micro_batches, -(-count // together))
        costs = layer_bytes(layers, rows, cols, plan.record.precision, batch, plan.halo_mode)
        job = costs, plan.balance, at_once, plan.checkpointing
        (part,) = partition_bytes(*job, optimizer, sharers=ranks)
        enough = batch * rows * cols <= ENOUGH_PX and countable(layers, rows, cols, batch)
        return enough and part.total <= limit

    # As even as can be: of 8, 4 and 4 in place of 5 and 3.
    even = sorted({-(-count // turns) for turns in range(1, count + 1)}, reverse=True)
    return next(filter(fits, even), 1)


def _limit_bytes(devices: Sequence[torch.device]) -> int:
    if len(devices) > 1 or devices[0].type == "cpu":
        return 0
    free, _ = torch.get_device_module(devices[0]).mem_get_info(devices[0])
    return int(free * ROOM)
