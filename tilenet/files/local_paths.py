"""The files of this file system that a name for GDAL leads to, whatever stands before and after."""

import os
import re
import stat
from itertools import combinations

__all__ = ["local_paths"]

# NETCDF:"file":variable, vrt://file?bands=1, /vsisubfile/0_9,file, /vsizip/{file}/inner, zip://a!b
BETWEEN = re.compile(r'[":?&,|!={}]+')
MOST_PARTS = 12
HANDLER = re.compile(r"/?vsi([a-z0-9_]+)[/?]")
# These read files of this file system, or what another of them reads.
LOCAL = ("zip", "tar", "gzip", "7z", "rar", "subfile", "sparse", "cached", "crypt")


def local_paths(name: str) -> tuple[str, ...]:
    """Paths of files and folders that are there, each once; none for what is elsewhere.

    The archive is one, not what lies in it.
    """
    if os.path.lexists(name):
        return (name,)
    ends = [(0, 0), *(match.span() for match in BETWEEN.finditer(name))][:MOST_PARTS]
    ends.append((len(name), len(name)))
    parts = (name[first[1] : last[0]] for first, last in combinations(ends, 2))
    found = (_there(candidate) for part in parts for candidate in _unwrapped(part))
    return tuple(dict.fromkeys(path for path in found if path is not None))


def _unwrapped(part: str) -> tuple[str, ...]:
    """What stands behind /vsi…/, with and without the slashes of ://."""
    while match := HANDLER.match(part):
        if match[1] not in LOCAL:
            return ()
        part = part[match.end() :]
    return (part, part[2:]) if part.startswith("//") else (part,)


def _there(path: str) -> str | None:
    """A path, or the archive above it."""
    if os.path.lexists(path):
        return path
    while path and path != os.path.dirname(path):
        path = os.path.dirname(path)
        try:
            return None if stat.S_ISDIR(os.stat(path).st_mode) else path
        except (OSError, ValueError):
            continue
    return None
