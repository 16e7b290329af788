"""Somebody's module in layers: a step over ranks, and alone, next to the module in plain PyTorch.

    pip install -c constraints.txt '.[bench]'

Two ranks with one thread each take half an image of 1280 × 640 px, float32, frozen batch norm. Ways
take turns in one job: the halos exchanged; the same windows with nothing sent and zeros in the
halos' place; and, on rank 0 alone, the half image by the layers and by the module itself. Medians
of steps, forward and backward.
"""

import warnings
from collections.abc import Callable
from typing import Any

from bench.exactness.networks import choices
from bench.report import Claim, Found, at_most, on_ranks
from bench.steps import in_turns

NAMES = ("DeepLabV3Plus/resnet34", "Unet/resnet34")
SIDE_PX = 640


def step_of(adopted: Any, where: Any, rank: int, comm: Any, *, over: bool) -> Callable[[], None]:
    """Forward and backward of the layers on a rank's tile; over ranks, halos of zeros without."""
    import torch
    from mpi4py import MPI

    from tilenet.model.origin import Origin
    from tilenet.parallel.exchange.network import spatial_network
    from tilenet.parallel.pipeline.pipe import Pipe

    network, balance = adopted.network(), [len(adopted.layers)]
    if over:
        network = spatial_network(network, adopted.layers, balance, "exchange", comm)
    pipe = Pipe(network.train(), balance, [torch.device("cpu")], inline=True)
    for part in network:
        if hasattr(part, "probability"):
            part.probability = 0.0
    image = torch.randn(1, adopted.bands, SIDE_PX, SIDE_PX)
    origin = Origin((0,), where, (rank,))

    def step() -> None:
        loss: Any = pipe([image], [origin])[0].square().sum()
        loss.backward()
        if over:
            MPI.COMM_WORLD.Barrier()

    return step


def measure(name: str, repeats: int) -> dict[str, Any]:
    """On two ranks: median seconds of each way."""
    import torch
    from mpi4py import MPI

    from tilenet.adoption.adopt import adopt
    from tilenet.geometry.halo_rule import HaloRule
    from tilenet.geometry.tiles import Cut, cut
    from tilenet.parallel.ranks.comm import wait_quietly

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    comm, one = MPI.COMM_WORLD, choices()[name]
    module = one.module()
    adopted = adopt(module, one.bands)
    rule = HaloRule(0, adopted.context.alignment_px, exchanged=True)
    tiling = cut(2 * SIDE_PX, SIDE_PX, Cut(grid=(2, 1)), rule)
    alone = cut(SIDE_PX, SIDE_PX, Cut(grid=(1, 1)), rule)
    image = torch.randn(1, one.bands, SIDE_PX, SIDE_PX)
    module.eval()  # frozen batch norm, no dropout: as the layers have it
    steps: dict[str, Callable[[], None]] = {
        "exchange": step_of(adopted, tiling, comm.rank, comm, over=True),
        "nothing sent": step_of(adopted, tiling, comm.rank, None, over=True),
        "layers alone": step_of(adopted, alone, 0, None, over=False),
        "plain torch": lambda: module(image).square().sum().backward(),
    }
    if comm.rank:
        steps |= dict.fromkeys(("layers alone", "plain torch"), lambda: None)
    # Quietly: the other rank's core is not ours.
    medians = in_turns(steps, repeats, comm.Barrier, lambda: wait_quietly(comm))
    return {"network": name, **medians}


def claims(rows: list[dict[str, Any]]) -> list[Claim]:
    """What the figures should say."""
    made = []
    for row in rows:
        name, exchange, plain = row["network"], row["exchange"], row["plain torch"]
        sent = exchange / row["nothing sent"]
        made += [
            at_most(f"{name}: exchange on 2 ranks over nothing sent", sent, 1.15),
            at_most(f"{name}: layers over plain torch, one rank", row["layers alone"] / plain, 1.1),
        ]
    return made


def bench(quick: bool) -> Found:
    """Measure all."""
    rows = [on_ranks(2, measure, name, 1 if quick else 5) for name in NAMES]
    return {"steps": rows}, claims(rows)
