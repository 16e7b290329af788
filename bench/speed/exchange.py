"""Exchange against overlap: work, messages, time and memory of a step.

Work is counted for the presets on 4 × 4 ranks (`exchange_work.py`). Time and memory are those of
forward and backward of a small U-Net on random pixels, side by side in one job on 1, 2 and 4 ranks
of one thread: with exchange, with overlap, and with exchange without communication, whose numbers
are wrong and which bounds from below what hiding all messages could reach. Above as many ranks as
the machine has cores ranks share them, so ratios count, not seconds.
"""

from collections.abc import Callable
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from bench.report import Claim, Found, at_most, on_ranks
from bench.steps import in_turns

if TYPE_CHECKING:
    from mpi4py import MPI

    from tilenet.geometry.layers import Layer
    from tilenet.parallel.exchange.network import SpatialNetwork

PRESETS = ("small", "medium-1", "medium-2", "large")
WAYS = ("exchange", "overlap", "no communication")


def work(quick: bool) -> list[dict[str, Any]]:
    """Work of the busiest rank, by preset and size of the image."""
    from bench.speed.exchange_work import work_of
    from tilenet.geometry.unet import PRESETS as KNOWN
    from tilenet.geometry.unet import unet_layers

    presets = PRESETS[::3] if quick else PRESETS
    return [
        {
            "preset": preset,
            "size": size,
            **asdict(work_of(unet_layers(KNOWN[preset]), size, (4, 4))),
        }
        for size in (10_000, 10_240)
        for preset in presets
    ]


def step_of(
    way: str, layers: tuple["Layer", ...], side: int, comm: "MPI.Intracomm"
) -> tuple["SpatialNetwork", Callable[[], None]]:
    """A network over the ranks, and forward and backward of this rank's tile."""
    import torch

    from tilenet.geometry.halo import context_of
    from tilenet.geometry.halo_rule import HaloRule
    from tilenet.geometry.tiles import Cut, cut
    from tilenet.model.network import build_network
    from tilenet.model.origin import Origin
    from tilenet.parallel.exchange.network import spatial_network
    from tilenet.parallel.pipeline.pipe import Pipe
    from tilenet.planning.mesh import choose_mesh

    context, mesh = context_of(layers), choose_mesh(comm.size, 1)
    halo = context.halo_px if way == "overlap" else 0
    rule = HaloRule(halo, context.alignment_px, exchanged=way != "overlap")
    tiling = cut(side, side, Cut(grid=(mesh.rows, mesh.columns)), rule)
    network = spatial_network(
        build_network(layers, 1), layers, [len(layers)],
        "overlap" if way == "overlap" else "exchange", None if way == "no communication" else comm,
    )  # fmt: skip
    pipe = Pipe(network.train(), [len(layers)], [torch.device("cpu")], inline=True)
    read, own = tiling.tiles[comm.rank].read, tiling.tiles[comm.rank].own
    image = torch.randn(1, 4, read.height, read.width)
    origin = Origin((0,), tiling, (comm.rank,))
    top, left = own.row - read.row, own.col - read.col

    def step() -> None:
        (output,) = pipe([image], [origin])
        mine = output[:, :, top : top + own.height, left : left + own.width]
        mine.square().sum().backward()  # type: ignore[no-untyped-call]
        comm.Barrier()

    return network, step


def measure(side: int, repeats: int) -> list[dict[str, Any]]:
    """On this job's ranks: the figures of each way and norm."""
    from mpi4py import MPI

    from tilenet.geometry.unet import UNetOptions, unet_layers
    from tilenet.planning.memory.live import LiveBytes

    comm, rows = MPI.COMM_WORLD, []
    for norm in ("none", "instance"):
        layers = unet_layers(UNetOptions(poolings=4, base=16, classes=2, norm=norm))
        made = {way: step_of(way, layers, side, comm) for way in WAYS}
        seconds = in_turns({way: step for way, (_, step) in made.items()}, repeats, comm.Barrier)
        for way, (network, step) in made.items():
            before = network.spatial.sent
            with LiveBytes() as live:
                step()
            sent = [after - one for after, one in zip(network.spatial.sent, before, strict=True)]
            rows.append(
                {
                    "ranks": comm.size, "norm": norm, "way": way, "seconds": seconds[way],
                    "peak_mib": comm.allreduce(live.peak, op=MPI.MAX) / 2**20,
                    "messages": comm.allreduce(sent[0], op=MPI.MAX),
                    "sent_mib": comm.allreduce(sent[1], op=MPI.MAX) / 2**20,
                }
            )  # fmt: skip
            comm.Barrier()
        for network, _ in made.values():
            network.close()
    return rows


def claims(counted: list[dict[str, Any]], measured: list[dict[str, Any]]) -> list[Claim]:
    """What the figures should say."""
    made = []
    for row in counted:
        size = row["size"]
        allowed = 1.02 if size == 10_240 else 1.02 * row["own_area"]
        made.append(
            at_most(
                f"{row['preset']}, {size}² on 4 × 4: work of exchange over whole image ÷ ranks "
                f"(overlap: {row['overlap']:.2f})",
                row["exchange"],
                allowed,
            )
        )
    by = {(row["ranks"], row["norm"], row["way"]): row for row in measured}
    for (ranks, norm, way), row in by.items():
        if ranks > 1 and way == "exchange":
            other, bound = by[ranks, norm, "overlap"], by[ranks, norm, "no communication"]
            where = f"{ranks} ranks, norm {norm}"
            made += [
                at_most(f"{where}: seconds of exchange over overlap",
                        row["seconds"] / other["seconds"], 1.0),
                at_most(f"{where}: seconds of exchange over no communication",
                        row["seconds"] / bound["seconds"], 1.15),
                at_most(f"{where}: peak bytes of exchange over overlap",
                        row["peak_mib"] / other["peak_mib"], 1.0),
            ]  # fmt: skip
    return made


def bench(quick: bool) -> Found:
    """Count work, and measure steps."""
    side, repeats = (512, 3) if quick else (1024, 7)
    counted = work(quick)
    measured = []
    for ranks in (1, 2) if quick else (1, 2, 4):
        measured += on_ranks(ranks, measure, side, repeats)
    return {"work": counted, "step": measured, "side_px": side}, claims(counted, measured)
