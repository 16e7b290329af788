"""One job at a time writes a run's folder or a map: a file that names the process that writes.

A lock is taken over at once where its process is dead on this kernel, or where it is of this very
batch job, which was queued again or continues on other nodes. Nothing tells whether a process on
another machine lives, so a lock that another job left there is for the user to delete. `flock` and
heartbeats would not tell either: Lustre, GPFS and NFS keep locks to a node or hold those of a dead
one, and a suspended process shows no heartbeat.
"""

import json
import os
import platform
import time
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any

from tilenet.errors import TilenetError

POLL_SECONDS = 0.1
# A process that was killed may take that long to give back its memory and end.
ENDING_SECONDS = 5.0


class Lock:
    """This process's right to write a folder or a file; a context manager that gives it back.

    Args:
        path: Path of the lock file, in the folder that is written.
        what: Name of the protected folder or file, for errors: `the run's folder out`.

    Raises:
        TilenetError: Another job holds it, or the file cannot be written.
    """

    def __init__(self, path: Path, what: str) -> None:
        self.path, self.what = path, what
        self._record = _this_process()
        until = time.monotonic() + ENDING_SECONDS
        try:
            while not self._take():
                if time.monotonic() > until:
                    raise TilenetError(
                        f"one job at a time writes {what} ({_owner(_read(path))}); wait for its "
                        f"end, or delete {path} if it no longer runs"
                    )
                time.sleep(POLL_SECONDS)
        except OSError as error:
            raise TilenetError(
                f"{what} needs a lock file that can be written ({path}: {error.strerror}); choose "
                "another place"
            ) from error

    @property
    def lost(self) -> bool:
        """Whether another process has taken over; not where the file is only gone."""
        return _read(self.path) not in ({}, self._record)

    def check(self) -> None:
        """Look whether this process still holds the lock, before something is written.

        Raises:
            TilenetError: Another process has taken over.
        """
        if self.lost:
            raise TilenetError(
                f"one job at a time writes {self.what} ({_owner(_read(self.path))}: it is the same "
                f"job, started again, or {self.path} was deleted); this one ends"
            )

    def release(self) -> None:
        """Delete the file, if it is still this process's."""
        with suppress(OSError):
            if _read(self.path) == self._record:
                self.path.unlink()

    def __enter__(self) -> "Lock":
        return self

    def __exit__(self, *error: object) -> None:
        self.release()

    def _take(self) -> bool:
        """Write the file if it is not there, or replace one that may be taken over."""
        following = self.path.with_name(f"{self.path.name}.next")
        if _write_new(self.path, self._record):
            following.unlink(missing_ok=True)  # of a process that was killed between two calls
            return True
        left = _read(self.path)
        if not self._may_replace(left):
            return False
        # One process at a time replaces, and only the file that it has looked at.
        if not _write_new(following, self._record):
            if self._may_replace(_read(following)):  # of a process that was killed just then
                following.unlink(missing_ok=True)
            return False
        if _read(self.path) != left:
            following.unlink(missing_ok=True)
            return False
        with suppress(FileNotFoundError):  # another process took it for that of a dead one
            following.replace(self.path)
        return _read(self.path) == self._record

    def _may_replace(self, record: dict[str, Any]) -> bool:
        mine = self._record
        if record.get("kernel") == mine["kernel"]:
            return not _lives(record)
        return mine["job"] is not None and record.get("job") == mine["job"]


def _write_new(path: Path, record: dict[str, Any]) -> bool:
    """Write a file that is not there yet; False: it is. At no moment is half of it there."""
    part = path.with_name(f"{path.name}.{platform.node()}.{os.getpid()}.part")
    try:
        part.write_text(json.dumps(record) + "\n")
        try:
            os.link(part, path)
        except FileExistsError:
            return False
        except OSError:  # a file system without hard links
            if path.exists():
                return False
            part.replace(path)
    finally:
        part.unlink(missing_ok=True)
    return True


def _read(path: Path) -> dict[str, Any]:
    """The record in a lock file; {} where it is missing or not readable."""
    try:
        record = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return record if isinstance(record, dict) else {}


def _this_process() -> dict[str, Any]:
    job = os.environ.get("SLURM_JOB_ID") or os.environ.get("PBS_JOBID")
    if not job and "LSB_JOBID" in os.environ:  # which all elements of an array share
        job = f"{os.environ['LSB_JOBID']}[{os.environ.get('LSB_JOBINDEX', 0)}]"
    return {
        "host": platform.node(),
        "process": os.getpid(),
        "since": datetime.now().astimezone().isoformat(" ", "seconds"),
        "job": job or None,
        "kernel": _kernel(),
        "started": _started(os.getpid()),
    }


def _lives(record: dict[str, Any]) -> bool:
    """Whether a process of this kernel has not ended, and its number is not another one's now."""
    process = record.get("process")
    if not isinstance(process, int):
        return True
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except OSError:  # another user's
        return True
    return _started(process) in (None, record.get("started"))


def _started(process: int) -> str | None:
    """Read a process's start in ticks of the kernel; "": it has ended; None: it cannot be read."""
    try:
        state, *more = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except (OSError, ValueError):
        return None
    return "" if state in "ZX" else more[18]


def _kernel() -> str:
    """Identity of this running kernel, and of its process namespace."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return platform.node()


def _owner(record: dict[str, Any]) -> str:
    """Describe the process that holds the lock, and since when it does, in words."""
    if not record:
        return "its lock file does not say which"
    job = f", job {record['job']}" if record.get("job") else ""
    return (
        f"process {record.get('process')} on host {record.get('host')}{job} has written it since "
        f"{record.get('since')}"
    )
