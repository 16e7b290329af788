"""Stop cleanly when the batch system asks: a flag that the ranks compare once per step."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from threading import current_thread, main_thread
from types import FrameType

# What batch systems send before they kill: Slurm SIGTERM (preemption, cancel) or what --signal
# names, LSF what -wa names.
SIGNALS = (signal.SIGTERM, signal.SIGUSR1)


class StopRequests:
    """Catches signals while it is entered; afterwards they are ignored, unless an error is raised.

    Job scripts repeat them every second, and a process that one kills while it ends looks like a
    crash. Python keeps ignoring them while it ends, and would no longer catch them. Programs that
    go on do all of it under `handlers_come_back`. In a thread other than the main one it catches no
    signal, since Python does not allow that.

    Attributes:
        requested: Whether this rank was asked to stop.
        agreed: Whether the ranks have agreed to stop.
    """

    def __init__(self) -> None:
        self.requested = False
        self.agreed = False
        self._numbers: tuple[signal.Signals, ...] = ()
        self._before: list[object] = []
        self._last = 0  # number of the last signal
        self._released = False

    def __enter__(self) -> "StopRequests":
        self._numbers = SIGNALS if current_thread() is main_thread() else ()
        self._before = [signal.signal(number, self._catch) for number in self._numbers]
        return self

    def __exit__(self, kind: object, *error: object) -> None:
        if self._released:
            return
        if kind is not None and not self.agreed:
            self._restore()
            return
        for number in self._numbers:
            signal.signal(number, signal.SIG_IGN)

    def release(self) -> None:
        """Restore the handlers of before, and raise again a signal that was caught."""
        self._restore()
        self._released = True
        if self._last:
            signal.raise_signal(self._last)

    def _restore(self) -> None:
        for number, before in zip(self._numbers, self._before, strict=True):
            signal.signal(number, before)  # type: ignore[arg-type]

    def _catch(self, number: int, frame: FrameType | None) -> None:
        self.requested, self._last = True, number


@contextmanager
def handlers_come_back() -> Iterator[None]:
    """Let signals do at the end what they did before."""
    before = {number: signal.getsignal(number) for number in SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            # None is not one of Python's.
            if handler is not None and signal.getsignal(number) is not handler:
                signal.signal(number, handler)


class StopAgreed(Exception):
    """All ranks end their work in the same round."""
