"""Phases of work in shares of the ranks, which all ranks end together.

With `agreed` ranks meet at the end of the phase. In a long one, a rank that fails, or is asked to
stop, would wait for others that may need hours more. Here all leave after their current part.
"""

import time
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np

from tilenet.errors import TilenetError
from tilenet.mpi import Comm, Intracomm
from tilenet.parallel.health.signals import StopAgreed, StopRequests
from tilenet.parallel.health.watchdog import NEVER, Watchdog
from tilenet.parallel.ranks.comm import agreed

SHORTEST_S, LONGEST_S = 1e-4, 0.02  # between two polls for the other ranks


@dataclass(frozen=True)
class RankControl:
    """All ranks of a run, the watchdog that is armed for each phase, and requests to stop."""

    comm: Intracomm
    watchdog: Watchdog = NEVER
    stop: StopRequests = field(default_factory=StopRequests)


class Phase:
    """All-reduced states of the ranks: whether one ended early, and whether one still works.

    Each all-reduce begins when the one before has ended, so all ranks see the same states in the
    same order, however many parts each of them has done meanwhile.

    Attributes:
        failed: Whether this rank raised an error.
        ended: Whether all ranks leave here, since one failed or was asked to stop.
    """

    def __init__(self, comm: Comm, requests: StopRequests | None) -> None:
        self._comm, self._requests = comm, requests
        self._own, self._all = np.zeros(2, np.int32), np.zeros(2, np.int32)
        self.failed = self.ended = False
        self._begin(working=True)

    def part_done(self) -> None:
        """Mark a part of a rank's share as done; leave the block if all ranks do."""
        if self._poll():
            if self.ended:
                raise _Left
            self._begin(working=True)

    def meet(self) -> None:
        """Wait until no rank works any more, or all leave."""
        while True:
            seconds = SHORTEST_S
            while not self._poll():
                time.sleep(seconds)  # MPI's own waiting would take cores from ranks that work
                seconds = min(2 * seconds, LONGEST_S)
            if self.ended or not self._all[1]:
                return
            self._begin(working=False)

    def _poll(self) -> bool:
        """Whether the all-reduce has ended; before, MPI may have written anything."""
        done = self._reduction.Test()
        if done:
            self.ended = bool(self._all[0])
        return done

    def _begin(self, *, working: bool) -> None:
        from mpi4py import MPI

        requested = self._requests is not None and self._requests.requested
        self._own[:] = self.failed or requested, working
        self._reduction = self._comm.Iallreduce(self._own, self._all, op=MPI.MAX)


class _Left(Exception):
    """Ends a block early, on all ranks."""


@contextmanager
def together(comm: Comm, requests: StopRequests | None = None) -> Generator[Phase, None, None]:
    """Agree on errors as `agreed` does; all ranks leave soon after one failed or is to stop.

    The block calls `part_done` between the parts of its work, and does not communicate otherwise.
    Collective at the end of the block.

    Raises:
        AgreedError: On all ranks, in the words of the lowest rank that failed.
        StopAgreed: On all ranks, as one was asked to stop.
    """
    phase, error = Phase(comm, requests), None
    try:
        yield phase
    except _Left:
        pass
    except TilenetError as raised:
        error, phase.failed = raised, True
    if not phase.ended:
        phase.meet()
    with agreed(comm):
        if error is not None:
            raise error
    if phase.ended and requests is not None:
        requests.agreed = True
        raise StopAgreed


def end_if_asked(comm: Comm, requests: StopRequests | None) -> None:
    """Leave between two phases if a rank was asked to stop. Collective.

    Raises:
        StopAgreed: On all ranks, as one was asked to stop.
    """
    with together(comm, requests):
        pass
