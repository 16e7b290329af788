"""Choose whether tiles of a run overlap or exchange halos."""

from dataclasses import dataclass, replace
from math import prod

from tilenet.errors import TilenetError
from tilenet.training.config.run_file import RunFile
from tilenet.training.setup.architecture import Architecture
from tilenet.training.setup.decide import plan_run, tiled_sizes
from tilenet.training.setup.run_plan import RunPlan, Shape


@dataclass(frozen=True)
class HaloChoice:
    """A plan with tiles that overlap or exchange halos, and the reason."""

    plan: RunPlan
    why: str

    def __str__(self) -> str:
        return f"halo_mode: {self.plan.halo_mode}, since {self.why}"


def choose_halo_mode(
    run: RunFile, shapes: tuple[Shape, ...], num_ranks: int, architecture: Architecture
) -> HaloChoice:
    """Exchange halos if ranks share an image and compute less of it that way; else overlap.

    Args:
        run: The run; its own `halo_mode` is ignored.
        shapes: See `plan_run`.

    Raises:
        TilenetError: The images cannot be cut into tiles that overlap.
    """
    overlap = plan_run(replace(run, halo_mode="overlap"), shapes, num_ranks, architecture)
    if overlap.mesh.rows * overlap.mesh.columns == 1:
        return HaloChoice(overlap, "each rank has images or crops of its own")
    try:
        exchange = plan_run(replace(run, halo_mode="exchange"), shapes, num_ranks, architecture)
    except TilenetError as error:
        return HaloChoice(overlap, f"ranks cannot exchange halos here: {error}")
    sizes = tiled_sizes([size for _, size in shapes], run.crop_px, rotations=False)
    largest = max(sizes, key=prod)
    # A step takes as long as the rank that computes most.
    most = [prod(plan.tiling(*largest).largest_read) for plan in (overlap, exchange)]
    if most[1] >= most[0]:
        return HaloChoice(overlap, "a rank that exchanges halos would compute no less")
    more = f"a tile that overlaps would compute {most[0] / most[1]:.2f} times as much"
    return HaloChoice(exchange, more)
