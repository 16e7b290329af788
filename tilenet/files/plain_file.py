"""Files that are no pipes, devices or sockets, which would be waited for, or read for ever."""

import errno
import os
import stat
from pathlib import Path

from tilenet.errors import TilenetError

__all__ = ["check_name", "read_plain", "refuse_special"]


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

    What is not there at all passes: whoever opens it knows better what it may be (/vsicurl/…).

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
