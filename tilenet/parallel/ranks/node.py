"""The ranks of a node, and what each of them has of its cores."""

import os

from tilenet.mpi import Comm


def ranks_of_node(comm: Comm) -> Comm:
    """The ranks of this rank's node; the caller frees it. Collective."""
    from mpi4py import MPI

    return comm.Split_type(MPI.COMM_TYPE_SHARED)


def cores_of_rank(node: Comm) -> int:
    """A rank's share of its node's cores, whether it is bound to some or not; 1 at least.

    Collective over the ranks of the node.
    """
    own = os.sched_getaffinity(0)
    cores = set().union(*node.allgather(own))
    return max(1, min(len(own), len(cores) // node.size))
