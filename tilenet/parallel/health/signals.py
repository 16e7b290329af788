"""Stop cleanly when the batch system asks: a flag that the ranks compare once per step."""

import signal
from types import FrameType

__all__ = ["StopAgreed", "StopRequests"]

# What batch systems send before they kill: Slurm SIGTERM (preemption, cancel) or what --signal
# names, LSF what -wa names.
SIGNALS = (signal.SIGTERM, signal.SIGUSR1)


class StopRequests:
    """Catches signals while it is entered.

    Once the ranks have agreed to stop, signals stay caught: job scripts repeat them every second,
    and a process that one kills while it ends looks like a crash.

    Attributes:
        requested: Whether this rank was asked to stop.
        agreed: Whether the ranks have agreed to stop.
    """

    def __init__(self) -> None:
        self.requested = False
        self.agreed = False
        self._before: list[object] = []
        self._last = 0  # number of the last signal

    def __enter__(self) -> "StopRequests":
        self._before = [signal.signal(number, self._catch) for number in SIGNALS]
        return self

    def __exit__(self, *error: object) -> None:
        if not self.agreed:
            self._restore()

    def release(self) -> None:
        """Restore the handlers of before, and raise again a signal that was caught."""
        self._restore()
        if self._last:
            signal.raise_signal(self._last)

    def _restore(self) -> None:
        for number, before in zip(SIGNALS, self._before, strict=True):
            signal.signal(number, before)  # type: ignore[arg-type]

    def _catch(self, number: int, frame: FrameType | None) -> None:
        self.requested, self._last = True, number


class StopAgreed(Exception):
    """All ranks end their work in the same round."""
