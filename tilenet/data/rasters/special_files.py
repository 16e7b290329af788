"""Pipes and devices among the files that GDAL opens with a raster or vector.

It waits for a pipe, and reads a device for as long as that gives bytes. So they are looked for
before it opens anything: the file itself, what lies next to it under its name, and what virtual
rasters name, one in the other.

The files of this file system that a name for GDAL leads to, whatever stands before and after.
"""

import bisect
import html
import os
import re
import stat
import time
from collections.abc import Iterator
from itertools import combinations
from typing import NamedTuple

from tilenet.errors import TilenetError

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
MOST_LOOKED_INTO = 4096  # files of one name; of further ones only those that end in .vrt
MOST_IN_FOLDER = 20_000  # entries of a folder that is a raster or vector itself

MOST_LISTINGS = 256
# A folder that was changed so long before it was listed shows later changes in its time.
SETTLED_S = 2.0


class _Listing(NamedTuple):
    """Entries of a folder that may be special, links among them, sorted by `lower`.

    Attributes:
        of_products: Those that are special, and belong to rasters of any name.
    """

    changed_ns: int
    lower: list[str]
    names: list[str]
    of_products: list[str]


_LISTINGS: dict[str, _Listing] = {}


def refuse_special_files(name: str | os.PathLike[str]) -> None:
    """Refuse a name for GDAL that leads it to a pipe or a device; nothing that may be is opened.

    Not seen are names that archives hold, and those in formats other than XML and JSON.

    Raises:
        TilenetError: With the first that was found.
    """
    found = _first(os.fspath(name))
    if found is not None:
        raise _refused(os.fspath(name), found)


def refuse_special_beside(path: str) -> None:
    """Refuse to write a file where pipes and devices have names that GDAL would open with it.

    Raises:
        TilenetError: With the first that was found.
    """
    found = _beside(path)
    if found is not None:
        raise _refused(path, found)


def _refused(name: str, found: str) -> TilenetError:
    shown = f"{found} is a" if found == name else f"{name}: {found} is a"
    return TilenetError(
        f"a raster or vector, and all that GDAL opens with it, must be files ({shown} pipe, "
        "device or socket); move it away, or name another file"
    )


def _first(name: str) -> str | None:
    waiting, seen = _led_to(name), set()
    while waiting:
        path = waiting.pop()
        if (key := os.path.abspath(path)) in seen:
            continue
        seen.add(key)
        if (found := _special_with(path)) is not None:
            return found
        if len(seen) <= MOST_LOOKED_INTO or path.lower().endswith(".vrt"):
            waiting += _named_by(path)
    return None


def _led_to(name: str) -> list[str]:
    return [STDIN] if STDIN in name else list(local_paths(name))


def _special_with(path: str) -> str | None:
    """A file, or the first special one that belongs to it."""
    if STDIN in path:
        return "standard input"
    try:
        mode = os.stat(path).st_mode
    except (OSError, ValueError):
        return None
    if stat.S_ISDIR(mode):
        return _special_in(path)
    return _beside(path) if stat.S_ISREG(mode) else path


def _beside(path: str) -> str | None:
    """The first special one that lies in a file's folder and belongs to it."""
    folder, base = os.path.split(path)
    listing = _listed(folder or ".")
    for name in _belonging(listing, base) if listing.names else ():
        if _is_waited_for(side_file := os.path.join(folder, name)):
            return side_file
    return None


def _belonging(listing: _Listing, base: str) -> Iterator[str]:
    """Names like x.tif.ovr, x.tfw or x_RPC.TXT for x.tif, whatever their case."""
    stem = (os.path.splitext(base)[0] or base).lower()
    first = bisect.bisect_left(listing.lower, stem)
    for place in range(first, len(listing.lower)):
        if not listing.lower[place].startswith(stem):
            break
        # Where x is the file itself, x2.tif is another one's.
        if listing.lower[place][len(stem) : len(stem) + 1] in (".", "_", "-"):
            yield listing.names[place]
    yield from listing.of_products


def _listed(folder: str) -> _Listing:
    """A folder's entries that are neither files nor folders; listed once while it does not change.

    By what the folder says of them: in one of 100 000 files none is asked for its kind.
    """
    try:
        folder = os.path.abspath(folder)
        changed_ns = os.stat(folder).st_mtime_ns
        kept = _LISTINGS.get(folder)
        if kept is not None and kept.changed_ns == changed_ns:
            return kept
        with os.scandir(folder) as entries:
            names = [entry.name for entry in entries if not _is_plain(entry)]
    except (OSError, ValueError):
        return _Listing(0, [], [], [])
    names.sort(key=str.lower)
    lower = [name.lower() for name in names]
    described = (n for n, text in zip(names, lower, strict=True) if OF_PRODUCTS.fullmatch(text))
    special = [name for name in described if _is_waited_for(os.path.join(folder, name))]
    listing = _Listing(changed_ns, lower, names, special)
    if time.time_ns() - changed_ns > SETTLED_S * 1e9:
        if len(_LISTINGS) >= MOST_LISTINGS:
            _LISTINGS.clear()
        _LISTINGS[folder] = listing
    return listing


def _is_plain(entry: "os.DirEntry[str]") -> bool:
    return entry.is_file(follow_symlinks=False) or entry.is_dir(follow_symlinks=False)


def _is_waited_for(path: str) -> bool:
    """Not a socket, which cannot be opened and does no harm next to a file."""
    try:
        mode = os.stat(path).st_mode
    except (OSError, ValueError):
        return False
    return stat.S_ISFIFO(mode) or stat.S_ISCHR(mode) or stat.S_ISBLK(mode)


def _special_in(folder: str) -> str | None:
    """The first in a folder that is a raster or vector: Zarr, File Geodatabase."""
    seen = 0
    for inside, _, names in os.walk(folder):
        listing = _listed(inside)
        for name in listing.names:
            if _is_waited_for(path := os.path.join(inside, name)):
                return path
        seen += len(names) + 1
        if seen > MOST_IN_FOLDER:
            break
    return None


def _named_by(path: str) -> list[str]:
    """Files that are named in a file, or in one next to it."""
    folder = os.path.dirname(path)
    found: dict[str, None] = {}
    for ending in BEGUN_SO:
        for words in NAMED.findall(_text(path + ending)):
            word = html.unescape("".join(words))
            if not NUMBER.fullmatch(word):
                found.update(dict.fromkeys((word, os.path.join(folder, word))))
    paths = (there for word in found for there in _led_to(word))
    return [there for there in paths if not os.path.isdir(there)]


def _text(path: str) -> str:
    """Text of a file that may name others; empty where it is none."""
    try:
        # Without waiting: what was a file a moment ago may be none.
        number = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except (OSError, ValueError):
        return ""
    if not stat.S_ISREG(os.fstat(number).st_mode):
        os.close(number)
        return ""
    with open(number, "rb") as file:
        try:
            head = file.read(HEAD_BYTES)
            most = MOST_VIRTUAL_BYTES if VIRTUAL.search(head) else MOST_TEXT_BYTES
            begins = head.removeprefix(b"\xef\xbb\xbf").lstrip()[:1]
            if most == MOST_TEXT_BYTES and begins not in (b"<", b"{"):
                return ""
            if os.fstat(number).st_size > most:
                return ""
            return (head + file.read(most)).decode(errors="surrogateescape")
        except OSError:
            return ""
