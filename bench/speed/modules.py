"""Somebody's module in layers: a step over ranks, and alone, next to the module in plain PyTorch.

    pip install -c constraints.txt '.[bench]'

Two ranks with one thread each take half an image of 1280 × 640 px, float32, frozen batch norm. Ways
take turns in one job: the halos exchanged; the same windows with nothing sent and zeros in the
halos' place; and, on rank 0 alone, the half image by the layers and by the module itself. Medians
of steps, forward and backward.
"""

import time
import warnings
from collections.abc import Callable
from typing import Any

from bench.exactness.networks import choices
from bench.report import Claim, Found, at_most, on_ranks

NAMES = ("DeepLabV3Plus/resnet34", "Unet/resnet34")
WAYS = ("exchange", "nothing sent", "layers alone", "plain torch")
SIDE_PX = 640


def measure(name: str, repeats: int) -> dict[str, Any]:
    """On two ranks: median seconds of each way."""
    import torch
    from mpi4py import MPI

    from tilenet.adoption.adopt import adopt
    from tilenet.geometry.tiles import Cut, HaloRule, cut
    from tilenet.model.skips import Origin
    from tilenet.parallel.exchange.network import spatial_network
    from tilenet.parallel.pipeline.pipe import Pipe
    from tilenet.parallel.ranks.comm import wait_quietly

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    comm, device = MPI.COMM_WORLD, [torch.device("cpu")]
    one = choices()[name]
    module = one.module()
    adopted = adopt(module, one.bands)
    layers, balance = adopted.layers, [len(adopted.layers)]
    rule = HaloRule(0, adopted.context.alignment_px, exchanged=True)
    tiling = cut(2 * SIDE_PX, SIDE_PX, Cut(grid=(2, 1)), rule)
    alone = cut(SIDE_PX, SIDE_PX, Cut(grid=(1, 1)), rule)
    image = torch.randn(1, one.bands, SIDE_PX, SIDE_PX)

    def of_layers(network: Any, where: Any, rank: int) -> Callable[[], None]:
        pipe = Pipe(network.train(), balance, device, inline=True)
        for part in network:
            if hasattr(part, "probability"):
                part.probability = 0.0
        origin = Origin((0,), where, (rank,))

        def step() -> None:
            loss: Any = pipe([image], [origin])[0].square().sum()
            loss.backward()

        return step

    module.eval()  # frozen batch norm, no dropout: as the layers have it
    plain = adopted.network()
    steps: dict[str, Callable[[], None]] = {
        "exchange": of_layers(
            spatial_network(adopted.network(), layers, balance, "exchange", comm), tiling, comm.rank
        ),
        "nothing sent": of_layers(
            spatial_network(adopted.network(), layers, balance, "exchange", None), tiling, comm.rank
        ),
        "layers alone": of_layers(plain, alone, 0),
        "plain torch": lambda: module(image).square().sum().backward(),
    }
    seconds: dict[str, list[float]] = {way: [] for way in WAYS}
    for turn in range(repeats + 1):
        for way in WAYS:
            comm.Barrier()
            began = time.perf_counter()
            if way in WAYS[:2] or comm.rank == 0:
                steps[way]()
            if way in WAYS[:2]:
                comm.Barrier()
            took = time.perf_counter() - began
            wait_quietly(comm)  # the other rank's core is not ours
            if turn:
                seconds[way].append(took)
    medians = {way: sorted(some)[len(some) // 2] for way, some in seconds.items()}
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
