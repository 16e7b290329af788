"""Where the time of a run went on each rank, gathered at its end and kept as `timings.json`."""

import json
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tilenet.errors import TilenetError
from tilenet.files.aside import write_aside
from tilenet.parallel.progress import say

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = ["TIMINGS", "RankTimes", "keep_times"]

TIMINGS = "timings.json"


@dataclass(frozen=True)
class RankTimes:
    """Seconds of some steps on one rank, and the most memory that it held.

    Attributes:
        seconds: Of the steps.
        read_seconds: Reading pixels and labels.
        exchange_seconds: Waiting for other ranks inside of layers and losses.
        reduce_seconds: Waiting for the sum of gradients after the last backward.
        swap_wait_seconds: Waiting for swapped tensors.
        peak_bytes: See `parallel.peak_memory`.
    """

    seconds: float = 0.0
    read_seconds: float = 0.0
    exchange_seconds: float = 0.0
    reduce_seconds: float = 0.0
    swap_wait_seconds: float = 0.0
    peak_bytes: int = 0

    @property
    def compute_seconds(self) -> float:
        """The rest. Threads of a pipeline may wait at the same time, so it may be too small."""
        waits = self.read_seconds + self.exchange_seconds
        waits += self.reduce_seconds + self.swap_wait_seconds
        return max(0.0, self.seconds - waits)

    def __add__(self, other: "RankTimes") -> "RankTimes":
        """Both one after the other: seconds add up, of the peaks the larger one stays."""
        both = {f.name: getattr(self, f.name) + getattr(other, f.name) for f in fields(self)}
        return RankTimes(**both | {"peak_bytes": max(self.peak_bytes, other.peak_bytes)})

    def to_json(self) -> dict[str, float]:
        """All of it, and what is left for computing."""
        return {**asdict(self), "compute_seconds": self.compute_seconds}


def keep_times(
    comm: "MPI.Intracomm", folder: Path, times: RankTimes, first_step: int, last_step: int
) -> None:
    """Have rank 0 write `timings.json`: each rank's, and of all the least, mean and most.

    Collective. A run is not lost for it: what cannot be written is said. Where no step was made, an
    earlier file stays.

    Args:
        times: Of this rank.
        first_step: The first that they are of, from 1.
        last_step: The last.
    """
    if last_step < first_step:
        return
    ranks = comm.gather(times.to_json())
    if ranks is None:
        return
    columns = {name: [rank[name] for rank in ranks] for name in ranks[0]}
    found: dict[str, Any] = {
        "first_step": first_step,
        "last_step": last_step,
        "least": {name: min(values) for name, values in columns.items()},
        "mean": {name: sum(values) / len(values) for name, values in columns.items()},
        "most": {name: max(values) for name, values in columns.items()},
        "ranks": ranks,
    }
    try:
        write_aside(json.dumps(found, indent=1), folder / TIMINGS, "the timings of a run")
    except TilenetError as error:
        say(f"{error}; the run is as without it")
