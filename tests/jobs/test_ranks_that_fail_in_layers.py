"""A rank that fails inside an exchange, or inside a norm's sum, ends the job on all ranks.

The others then wait for its messages: in forward, in backward, in recomputation, and with several
partitions in threads that Python cannot interrupt.
"""

import textwrap
import time
from itertools import product

import pytest
from launched import mpiexec

PROGRAM = """
import itertools, os, signal, sys, torch
from mpi4py import MPI
from tilenet.errors import TilenetError
from tilenet.geometry.unet import UNetOptions, unet_layers
from tilenet.geometry.tiles import Cut, cut
from tilenet.geometry.halo_rule import HaloRule
from tilenet.model.network import build_network
from tilenet.model.origin import Origin
from tilenet.parallel.exchange import norm
from tilenet.parallel.exchange.halo import HaloChannel
from tilenet.parallel.ranks.abort import run_as_rank
from tilenet.parallel.ranks.comm import world
from tilenet.parallel.pipeline.pipe import Pipe
from tilenet.parallel.exchange.network import spatial_network

calls = itertools.count(1)  # counts for several threads

def broken(plain, last):
    def call(first, *arguments):
        if next(calls) >= last and world().rank == 1:
            {fault}
        return plain(first, *arguments)
    return call

def program():
    comm = world()
    partitions = {partitions}
    layers = unet_layers(UNetOptions(poolings=1, convolutions=1, base=4, norm="group", groups=2))
    size = len(layers) // partitions
    balance = [size] * (partitions - 1) + [len(layers) - size * (partitions - 1)]
    network = build_network(layers).train()
    spatial = spatial_network(network, layers, balance, "exchange", comm, comm)
    pipe = Pipe(spatial, balance, [torch.device("cpu")] * partitions, "{checkpointing}",
                inline=partitions == 1)
    tiling = cut(48, 16, Cut(grid=(3, 1)), HaloRule(0, 2, exchanged=True))
    images = [torch.randn(1, 4, 16, 16) for _ in range(2)]
    origins = [Origin((i,), tiling, (comm.rank,), i) for i in range(2)]
    for owner, name in ((HaloChannel, "start"), (norm, "add_over")):
        if name == "{where}":
            # A step of 2 micro-batches has so many calls; the first half is forward.
            setattr(owner, name, broken(getattr(owner, name), {call}))
    for step in range(200):
        torch.cat(pipe(images, origins)).sum().backward()
    return 0

sys.exit(run_as_rank(program))
"""

# Calls of a rank and step, 2 micro-batches: 3 convolutions, and 3 norms with 2 sums in forward.
CALLS = {
    ("start", "forward"): 3,
    ("start", "backward"): 9,
    ("add_over", "forward"): 4,
    ("add_over", "backward"): 15,
}
FAULTS = {
    "error": ("raise TilenetError('the disk is full')", "the disk is full"),
    "bug": ("1 / 0", "ZeroDivisionError"),
    "exit": ("sys.exit(3)", "stopped (3)"),
    "kill -9": ("os.kill(os.getpid(), signal.SIGKILL)", ""),
    "os._exit": ("os._exit(4)", ""),
}
# All faults once in the caller's thread, and each place once with partitions in threads.
CASES = [
    *((place, fault, 1, "never") for place, fault in product(CALLS, ("bug", "kill -9"))),
    *((("start", "forward"), fault, 1, "never") for fault in ("error", "exit", "os._exit")),
    *((place, "bug", 3, "never") for place in CALLS),
    (("start", "forward"), "kill -9", 3, "never"),
    (("add_over", "backward"), "kill -9", 3, "always"),
    (("start", "backward"), "exit", 3, "always"),
]


@pytest.mark.parametrize(
    ("place", "fault", "partitions", "checkpointing"),
    CASES,
    ids=[f"{where} {way}-{fault}-{n}-{kept}" for (where, way), fault, n, kept in CASES],
)
def test_the_job_ends(
    place: tuple[str, str], fault: str, partitions: int, checkpointing: str
) -> None:
    code, reason = FAULTS[fault]
    program = textwrap.dedent(PROGRAM).format(
        fault=code,
        where=place[0],
        call=CALLS[place],
        partitions=partitions,
        checkpointing=checkpointing,
    )
    began = time.monotonic()
    ended = mpiexec(3, "-c", program)
    assert ended.returncode != 0
    assert reason in ended.stderr
    if reason:
        assert "[rank 1 of 3]" in ended.stderr
    assert time.monotonic() - began < 60  # mostly to start; the others would wait forever
