"""How many files a process may hold open: every rank holds each image and its labels."""

import resource
from contextlib import suppress

from tilenet.errors import TilenetError
from tilenet.files.tools import JOIN

__all__ = ["allow_open_files"]

OTHER_FILES = 64  # libraries, sockets, logs


def allow_open_files(count: int) -> None:
    """Raise this process's limit where it is below what `count` files need.

    Raises:
        TilenetError: The system's own limit is lower.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    endless = resource.RLIM_INFINITY
    if hard != endless and hard < count + OTHER_FILES:
        raise TilenetError(
            f"a rank holds all images and labels open (files: {count}, the system allows: {hard}); "
            f"raise ulimit -Hn, or join images into fewer files with {JOIN}"
        )
    wanted = 4 * count + OTHER_FILES  # a file may be opened several times over
    if soft != endless and soft < wanted:
        limit = wanted if hard == endless else min(wanted, hard)
        with suppress(OSError, ValueError):  # macOS has a lower limit than it names
            resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, limit), hard))
