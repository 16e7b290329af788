"""What a run says of itself: a progress bar, seconds by rank, and the peak of its memory.

Rank 0 alone has a bar. The seconds of all ranks are gathered at the end and kept as `timings.json`.

The exchange clock counts how long this process waits for other ranks inside of layers: halos, sums
of norms and losses. There is one clock per process, since a pipeline's partitions exchange in
threads of their own and none knows the step. What is counted is time in which at least one thread
exchanges, so it never exceeds the step's, however many threads there are; while one exchanges
another may compute.
"""

import json
import re
import resource
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from tqdm import tqdm

from tilenet.errors import TilenetError, one_line
from tilenet.parallel.health.log_lines import LogLines
from tilenet.storage.atomic import write_aside

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = [
    "EXCHANGING",
    "TIMINGS",
    "ExchangeClock",
    "RankTimes",
    "keep_times",
    "peak_bytes",
    "progress_bar",
    "say",
]


def progress_bar(
    comm: "MPI.Comm",
    total: int,
    unit: str,
    done: int = 0,
    *,
    brief: bool = False,
    what: str | None = None,
) -> "tqdm[None] | LogLines":
    """A bar that counts units, with the time that is left; without a terminal, lines in its place.

    Args:
        done: Units done before.
        brief: Whether it is a part of something with a bar of its own: it appears only where it
            takes long, and vanishes when it is closed.
        what: Text before the bar.
    """
    what, done = None if what is None else one_line(what), min(done, total)
    if comm.rank == 0 and not sys.stderr.isatty():
        return LogLines(total, unit, done, brief=brief, what=what)
    return tqdm(
        desc=what,
        total=total,
        initial=done,
        unit=unit,
        disable=comm.rank != 0,
        mininterval=0.5,
        maxinterval=1.0,
        leave=not brief,
        delay=0.5 if brief else 0,
    )


def say(sentence: str) -> None:
    """Print a sentence to stderr, above the bar."""
    tqdm.write(one_line(sentence), file=sys.stderr)


TIMINGS = "timings.json"


@dataclass(frozen=True)
class RankTimes:
    """Seconds of some steps on one rank, and its peak of memory.

    Attributes:
        seconds: The whole steps.
        read_seconds: Reading pixels and labels.
        exchange_seconds: Waiting for other ranks inside of layers and losses.
        reduce_seconds: Waiting for the sum of gradients after the last backward.
        swap_wait_seconds: Waiting for swapped tensors.
        peak_bytes: Peak of the process's memory, in bytes; on GPUs, of the device's.
    """

    seconds: float = 0.0
    read_seconds: float = 0.0
    exchange_seconds: float = 0.0
    reduce_seconds: float = 0.0
    swap_wait_seconds: float = 0.0
    peak_bytes: int = 0

    @property
    def compute_seconds(self) -> float:
        """The rest; too small where threads of a pipeline wait at the same time."""
        waits = self.read_seconds + self.exchange_seconds
        waits += self.reduce_seconds + self.swap_wait_seconds
        return max(0.0, self.seconds - waits)

    def __add__(self, other: "RankTimes") -> "RankTimes":
        """Seconds of both together, and the larger peak."""
        sums = {f.name: getattr(self, f.name) + getattr(other, f.name) for f in fields(self)}
        return RankTimes(**sums | {"peak_bytes": max(self.peak_bytes, other.peak_bytes)})

    def to_json(self) -> dict[str, float]:
        """All fields, and the seconds of computing."""
        return {**asdict(self), "compute_seconds": self.compute_seconds}


def keep_times(
    comm: "MPI.Intracomm", folder: Path, times: RankTimes, first_step: int, last_step: int
) -> None:
    """Have rank 0 write `timings.json`: each rank's, and of all the least, mean and most.

    Collective. A run is not lost for it: an error is printed. Without a step an earlier file stays.

    Args:
        first_step: Number of the first step, from 1.
    """
    if last_step < first_step:
        return
    ranks = comm.gather(times.to_json())
    if ranks is None:
        return
    columns = {name: [rank[name] for rank in ranks] for name in ranks[0]}
    table: dict[str, Any] = {
        "first_step": first_step,
        "last_step": last_step,
        "least": {name: min(values) for name, values in columns.items()},
        "mean": {name: sum(values) / len(values) for name, values in columns.items()},
        "most": {name: max(values) for name, values in columns.items()},
        "ranks": ranks,
    }
    try:
        write_aside(json.dumps(table, indent=1), folder / TIMINGS, "the timings of a run")
    except TilenetError as error:
        say(f"{error}; the run is as without it")


STATUS = Path("/proc/self/status")
highest = [0]  # peak of resident memory so far, in bytes


def peak_bytes(devices: Sequence[torch.device]) -> int:
    """Most bytes since the process began: of tensors on the fullest GPU, or resident on CPUs."""
    cuda = {device for device in devices if device.type == "cuda"}
    if cuda:
        return max(torch.cuda.max_memory_allocated(device) for device in cuda)
    try:
        # Not getrusage's: in a process forked off a large one it begins at that one's size.
        match = re.search(r"VmHWM:\s+(\d+) kB", STATUS.read_text())
    except OSError:
        match = None
    if match:
        # The kernel's peak may fall by a page, since it adds up the counts of cores later.
        highest[0] = max(highest[0], int(match[1]) * 1024)
        return highest[0]
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


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
