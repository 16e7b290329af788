"""Cut tiles into sub-tiles where a rank has fewer of them than micro-batches."""

from dataclasses import replace

from tilenet.errors import TilenetError
from tilenet.geometry.tiles import Cut
from tilenet.planning.compatibility import whole_image
from tilenet.planning.mesh import most_tiles
from tilenet.planning.micro_batches import most_micro_batches
from tilenet.training.setup.run_plan import RunPlan


def most_in_a_step(plan: RunPlan, num_samples: int, size: tuple[int, int]) -> int:
    """Most micro-batches that a rank can have in a step on the tiles as they are."""
    tiles = most_tiles(plan.mesh, plan.tiling(*size).grid)
    images = -(-num_samples // plan.mesh.replicas)
    return most_micro_batches(plan.record.layers, tiles, images)


def with_sub_tiles(plan: RunPlan, num_samples: int, size: tuple[int, int]) -> RunPlan:
    """Cut tiles into sub-tiles where a rank has fewer of them than micro-batches.

    Of all finer grids the one with the least overlap. Sub-tiles are tiles, so nothing else changes.

    Raises:
        TilenetError: They would become smaller than the alignment, or a norm forbids them.
    """
    grid = plan.tiling(*size).grid
    mesh, needed = plan.mesh, plan.micro_batches
    images = -(-num_samples // mesh.replicas)
    norm = whole_image(plan.record.layers)
    whole = norm is not None or plan.rule.exchanged
    have = most_in_a_step(plan, num_samples, size)
    if have >= needed:
        return plan
    if plan.halo_mode == "windows":
        raise TilenetError(
            f"windows are not cut (micro_batches: {needed}, windows of a rank: {have}); set "
            f"micro_batches: {have}, or a larger batch_size"
        )
    unit = plan.rule.alignment_px
    most = -(-size[0] // unit), -(-size[1] // unit)
    finer = [
        replace(plan, requested=Cut(grid=(grid[0] * a, grid[1] * b)), uncut=plan.requested)
        for a in range(1, min(2 * needed, most[0] // grid[0]) + 1)
        for b in range(1, min(2 * needed // a, most[1] // grid[1]) + 1)
        if images * most_tiles(mesh, (grid[0] * a, grid[1] * b)) >= needed and not whole
    ]
    if whole:
        why = "all tiles of a step" if norm == "batch norm" else "the tiles of an image"
        raise TilenetError(
            f"micro-batches wait for one another, and {why} cannot (micro_batches: {needed}, "
            f"over whole images: {norm or 'nothing'}, halo_mode: "
            f"{'exchange' if plan.rule.exchanged else 'overlap'}, images of a replica: {images}); "
            f"set micro_batches: {have}" + ", or a larger batch_size" * (norm != "batch norm")
        )
    if not finer:
        raise TilenetError(
            f"a rank needs at least as many tiles as micro-batches (micro_batches: {needed}, tiles "
            f"of a rank: {have}), and these cannot be cut further; set micro_batches: {have}, or a "
            "larger batch_size"
        )
    return min(finer, key=lambda cut_finer: cut_finer.tiling(*size).work_ratio)
