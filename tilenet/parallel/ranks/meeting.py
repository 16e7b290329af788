"""Checks that all ranks are at the same place of a user's program."""

import atexit
import sys
from collections.abc import Sequence
from typing import ClassVar

from tilenet.errors import AgreedError
from tilenet.mpi import Intracomm
from tilenet.parallel.ranks.abort import end_where_uncaught


def check_alike(comm: Intracomm, *arguments: str) -> None:
    """Refuse ranks with different arguments. Collective.

    Raises:
        AgreedError: Names the first argument that differs.
    """
    _compare_arguments(comm.allgather(arguments))


class Meeting:
    """Compares the places of ranks before they wait for each other, so that none waits in vain.

    The end of the program is a place, too: a rank that left a loop comes there by itself. From the
    first meeting on an error that the program does not catch on one rank ends all.
    """

    apart: ClassVar[bool] = False
    """Whether ranks of this process's job differed once: they are compared no more."""
    _at_exit: ClassVar[bool] = False

    def __init__(self, comm: Intracomm) -> None:
        self._comm = comm
        self._error: AgreedError | None = None
        end_where_uncaught()
        if comm.size > 1 and not Meeting._at_exit:
            Meeting._at_exit = True
            atexit.register(_compare_at_exit, comm)

    def at(self, place: str, *arguments: str) -> None:
        """Compare this rank's place with those of the others, and what it brings there. Collective.

        Raises:
            AgreedError: On all ranks, if they are not at the same place, now or before, or with
                different arguments.
        """
        if self._error is not None:
            raise self._error
        try:
            _compare(self._comm, place, *arguments)
        except AgreedError as error:
            Meeting.apart, self._error = True, error
            raise


def _compare(comm: Intracomm, own_place: str, *own_arguments: str) -> None:
    places, arguments = zip(*comm.allgather((own_place, own_arguments)), strict=True)
    for rank, place in enumerate(places):
        if place != places[0]:
            raise AgreedError(
                f"all ranks do the same in the same order (rank 0: {places[0]}, rank {rank}: "
                f"{place}); let no rank leave a loop by itself"
            )
    _compare_arguments(arguments)


def _compare_arguments(of_ranks: Sequence[tuple[str, ...]]) -> None:
    for rank, of_rank in enumerate(of_ranks):
        for first, here in zip(of_ranks[0], of_rank, strict=True):
            if first != here:
                raise AgreedError(
                    f"all ranks ask for the same (rank 0: {first[:300]}, rank {rank}: "
                    f"{here[:300]}); give each the same arguments"
                )


def _compare_at_exit(comm: Intracomm) -> None:
    if Meeting.apart:
        return
    try:
        _compare(comm, "the end of the program")
    except AgreedError as error:
        if comm.rank == 0:
            print(f"tilenet: {error}", file=sys.stderr)
