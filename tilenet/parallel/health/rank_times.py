"""Seconds of a run by rank and by what they went to, kept as `timings.json`."""

import json
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from tilenet.errors import TilenetError
from tilenet.mpi import Intracomm
from tilenet.parallel.health.progress import say
from tilenet.storage.atomic import write_aside

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


def write_times(
    comm: Intracomm, folder: Path, times: RankTimes, first_step: int, last_step: int
) -> None:
    """Have rank 0 write `timings.json`: seconds of each rank, their least, mean and most.

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
