"""Learning rates as a function of the step alone, so that a run that goes on has the same ones."""

from dataclasses import dataclass
from math import cos, pi
from typing import Literal

ScheduleName = Literal["constant", "poly", "cosine", "step"]


@dataclass(frozen=True)
class LearningRate:
    """The rate of each step of a run.

    Attributes:
        lr: The rate that the schedule begins with.
        num_steps: Steps of the whole run; poly and cosine end with it.
        name: `constant`; `poly`: falls with (1 − share)^power (Chen et al., "DeepLab", 2016);
            `cosine`: half a wave (Loshchilov and Hutter, "SGDR", 2017, without restarts); `step`:
            times `factor` from each milestone on. The share is that of the steps after the warm-up
            that are made.
        power: Power of poly.
        warmup_steps: Steps before the schedule begins, in which the rate rises in equal steps to
            `lr` (Goyal et al., "Accurate, Large Minibatch SGD", 2017).
        milestones: Steps from 0, rising.
        factor: Factor of step.
        min_lr: Rate that poly and cosine fall to, and that step does not fall below.
    """

    lr: float
    num_steps: int
    name: ScheduleName = "constant"
    power: float = 0.9
    warmup_steps: int = 0
    milestones: tuple[int, ...] = ()
    factor: float = 0.1
    min_lr: float = 0.0

    def at(self, step: int) -> float:
        """The rate of a step; steps count from 0."""
        if step < self.warmup_steps:
            return self.lr * (step + 1) / (self.warmup_steps + 1)
        share = (step - self.warmup_steps) / max(self.num_steps - self.warmup_steps, 1)
        match self.name:
            case "constant":
                return self.lr
            case "poly":
                return self._between((1 - min(share, 1.0)) ** self.power)
            case "cosine":
                return self._between((1 + cos(pi * min(share, 1.0))) / 2)
            case "step":
                passed = sum(milestone <= step for milestone in self.milestones)
                return max(self.lr * self.factor**passed, self.min_lr)

    def _between(self, height: float) -> float:
        """Return the rate at a height between `min_lr` (0) and `lr` (1)."""
        return self.min_lr + (self.lr - self.min_lr) * height
