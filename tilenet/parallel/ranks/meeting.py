"""Whether all ranks are at the same place of a user's program."""

import atexit
import sys
from typing import TYPE_CHECKING, ClassVar

from tilenet.errors import AgreedError

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = ["Meeting", "check_alike"]


def check_alike(comm: "MPI.Intracomm", *given: str) -> None:
    """Refuse ranks that ask for different things. Collective.

    Raises:
        AgreedError: With the first of them.
    """
    for rank, other in enumerate(asked := comm.allgather(given)):
        for mine, theirs in zip(asked[0], other, strict=True):
            if mine != theirs:
                raise AgreedError(
                    f"all ranks ask for the same (rank 0: {mine[:300]}, rank {rank}: "
                    f"{theirs[:300]}); give each the same arguments"
                )


class Meeting:
    """Where ranks say where they are before they wait for each other, so that none waits in vain.

    The end of the program is such a place, too: a rank that left a loop comes there by itself.

    Args:
        comm: All ranks.
    """

    apart: ClassVar[bool] = False
    """Whether ranks of this process's job were found apart: they meet no more."""
    _ends: ClassVar[bool] = False

    def __init__(self, comm: "MPI.Intracomm") -> None:
        self._comm = comm
        self._error: AgreedError | None = None
        if comm.size > 1 and not Meeting._ends:
            Meeting._ends = True
            atexit.register(_end, comm)

    def at(self, where: str) -> None:
        """Say where this rank is. Collective.

        Raises:
            AgreedError: On all ranks, where they are not at the same place, now or before.
        """
        if self._error is not None:
            raise self._error
        try:
            _meet(self._comm, where)
        except AgreedError as error:
            Meeting.apart, self._error = True, error
            raise


def _meet(comm: "MPI.Intracomm", where: str) -> None:
    places = comm.allgather(where)
    for rank, place in enumerate(places):
        if place != places[0]:
            raise AgreedError(
                f"all ranks do the same in the same order (rank 0: {places[0]}, rank {rank}: "
                f"{place}); let no rank leave a loop by itself"
            )


def _end(comm: "MPI.Intracomm") -> None:
    if Meeting.apart:
        return
    try:
        _meet(comm, "the end of the program")
    except AgreedError as error:
        if comm.rank == 0:
            print(f"tilenet: {error}", file=sys.stderr)
