"""The ranks: the one door to MPI, and agreement on errors.

Rank and size come from MPI alone: in a batch script the environment's rank variables are those of
the script, not of the ranks that mpiexec starts there.
"""

import os
import time
from collections.abc import Generator
from contextlib import contextmanager
from functools import cache

from tilenet.errors import AgreedError, TilenetError
from tilenet.mpi import Comm, Intracomm
from tilenet.parallel.ranks.shared_memory import unname_shared_memory
from tilenet.parallel.ranks.start import STEP_SIZES, say_started, watched_start

POLL_SECONDS = 0.02


def world() -> Intracomm:
    """All ranks of the job, whose messages meet none of the program's own. Collective.

    The first call starts MPI.

    Raises:
        TilenetError: The launcher started several tasks, but MPI sees one: each would train alone.
    """
    with watched_start():
        from mpi4py import MPI  # not at the top: importing starts MPI, and planning must not

    if MPI.COMM_WORLD.size == 1:
        for name in STEP_SIZES:
            if os.environ.get(name, "1") not in ("", "1"):
                raise TilenetError(
                    f"MPI must see the ranks that the launcher starts ({name}: "
                    f"{os.environ[name]}, MPI: 1 rank); give srun the --mpi plug-in of this MPI "
                    "(--mpi=pmi2 for mpich, --mpi=pmix for Open MPI) or use the mpiexec that came "
                    "with it"
                )
    return _begin_once()


def check_torchrun(comm: Comm) -> None:
    """Refuse processes that torchrun started, each of which would train alone.

    Raises:
        TilenetError: There are several, and MPI sees one.
    """
    size = os.environ.get("WORLD_SIZE", "1")
    if comm.size == 1 and "TORCHELASTIC_RUN_ID" in os.environ and size != "1":
        raise TilenetError(
            f"ranks are those of MPI, which torchrun does not start (WORLD_SIZE: {size}, MPI: 1 "
            "rank); start them with mpiexec or srun"
        )


@cache
def _begin_once() -> Intracomm:
    from mpi4py import MPI

    if MPI.COMM_WORLD.rank == 0:
        say_started()
    unname_shared_memory(MPI.COMM_WORLD)
    return MPI.COMM_WORLD.Dup()


def threads_may_call(comm: Comm) -> bool:
    """Whether several threads of each rank may call MPI at a time. Collective."""
    from mpi4py import MPI

    return all(comm.allgather(MPI.Query_thread() >= MPI.THREAD_MULTIPLE))


@contextmanager
def agreed(comm: Comm) -> Generator[None, None, None]:
    """Have all ranks raise the error of one of them. Collective at the end of the block.

    A rank that raised alone would leave the others waiting in their next message forever. The
    block itself must not communicate.

    Raises:
        AgreedError: On every rank, in the words of the lowest rank that raised one.
    """
    error: TilenetError | None = None
    try:
        yield
    except TilenetError as raised:
        error = raised
    # Ranks that wait in mpi4py's allreduce keep the interpreter locked: a watchdog could not speak.
    lowest = min(comm.allgather(comm.rank if error else comm.size))
    if lowest < comm.size:
        raise AgreedError(comm.bcast(str(error), root=lowest)) from error


def wait_quietly(comm: Comm) -> None:
    """A barrier that sleeps between polls. Collective.

    MPI's own polls without a pause, and where ranks share cores it takes the core of the rank that
    all wait for.
    """
    barrier = comm.Ibarrier()
    while not barrier.Test():
        time.sleep(POLL_SECONDS)
