"""Whether sums of gradients pay while backward runs, or are made after it.

A thread that waits inside of MPI spins. Where it shares a core with the thread that computes, and
no network has to be waited for, it takes from backward more than it hides.
"""

import os
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import torch

from tilenet.parallel.ranks.comm import threads_may_call

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = ["room_for_helpers", "sums_pay_meanwhile"]


def room_for_helpers(cores: Sequence[Iterable[int]], threads: Sequence[int]) -> bool:
    """Whether the ranks of a node leave a core for one more thread each.

    Args:
        cores: Cores that each rank may run on; ranks that are not bound share them.
        threads: Threads with which each computes.
    """
    return len({core for some in cores for core in some}) >= sum(threads) + len(threads)


def sums_pay_meanwhile(comm: "MPI.Intracomm", *, on_devices: bool) -> bool:
    """Whether a helper should sum gradients while backward runs; alike on all ranks. Collective.

    Backward may call MPI too, so it should not where MPI takes one thread at a time.

    Args:
        on_devices: Whether this rank's gradients, or some of them, lie on devices, which compute
            without its cores.
    """
    from mpi4py import MPI

    node = comm.Split_type(MPI.COMM_TYPE_SHARED)
    facts = node.allgather((sorted(os.sched_getaffinity(0)), torch.get_num_threads()))
    alone = node.size == comm.size
    node.Free()
    cores, threads = zip(*facts, strict=True)
    pays = any(comm.allgather(on_devices or not alone or room_for_helpers(cores, threads)))
    return threads_may_call(comm) and pays
