"""What a training run decides before a pixel is read: network, halo, mesh and tiles."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod

from torch import Tensor

from tilenet.adoption.adopt import Adopted
from tilenet.choices import Checkpointing, HaloMode, Pipelining
from tilenet.data.crops import cell_side
from tilenet.errors import TilenetError
from tilenet.geometry.maps import output_size
from tilenet.geometry.ownership import check_shares
from tilenet.geometry.tiles import Cut, HaloRule, Tiling, check_cells, cut, halo_rule
from tilenet.planning.balance import check_balance, likely_balance
from tilenet.planning.compatibility import (
    batch_obstacle,
    device_obstacle,
    flow_obstacle,
    most_micro_batches,
    most_stacked,
    needs_all_tiles,
    obstacle,
    whole_image,
)
from tilenet.planning.memory.map_limits import check_map_sizes, check_weight_bytes
from tilenet.planning.memory.trained_sweeps import averaged_sweeps, plan_sweeps
from tilenet.planning.mesh import MeshShape, choose_mesh, most_tiles
from tilenet.storage.network_json import NetworkRecord
from tilenet.training.architecture import Architecture
from tilenet.training.config.planned import check_plan
from tilenet.training.config.run_file import RunFile
from tilenet.training.config.sweep import check_sweep

__all__ = ["RunPlan", "Shape", "plan_run", "tiled_sizes"]

Shape = tuple[tuple[int, ...], tuple[int, int]]  # an image's bands; its height and width


@dataclass(frozen=True)
class RunPlan:
    """How a run is laid out.

    Attributes:
        record: The network; its statistics are filled in after the survey of the images.
        rule: Halo and alignment of the tiles.
        mesh: Layout of the ranks.
        asked: Grid or size of the tiles of an image, as requested.
        balance: Layers per partition.
        micro_batches: Most tiles of a rank in the pipeline at once.
        checkpointing: Which micro-batches are computed again in backward.
        pipeline: How micro-batches go through the partitions.
        merged: Number of micro-batches of crops that are computed as one, see `stacking`.
        crop_px: Side of the crops of a step; None: a step has whole images.
        uncut: Tiles before they were cut into sub-tiles, one per micro-batch; None: not cut.
        cell_px: Side of the grid cells for which the survey keeps the classes labelled there.
        adopted: The adopted user module; None: a U-Net of tilenet.
        note: A sentence on the module's loaded weights.
        swept: Whether tiles are swept.
        strip_rows: Rows of a strip; None: the number that takes the least memory.
    """

    record: NetworkRecord
    rule: HaloRule
    mesh: MeshShape
    asked: Cut
    balance: tuple[int, ...]
    micro_batches: int = 1
    checkpointing: Checkpointing = "never"
    pipeline: Pipelining = "gpipe"
    merged: int = 1
    crop_px: int | None = None
    uncut: Cut | None = None
    cell_px: int = 0
    adopted: Adopted | None = None
    note: str = ""
    swept: bool = False
    strip_rows: int | None = None

    @property
    def halo_mode(self) -> HaloMode:
        """How tiles get their context."""
        if self.record.opaque is not None:
            return "windows"
        if self.swept:
            return "sweep"
        return "exchange" if self.rule.exchanged else "overlap"

    @property
    def needs_all_tiles(self) -> bool:
        """Whether some layer needs data of the other tiles of an image."""
        return self.rule.exchanged or needs_all_tiles(self.record.layers, self.halo_mode)

    def named(self, weights: dict[str, Tensor]) -> dict[str, Tensor]:
        """The network's `state_dict()` under the names that checkpoints have for it."""
        return weights if self.adopted is None else self.adopted.module_state(weights)

    def tiling(self, height: int, width: int) -> Tiling:
        """The tiles of an image or crop; of a small one fewer than were asked for."""
        unit = self.rule.alignment_px
        grid = self.asked.grid
        if grid is not None:
            grid = min(grid[0], -(-height // unit)), min(grid[1], -(-width // unit))
        return cut(height, width, Cut(grid, self.asked.size_px), self.rule)


def plan_run(
    run: RunFile,
    shapes: tuple[Shape, ...],
    num_ranks: int,
    architecture: Architecture | None = None,
) -> RunPlan:
    """Decide how a run is laid out.

    Args:
        shapes: Bands and size of each image, at the resolution at which it is read.
        architecture: The network that all ranks share; None: it is made here.

    Raises:
        TilenetError: A rule is broken.
    """
    _check_bands(run.image_paths, shapes)
    request = run.network, len(shapes[0][0]), len(run.class_names), run.seed
    network = architecture or Architecture.of(*request, window_px=run.window_px)
    sizes = tiled_sizes([size for _, size in shapes], run.crop_px, rotations=run.augment.rotations)
    if run.plan is not None:
        of_network = network.options, network.layers
        check_plan(run.plan, *of_network, sizes, rotations=run.augment.rotations)
    record = _record(run, network, shapes[0][0])
    num_samples = run.batch_size if run.crop_px else min(run.batch_size, len(shapes))
    _check_window_sizes(run, shapes)
    mesh = choose_mesh(num_ranks, num_samples, run.mesh.replicas, *_ranks_of_an_image(run))
    plan = RunPlan(
        record,
        _rule(run, record, mesh),
        mesh,
        run.tiles.cut or Cut(grid=(mesh.rows, mesh.columns)),
        balance=(),
        micro_batches=run.micro_batches,
        checkpointing=run.checkpointing,
        pipeline=run.pipeline,
        crop_px=run.crop_px,
        adopted=network.adopted,
        note=network.note,
        swept=run.halo_mode == "sweep",
    )
    # The last step of an epoch of whole images has the remaining ones.
    left = 0 if run.crop_px else len(shapes) % num_samples
    per_step = [num_samples, left] if left else [num_samples]
    _check_exact(plan, per_step, sizes, rotations=run.augment.rotations)
    _check_pipeline(run, plan)

    def busy(size: tuple[int, int]) -> tuple[int, int]:
        # A rank may have more tiles of a long image than of the largest one.
        return _micro_batches(plan, num_samples, size), size[0] * size[1]

    plan = _with_tiles_for_micro_batches(plan, num_samples, max(sizes, key=busy))
    if "dice" in run.loss_terms:
        _check_whole_loss(run.loss, plan, _micro_batches(plan, num_samples, max(sizes, key=busy)))
    grid_asked = run.tiles.rows is not None and not run.crop_px
    for size in sizes:
        _check_tiles(plan, size, per_step, grid_asked=grid_asked)
    plan = replace(plan, balance=_balance(run, plan, max(sizes, key=prod)))
    unit, whole = record.context().alignment_px, [size for _, size in shapes]
    cell_px = cell_side(whole, len(run.class_names), unit, run.crop_px)
    return replace(plan, cell_px=cell_px)


def _ranks_of_an_image(run: RunFile) -> tuple[int | None, int | None]:
    """Rows and columns of ranks that the run file or the halo mode sets; None: free."""
    if run.halo_mode == "windows":
        return 1, 1
    rows, columns = run.mesh.rows, run.mesh.columns
    # In a sweep ranks hold columns of an image.
    swept = run.halo_mode == "sweep" and rows is None and columns is None
    return 1 if swept else rows, columns


def _balance(run: RunFile, plan: RunPlan, size: tuple[int, int]) -> tuple[int, ...]:
    """Layers per partition: as the run file says, or the fastest for the largest tile."""
    layers, read = plan.record.layers, plan.tiling(*size).tiles[0].read
    size, together = (
        (read.height, read.width),
        {} if plan.adopted is None else plan.adopted.together,
    )
    balance = run.balance or likely_balance(layers, size, run.num_partitions, together)
    check_balance(balance, len(layers), run.num_partitions, together)
    return tuple(balance)


def _check_bands(paths: Sequence[str], shapes: Sequence[Shape]) -> None:
    bands = shapes[0][0]
    for path, (own, _) in zip(paths, shapes, strict=True):
        if len(own) != len(bands):
            raise TilenetError(
                f"all images need the same number of bands ({paths[0]}: {len(bands)}, "
                f"{path}: {len(own)}); choose some with bands"
            )


def _check_window_sizes(run: RunFile, shapes: Sequence[Shape]) -> None:
    side = run.window_px or 0
    small = [
        path for path, (_, size) in zip(run.image_paths, shapes, strict=True) if min(size) < side
    ]
    if small:
        raise TilenetError(
            f"an image is at least as large as a window (halo_mode: windows, crop_px: "
            f"{run.crop_px}, {small[0]} is smaller); leave it out, or choose smaller crops"
        )


def _record(run: RunFile, network: Architecture, bands: tuple[int, ...]) -> NetworkRecord:
    """The network, with statistics that standardise nothing yet."""
    return NetworkRecord(
        layers=network.layers,
        bands=bands,
        classes=run.class_names,
        ignore_index=run.ignore_index,
        mean=(0.0,) * len(bands),
        std=(1.0,) * len(bands),
        resolution=run.resolution,
        nodata=run.nodata,
        precision=run.precision,
        epsilon_px=network.epsilon_px,
        band_names=run.band_names,
        names=None if network.adopted is None else network.adopted.names,
        task=run.task,
        unit=run.unit,
    )


def _check_exact(
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
    reason = batch_obstacle(layers, mesh.replicas, per_step, extended)
    if reason is not None:
        raise TilenetError(reason + ", or augment.rotations: false" * rotations)


def _check_pipeline(run: RunFile, plan: RunPlan) -> None:
    """Refuse partitions on shared devices where ranks could wait without an end, and one forward,
    one backward where something needs a whole mini-batch.
    """
    mesh, layers, mode = plan.mesh, plan.record.layers, plan.halo_mode
    reason = None
    if isinstance(run.device, list):
        shape = mesh.replicas, mesh.rows, mesh.columns
        reason = device_obstacle(run.device, layers, shape, mode, plan.pipeline)
    if reason is None and plan.pipeline == "1f1b":
        keys = run.num_partitions, plan.checkpointing, run.swap or "off", run.loss_terms
        reason = flow_obstacle(layers, *keys, mode)
    if reason is not None:
        raise TilenetError(reason)


def _rule(run: RunFile, record: NetworkRecord, mesh: MeshShape) -> HaloRule:
    """How tiles read: what they own and the halo, or what they own where ranks exchange halos.

    Raises:
        TilenetError: The halo that was asked for cannot be had, or the network cannot be swept.
    """
    context, halo = record.context(), run.halo
    if run.halo_mode == "windows":
        # A crop at an image's edge is reflected up to the size of a window.
        return HaloRule(0, run.window_px or 0, exact=False)
    if run.halo_mode == "sweep":
        check_sweep(run, record, mesh)
        if mesh.rows == 1 and mesh.columns > 1 and run.tiles.cut is None:
            return HaloRule(0, context.alignment_px, exchanged=True)
    if run.halo_mode == "exchange":
        if halo != "exact":
            raise TilenetError(
                f"with halo_mode: exchange each layer takes just what it needs (halo: {halo}); "
                "leave halo out, or use halo_mode: overlap"
            )
        return HaloRule(0, context.alignment_px, exchanged=True)
    rule = halo_rule(halo, context, record.layers, record.epsilon_px)
    if rule.alignment_px != context.alignment_px and whole_image(record.layers):
        raise TilenetError(
            f"tiles must lie on the network's grid for statistics over whole images (halo: "
            f"{halo}, network.norm_scope: image); use halo: exact, or network.norm_scope: tile"
        )
    return rule


def tiled_sizes(
    whole: Sequence[tuple[int, int]], crop_px: int | None, *, rotations: bool
) -> list[tuple[int, int]]:
    """Sizes of the images or crops that are tiled, and of turned ones."""
    crop = crop_px or max(map(max, whole))
    sizes = [(min(crop, height), min(crop, width)) for height, width in whole]
    return sizes + [size[::-1] for size in sizes if rotations and size[0] != size[1]]


def _check_whole_loss(loss: str | None, plan: RunPlan, most: int) -> None:
    """Refuse a loss of whole images where a rank's tiles of a step are not in flight at once."""
    if most > plan.micro_batches:
        raise TilenetError(
            f"a loss over whole images needs all tiles of a step at once (loss: {loss}, "
            f"micro_batches: {plan.micro_batches}, a rank has {most}); set micro_batches: {most}, "
            "larger tiles, or loss: ce"
        )


def _micro_batches(plan: RunPlan, num_samples: int, size: tuple[int, int]) -> int:
    """Most micro-batches that a rank can have in a step on the tiles as they are."""
    tiles = most_tiles(plan.mesh, plan.tiling(*size).grid)
    images = -(-num_samples // plan.mesh.replicas)
    return most_micro_batches(plan.record.layers, tiles, images)


def _with_tiles_for_micro_batches(
    plan: RunPlan, num_samples: int, size: tuple[int, int]
) -> RunPlan:
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
    have = _micro_batches(plan, num_samples, size)
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
        replace(plan, asked=Cut(grid=(grid[0] * a, grid[1] * b)), uncut=plan.asked)
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


def _check_tiles(
    plan: RunPlan, size: tuple[int, int], per_step: Sequence[int], *, grid_asked: bool
) -> None:
    """Refuse tiles of images or crops of a size; see `_check_exact` for `per_step`."""
    if grid_asked:  # a grid that cannot be had is refused, not made coarser
        cut(*size, plan.uncut or plan.asked, plan.rule)
    tiling, layers = plan.tiling(*size), plan.record.layers
    height = max(span.read for span in tiling.rows)
    width = max(span.read for span in tiling.cols)
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
