"""Whether tiles of a run overlap or exchange halos, where that is left to tilenet."""

from dataclasses import dataclass, replace
from math import prod

from tilenet.errors import TilenetError
from tilenet.training.architecture import Architecture
from tilenet.training.config.run_file import RunFile
from tilenet.training.setup import RunPlan, Shape, plan_run, tiled_sizes

__all__ = ["HaloChoice", "choose_halo_mode"]


@dataclass(frozen=True)
class HaloChoice:
    """A plan whose tiles overlap or exchange halos, and why they do."""

    plan: RunPlan
    why: str

    def __str__(self) -> str:
        return f"halo_mode: {self.plan.halo_mode}, since {self.why}"


def choose_halo_mode(
    run: RunFile, shapes: tuple[Shape, ...], num_ranks: int, architecture: Architecture
) -> HaloChoice:
    """Exchange where ranks share an image and compute less of it so; overlap elsewhere.

    Args:
        run: Its own `halo_mode` counts for nothing.
        shapes: As of `plan_run`.

    Raises:
        TilenetError: The images cannot be cut into tiles that overlap.
    """
    asked = shapes, num_ranks, architecture
    overlap = plan_run(replace(run, halo_mode="overlap"), *asked)
    if overlap.mesh.rows * overlap.mesh.columns == 1:
        return HaloChoice(overlap, "each rank has images or crops of its own")
    try:
        exchange = plan_run(replace(run, halo_mode="exchange"), *asked)
    except TilenetError as error:
        return HaloChoice(overlap, f"ranks cannot exchange halos here: {error}")
    sizes = tiled_sizes([size for _, size in shapes], run.crop_px, rotations=False)
    largest = max(sizes, key=prod)
    tilings = [plan.tiling(*largest) for plan in (overlap, exchange)]
    # The rank that computes most sets the pace.
    most = [max(s.read for s in t.rows) * max(s.read for s in t.cols) for t in tilings]
    if most[1] >= most[0]:
        return HaloChoice(overlap, "a rank that exchanges halos would compute no less")
    more = f"a tile that overlaps would compute {most[0] / most[1]:.2f} times as much"
    return HaloChoice(exchange, more)
