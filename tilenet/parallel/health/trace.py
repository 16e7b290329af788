"""A trace of some steps of a run, by torch's profiler: when each operator, kernel and copy ran.

Rank 0 records its own work, which resembles that of the others. The trace is kept in memory until
its last step, and written after that step's checkpoint. An error of it is printed, and the run goes
on without a trace.
"""

import gzip
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, schedule

from tilenet.errors import TilenetError
from tilenet.parallel.health.progress import say

TRACE = "trace-rank0.json.gz"


class TraceRecorder:
    """Records steps while it is entered; on leaving without an error it writes what it has.

    Args:
        folder: Folder for `trace-rank0.json.gz`.
        steps: Numbers of the steps, from 1; empty: nothing is recorded.
        devices: Devices on which this rank computes.
        write: Whether this rank records; the others only tell which steps take longer.
    """

    def __init__(
        self, folder: Path, steps: range, devices: Sequence[torch.device], *, write: bool
    ) -> None:
        self._folder, self._steps = folder, steps
        self._kinds = {ProfilerActivity.CPU, getattr(ProfilerActivity, devices[0].type.upper())}
        self._left = steps if write else range(0)
        self._profile: profile | None = None

    def slows(self, number: int) -> bool:
        """Whether a step takes longer: in it the profiler starts, or a trace is written."""
        return bool(self._steps) and number in (self._steps[0], self._steps[-1] + 1)

    def begin(self, number: int) -> None:
        """Begin a step, after the checkpoint of the step before."""
        if self._profile is not None:
            self._try(self._profile.step if number in self._left else self._stop)
        elif number in self._left:
            self._first = number  # recorded step
            self._try(self._start)

    def __enter__(self) -> "TraceRecorder":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._profile is not None:
            if kind is not None:
                self._profile.on_trace_ready = None
            self._try(self._stop)
        elif self._left and kind is None:
            self._say_lost("the run made none of them")

    def _start(self) -> None:
        self._profile = profile(
            activities=self._kinds,
            schedule=schedule(wait=0, warmup=1, active=len(self._left), repeat=1),
            on_trace_ready=self._write,
            experimental_config=_record_all_threads(),
        )
        self._profile.start()
        self._profile.step()  # out of the warm-up, which is no step of the run

    def _stop(self) -> None:
        assert self._profile is not None
        self._profile.stop()  # which calls _write
        self._left, self._profile = range(0), None

    def _write(self, recorded: profile) -> None:
        # In a folder of its own: the profiler leaves pieces next to a file that it cannot write;
        # its own compression leaves them in /tmp, and says nothing.
        with TemporaryDirectory(prefix=".trace-", dir=self._folder) as aside:
            raw, packed = Path(aside) / "trace.json", Path(aside) / TRACE
            recorded.export_chrome_trace(str(raw))
            if not raw.exists():  # the profiler does not raise
                raise TilenetError(f"the profiler found no room in {self._folder}")
            with raw.open("rb") as file, gzip.open(packed, "wb", compresslevel=6) as target:
                shutil.copyfileobj(file, target)
            packed.replace(self._folder / TRACE)
        last = self._first + recorded.step_num - 1
        say(f"{TRACE}: steps {self._first} to {last} of rank 0, for ui.perfetto.dev")

    def _try(self, work: Callable[[], None]) -> None:
        try:
            work()
        except Exception as error:  # of any kind: a run is not lost for its trace
            self._left, self._profile = range(0), None
            self._say_lost(" ".join(str(error).split()) or type(error).__name__)

    def _say_lost(self, why: str) -> None:
        first, last = self._steps[0], self._steps[-1]
        say(f"no trace of steps {first} to {last} was written ({why}); the run is as without it")


def _record_all_threads() -> Any:
    """The profiler's setting that records partitions' workers too; None where torch has none."""
    try:
        return torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
    except TypeError:
        return None
