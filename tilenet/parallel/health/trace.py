"""A trace of some steps of a run, and what it says: how busy devices were, how fast copies went.

Rank 0 records its own work, since ranks do alike work and a thousand traces serve nobody. A trace
is kept in memory until its last step; it is written when a checkpoint cannot get lost by it. What
goes wrong with a trace is said, and the run goes on without.

How busy devices were in a trace, and how fast copies went: arithmetic on intervals of time.

Traces in Chrome's format, as torch's profiler writes them: read, and packed.

Perfetto (ui.perfetto.dev) and chrome://tracing show them.
"""

import gzip
import json
import shutil
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from types import TracebackType
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from tilenet.errors import TilenetError
from tilenet.parallel.health.progress import say
from tilenet.parallel.swap.statistics import SwapCounts
from tilenet.storage.atomic import write_aside

__all__ = [
    "FILES",
    "Copies",
    "TraceEvent",
    "TraceRecorder",
    "busy_shares",
    "copies_by_direction",
    "length",
    "overlap",
    "pack_trace",
    "read_trace",
    "union",
]


@dataclass(frozen=True, slots=True)
class TraceEvent:
    """Something that took time.

    Attributes:
        kind: `kernel`, `gpu_memcpy`, `cpu_op`, `user_annotation` and more.
        name: Of the operator, the kernel, the direction of the copy or the mark.
        start: In seconds since some time that all events of a trace share.
        stop: In seconds since the same time.
        device: Number of the GPU; None: not on one.
        num_bytes: Copied; None: not a copy, or not known.
    """

    kind: str
    name: str
    start: float
    stop: float
    device: int | None = None
    num_bytes: int | None = None


def read_trace(path: Path) -> list[TraceEvent]:
    """The events of a trace that take time, in the file's order.

    Raises:
        TilenetError: The file is not whole.
    """
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            # Each event shrinks as soon as it is read: as dicts they would take several times the
            # file's size.
            found = json.load(file, object_hook=_shrunk)
        events = found["traceEvents"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise TilenetError(
            f"a trace must be a whole JSON file with traceEvents ({path}: {error}); record it "
            "again, with room on the disk"
        ) from error
    return [event for event in events if isinstance(event, TraceEvent)]


def pack_trace(path: Path, target: Path) -> None:
    """Compress a trace; the target is whole or not there.

    Raises:
        OSError: It cannot be written.
    """
    part = target.with_name(f"{target.name}.part")
    try:
        with path.open("rb") as file, gzip.open(part, "wb", compresslevel=6) as packed:
            shutil.copyfileobj(file, packed)
        part.replace(target)
    except BaseException:
        part.unlink(missing_ok=True)
        raise


def _shrunk(found: dict[str, Any]) -> Any:
    """An event that takes time as such, other events as None, other objects as they are."""
    if "ph" not in found:
        return found
    if found["ph"] != "X" or "cat" not in found:
        return None
    facts, start = found.get("args", {}), float(found["ts"])
    return TraceEvent(
        kind=found["cat"],
        name=str(found["name"]),
        start=start / 1e6,
        stop=(start + float(found.get("dur", 0))) / 1e6,
        device=facts.get("device"),
        num_bytes=facts.get("bytes"),
    )


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


TRACE, FIGURES = FILES = "trace-rank0.json.gz", "profile.json"
MARK = "tilenet: step "


class TraceRecorder:
    """Records steps; entered around all of a run, and writes when it is left without an error.

    Args:
        folder: Gets `trace-rank0.json.gz` and `profile.json`.
        steps: Their numbers, from 1; none: nothing is recorded.
        devices: On which this rank computes.
        write: Whether this rank records; the others only know when that takes time.
    """

    def __init__(
        self, folder: Path, steps: range, devices: Sequence[torch.device], *, write: bool
    ) -> None:
        self._folder, self._steps, self._devices = folder, steps, devices
        self._left = steps if write else range(0)
        self._profile: Any = None
        self._recording = False
        self._seconds = {"steps": 0.0, "read": 0.0, "reduce": 0.0}
        self._swaps = SwapCounts()

    def slows(self, number: int) -> bool:
        """Whether a step needs more patience: in it the profiler starts, or a trace is written."""
        return bool(self._steps) and number in (self._steps[0], self._steps[-1] + 1)

    @contextmanager
    def step(self, number: int) -> Iterator[None]:
        """Around a step; records it if its number is asked for."""
        if number in self._left and self._profile is None:
            self._start()
        if not self._recording:
            self._finish()
            yield
            return
        with record_function(f"{MARK}{number}"):
            yield
        if number == self._steps[-1]:
            self._stop()

    def add(
        self, seconds: float, read_seconds: float, reduce_seconds: float, swaps: SwapCounts
    ) -> None:
        """Note what a step, inside of `step`, says of itself."""
        if self._recording:
            for name, value in zip(
                self._seconds, (seconds, read_seconds, reduce_seconds), strict=True
            ):
                self._seconds[name] += value
            self._swaps = self._swaps + swaps

    def __enter__(self) -> "TraceRecorder":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stop()
        if kind is None:
            if self._left and self._profile is None:
                self._say_lost("the run made none of them")
            self._finish()

    def _start(self) -> None:
        activities = [ProfilerActivity.CPU]
        if self._devices[0].type == "cuda":
            activities.append(ProfilerActivity.CUDA)
        try:
            self._profile = profile(activities=activities, experimental_config=_all_threads())
            self._profile.start()
            self._recording = True
        except Exception as error:
            self._give_up(error)

    def _stop(self) -> None:
        if self._recording:
            self._recording = False
            try:
                self._profile.stop()
            except Exception as error:
                self._give_up(error)

    def _finish(self) -> None:
        """Write what was recorded, once."""
        if self._profile is None or self._recording or not self._left:
            return
        try:
            # A folder of its own, for the profiler leaves pieces next to what it cannot write.
            with TemporaryDirectory(prefix=".trace-", dir=self._folder) as aside:
                raw = Path(aside) / "trace.json"
                self._profile.export_chrome_trace(str(raw))
                if not raw.exists():  # it does not raise
                    raise TilenetError(f"the profiler found no room in {self._folder}")
                found = self._figures(read_trace(raw))
                pack_trace(raw, self._folder / TRACE)
            write_aside(json.dumps(found, indent=1), self._folder / FIGURES, "a profile")
            say(_sentence(found))
        except Exception as error:  # whatever it is: a run is not lost for its trace
            self._give_up(error)
        self._left, self._profile = range(0), None

    def _figures(self, events: Sequence[TraceEvent]) -> dict[str, Any]:
        marks = [
            event
            for event in events
            if event.kind == "user_annotation" and event.name.startswith(MARK)
        ]
        marks.sort(key=lambda event: event.start)
        steps = [(mark.start, mark.stop) for mark in marks]
        gpus = sorted({device.index or 0 for device in self._devices if device.type == "cuda"})
        copies = copies_by_direction(events, steps) if gpus else {}
        swaps, seconds = self._swaps, self._seconds
        if not gpus:  # copies are made by who waits for them
            copies = {"swap": Copies(swaps.out_bytes + swaps.in_bytes, swaps.wait_seconds)}
        waits = {name: seconds[name] for name in ("read", "reduce")}
        waits["wait_for_copies"] = swaps.wait_seconds
        return {
            "rank": 0,
            "first_step": int(marks[0].name.removeprefix(MARK)),
            "last_step": int(marks[-1].name.removeprefix(MARK)),
            "seconds": seconds["steps"],
            "busy_share": busy_shares(events, steps, gpus),
            "copies": {
                name: {**asdict(some), "gb_per_s": some.gb_per_s} for name, some in copies.items()
            },
            # Threads may wait for copies at the same time, so the rest may be too small.
            "parts": {"compute": max(0.0, seconds["steps"] - sum(waits.values())), **waits},
        }

    def _give_up(self, error: Exception) -> None:
        self._left, self._recording = range(0), False
        self._say_lost(" ".join(str(error).split()) or type(error).__name__)

    def _say_lost(self, why: str) -> None:
        first, last = self._steps[0], self._steps[-1]
        say(f"no trace of steps {first} to {last} was written ({why}); the run is as without it")


def _all_threads() -> Any:
    """So that partitions' workers are recorded, where this torch can."""
    try:
        return torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
    except TypeError:
        return None


def _sentence(found: dict[str, Any]) -> str:
    copies, seconds = found["copies"], found["seconds"]
    busy = [f"{name} {share:.1%}" for name, share in found["busy_share"].items()]
    rates = [
        f"{name.replace('_', ' ')} {some['gb_per_s']:.1f}"
        for name, some in copies.items()
        if some["gb_per_s"] is not None
    ]
    return (
        f"{TRACE}: steps {found['first_step']} to {found['last_step']}; busy "
        f"{', '.join(busy) or 'unknown, no kernel was recorded'}"
        + (f"; GB/s {', '.join(rates)}" if rates else "")
        + f"; {seconds:.3g} s, of which "
        + ", ".join(
            f"{name.replace('_', ' ')} {part / seconds:.1%}"
            for name, part in found["parts"].items()
        )
    )
