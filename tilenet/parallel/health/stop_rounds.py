"""Rounds of work that end early when any rank is asked to stop."""

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from mpi4py import MPI
from tilenet.parallel.health.signals import StopRequests

__all__ = ["StopRounds"]


class StopRounds:
    """Has ranks agree, once per round, whether to stop. Collective.

    What is compared at a round's end is what the ranks said as it began, which travelled meanwhile:
    so a rank waits for others to begin the round, not to end it, and may be ahead of them.
    """

    def __init__(self, comm: "MPI.Intracomm", requests: StopRequests) -> None:
        self.comm, self.requests = comm, requests
        self._asked, self._found = np.zeros(1, np.int32), np.zeros(1, np.int32)
        self._answer = self._ask()

    def round_done(self) -> bool:
        """Whether any rank was asked to stop before this round began; all get the same answer."""
        self._answer.Wait()
        self.requests.agreed = self.requests.agreed or bool(self._found[0])
        self._answer = self._ask()
        return self.requests.agreed

    def close(self) -> None:
        """End what is under way."""
        self._answer.Wait()

    def _ask(self) -> "MPI.Request":
        self._asked[0] = self.requests.requested
        return self.comm.Iallreduce(self._asked, self._found)
