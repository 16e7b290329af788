"""Scalars of a run for TensorBoard, in a folder next to its tables.

TensorBoard's record writer writes them, and not torch's SummaryWriter: that one writes in a thread
that a full disk kills, which would end the rank.
"""

import contextlib
import os
import secrets
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tilenet.errors import TilenetError

FOLDER = "tensorboard"
EVENTS = "events.out.tfevents"


def check_package() -> None:
    """Refuse to write scalars without the package.

    Raises:
        TilenetError: It is missing.
    """
    try:
        import tensorboard.summary.writer.record_writer  # noqa: F401
    except ImportError as error:
        raise TilenetError(
            f"scalars need the package tensorboard (tensorboard: true, {error}); pip install "
            "tilenet[tensorboard], or leave the key out"
        ) from error


class Scalars:
    """Writes `<run>/tensorboard`.

    A run is not lost for it: where a record after the first one cannot be written, that is said
    once, and the run goes on without.

    Args:
        steps_done: Scalars of later steps are hidden: the run repeats these steps.
        warn: Called at most once, with a sentence.

    Raises:
        TilenetError: The package is missing, or the folder cannot be written.
    """

    def __init__(self, run: Path, steps_done: int, warn: Callable[[str], None]) -> None:
        check_package()
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.summary.writer.record_writer import RecordWriter

        self._event, self._warn = Event, warn
        # TensorBoard reads files in the order of their names, and clocks may go backwards.
        texts = [path.name.split(".")[3] for path in (run / FOLDER).glob(f"{EVENTS}.*.*")]
        number = max(time.time_ns(), 1 + max(map(int, filter(str.isdecimal, texts)), default=0))
        name = f"{EVENTS}.{number:020d}.{secrets.token_hex(4)}"
        self._path = run / FOLDER / name
        try:
            self._path.parent.mkdir(exist_ok=True)
            self._file = self._path.open("xb")
            self._records = RecordWriter(self._file)
            start = SessionLog(status=SessionLog.START)  # which hides what was there
            self._write(steps_done + 1, file_version="brain.Event:2")
            self._write(steps_done + 1, session_log=start)
        except OSError as error:
            raise TilenetError(
                f"scalars need a folder that can be written ({run / FOLDER}: {error.strerror}); "
                "choose another output"
            ) from error

    def add(self, step: int, values: Mapping[str, float | None]) -> None:
        """Add values by their names; None is left out. They are in the file on return."""
        if self._file.closed:
            return
        from tensorboard.compat.proto.summary_pb2 import Summary

        scalars = [
            Summary.Value(tag=name, simple_value=value)
            for name, value in values.items()
            if value is not None
        ]
        end = self._file.tell()
        try:
            self._write(step, summary=Summary(value=scalars))
        except OSError as error:
            with contextlib.suppress(OSError):  # half a record is useless
                os.truncate(self._path, end)
            self.close()
            self._warn(
                f"scalars for TensorBoard cannot be written any more ({self._path}: "
                f"{error.strerror}); training goes on, and history.csv and validation.csv hold the "
                "same"
            )

    def close(self) -> None:
        """Close the file."""
        with contextlib.suppress(OSError):  # each record was written when it was added
            self._file.close()

    def _write(self, step: int, **field: Any) -> None:
        event = self._event(wall_time=time.time(), step=step, **field)
        self._records.write(event.SerializeToString())
        self._records.flush()
