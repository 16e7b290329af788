"""Validations of a run: their steps, the best one, and none skipped where a run resumes."""

from math import isnan

from tilenet.model.loss import Loss
from tilenet.model.network import Network
from tilenet.parallel.health.progress import say
from tilenet.parallel.health.signals import StopRequests
from tilenet.parallel.ranks.comm import agreed
from tilenet.parallel.ranks.together import RankControl
from tilenet.scores import better
from tilenet.training.config.run_file import RunFile
from tilenet.training.folder.log import RunLog
from tilenet.training.folder.run_folder import RunFolder
from tilenet.training.images.run_data import RunData
from tilenet.training.network import RunNetwork
from tilenet.training.scoring import Validation


class RunValidation:
    """Validations between the steps of a run. Collective to make; so are all methods but `due`.

    Args:
        scoring: Validation that scores the network.
        score: Name of the score that chooses the best.
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
        self._unscored = False  # whether a validation without a score was said

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
        """The validations of a run; None: nothing is held out."""
        if not data.images.validation:
            return None
        keys = run.validation
        scoring = Validation(network, data.images.validation, loss, keys.batch_size, control)
        return cls(
            scoring, run.score, keys.every or data.schedule.steps_per_epoch, data.last, folder
        )

    def due(self, step: int) -> bool:
        """Whether the network is scored after `step` steps."""
        return step > 0 and (step % self.every == 0 or step == self.last)

    def resume(self, step: int, network: Network, log: RunLog | None, stop: StopRequests) -> None:
        """Resume after `step` steps: find the best validation, and make one that a stop prevented.

        Raises:
            AgreedError: See `Validation.score`; or the run's folder cannot be written.
        """
        logged = (log.best(), log.has_validation(step)) if log else None
        best, is_made = self.comm.bcast(logged)
        with agreed(self.comm):
            if best is not None:  # a run that was killed may not have linked it
                self._best = best[1]
                self.folder.mark_best(best[0])
        if self.due(step) and not is_made and self.make(step, network, log, stop):
            with agreed(self.comm):
                self.folder.mark_best(step)

    def make(self, step: int, network: Network, log: RunLog | None, stop: StopRequests) -> bool:
        """Score the network after `step` steps; return whether it is the best so far.

        Among equal scores the earliest is the best. Ranks then agree on requests to stop.

        Raises:
            AgreedError: See `Validation.score`.
        """
        result = self.scoring.score(network)
        value = result.score(self.score)
        best = not isnan(value) and (self._best is None or better(self.score, value, self._best))
        if best:
            self._best = value
        if log:
            log.validation(step, result, best=best)
            if isnan(value) and not self._unscored:
                self._unscored = True
                why = ", since all labels are equal" * (self.score == "r2")
                say(
                    f"a validation without a value of its score is never the best (validation."
                    f"score: {self.score}, after step {step}: none{why}); choose another score"
                )
        stop.agreed = any(self.comm.allgather(stop.requested))
        return best
