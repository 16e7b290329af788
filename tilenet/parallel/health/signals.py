"""Stop cleanly when the batch system asks: a flag that the ranks compare once per step."""

import signal
from types import FrameType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    pass

__all__ = ["StopAgreed", "StopRequests"]

# What batch systems send before they kill: Slurm SIGTERM (preemption, cancel) or what --signal
# names, LSF what -wa names.
SIGNALS = (signal.SIGTERM, signal.SIGUSR1)


class StopRequests:
    """Catches signals while it is entered.

    Once the ranks have agreed to stop, signals stay caught: the process is about to end, and job
    scripts ask every second: who dies of that looks like a crash.

    Attributes:
        requested: Whether this rank was asked to stop.
        agreed: Whether any rank was; set by the step that compared.
    """

    def __init__(self) -> None:
        self.requested = False
        self.agreed = False
        self._before: list[object] = []
        self._came = 0

    def __enter__(self) -> "StopRequests":
        self._before = [signal.signal(number, self._caught) for number in SIGNALS]
        return self

    def __exit__(self, *error: object) -> None:
        if not self.agreed:
            self._restore()

    def release(self) -> None:
        """Let signals do again what they did before, one that has come meanwhile first of all."""
        self._restore()
        if self._came:
            signal.raise_signal(self._came)

    def _restore(self) -> None:
        for number, before in zip(SIGNALS, self._before, strict=True):
            signal.signal(number, before)  # type: ignore[arg-type]

    def _caught(self, number: int, frame: FrameType | None) -> None:
        self.requested, self._came = True, number


class StopAgreed(Exception):
    """The ranks end their work here, all in the same round."""
