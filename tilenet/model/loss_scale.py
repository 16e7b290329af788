"""Scale the loss under float16, where small gradients would be rounded to zero."""

from dataclasses import dataclass
from typing import Any

from tilenet.errors import TilenetError

# The loss is a sum over pixels, not a mean: the gradient of each logit is of order 1, and that of a
# weight adds up millions of them. A scale of 1 here equals one of 10⁶ for the mean of a megapixel,
# and large tiles need less than 1: float16 ends at 65 504.
FIRST, SMALLEST, LARGEST = 1.0, 2.0**-24, 2.0**24

PATIENCE = 2000  # steps without overflow before the scale is doubled, as in torch's GradScaler


@dataclass
class LossScale:
    """Factor that multiplies the loss before backward and divides gradients after it.

    A power of two, so that scaling rounds nothing. It changes alike on all ranks without messages:
    it depends on summed gradients, and a sum is infinite on all ranks or on none.

    Attributes:
        value: The factor; 1 for all precisions but float16.
        most: Largest factor; 1: gradients need not be checked for overflow.
        calm_steps: Steps since the last overflow or doubling.
    """

    value: float = 1.0
    most: float = 1.0
    calm_steps: int = 0

    @classmethod
    def of(cls, precision: str) -> "LossScale":
        """The first scale of a run."""
        return cls(FIRST, LARGEST) if precision == "float16" else cls()

    def restore(self, value: Any, calm_steps: Any) -> None:
        """Set the scale that a resumed run's checkpoint holds.

        Raises:
            TilenetError: A value is not a legal scale or number of steps.
        """
        known = all(type(x) in (int, float) for x in (value, calm_steps))
        if not (known and SMALLEST <= value <= LARGEST and 0 <= calm_steps < PATIENCE):
            raise TilenetError(
                f"a loss scale lies between 2⁻²⁴ and 2²⁴ and its steps below {PATIENCE} "
                f"(loss_scale: {value!r}, calm_steps: {calm_steps!r}); use another checkpoint"
            )
        self.value, self.calm_steps = float(value), int(calm_steps)

    def overflowed(self) -> None:
        """Halve the scale after a step that was thrown away, as its gradients were not finite.

        Raises:
            TilenetError: No scale is small enough.
        """
        if self.value <= SMALLEST:
            raise TilenetError(
                f"float16 must hold the gradients (they overflow even scaled by {self.value:.1e}); "
                "lower optimizer.lr, or use precision: float32"
            )
        self.value /= 2
        self.calm_steps = 0

    def went_well(self) -> None:
        """Count a step with finite gradients; double the scale after many."""
        self.calm_steps += 1
        if self.calm_steps >= PATIENCE:
            self.value = min(2 * self.value, self.most)
            self.calm_steps = 0
