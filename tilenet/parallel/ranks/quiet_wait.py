"""Wait for other ranks without taking a core from them."""

import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = ["wait_quietly"]

LOOK_SECONDS = 0.02


def wait_quietly(comm: "MPI.Comm") -> None:
    """Return when all ranks have come here. Collective.

    MPI's own barrier looks again and again, and where ranks share cores it does so in the place of
    the rank that all wait for.
    """
    met = comm.Ibarrier()
    while not met.Test():
        time.sleep(LOOK_SECONDS)
