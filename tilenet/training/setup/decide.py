"""Decide how a run is laid out: network, tiles, mesh, micro-batches and partitions."""

from collections.abc import Sequence
from dataclasses import replace
from math import prod

from tilenet.data.crops import cell_side
from tilenet.errors import TilenetError
from tilenet.geometry.tiles import Cut
from tilenet.planning.balance import check_balance, likely_balance
from tilenet.planning.mesh import choose_mesh
from tilenet.storage.network_json import NetworkRecord
from tilenet.training.config.planned import check_plan
from tilenet.training.config.run_file import RunFile
from tilenet.training.setup.architecture import Architecture
from tilenet.training.setup.checks import check_exact, check_pipeline, check_tiles, check_whole_loss
from tilenet.training.setup.run_plan import RunPlan, Shape
from tilenet.training.setup.sub_tiles import most_in_a_step, with_sub_tiles
from tilenet.training.setup.tile_rule import tile_rule


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
        tile_rule(run, record, mesh),
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
    check_exact(plan, per_step, sizes, rotations=run.augment.rotations)
    check_pipeline(run, plan)

    def busy(size: tuple[int, int]) -> tuple[int, int]:
        # A rank may have more tiles of a long image than of the largest one.
        return most_in_a_step(plan, num_samples, size), size[0] * size[1]

    plan = with_sub_tiles(plan, num_samples, max(sizes, key=busy))
    if "dice" in run.loss_terms:
        check_whole_loss(run.loss, plan, most_in_a_step(plan, num_samples, max(sizes, key=busy)))
    grid_asked = run.tiles.rows is not None and not run.crop_px
    for size in sizes:
        check_tiles(plan, size, per_step, grid_asked=grid_asked)
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
    together = {} if plan.adopted is None else plan.adopted.together
    size = read.height, read.width
    balance = run.balance or likely_balance(layers, size, run.num_partitions, together)
    check_balance(balance, len(layers), run.num_partitions, together)
    return tuple(balance)


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
        all_bands=run.bands is None,
        names=None if network.adopted is None else network.adopted.names,
        task=run.task,
        unit=run.unit,
    )


def tiled_sizes(
    whole: Sequence[tuple[int, int]], crop_px: int | None, *, rotations: bool
) -> list[tuple[int, int]]:
    """Sizes of the images or crops that are tiled, and of turned ones, each once."""
    crop = crop_px or max(map(max, whole))
    sizes = list(dict.fromkeys((min(crop, height), min(crop, width)) for height, width in whole))
    return sizes + [size[::-1] for size in sizes if rotations and size[0] != size[1]]
