"""Files that are whole or not there: written next to their target, then renamed.

A rename is on disk once the folder is, so that both the file and its folder are synced: after a
power cut there is the old file or the new one, never an empty one or none.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from tilenet.errors import TilenetError


def sync(path: str | Path) -> None:
    """Wait until a file or a folder is on disk.

    Raises:
        OSError: It cannot be opened or written to the disk.
    """
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def put(part: str | Path, path: str | Path) -> None:
    """Sync a finished file and rename it to `path`, in the same folder.

    Raises:
        OSError: The disk does not take the file, or the folder cannot be written.
    """
    sync(part)
    os.replace(part, path)
    sync(os.path.dirname(os.path.abspath(path)))


@contextmanager
def aside(path: Path) -> Iterator[Path]:
    """A path next to another one, which a file written there in the context takes at its end.

    Raises:
        OSError: As of `put`.
    """
    part = path.with_name(f".{path.name}.part")
    try:
        yield part
        put(part, path)
    except BaseException:  # after a success the file may be that of another writer
        with suppress(OSError):  # the file system may have become read-only
            part.unlink(missing_ok=True)
        raise


def write_aside(text: str, path: Path, what: str, *, executable: bool = False) -> None:
    """Write a text and a line end to a file, atomically.

    Args:
        what: Name of the text's kind for the error, such as `a plan`.
        executable: Whether all users may run the file.

    Raises:
        TilenetError: The file cannot be written.
    """
    try:
        with aside(path) as part:
            part.write_text(text + "\n", encoding="utf-8")
            if executable:
                part.chmod(0o755)
    except OSError as error:
        raise TilenetError(
            f"{what} must be written to a place that can be written ({path}: {error.strerror}); "
            "name another file"
        ) from error


def check_name(what: str, path: str | Path) -> None:
    """Refuse a name that GDAL and safetensors could not write to: they know UTF-8 only.

    Raises:
        TilenetError: The name is not UTF-8, or holds a NUL byte.
    """
    text = str(path)
    if "\0" in text or text != text.encode(errors="replace").decode():
        raise TilenetError(
            f"the name of {what} is UTF-8 without NUL bytes ({text!r}); give it another one"
        )
