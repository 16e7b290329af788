"""The watchdog: a job in which nothing happens any more shows where each rank waits, and ends.

Every rank keeps its own, because the rank that hangs is rarely the one that notices. Each prints
its stacks first and ends later: launchers kill all ranks as soon as one has ended.
"""

import contextlib
import faulthandler
import os
import signal
import tempfile
import threading
import time
from types import TracebackType

from tilenet.errors import TilenetError

__all__ = ["SLOW", "Watchdog"]

# What the first step (caches, kernels that are chosen by trying) and checkpoints may take, in
# multiples of the usual patience.
SLOW = 4.0

# Between the stacks and the end; ranks notice within milliseconds of each other.
GRACE_SECONDS = 2.0


class Watchdog:
    """Ends this rank when `hang_seconds` pass without a sign of life.

    Two mechanisms, for two kinds of hang. A thread prints the stacks in one piece with the rank's
    number, where the hanging call lets other threads run, as MPI's do. Where it does not, an alarm
    that needs no interpreter prints them a little later. Not faulthandler's own timer: there is one
    per process, and test runners use it.
    """

    def __init__(self, hang_seconds: float, who: str = "") -> None:
        """Make one that sleeps.

        Args:
            hang_seconds: Patience; 0: it never wakes.
            who: Of whom the stacks are: `rank 3 of 12`.
        """
        if not 0 <= hang_seconds <= 1e7:
            raise TilenetError(
                f"hang_seconds must lie between 0 and 10 million (hang_seconds: {hang_seconds}); "
                "1800 is usual, 0 switches the watchdog off"
            )
        self.hang_seconds, self.who = float(hang_seconds), who
        self._deadline = float("inf")
        self._patience = 0.0
        self._doing = ""
        self._over = threading.Event()

    def __enter__(self) -> "Watchdog":
        if self.hang_seconds:
            faulthandler.register(signal.SIGALRM, file=2, all_threads=True, chain=True)
            threading.Thread(target=self._watch, name="watchdog", daemon=True).start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._over.set()
        if self.hang_seconds:
            self._deadline = float("inf")
            signal.setitimer(signal.ITIMER_REAL, 0)
            faulthandler.unregister(signal.SIGALRM)

    def arm(self, doing: str, times: float = 1.0) -> None:
        """Start to wait for the end of `doing`, for `times` the usual patience."""
        if self.hang_seconds:
            self._doing, self._patience = doing, times * self.hang_seconds
            signal.setitimer(signal.ITIMER_REAL, self._patience + GRACE_SECONDS)
            self._deadline = time.monotonic() + self._patience

    def _watch(self) -> None:
        """Sleep until the deadline, which moves on whenever there is a sign of life."""
        pause = self.hang_seconds
        while not self._over.wait(pause):
            left = self._deadline - time.monotonic()
            if left <= 0:
                self._bark()
            pause = min(max(left, 0.01), self.hang_seconds)

    def _bark(self) -> None:
        signal.setitimer(signal.ITIMER_REAL, 0)
        # Whatever goes wrong with the words: the end must come.
        with contextlib.suppress(Exception), tempfile.TemporaryFile() as file:
            faulthandler.dump_traceback(file, all_threads=True)
            file.seek(0)
            os.write(2, self._words().encode() + file.read())  # in one piece
        time.sleep(2 * GRACE_SECONDS)
        os._exit(1)

    def _words(self) -> str:
        return (
            f"\n[{self.who}] tilenet: {self._doing} must end within {self._patience:g} s; the "
            "stacks below show where it hangs, or what is slow: then raise hang_seconds\n"
        )
