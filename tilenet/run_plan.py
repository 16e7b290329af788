"""What a training run decides before a pixel is read: network, halo, mesh and tiles."""

from dataclasses import dataclass

from tilenet.errors import TilenetError
from tilenet.files.network_record import NetworkRecord
from tilenet.geometry.halo import norm_context, output_size
from tilenet.geometry.networks import unet_layers
from tilenet.geometry.tiles import Cut, HaloRule, Tiling, check_norms, cut, halo_rule
from tilenet.planning.ranks import MeshShape, choose_mesh
from tilenet.run_file import RunFile, network_options, paper_epsilon_px

__all__ = ["RunPlan", "plan_run"]

Shape = tuple[tuple[int, ...], tuple[int, int]]  # an image's bands; its height and width


@dataclass(frozen=True)
class RunPlan:
    """The decisions.

    Attributes:
        record: The network; its statistics are filled in when the images were looked at.
        rule: How tiles read.
        mesh: How the ranks are laid out.
        asked: The tiles of an image.
    """

    record: NetworkRecord
    rule: HaloRule
    mesh: MeshShape
    asked: Cut

    def tiling(self, height: int, width: int) -> Tiling:
        """The tiles of an image or crop; of a small one fewer than were asked for."""
        unit = self.rule.alignment_px
        grid = self.asked.grid
        if grid is not None:
            grid = min(grid[0], -(-height // unit)), min(grid[1], -(-width // unit))
        return cut(height, width, Cut(grid, self.asked.size_px), self.rule)


def plan_run(run: RunFile, shapes: tuple[Shape, ...], num_ranks: int) -> RunPlan:
    """Decide how a run is laid out.

    Args:
        shapes: Bands and size of each image, at the resolution at which it is read.

    Raises:
        TilenetError: A rule is broken, or something is not built yet.
    """
    bands = shapes[0][0]
    for path, (others, _) in zip(run.image_paths, shapes, strict=True):
        if len(others) != len(bands):
            raise TilenetError(
                f"all images need the same number of bands ({run.image_paths[0]}: {len(bands)}, "
                f"{path}: {len(others)}); choose some with bands"
            )
    options = network_options(run.network, len(bands), len(run.class_names))
    layers = unet_layers(options)
    if norm_context(layers) == "image":
        raise TilenetError(
            f"{options.norm} norm over the whole image is not built yet (network.norm_scope: "
            "image); set network.norm_scope: tile (approximate: the map then depends on the "
            "tiles) or network.norm: none"
        )
    epsilon = paper_epsilon_px(run.network, options)
    record = NetworkRecord(
        layers=layers,
        bands=bands,
        classes=run.class_names,
        ignore_index=run.ignore_index,
        mean=(0.0,) * len(bands),
        std=(1.0,) * len(bands),
        resolution=run.resolution,
        nodata=run.nodata,
        precision=run.precision,
        epsilon_px=epsilon,
    )
    num_samples = run.batch_size if run.crop_px else min(run.batch_size, len(shapes))
    keys = run.mesh
    mesh = choose_mesh(num_ranks, num_samples, keys.replicas, keys.rows, keys.columns)
    asked = Cut(size_px=run.tiles.size_px)
    if run.tiles.rows is not None and run.tiles.columns is not None:
        asked = Cut(grid=(run.tiles.rows, run.tiles.columns))
    elif run.tiles.size_px is None:
        asked = Cut(grid=(mesh.rows, mesh.columns))
    plan = RunPlan(record, halo_rule(run.halo, record.context(), layers, epsilon), mesh, asked)
    for _, size in shapes:
        crop = run.crop_px or max(size)
        _check_tiles(run, plan, (min(crop, size[0]), min(crop, size[1])))
    return plan


def _check_tiles(run: RunFile, plan: RunPlan, size: tuple[int, int]) -> None:
    if run.tiles.rows is not None and not run.crop_px:
        cut(*size, plan.asked, plan.rule)  # refuses a grid that the user asked for and cannot have
    read = plan.tiling(*size).tiles[0].read
    layers = plan.record.layers
    if min(output_size(layers, read.height), output_size(layers, read.width)) < 1:
        raise TilenetError(
            f"a tile must leave every pooling something (tile: {read.height} × {read.width} px, "
            f"total stride: {plan.record.context().alignment_px} px); make tiles larger"
        )
    check_norms(layers, read)
