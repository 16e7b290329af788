"""The update of the weights by a step's summed gradient: divided once, clipped, scaled back.

No run goes on with a loss or weights that are infinite or NaN, nor does it save them.
"""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from math import isfinite
from pathlib import Path

import torch
from torch import Tensor

from tilenet.errors import AgreedError, TilenetError
from tilenet.model.average import WeightAverage
from tilenet.model.loss_scale import LossScale
from tilenet.model.network import Network
from tilenet.parallel.sums.gradients import GradientSum
from tilenet.parallel.sums.shares import Shares
from tilenet.storage.checkpoints import kept_checkpoint
from tilenet.training.config.run_file import RunFile
from tilenet.training.learning_rate import LearningRate
from tilenet.training.optimizer import make_optimizer
from tilenet.training.states import optimizer_tensors


@dataclass(frozen=True)
class Update:
    """The update of the weights by a step's summed gradient.

    Attributes:
        optimizer: Optimizer of all parameters of the network, or of this rank's share.
        rates: Learning rate of each step.
        scale: Factor of the loss before backward.
        clip_norm: Largest norm of the gradient; None: it is not clipped.
        average: Average of the weights, which moves after each update; None: they have none.
    """

    optimizer: torch.optim.Optimizer
    rates: LearningRate
    scale: LossScale
    clip_norm: float | None = None
    average: WeightAverage | None = None

    @classmethod
    def of(cls, run: RunFile, network: Network, shares: Shares | None, num_steps: int) -> "Update":
        """The update that a run file asks for, of a network's weights or of this rank's share."""
        ema = run.optimizer.ema
        return cls(
            make_optimizer(run.optimizer, network.trained if shares is None else shares.own),
            run.schedule.rates(run.optimizer.lr, num_steps),
            LossScale.of(run.precision),
            run.optimizer.clip_norm,
            None if ema is None else WeightAverage(network, ema),
        )

    def apply(self, gradients: GradientSum, weight: float, step: int) -> bool:
        """Divide the sum once, clip, and step; return whether float16 overflowed and none was made.

        Collective where ranks share out the update.

        Raises:
            AgreedError: No scale of the loss is small enough for float16.
        """
        gradients.divide(weight * self.scale.value)
        if self.scale.most > 1:
            if not gradients.finite:
                try:
                    self.scale.overflowed()
                except TilenetError as error:
                    raise AgreedError(str(error)) from error
                return True
            self.scale.went_well()
        if self.clip_norm is not None:
            gradients.clip(self.clip_norm)
        for group in self.optimizer.param_groups:
            group["lr"] = self.rates.at(step)
        self.optimizer.step()
        gradients.share_weights()
        if self.average is not None:
            self.average.update()
        return False

    def averaged(self) -> AbstractContextManager[None]:
        """Return a context in which the network has its averaged weights, if they are averaged."""
        return nullcontext() if self.average is None else self.average.in_network()

    def states(self, network: Network, shares: Shares | None) -> dict[str, Tensor]:
        """Return the optimizer's states for a checkpoint; collective where ranks share them out."""
        return optimizer_tensors(network, self.optimizer, shares)


def check_weights(network: Network, steps: int, run: Path) -> None:
    """Refuse weights that are not finite after some steps.

    Raises:
        TilenetError: Names the first of them, and the run's last checkpoint.
    """
    wrong = [
        name for name, parameter in network.named_parameters() if not parameter.isfinite().all()
    ]
    if wrong:
        raise TilenetError(
            f"weights must stay finite (step {steps}: {wrong[0]} and {len(wrong) - 1} more are "
            "not); lower optimizer.lr, or look for divisions by 0 and logarithms of 0 in the "
            "network, also around tiles, where halo_mode exchange computes nothing: "
            f"{kept_checkpoint(run)}"
        )


def check_loss(loss: float, network: Network, steps: int, run: Path) -> None:
    """Refuse a loss, the same on all ranks, that is not finite after some steps.

    Raises:
        AgreedError: Names the weights that are not finite either, if so.
    """
    if isfinite(loss):
        return
    try:
        check_weights(network, steps, run)
    except TilenetError as error:  # on all ranks, which have the same weights
        raise AgreedError(str(error)) from None
    raise AgreedError(
        f"the loss must stay finite (step {steps + 1}: {loss}); lower optimizer.lr, or look for "
        f"extreme pixel values: {kept_checkpoint(run)}"
    )
