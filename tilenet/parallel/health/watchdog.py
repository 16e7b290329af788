"""The watchdog: a job that hangs shows where each rank waits, and ends.

Every rank keeps its own, because the rank that hangs is rarely the one that notices. Each prints
its stacks first and ends later: launchers kill all ranks as soon as one has ended.
"""

import faulthandler
import os
import time
from tempfile import TemporaryFile
from threading import Event, Thread
from types import FunctionType

from tilenet.errors import TilenetError

# Patience for the first step (caches, kernels that are chosen by trying), checkpoints and all that
# is done once, in multiples of the usual one.
SLOW = 4.0

# Between the stacks and the end; ranks notice within milliseconds of each other.
GRACE_SECONDS = 2.0

STDERR = 2  # not sys.stderr: C code writes to it


class Watchdog:
    """Ends this rank when `hang_seconds` pass without a sign of life.

    A thread prints the stacks. C code may keep the interpreter locked while it waits (MPI_Init and
    mpi4py's pickled allreduce do): then no thread of Python runs, and faulthandler, which needs no
    interpreter, dumps the stacks and ends the rank, half the grace later. The thread's function
    bears the sentence as its name, so the dump says it too. There is one such timer per process.

    Args:
        hang_seconds: Patience; 0: it never wakes.
        who: Rank of the stacks: `rank 3 of 12`.
        key: The user's name of the patience.
    """

    def __init__(self, hang_seconds: float, who: str = "", key: str = "hang_seconds") -> None:
        if not 0 <= hang_seconds <= 1e7:
            raise TilenetError(
                f"{key} must lie between 0 and 10 million ({key}: {hang_seconds}); "
                "1800 is usual, 0 switches the watchdog off"
            )
        self.hang_seconds, self.who, self._key = float(hang_seconds), who, key
        self._over: Event | None = None  # set when the phase that it was armed for has ended
        self._armed = 0.0  # time at which it was armed for a part

    def __enter__(self) -> "Watchdog":
        if self.hang_seconds:
            self._over = Event()
        return self

    def __exit__(self, *error: object) -> None:
        if self._over:
            self._over.set()
            self._over = None
            faulthandler.cancel_dump_traceback_later()

    def arm(self, doing: str, times: float = 1.0) -> None:
        """Start to wait for the end of `doing`, for `times` the usual patience."""
        if not self._over:
            return
        self._over.set()
        self._over, begun, seconds = Event(), Event(), times * self.hang_seconds
        sentence = (
            f"tilenet: {doing} must end within {seconds:g} s; the stacks show where it hangs, or "
            f"what is slow: then raise {self._key}"
        )
        code = _wait.__code__.replace(co_name=f"[{self.who}] {sentence}")
        args = (begun, self._over, seconds, self.who, sentence)
        Thread(target=FunctionType(code, globals()), args=args, daemon=True).start()
        begun.wait()
        faulthandler.dump_traceback_later(seconds + GRACE_SECONDS / 2, exit=True, file=STDERR)

    def rest(self) -> None:
        """Wait for nothing until it is armed again: what comes next is the caller's code."""
        if self._over:
            self._over.set()
            faulthandler.cancel_dump_traceback_later()

    def arm_part(self, doing: str, number: int, total: int) -> None:
        """Start to wait for one of many parts of a rank's share, which may take long together.

        Parts that begin within a thousandth of the patience are one.

        Args:
            number: Number of the part, from 0.
        """
        # Arming starts a thread, and parts may be thousands of small images.
        if not number or time.monotonic() > self._armed + self.hang_seconds / 1000:
            self._armed = time.monotonic()
            self.arm(f"{doing}, part {number + 1} of {total}", 1.0 if number else SLOW)

    def arm_others(self, doing: str, parts: float) -> None:
        """Start to wait for the other ranks' parts; the slowest may be behind by all of its own.

        That rank's own watchdog ends the job if it hangs, so patience here is long.
        """
        self.arm(f"{doing} on other ranks", SLOW + parts)


def _wait(begun: Event, over: Event, seconds: float, who: str, sentence: str) -> None:
    """Return if `over` is set in time; else print the sentence and the stacks, and end the rank."""
    begun.set()
    if over.wait(seconds):
        return
    with TemporaryFile() as file:
        faulthandler.dump_traceback(file)
        file.seek(0)
        text = f"{sentence}\n{file.read().decode()}"
    # Each line with its rank: launchers mix the lines of ranks.
    lines = "".join(f"[{who}] {line}\n" for line in text.splitlines() if line)
    os.write(STDERR, f"\n{lines}".encode())
    faulthandler.cancel_dump_traceback_later()
    time.sleep(GRACE_SECONDS)
    os._exit(1)


NEVER = Watchdog(0)
