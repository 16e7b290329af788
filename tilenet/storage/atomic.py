"""Files that are whole or not there: written next to their target, then renamed.

A rename reaches the disk with the folder, so that both the file and its folder are synced: after
a power cut there is the old file or the new one, never an empty one or none.

Files that are no pipes, devices or sockets, which would be waited for, or read forever.
"""

import errno
import os
import stat
from pathlib import Path

from tilenet.errors import TilenetError

__all__ = ["check_name", "put", "read_plain", "refuse_special", "sync", "write_aside"]


def sync(path: str | Path) -> None:
    """Have the disk hold what a file or a folder says.

    Raises:
        OSError: The disk does not take it.
    """
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def put(part: str | Path, path: str | Path) -> None:
    """Give a finished file its name, in the same folder, on the disk too.

    Raises:
        OSError: The disk does not take the file, or the folder cannot be written.
    """
    sync(part)
    os.replace(part, path)
    sync(os.path.dirname(os.path.abspath(path)))


def write_aside(text: str, path: Path, what: str, *, executable: bool = False) -> None:
    """Write a text and a line end.

    Args:
        what: It is, for the error: `a plan`.
        executable: Whether everybody may run it.

    Raises:
        TilenetError: It cannot be written.
    """
    part = path.with_name(f"{path.name}.part")
    try:
        part.write_text(text + "\n", encoding="utf-8")
        if executable:
            part.chmod(0o755)
        put(part, path)
    except OSError as error:
        part.unlink(missing_ok=True)
        raise TilenetError(
            f"{what} must be written to a place that can be written ({path}: {error.strerror}); "
            "name another file"
        ) from error


def check_name(what: str, path: str | Path) -> None:
    """Refuse a name that GDAL and safetensors could not write to: they know UTF-8 only.

    Raises:
        TilenetError: Its bytes are no UTF-8, or one is NUL.
    """
    text = str(path)
    if "\0" in text or text != text.encode(errors="replace").decode():
        raise TilenetError(
            f"the name of {what} is UTF-8 without NUL bytes ({text!r}); give it another one"
        )


def refuse_special(path: str | Path) -> None:
    """Refuse what is there but neither a file nor a folder; nothing is opened.

    What is not there at all passes: GDAL may know what it is (/vsicurl/…).

    Raises:
        OSError: It is a pipe, a device or a socket.
    """
    try:
        mode = os.stat(path).st_mode
    except (OSError, ValueError):
        return
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
        raise OSError(errno.EINVAL, "is a pipe, device or socket and no file", str(path))


def read_plain(path: str | Path, most_bytes: int) -> bytes:
    """All bytes of a file.

    Raises:
        OSError: It cannot be read, is no file, or is larger than that.
    """
    refuse_special(path)
    with open(path, "rb") as file:
        found = file.read(most_bytes + 1)
    if len(found) > most_bytes:
        raise OSError(errno.EFBIG, f"is larger than {most_bytes >> 20} MiB", str(path))
    return found
