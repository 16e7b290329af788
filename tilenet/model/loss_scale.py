"""Loss scaling for float16, whose small gradients would be rounded to zero."""

from dataclasses import dataclass

from tilenet.errors import TilenetError

__all__ = ["LossScale"]

FIRST, LARGEST = 2.0**16, 2.0**24
PATIENCE = 2000  # steps without overflow before the scale is doubled, as torch's own GradScaler


@dataclass
class LossScale:
    """What the loss is multiplied with before backward, and gradients divided by after it.

    A power of two, so that scaling rounds nothing. It must change alike on all ranks, which it does
    by itself: it looks at summed gradients, and a sum is infinite on all ranks or on none.

    Attributes:
        value: 1 for all precisions but float16.
        most: It never grows above this; 1: there is nothing to watch.
        calm_steps: Steps since the last overflow or doubling.
    """

    value: float = 1.0
    most: float = 1.0
    calm_steps: int = 0

    @classmethod
    def of(cls, precision: str) -> "LossScale":
        """The first scale of a run."""
        return cls(FIRST, LARGEST) if precision == "float16" else cls()

    def overflowed(self) -> None:
        """Halve the scale, after a step whose gradients were not finite and were thrown away.

        Raises:
            TilenetError: No scale is small enough.
        """
        if self.value <= 1:
            raise TilenetError(
                "gradients must be finite (they are not, even unscaled); lower optimizer.lr, or "
                "use precision: float32"
            )
        self.value /= 2
        self.calm_steps = 0

    def went_well(self) -> None:
        """Count a step with finite gradients; double the scale after many."""
        self.calm_steps += 1
        if self.calm_steps == PATIENCE:
            self.value = min(2 * self.value, self.most)
            self.calm_steps = 0
