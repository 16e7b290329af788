"""Decide whether a thread sums gradients while backward runs, or the sum follows backward.

A thread that waits in MPI spins. Where it shares a core with the thread that computes, and all
ranks are on one node, it slows backward down by more time than it hides.
"""

import os
from collections.abc import Iterable, Sequence
from itertools import chain

import torch

from tilenet.mpi import Intracomm
from tilenet.parallel.ranks.comm import threads_may_call
from tilenet.parallel.ranks.node import ranks_of_node


def room_for_helpers(cores: Sequence[Iterable[int]], threads: Sequence[int]) -> bool:
    """Whether a node has a core for one more thread of each of its ranks.

    Args:
        cores: Per rank, numbers of the cores that it may run on; unbound ranks share them.
        threads: Per rank, the number of its threads that compute.
    """
    num_cores = len(set(chain.from_iterable(cores)))
    return num_cores >= sum(threads) + len(threads)


def sums_pay_meanwhile(comm: Intracomm, *, on_devices: bool) -> bool:
    """Whether a thread should sum gradients while backward runs; alike on all ranks. Collective.

    Backward may call MPI too, so that this needs an MPI that several threads may call.

    Args:
        on_devices: Whether some of this rank's gradients are on devices, which compute without its
            cores.
    """
    node = ranks_of_node(comm)
    facts = node.allgather((sorted(os.sched_getaffinity(0)), torch.get_num_threads()))
    one_node = node.size == comm.size
    node.Free()
    cores, threads = zip(*facts, strict=True)
    pays = on_devices or not one_node or room_for_helpers(cores, threads)
    pays_anywhere = any(comm.allgather(pays))
    return threads_may_call(comm) and pays_anywhere
