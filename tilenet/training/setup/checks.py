"""Refuse a layout with which a run could not be trained exactly, or not at all."""

from collections.abc import Sequence
from dataclasses import replace

from tilenet.choices import HaloMode
from tilenet.errors import TilenetError
from tilenet.geometry.maps import check_cells, output_size
from tilenet.geometry.ownership import check_shares
from tilenet.geometry.tiles import cut
from tilenet.planning.compatibility import (
    batch_obstacle,
    device_obstacle,
    flow_obstacle,
    obstacle,
    whole_image,
)
from tilenet.planning.memory.map_limits import check_map_sizes, check_weight_bytes
from tilenet.planning.memory.sweeps.trained_sweeps import averaged_sweeps, plan_sweeps
from tilenet.planning.mesh import most_tiles
from tilenet.planning.micro_batches import most_stacked
from tilenet.training.config.run_file import RunFile
from tilenet.training.setup.run_plan import RunPlan


def check_exact(
    plan: RunPlan,
    per_step: Sequence[int],
    sizes: Sequence[tuple[int, int]],
    *,
    rotations: bool,
) -> None:
    """Refuse a network that cannot be trained exactly as planned.

    Args:
        per_step: Numbers of images or crops that steps have.
        sizes: Their heights and widths.
        rotations: Whether images are turned.
    """
    mesh, layers = plan.mesh, plan.record.layers
    shape = mesh.replicas, mesh.rows, mesh.columns
    for size in sizes:
        mode: HaloMode = "exchange" if plan.rule.exchanged else plan.halo_mode
        reason = obstacle(layers, plan.tiling(*size).grid, shape, mode)
        if reason is not None:
            raise TilenetError(reason)
    extended = [plan.tiling(*size).extended for size in sizes]
    cropped = plan.crop_px is not None
    reason = batch_obstacle(layers, mesh.replicas, per_step, extended, cropped=cropped)
    if reason is not None:
        raise TilenetError(reason + ", or augment.rotations: false" * rotations)


def check_pipeline(run: RunFile, plan: RunPlan) -> None:
    """Refuse partitions on shared devices where ranks could wait without an end, and one forward,
    one backward where something needs a whole mini-batch.
    """
    mesh, layers, mode = plan.mesh, plan.record.layers, plan.halo_mode
    reason = None
    if isinstance(run.device, list):
        shape = mesh.replicas, mesh.rows, mesh.columns
        reason = device_obstacle(run.device, layers, shape, mode, plan.pipeline)
    if reason is None and plan.pipeline == "1f1b":
        reason = flow_obstacle(
            layers,
            run.num_partitions,
            plan.checkpointing,
            run.swap or "off",
            run.loss_terms,
            mode,
        )
    if reason is not None:
        raise TilenetError(reason)


def check_whole_loss(loss: str | None, plan: RunPlan, most: int) -> None:
    """Refuse a loss of whole images where a rank's tiles of a step are not in flight at once."""
    if most > plan.micro_batches:
        raise TilenetError(
            f"a loss over whole images needs all tiles of a step at once (loss: {loss}, "
            f"micro_batches: {plan.micro_batches}, a rank has {most}); set micro_batches: {most}, "
            "larger tiles, or loss: ce"
        )


def check_tiles(
    plan: RunPlan, size: tuple[int, int], per_step: Sequence[int], *, grid_asked: bool
) -> None:
    """Refuse tiles of images or crops of a size; see `check_exact` for `per_step`."""
    if grid_asked:  # a grid that cannot be had is refused, not made coarser
        cut(*size, plan.uncut or plan.requested, plan.rule)
    tiling, layers = plan.tiling(*size), plan.record.layers
    height, width = tiling.largest_read
    if min(output_size(layers, height), output_size(layers, width)) < 1:
        raise TilenetError(
            f"a tile must leave every pooling something (tile: {height} × {width} px, "
            f"total stride: {plan.record.context().alignment_px} px); make tiles larger"
        )
    if plan.rule.exchanged:
        check_shares(layers, tiling.rows, "rows")
        check_shares(layers, tiling.cols, "columns")
    # The cells over which a norm takes its statistics
    cells = (height, width) if whole_image(layers) is None else tiling.extended
    check_cells(
        layers, replace(tiling.tiles[0].read, height=cells[0], width=cells[1]), min(per_step)
    )
    if plan.swept:
        strip = plan_sweeps(layers, height, width, 4).edges[1]
        height = strip * (1 + bool(averaged_sweeps(layers)))  # higher where maps are kept
    images, tiles = -(-max(per_step) // plan.mesh.replicas), most_tiles(plan.mesh, tiling.grid)
    check_map_sizes(layers, height, width, most_stacked(layers, tiles, images))
    check_weight_bytes(layers)
