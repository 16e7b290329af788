"""A run's validations: when they are made, which was the best, and that none is left out."""

from math import isnan
from typing import TYPE_CHECKING

from tilenet.model.network import Network
from tilenet.parallel.health.signals import StopRequests
from tilenet.parallel.ranks.comm import agreed
from tilenet.scores import better
from tilenet.training.folder import RunFolder
from tilenet.training.record import RunLog
from tilenet.training.scoring import Validation

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = ["RunValidation"]


class RunValidation:
    """Validations between the steps of a run. All methods but `due` are collective.

    Args:
        validation: Scores the network.
        network: In training.
        every: Steps between validations.
        last: Steps of the run.
        log: On the rank that writes.
    """

    def __init__(
        self,
        validation: Validation,
        network: Network,
        every: int,
        last: int,
        folder: RunFolder,
        log: RunLog | None,
        comm: "MPI.Intracomm",
    ) -> None:
        self.validation, self.network = validation, network
        self.score = validation.run.validation.score
        self.every, self.last = every, last
        self.folder, self.log, self.comm = folder, log, comm
        self._best: float | None = None

    def due(self, step: int) -> bool:
        """Whether the network is scored after so many steps."""
        return step > 0 and (step % self.every == 0 or step == self.last)

    def resume(self, step: int, stop: StopRequests) -> None:
        """Go on after so many steps: from the best validation, with the one that a stop left out.

        Raises:
            AgreedError: As `Validation.score`, or the run's folder cannot be written.
        """
        found = (self.log.best(), self.log.has_validation(step)) if self.log else None
        best, made = self.comm.bcast(found)
        with agreed(self.comm):
            if best is not None:  # a run that was killed may not have come to linking it
                self._best = best[1]
                self.folder.mark_best(best[0])
        if self.due(step) and not made and self.make(step, stop):
            with agreed(self.comm):
                self.folder.mark_best(step)

    def make(self, step: int, stop: StopRequests) -> bool:
        """Score the network after so many steps; return whether it is the best so far.

        Of equals the earlier one is. Ranks agree on requests to stop, which may come meanwhile.

        Raises:
            AgreedError: As `Validation.score`.
        """
        found = self.validation.score(self.network)
        value = found.score(self.score)
        best = not isnan(value) and (self._best is None or better(self.score, value, self._best))
        if best:
            self._best = value
        if self.log:
            self.log.validation(step, found, best=best)
        stop.agreed = bool(self.comm.allreduce(int(stop.requested)))
        return best
