"""How busy devices were in a trace, and how fast copies went: arithmetic on intervals of time."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from tilenet.files.chrome_trace import TraceEvent

__all__ = ["Copies", "busy_shares", "copies_by_direction", "length", "overlap", "union"]

Interval = tuple[float, float]  # start and stop, in seconds

# In the names of copies, as CUDA's and ROCm's tracers write them.
DIRECTIONS = {
    "to_host": ("DtoH", "DeviceToHost"),
    "to_device": ("HtoD", "HostToDevice"),
}


@dataclass(frozen=True)
class Copies:
    """Copies in one direction.

    Attributes:
        num_bytes: Of all.
        seconds: In which at least one was under way.
    """

    num_bytes: int
    seconds: float

    @property
    def gb_per_s(self) -> float | None:
        """10⁹ bytes per second; None where nothing was copied."""
        return self.num_bytes / self.seconds / 1e9 if self.seconds > 0 else None


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """What at least one of them covers: disjoint, in order."""
    found: list[Interval] = []
    for start, stop in sorted(intervals):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], stop))
        else:
            found.append((start, stop))
    return found


def overlap(ours: Sequence[Interval], theirs: Sequence[Interval]) -> list[Interval]:
    """What two unions both cover: disjoint, in order."""
    found: list[Interval] = []
    i = j = 0
    while i < len(ours) and j < len(theirs):
        start, stop = max(ours[i][0], theirs[j][0]), min(ours[i][1], theirs[j][1])
        if start < stop:
            found.append((start, stop))
        if ours[i][1] < theirs[j][1]:
            i += 1
        else:
            j += 1
    return found


def length(intervals: Iterable[Interval]) -> float:
    """Seconds of disjoint intervals."""
    return sum(stop - start for start, stop in intervals)


def busy_shares(
    events: Iterable[TraceEvent], steps: Sequence[Interval], gpus: Sequence[int]
) -> dict[str, float]:
    """Share of the steps' time in which each device was busy.

    A GPU is busy while a kernel runs; copies do not count. A CPU is while any thread is in one of
    torch's own operators, what they call included. Not in others: those of the program may wait
    for messages.

    Args:
        events: Of a trace.
        steps: When they were made; disjoint, in order.
        gpus: Numbers of the devices that compute; none: the CPU.

    Returns:
        By `cuda:0` and so on, or `cpu`. Empty where a trace of GPUs holds no kernel at all: then
        kernels could not be recorded.
    """
    at: dict[str, list[Interval]] = {f"cuda:{gpu}": [] for gpu in gpus} or {"cpu": []}
    kind = "kernel" if gpus else "cpu_op"
    for event in events:
        device = f"cuda:{event.device}" if gpus else "cpu"
        if event.kind == kind and device in at and (gpus or event.name.startswith("aten::")):
            at[device].append((event.start, event.stop))
    if gpus and not any(at.values()):
        return {}
    seconds = length(steps)
    return {name: length(overlap(union(some), steps)) / seconds for name, some in at.items()}


def copies_by_direction(
    events: Iterable[TraceEvent], steps: Sequence[Interval]
) -> dict[str, Copies]:
    """Copies between host and GPUs that began in the steps: `to_host`, `to_device`."""
    events = [
        event
        for event in events
        if event.kind == "gpu_memcpy"
        and event.num_bytes is not None
        and any(start <= event.start < stop for start, stop in steps)
    ]
    found = {}
    for direction, names in DIRECTIONS.items():
        some = [event for event in events if any(name in event.name for name in names)]
        found[direction] = Copies(
            sum(event.num_bytes or 0 for event in some),
            length(union((event.start, event.stop) for event in some)),
        )
    return found
