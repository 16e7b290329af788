"""Phases in which each rank works through a share of its own, and all ranks end together.

With `agreed` ranks meet when all are through. Where that takes long, a rank that fails, or that is
asked to stop, would wait for others that may need hours more. Here all leave after the part that
they are at.
"""

import time
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from tilenet.errors import TilenetError
from tilenet.parallel.health.signals import StopAgreed, StopRequests
from tilenet.parallel.health.watchdog import NEVER, Watchdog
from tilenet.parallel.ranks.comm import agreed

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = ["RankControl", "Turns", "end_if_asked", "together"]

SHORTEST_S, LONGEST_S = 1e-4, 0.02  # between two looks at whether the others have come


@dataclass(frozen=True)
class RankControl:
    """How a rank works with the others of its run, and how it ends.

    Attributes:
        comm: All ranks.
        watchdog: Armed for each phase of the run.
        stop: Requests to stop.
    """

    comm: "MPI.Intracomm"
    watchdog: Watchdog = NEVER
    stop: StopRequests = field(default_factory=StopRequests)


class Turns:
    """What the ranks say of their shares: whether one ended early, and whether one still works.

    Each sum of what all ranks say begins when the one before has ended, so all ranks see the same
    sums in the same order, however many parts each of them has done meanwhile.

    Attributes:
        failed: Whether this rank found something wrong.
        ended: Whether all ranks leave here, since one failed or was asked to stop.
    """

    def __init__(self, comm: "MPI.Comm", requests: StopRequests | None) -> None:
        self._comm, self._requests = comm, requests
        self._mine, self._all = np.zeros(2, np.int32), np.zeros(2, np.int32)
        self.failed = self.ended = False
        self._ask(working=True)

    def part_done(self) -> None:
        """Between two parts of a rank's share: leave the block if all ranks do."""
        if self._answered():
            if self.ended:
                raise _Left
            self._ask(working=True)

    def meet(self) -> None:
        """Wait until no rank works any more, or all leave."""
        while True:
            seconds = SHORTEST_S
            while not self._answered():
                time.sleep(seconds)  # MPI's own waiting would take cores from ranks that work
                seconds = min(2 * seconds, LONGEST_S)
            if self.ended or not self._all[1]:
                return
            self._ask(working=False)

    def _answered(self) -> bool:
        there = self._answer.Test()
        if there:  # until then MPI may have written anything
            self.ended = bool(self._all[0])
        return there

    def _ask(self, *, working: bool) -> None:
        from mpi4py import MPI

        asked = self._requests is not None and self._requests.requested
        self._mine[:] = self.failed or asked, working
        self._answer = self._comm.Iallreduce(self._mine, self._all, op=MPI.MAX)


class _Left(Exception):
    """Ends a block early, on all ranks."""


@contextmanager
def together(
    comm: "MPI.Comm", requests: StopRequests | None = None
) -> Generator[Turns, None, None]:
    """As `agreed`, but all ranks leave the block soon after one failed or was asked to stop.

    The block calls `part_done` between the parts of its work, and does not communicate otherwise.
    Collective at the end of the block.

    Raises:
        AgreedError: On all ranks, in the words of the lowest rank that failed.
        StopAgreed: On all ranks, as one was asked to stop.
    """
    turns, error = Turns(comm, requests), None
    try:
        yield turns
    except _Left:
        pass
    except TilenetError as raised:
        error, turns.failed = raised, True
    if not turns.ended:
        turns.meet()
    with agreed(comm):
        if error is not None:
            raise error
    if turns.ended and requests is not None:
        requests.agreed = True
        raise StopAgreed


def end_if_asked(comm: "MPI.Comm", requests: StopRequests | None) -> None:
    """Between two phases. Collective.

    Raises:
        StopAgreed: On all ranks, as one was asked to stop.
    """
    with together(comm, requests):
        pass
