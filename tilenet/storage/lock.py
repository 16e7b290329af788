"""One job at a time writes a run's folder or a map: a lock file with a heartbeat.

Two things tell whether the job that wrote a lock file still lives:

- On the same machine `flock` does. The kernel gives the lock back when the process ends, however it
  ends, and containers and virtual nodes on one kernel see each other's.
- Between machines it cannot. Lustre and GPFS may keep `flock` to a node or refuse it; NFS passes it
  on, but a server may hold the lock of a node that died until that node is back. So the process
  touches the file every `BEAT_SECONDS`, and a job on another machine waits for `DEAD_SECONDS`: if
  the file's time has changed the other lives; else it is dead, and its lock is taken over. No
  clocks are compared.

A process that was stopped for longer than that (SIGSTOP, a suspended job) may find its lock taken
over. It looks before each checkpoint and before a map is put in place, and ends without writing.
"""

import errno
import fcntl
import json
import os
import platform
import secrets
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

from tilenet.errors import TilenetError

__all__ = ["Lock"]

BEAT_SECONDS = 5.0
DEAD_SECONDS = 30.0
POLL_SECONDS = 0.1
# A process that was killed may take that long to give back its memory, and its lock after it.
ENDING_SECONDS = 5.0
MOST_BYTES = 4096
KERNEL = Path("/proc/sys/kernel/random/boot_id")
HELD = errno.EWOULDBLOCK, errno.EACCES


class Lock:
    """This process's right to write something; a context manager that gives it back.

    Args:
        path: Path of the lock file, in the folder that is written.
        what: What it protects, for errors: `the run's folder out`.
        say: Called with a sentence where it takes long to see whether another job lives.

    Raises:
        TilenetError: Another job holds it, or the file cannot be written.
    """

    def __init__(self, path: Path, what: str, say: Callable[[str], None]) -> None:
        self.path, self.what = path, what
        self._token = secrets.token_hex(8)
        self._lost = False
        self._stop = threading.Event()
        try:
            self._file = self._take(say)
        except OSError as error:
            raise TilenetError(
                f"{what} needs a lock file that can be written ({path}: {error.strerror}); choose "
                "another place, or delete that file if no job writes there"
            ) from error
        # A daemon: a process that ends on an error must not wait for it.
        self._beats = threading.Thread(target=self._beat, name="lock", daemon=True)
        self._beats.start()

    @property
    def lost(self) -> bool:
        """Whether another job was seen to have taken over."""
        return self._lost

    def check(self) -> None:
        """Look whether this process still holds the lock, before something is written.

        Raises:
            TilenetError: Another job has taken over.
        """
        if self._taken_over():
            raise TilenetError(
                f"one job at a time writes {self.what} ({_named(_holder(self.path))} has taken "
                f"over: this one gave no sign of life for {DEAD_SECONDS:.0f} s, or its lock "
                f"{self.path} was deleted); this job ends, and the other one goes on"
            )

    def release(self) -> None:
        """Give it back, and delete the file; a second call does nothing."""
        if self._stop.is_set():
            return
        self._stop.set()
        self._beats.join(timeout=1)  # a file system that does not answer must not hold the run
        with suppress(OSError):
            if _holder(self.path).get("token") == self._token:
                self.path.unlink()
        os.close(self._file)

    def __enter__(self) -> "Lock":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.release()

    def _take(self, say: Callable[[str], None]) -> int:
        """Take the lock, and return the file's descriptor, which holds it."""
        while True:
            flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
            file = os.open(self.path, flags, 0o666)
            try:
                seen = os.fstat(file)
                self._await(file, say)
                # The one that held it may have deleted the file, and a third made it once more.
                if _same_file(self.path, seen):
                    self._sign(file)
                    return file
            except BaseException:
                os.close(file)
                raise
            os.close(file)

    def _await(self, file: int, say: Callable[[str], None]) -> None:
        """Return when no living job holds the lock.

        Raises:
            TilenetError: One does.
        """
        flock, holder = _flock(file), _holder(self.path)
        elsewhere = holder.get("kernel", _kernel()) != _kernel()
        if holder and (elsewhere or flock == "unknown"):
            self._await_beat(holder, say)
            return
        until = time.monotonic() + ENDING_SECONDS
        while flock == "theirs":
            if time.monotonic() > until:
                raise self._refused(_holder(self.path))
            time.sleep(POLL_SECONDS)
            flock = _flock(file)

    def _await_beat(self, holder: dict[str, Any], say: Callable[[str], None]) -> None:
        """See for `DEAD_SECONDS` whether a job on another machine touches the file.

        Raises:
            TilenetError: It does.
        """
        say(
            f"{_named(holder)} has not given back {self.what}: waiting {DEAD_SECONDS:.0f} s to see "
            "whether it still runs"
        )
        first, until = _touched(self.path), time.monotonic() + DEAD_SECONDS
        while time.monotonic() < until:
            time.sleep(POLL_SECONDS)
            now = _touched(self.path)
            if now is None:  # it has ended meanwhile
                return
            if now != first:
                raise self._refused(_holder(self.path))

    def _refused(self, holder: dict[str, Any]) -> TilenetError:
        return TilenetError(
            f"one job at a time writes {self.what} ({_named(holder)} has written it since "
            f"{holder.get('since', 'an unknown time')}); wait for its end, stop it, or choose "
            "another place"
        )

    def _sign(self, file: int) -> None:
        record = {
            "host": platform.node(),
            "process": os.getpid(),
            "since": datetime.now().astimezone().isoformat(" ", "seconds"),
            "job": os.environ.get("SLURM_JOB_ID") or os.environ.get("LSB_JOBID"),
            "kernel": _kernel(),
            "token": self._token,
        }
        os.ftruncate(file, 0)
        os.pwrite(file, json.dumps(record).encode() + b"\n", 0)
        os.fsync(file)

    def _beat(self) -> None:
        while not self._stop.wait(BEAT_SECONDS):
            if self._taken_over():
                return
            with suppress(OSError):
                os.utime(self.path)

    def _taken_over(self) -> bool:
        # Not where the file is only gone or cannot be read: that alone harms nothing.
        self._lost |= _holder(self.path).get("token", self._token) != self._token
        return self._lost


def _flock(file: int) -> Literal["ours", "theirs", "unknown"]:
    """Try to take a file's lock; unknown: its file system has none."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return "theirs" if error.errno in HELD else "unknown"
    return "ours"


def _holder(path: Path) -> dict[str, Any]:
    """What a lock file says, opened once more: an NFS client asks the server then."""
    try:
        with open(path, "rb") as file:
            found = json.loads(file.read(MOST_BYTES))
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _touched(path: Path) -> int | None:
    """The time of a lock file's last beat; None: it is gone."""
    try:
        with open(path, "rb") as file:
            return os.fstat(file.fileno()).st_mtime_ns
    except OSError:
        return None


def _same_file(path: Path, seen: os.stat_result) -> bool:
    try:
        now = os.stat(path, follow_symlinks=False)
    except OSError:
        return False
    return (now.st_dev, now.st_ino) == (seen.st_dev, seen.st_ino)


def _named(holder: dict[str, Any]) -> str:
    """A job, in words."""
    if not holder:
        return "a process that has not said its name"
    job = f", job {holder['job']}" if holder.get("job") else ""
    return f"process {holder.get('process', '?')} on host {holder.get('host', '?')}{job}"


def _kernel() -> str:
    """What tells this running kernel from all others: what containers on it share."""
    try:
        return KERNEL.read_text().strip()
    except OSError:
        return platform.node()
