"""Rounds of work that end early when any rank is asked to stop."""

import numpy as np

from tilenet.mpi import Intracomm, Request
from tilenet.parallel.health.signals import StopRequests


class StopRounds:
    """Has ranks agree, once per round, whether to stop. Collective.

    The sum at a round's end was begun with the round: so a rank waits for others to begin the
    round, not to end it, and may be ahead of them.
    """

    def __init__(self, comm: Intracomm, requests: StopRequests) -> None:
        self.comm, self.requests = comm, requests
        self._own, self._sum = np.zeros(1, np.int32), np.zeros(1, np.int32)
        self._reduction = self._begin()

    def round_done(self) -> bool:
        """Whether any rank was asked to stop before this round began; all get the same answer."""
        self._reduction.Wait()
        self.requests.agreed = self.requests.agreed or bool(self._sum[0])
        self._reduction = self._begin()
        return self.requests.agreed

    def close(self) -> None:
        """End the sum that is under way."""
        self._reduction.Wait()

    def _begin(self) -> Request:
        self._own[0] = self.requests.requested
        return self.comm.Iallreduce(self._own, self._sum)
