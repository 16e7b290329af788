"""Pipes and devices among the files that GDAL opens with a raster or vector.

It waits for a pipe, and reads a device for as long as that gives bytes. So they are looked for
before it opens anything: the file itself, what lies next to it under its name, and what virtual
rasters name, one in the other.

The files of this file system that a name for GDAL leads to, whatever stands before and after.
"""

import html
import os
import re
import stat
from functools import lru_cache
from itertools import combinations

from tilenet.errors import TilenetError
from tilenet.storage.atomic import refuse_special

__all__ = ["local_paths", "refuse_special_beside", "refuse_special_files"]

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


# Not named after the image: what describes products of some satellites, and Esri's grids.
OF_PRODUCTS = re.compile(r"summary\.txt|metadata\.dim|(?:dim|rpc|hdr).*\.(?:xml|txt)|.*\.adf")
BEGUN_SO = ("", ".aux.xml", ".ovr", ".msk")  # a file, and those next to it that may name others
VIRTUAL = re.compile(rb"<(?:VRTDataset|OGRVRTDataSource|GDALTileIndexDataset)")
NAMED = re.compile(r">\s*([^<>]{1,4096}?)\s*<|\"([^\"<>\n]{1,4096})\"|'([^'<>\n]{1,4096})'")
NUMBER = re.compile(r"[-+.,\deE\s]*")

STDIN = "/vsistdin"
HEAD_BYTES = 4096
MOST_VIRTUAL_BYTES = 64 << 20
MOST_TEXT_BYTES = 1 << 20  # of other files that begin as XML or JSON does: polygons, mostly
MOST_LOOKED_INTO = 4096  # files of one name
MOST_IN_FOLDER = 20_000  # entries of a folder that is a raster or vector itself


def refuse_special_files(name: str | os.PathLike[str]) -> None:
    """Refuse a name for GDAL that leads it to a pipe or a device; nothing that may be is opened.

    Not seen are names that archives hold, and those in formats other than XML and JSON.

    Raises:
        TilenetError: With the first that was found.
    """
    name = os.fspath(name)
    waiting, seen = _led_to(name), set()
    while waiting:
        path = waiting.pop()
        if (key := os.path.abspath(path)) in seen:
            continue
        seen.add(key)
        if (found := _special_with(path)) is not None:
            raise _refused(name, found)
        if len(seen) <= MOST_LOOKED_INTO:
            waiting += _named_by(path)


def refuse_special_beside(path: str) -> None:
    """Refuse to write a file where pipes and devices have names that GDAL would open with it.

    Raises:
        TilenetError: With the first that was found.
    """
    if (found := _beside(path)) is not None:
        raise _refused(path, found)


def _refused(name: str, found: str) -> TilenetError:
    shown = f"{found} is a" if found == name else f"{name}: {found} is a"
    return TilenetError(
        f"a raster or vector, and all that GDAL opens with it, must be files ({shown} pipe, "
        "device or socket); move it away, or name another file"
    )


def _led_to(name: str) -> list[str]:
    return [STDIN] if STDIN in name else list(local_paths(name))


def _special_with(path: str) -> str | None:
    """A file, or the first special one that belongs to it."""
    if STDIN in path:
        return "standard input"
    if os.path.isdir(path):
        return _special_in(path)
    if os.path.isfile(path):
        return _beside(path)
    return path if os.path.exists(path) else None


def _beside(path: str) -> str | None:
    """The first special one that belongs to a file: x.tif.ovr, x.tfw or x_RPC.TXT to x.tif."""
    folder, base = os.path.split(path)
    stem = (os.path.splitext(base)[0] or base).lower()
    for name in _waited_for(folder or "."):
        end = name.lower().removeprefix(stem)
        # Where x is the file itself, x2.tif is another one's.
        own = end != name.lower() and end.startswith((".", "_", "-"))
        if own or OF_PRODUCTS.fullmatch(name.lower()):
            return os.path.join(folder, name)
    return None


def _special_in(folder: str) -> str | None:
    """The first in a folder that is a raster or vector: Zarr, File Geodatabase."""
    seen = 0
    for inside, _, names in os.walk(folder):
        for name in _waited_for(inside):
            return os.path.join(inside, name)
        seen += len(names) + 1
        if seen > MOST_IN_FOLDER:
            break
    return None


def _waited_for(folder: str) -> tuple[str, ...]:
    """Pipes and devices in a folder; not sockets, which GDAL cannot open."""
    try:
        return _listed(os.path.abspath(folder), os.stat(folder).st_mtime_ns)
    except (OSError, ValueError):
        return ()


@lru_cache(256)
def _listed(folder: str, changed_ns: int) -> tuple[str, ...]:
    """Once while a folder does not change; in one of 100 000 files none is asked for its kind."""
    with os.scandir(folder) as entries:
        odd = [
            entry.name
            for entry in entries
            if not (entry.is_file(follow_symlinks=False) or entry.is_dir(follow_symlinks=False))
        ]
    return tuple(sorted(name for name in odd if _is_waited_for(os.path.join(folder, name))))


def _is_waited_for(path: str) -> bool:
    try:
        mode = os.stat(path).st_mode
    except OSError:
        return False
    return stat.S_ISFIFO(mode) or stat.S_ISCHR(mode) or stat.S_ISBLK(mode)


def _named_by(path: str) -> list[str]:
    """Files that are named in a file, or in one next to it."""
    folder = os.path.dirname(path)
    words = ("".join(w) for ending in BEGUN_SO for w in NAMED.findall(_text(path + ending)))
    named = [html.unescape(word) for word in words if not NUMBER.fullmatch(word)]
    names = dict.fromkeys(named + [os.path.join(folder, name) for name in named])
    return [path for name in names for path in _led_to(name) if not os.path.isdir(path)]


def _text(path: str) -> str:
    """Text of a file that may name others; empty where it is none."""
    try:
        refuse_special(path)
        with open(path, "rb") as file:
            head = file.read(HEAD_BYTES)
            virtual = VIRTUAL.search(head)
            if not (virtual or head.removeprefix(b"\xef\xbb\xbf").lstrip()[:1] in (b"<", b"{")):
                return ""
            most = MOST_VIRTUAL_BYTES if virtual else MOST_TEXT_BYTES
            found = head + file.read(most)
    except (OSError, ValueError):
        return ""
    return found.decode(errors="surrogateescape") if len(found) <= most else ""
