"""How long this process waits for other ranks inside of layers: halos, sums of norms and losses.

There is one clock per process, since a pipeline's partitions exchange in threads of their own and
none knows the step. What is counted is time in which at least one thread exchanges, so it never
exceeds the step's, however many threads there are; while one exchanges another may compute.
"""

import threading
import time


class ExchangeClock:
    """Runs while it is entered, by any thread; entering costs less than a microsecond.

    With a device it must be entered only after a wait for its kernels: that time is computing.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._inside = 0
        self._began = 0.0
        self._seconds = 0.0

    def __enter__(self) -> None:
        with self._lock:
            if self._inside == 0:
                self._began = time.perf_counter()
            self._inside += 1

    def __exit__(self, *error: object) -> None:
        with self._lock:
            self._inside -= 1
            if self._inside == 0:
                self._seconds += time.perf_counter() - self._began

    def take(self) -> float:
        """Return the seconds since the last call; between steps, when no thread is inside."""
        with self._lock:
            seconds, self._seconds = self._seconds, 0.0
        return seconds


EXCHANGING = ExchangeClock()
