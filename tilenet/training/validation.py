"""A run's validations: when they are made, which was the best, and that none is left out."""

from math import isnan

from tilenet.model.loss import Loss
from tilenet.model.network import Network
from tilenet.parallel.health.signals import StopRequests
from tilenet.parallel.ranks.comm import agreed
from tilenet.parallel.ranks.together import RankControl
from tilenet.scores import better
from tilenet.training.config.run_file import RunFile
from tilenet.training.folder import RunFolder
from tilenet.training.images.run_data import RunData
from tilenet.training.log import RunLog
from tilenet.training.network import RunNetwork
from tilenet.training.scoring import Validation

__all__ = ["RunValidation"]


class RunValidation:
    """Validations between the steps of a run. Collective to make; so are all methods but `due`.

    Args:
        scoring: Scores the network.
        score: Name of the score by which the best is chosen.
        every: Steps between validations.
        last: Number of steps of the run.
        folder: Folder of the run.
    """

    def __init__(
        self, scoring: Validation, score: str, every: int, last: int, folder: RunFolder
    ) -> None:
        self.scoring, self.score = scoring, score
        self.every, self.last, self.folder = every, last, folder
        self.comm = scoring.comm
        self._best: float | None = None

    @classmethod
    def of(
        cls,
        run: RunFile,
        network: RunNetwork,
        loss: Loss,
        data: RunData,
        folder: RunFolder,
        control: RankControl,
    ) -> "RunValidation | None":
        """Those that the run asks for; None: nothing is held out."""
        if not data.images.validation:
            return None
        asked = run.validation
        scoring = Validation(network, data.images.validation, loss, asked.batch_size, control)
        return cls(
            scoring, run.score, asked.every or data.schedule.steps_per_epoch, data.last, folder
        )

    def due(self, step: int) -> bool:
        """Whether the network is scored after `step` steps."""
        return step > 0 and (step % self.every == 0 or step == self.last)

    def resume(self, step: int, network: Network, log: RunLog | None, stop: StopRequests) -> None:
        """Go on after `step` steps: from the best validation, with the one that a stop left out.

        Raises:
            AgreedError: As `Validation.score`, or the run's folder cannot be written.
        """
        found = (log.best(), log.has_validation(step)) if log else None
        best, made = self.comm.bcast(found)
        with agreed(self.comm):
            if best is not None:  # a run that was killed may not have come to linking it
                self._best = best[1]
                self.folder.mark_best(best[0])
        if self.due(step) and not made and self.make(step, network, log, stop):
            with agreed(self.comm):
                self.folder.mark_best(step)

    def make(self, step: int, network: Network, log: RunLog | None, stop: StopRequests) -> bool:
        """Score the network after `step` steps; return whether it is the best so far.

        Of equals the earlier one is. Ranks agree on requests to stop, which may come meanwhile.

        Raises:
            AgreedError: As `Validation.score`.
        """
        found = self.scoring.score(network)
        value = found.score(self.score)
        best = not isnan(value) and (self._best is None or better(self.score, value, self._best))
        if best:
            self._best = value
        if log:
            log.validation(step, found, best=best)
        stop.agreed = any(self.comm.allgather(stop.requested))
        return best
