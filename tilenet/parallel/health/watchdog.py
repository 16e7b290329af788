"""The watchdog: a job in which nothing happens any more shows where each rank waits, and ends.

Every rank keeps its own, because the rank that hangs is rarely the one that notices. Each prints
its stacks first and ends later: launchers kill all ranks as soon as one has ended.
"""

import contextlib
import faulthandler
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import TracebackType

from tilenet.errors import TilenetError

__all__ = ["NEVER", "SLOW", "Watchdog"]

# What the first step (caches, kernels that are chosen by trying), checkpoints and all that is done
# once may take, in multiples of the usual patience.
SLOW = 4.0

# Between the stacks and the end; ranks notice within milliseconds of each other.
GRACE_SECONDS = 2.0

PROGRAM = Path(__file__).with_name("watchdog_process.py")


class Watchdog:
    """Ends this rank when `hang_seconds` pass without a sign of life.

    A process next to the rank keeps the time: a thread would need the interpreter, which mpi4py's
    pickled allreduce, among others, keeps locked while it waits. The stacks are dumped by a signal
    handler that does not need it either. Not by faulthandler's own timer: there is one per process,
    and test runners use it.
    """

    def __init__(self, hang_seconds: float, who: str = "", key: str = "hang_seconds") -> None:
        """Make one that sleeps.

        Args:
            hang_seconds: Patience; 0: it never wakes.
            who: Of whom the stacks are: `rank 3 of 12`.
            key: What the user calls the patience.
        """
        if not 0 <= hang_seconds <= 1e7:
            raise TilenetError(
                f"{key} must lie between 0 and 10 million ({key}: {hang_seconds}); "
                "1800 is usual, 0 switches the watchdog off"
            )
        self.hang_seconds, self.who, self._key = float(hang_seconds), who, key
        self._process: subprocess.Popen[bytes] | None = None
        self._signs = self._dumps = -1

    def __enter__(self) -> "Watchdog":
        if not self.hang_seconds:
            return self
        theirs, self._dumps = os.pipe()
        words = (os.getpid(), self.who, signal.SIGALRM.value, GRACE_SECONDS, self._key)
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", PROGRAM, *(str(word) for word in words)],
                stdin=subprocess.PIPE,
                stdout=theirs,  # from where it reads the stacks
                start_new_session=True,  # out of reach of signals to the job, such as Ctrl-C
            )
        except OSError as error:
            os.close(self._dumps)
            raise TilenetError(
                f"the watchdog is a process next to each rank, which must start ({self.who}: "
                f"{error.strerror}); permit more processes, or set {self._key}: 0"
            ) from error
        finally:
            os.close(theirs)
        assert self._process.stdin is not None
        self._signs = self._process.stdin.fileno()
        os.set_blocking(self._signs, False)  # a watchdog that hangs must not make the rank hang
        faulthandler.register(signal.SIGALRM, file=self._dumps, all_threads=True)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._process:
            self._process.communicate()  # closes its stdin and waits for its end
            self._process = None
            faulthandler.unregister(signal.SIGALRM)
            os.close(self._dumps)

    def arm(self, doing: str, times: float = 1.0) -> None:
        """Start to wait for the end of `doing`, for `times` the usual patience."""
        if self._process:
            with contextlib.suppress(OSError):  # it is gone, or has much to read
                os.write(self._signs, f"{times * self.hang_seconds} {doing}\n".encode())

    def arm_part(self, doing: str, number: int, total: int) -> None:
        """Start to wait for one of many parts of a rank's share: what is slow but moves may go on.

        Args:
            number: Of the part, from 0.
        """
        self.arm(f"{doing}, part {number + 1} of {total}", 1.0 if number else SLOW)

    def arm_others(self, doing: str, parts: float) -> None:
        """Start to wait for the other ranks' parts; the slowest rank may be behind by all of its.

        Whether it moves its own watchdog knows, which ends the job; here it may take long.
        """
        self.arm(f"{doing} on other ranks", SLOW + parts)


NEVER = Watchdog(0)
