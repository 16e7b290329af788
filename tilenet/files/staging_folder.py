"""A folder on a node's own disk for what a run's ranks there read; gone when the run is.

The folder is locked (`flock`) by every rank that uses it, and the system gives a lock back when its
process ends, however it ends. So a folder that no process holds was left by a run that was killed,
and the next run there removes it, if a marker in it says that tilenet made it: a user may have
folders of such names, too. Where a file system knows no locks, nothing is removed but a run's own
folder.
"""

import fcntl
import os
import secrets
import shutil
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from tilenet.errors import TilenetError
from tilenet.files.plain_file import read_plain

__all__ = ["StagingFolder"]

PREFIX = "tilenet-cache-"  # of the names of all such folders
MARKER = ".made-by-tilenet"
MARK = b"Pixels that a run of tilenet copied to this node. A later run deletes this folder.\n"


class StagingFolder:
    """A rank's hold on the folder of its run.

    Args:
        path: Of the folder, which is there.
        warn: Called once, with a sentence, when the folder cannot be written any more.

    Attributes:
        path: Of the folder.

    Raises:
        TilenetError: The folder is not there.
    """

    def __init__(self, path: Path, warn: Callable[[str], None]) -> None:
        self.path, self._warn, self._writable = path, warn, True
        self._own = secrets.token_hex(8)  # process numbers may be the same in two containers
        try:
            self._held = _hold(path)
        except OSError as error:
            raise _unusable(path.parent, error) from error

    @classmethod
    def make(cls, cache_dir: Path, warn: Callable[[str], None]) -> "StagingFolder":
        """Make a folder of a new name in `cache_dir`; remove those that killed runs left.

        Raises:
            TilenetError: It cannot be written.
        """
        try:
            cache_dir.mkdir(parents=True, exist_ok=True)
            for left in cache_dir.glob(f"{PREFIX}*"):
                _remove_unheld(left)
            made = cls(Path(tempfile.mkdtemp(prefix=PREFIX, dir=cache_dir)), warn)
            try:
                # Once it is held: until it is marked, no other run removes it.
                (made.path / MARKER).write_bytes(MARK)
            except OSError:
                made.remove()
                made.close()
                raise
        except OSError as error:
            raise _unusable(cache_dir, error) from error
        return made

    def write(self, name: str, arrays: Sequence[NDArray[Any]]) -> None:
        """Write a file of arrays, one after another, aside and renamed: it is whole or not there.

        Where that fails, it is said, and nothing is written any more.
        """
        if not self._writable:
            return
        part = self.path / f".{name}.{self._own}.part"
        try:
            with part.open("wb", buffering=0) as file:
                for array in arrays:
                    left = array.data.cast("B")
                    while left:  # a disk that becomes full takes some first
                        left = left[file.write(left) or 0 :]
            part.replace(self.path / name)
        except OSError as error:
            self._writable = False
            with suppress(OSError):
                part.unlink(missing_ok=True)
            self._warn(
                f"cache_dir cannot be written any more ({self.path}: {error.strerror}); what is "
                "not there is read from its files"
            )

    def remove(self) -> None:
        """Delete the folder and all in it, as far as that is possible."""
        shutil.rmtree(self.path, ignore_errors=True)

    def close(self) -> None:
        """Let go of the folder."""
        if self._held >= 0:
            os.close(self._held)
            self._held = -1


def _hold(folder: Path) -> int:
    """A folder's descriptor, which holds a lock on it where its file system knows any."""
    held = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    with suppress(OSError):
        fcntl.flock(held, fcntl.LOCK_SH | fcntl.LOCK_NB)
    return held


def _remove_unheld(folder: Path) -> None:
    try:
        held = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError:
        return
    try:
        if read_plain(folder / MARKER, len(MARK)) == MARK:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)
    except OSError:  # it has no marker, a run holds it, or locks are not known
        return
    finally:
        os.close(held)


def _unusable(cache_dir: Path, error: OSError) -> TilenetError:
    return TilenetError(
        f"cache_dir must be a folder that can be written on every node, by all its ranks "
        f"({cache_dir}: {error.strerror}); name another one, or leave it out"
    )
