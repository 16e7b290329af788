"""A module's proof without a run: uneven tiles of a small image, in turn in one process.

Where a halo is wide, tiles read all of an image that is small enough for a pass back. Then a tile
inside of a long image is computed too, forward.
"""

import copy
from dataclasses import dataclass

import torch
from torch import nn

from tilenet.adoption.adopt import Adopted
from tilenet.errors import TilenetError
from tilenet.geometry.halo_rule import HaloRule, halo_rule
from tilenet.geometry.tiles import Cut, cut
from tilenet.mpi import Intracomm
from tilenet.parallel.proof import Difference, check_rounding, no_trace
from tilenet.parallel.ranks.devices import NodePlace
from tilenet.parallel.ranks.layout import RunDevices
from tilenet.parallel.ranks.together import RankControl
from tilenet.planning.compatibility import needs_all_tiles
from tilenet.planning.mesh import MeshShape
from tilenet.planning.small_image import ImageQuestion, choose_number_too, untested_halo
from tilenet.storage.network_json import NetworkRecord
from tilenet.training.proof.reference import Problem, random_problem
from tilenet.training.proof.run import compare
from tilenet.training.setup.run_plan import RunPlan

SECONDS = 4.0  # seconds of one core for an image


@dataclass(frozen=True)
class TilesProof:
    """The difference of tiles from the module on the whole image.

    Attributes:
        tiles: Description of the tiles that were compared.
        differences: Differences of logits, and of gradients if computed; empty: not compared.
        note: A remark on them, or the reason why there are none.
    """

    tiles: str
    differences: list[Difference]
    note: str = ""


def prove_over_tiles(
    module: nn.Module, adopted: Adopted, batch_norm: str, comm: Intracomm
) -> list[TilesProof]:
    """Compare the list of layers over tiles with the module on the whole image.

    Args:
        module: The module that was adopted; it is not changed.
        batch_norm: Mode of batch norm with which it was adopted.
        comm: A communicator of this process alone.

    Raises:
        AgreedError: Tiles do not give the module's numbers.
    """
    proofs = []
    for tiles, problem in _problems(adopted):
        if isinstance(problem, str):
            proofs.append(TilesProof(tiles, [], problem))
            continue
        cpu = RunDevices((torch.device("cpu"),), NodePlace(0, 1, 1), [])
        copied = copy.deepcopy(module)
        plan = plan_of(adopted, problem.tiling.rule, problem.tiling.grid)
        control = RankControl(comm)
        with no_trace(cpu.partitions):
            differences, reason = compare(plan, problem, copied, batch_norm, cpu, "host", control)
        check_rounding(differences, tiles, "--no-prove")
        note = untested_halo(problem.tiling)
        proofs.append(TilesProof(tiles, differences, reason or note.removeprefix("; ")))
    return proofs


def _problems(adopted: Adopted) -> list[tuple[str, Problem | str]]:
    """Descriptions of tiles, each with its problem or the reason why there is none."""
    problem = _problem(adopted, (3, 2))
    if isinstance(problem, Problem) and not untested_halo(problem.tiling):
        return [("3 × 2 tiles", problem)]
    problems = [("2 × 2 tiles", _problem(adopted, (2, 2)))]
    if not needs_all_tiles(adopted.layers, "overlap"):
        rows = 2 * adopted.context.halo_px // adopted.context.alignment_px + 3
        problems.append((f"a tile of {rows} × 1", _problem(adopted, (rows, 1), inner=True)))
    return problems


def _problem(adopted: Adopted, grid: tuple[int, int], *, inner: bool = False) -> Problem | str:
    """A problem over tiles of a random image, or the reason why there is none.

    Args:
        inner: Compute one tile that lies inside of the image, forward; else all tiles.
    """
    layers, unit = adopted.layers, adopted.context.alignment_px
    rule = halo_rule("exact", layers)
    # Uneven tiles; one inside is large, since a smaller one reads more than its halo.
    rows, columns = (unit * (tiles if inner else 2 * tiles - 1) for tiles in grid)
    question = ImageQuestion(
        layers,
        rule,
        grid,
        cut(rows, columns, Cut(grid), rule),
        1 if inner else grid[0] * grid[1],
        backward=not inner,
        patience_s=SECONDS,
    )
    try:
        question, tiling = choose_number_too(question)
    except TilenetError as error:
        return str(error)
    inside = [
        number
        for number, span in enumerate(tiling.rows)
        if span.start > 0 and span.start + span.read < tiling.extended[0]
    ]
    return random_problem(tiling, layers, question.images, chosen=inside[:1] if inner else None)


def plan_of(adopted: Adopted, rule: HaloRule, grid: tuple[int, int]) -> RunPlan:
    """The plan of a run on one rank, in float64."""
    record = NetworkRecord(
        adopted.layers,
        tuple(range(1, adopted.bands + 1)),
        tuple(map(str, range(adopted.classes))),
        255,
        (0.0,) * adopted.bands,
        (1.0,) * adopted.bands,
        resolution=None,
        nodata=None,
        precision="float64",
        epsilon_px=0,
        names=adopted.names,
    )
    mesh, balance = MeshShape(1, 1, 1), (len(adopted.layers),)
    return RunPlan(record, rule, mesh, Cut(grid), balance, adopted=adopted)
