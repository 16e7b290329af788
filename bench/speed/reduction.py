"""Summing gradients over ranks: ours, torch's DistributedDataParallel over gloo, and plain MPI.

The parameters of the paper's networks of 72 and 290 million, whose backward only writes
gradients. Ways take turns, each in jobs of its own; seconds are the least of all turns, for what
else the machine does is no way's own. What a way takes is its time less that of the same backward
without a sum. `pieces` and `one message` are blocking `MPI_Allreduce` after backward, in
pieces of 4 MB and in one call; `ours` is `tilenet.parallel.sums.gradients`, `ddp` with
`gradient_as_bucket_view`, whose mean is taken for the sum.
"""

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from bench.report import Claim, Found, at_least, at_most, on_ranks

if TYPE_CHECKING:
    from mpi4py import MPI
    from torch import nn

NETWORKS = {"72 million": "small", "290 million": "medium-2"}
WAYS = ("none", "ours", "ddp", "pieces", "one message")
PIECE_BYTES = 4 << 20


def join_gloo(comm: "MPI.Intracomm") -> None:
    """Make torch's process group over the ranks of this node."""
    import socket

    from torch import distributed

    port = 0
    if comm.rank == 0:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
    place = f"tcp://127.0.0.1:{comm.bcast(port)}"
    distributed.init_process_group("gloo", place, rank=comm.rank, world_size=comm.size)


def parameters_only(shapes: list[tuple[int, ...]]) -> "nn.Module":
    """A module whose backward does nothing but write its parameters' gradients."""
    import torch
    from torch import nn

    class Parameters(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.all = nn.ParameterList(nn.Parameter(torch.zeros(shape)) for shape in shapes)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.stack([one.sum() for one in self.all]).sum() * x

    return Parameters()


def step_of(way: str, module: "nn.Module", comm: "MPI.Intracomm") -> Callable[[], float]:
    """A function that times backward and the sum."""
    import torch
    from mpi4py import MPI
    from torch.nn.parallel import DistributedDataParallel

    from tilenet.parallel.sums.gradients import GradientSum

    torch.set_num_threads(1)
    parameters = list(module.parameters())
    x, size = torch.ones(()), PIECE_BYTES // 4
    alone = MPI.COMM_SELF
    # Without a sum gradients lie in one buffer as well.
    sums = GradientSum(parameters, comm if way == "ours" else alone) if way != "ddp" else None
    wrapped = DistributedDataParallel(module, gradient_as_bucket_view=True) if not sums else module
    flat = sums._flats[0] if sums else None

    def step() -> float:
        if sums:
            sums.zero()
        else:
            wrapped.zero_grad(set_to_none=False)
        comm.Barrier()
        began = time.perf_counter()
        loss = wrapped(x)
        if sums:
            sums.arm()
        loss.backward()
        if sums:
            sums.finish()
        if flat is not None and way in ("pieces", "one message"):
            pieces = [flat] if way == "one message" else torch.split(flat, size)
            for piece in pieces:
                comm.Allreduce(MPI.IN_PLACE, piece.numpy())
        comm.Barrier()
        return time.perf_counter() - began

    return step


def measure(name: str, way: str, turns: int) -> list[float]:
    """On this job's ranks: the seconds of a way's turns."""
    import torch
    from mpi4py import MPI
    from torch import distributed

    from tilenet.geometry.unet import PRESETS, unet_layers
    from tilenet.model.dropout import MaskKey
    from tilenet.model.network import build_layer

    comm = MPI.COMM_WORLD
    if way == "ddp":
        join_gloo(comm)
    layers = unet_layers(PRESETS[NETWORKS[name]])
    mask_key = MaskKey()
    with torch.device("meta"):  # for their shapes
        modules = [build_layer(layer, i, mask_key) for i, layer in enumerate(layers)]
    shapes = [tuple(one.shape) for module in modules for one in module.parameters()]
    step = step_of(way, parameters_only(shapes), comm)
    seconds = [step() for _ in range(turns + 1)][1:]
    if way == "ddp":
        distributed.destroy_process_group()
    return seconds


def jobs(name: str, ranks: int, turns: int, rounds: int) -> dict[str, float]:
    """The least seconds of each way."""
    found: dict[str, list[float]] = {}
    for _ in range(rounds):
        # One way a job: gradients of all would not fit a small machine.
        for way in WAYS:
            found.setdefault(way, []).extend(on_ranks(ranks, measure, name, way, turns))
    return {way: min(some) for way, some in found.items()}


def claims(alone: list[dict[str, Any]]) -> list[Claim]:
    """What the sums should take."""
    made = []
    for row in alone:
        took = {way: row["seconds"][way] - row["seconds"]["none"] for way in WAYS[1:]}
        where = f"{row['network']} parameters, {row['ranks']} ranks"
        made += [
            at_least(f"{where}: seconds of gloo over ours", took["ddp"] / took["ours"], 2.0),
            at_most(f"{where}: seconds of ours over pieces", took["ours"] / took["pieces"], 1.1),
        ]
    return made


def bench(quick: bool) -> Found:
    """Measure sums alone."""
    names = list(NETWORKS)[:1] if quick else list(NETWORKS)
    turns, rounds = (2, 1) if quick else (7, 3)
    rows: list[dict[str, Any]] = [
        {"network": name, "ranks": ranks, "seconds": jobs(name, ranks, turns, rounds)}
        for name in names
        for ranks in ((2,) if quick else (2, 4))
    ]
    return {"piece_bytes": PIECE_BYTES, "alone": rows}, claims(rows)
