"""What is done of a map: lines of JSON next to it, each true once it is written.

The first line says what the map is made of, the second what its file begins with; the others name
tiles that are on the disk, with checksums of their pixels, and sums that were found on the way to
them. Each line ends with a digest of itself and of all lines before, so that none is changed, lost
or in another place unseen. A map goes on only where nothing of the first line has changed.

Whether the pixels that an interrupted map left are still those that were written.

CRC-32 of each window as it was written, and of the bytes of the file before its first pixel: it
finds what disks and copies do to files, at the speed of reading.
"""

import contextlib
import hashlib
import json
import os
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import rasterio
from numpy.typing import NDArray
from rasterio.windows import Window as FileWindow

from tilenet.data.rasters.opening import GDAL_ERRORS
from tilenet.errors import TilenetError

__all__ = [
    "Done",
    "MapJournal",
    "Part",
    "file_facts",
    "frame_of",
    "hash_of",
    "part_of",
    "why_not_kept",
    "wrong_pixels",
]

# Row, column, height and width of a window of the file, and CRC-32 of its pixels.
Part = tuple[int, int, int, int, int]

BAND_BYTES = 64 << 20  # of a window that are read at once


def part_of(window: FileWindow, values: NDArray[Any]) -> Part:
    """What is kept of pixels (bands, H, W) that are written to a window."""
    found = 0
    for band in values:
        found = zlib.crc32(np.ascontiguousarray(band).data, found)
    return window.row_off, window.col_off, window.height, window.width, found


def frame_of(path: str, block_bytes: int) -> tuple[int, int]:
    """Bytes of a file before its blocks, and their CRC-32.

    Args:
        block_bytes: Bytes of all blocks, which stand at its end.

    Raises:
        OSError: It cannot be read.
    """
    num_bytes = max(0, os.path.getsize(path) - block_bytes)
    with open(path, "rb") as file:
        return num_bytes, zlib.crc32(file.read(num_bytes))


def why_not_kept(path: str, block_bytes: int, frame: tuple[int, int], parts: Iterable[Part]) -> str:
    """Why a file's pixels are not those that were written; "": they are."""
    try:
        if frame_of(path, block_bytes) != frame:
            return "damaged: its header is not what was written"
        wrong = wrong_pixels(path, parts)
        if wrong:
            return f"damaged: {wrong}"
    except FileNotFoundError:
        return "gone"
    except GDAL_ERRORS as error:
        reason = " ".join(str(error.__cause__ or error).split())
        return f"damaged: it cannot be read ({reason})"
    return ""


def wrong_pixels(path: str, parts: Iterable[Part]) -> str:
    """Which of a file's pixels are not those that were written; "": they all are.

    Raises:
        OSError, rasterio.errors.RasterioError: It cannot be read.
    """
    with rasterio.open(path) as file:
        for row, col, height, width, crc in parts:
            found = 0
            for band in file.indexes:
                found = _crc_of(file, band, (row, col, height, width), found)
            if found != crc:
                return (
                    f"its pixels are not what was written (rows {row} to {row + height - 1}, "
                    f"columns {col} to {col + width - 1})"
                )
    return ""


def _crc_of(file: Any, band: int, place: tuple[int, int, int, int], crc: int) -> int:
    """CRC of a band's pixels, after others; a window as wide as an image is read in strips."""
    row, col, height, width = place
    if min(row, col, height - 1, width - 1) < 0:
        return -1
    if row + height > file.height or col + width > file.width:
        return -1
    rows = max(1, BAND_BYTES // (width * np.dtype(file.dtypes[0]).itemsize))
    for top in range(row, row + height, rows):
        window = FileWindow(col, top, width, min(rows, row + height - top))
        crc = zlib.crc32(file.read(band, window=window), crc)
    return crc


# What lines raise that hold something else than what is noted.
NONSENSE = (ValueError, TypeError, KeyError, OverflowError, RecursionError)
DAMAGED = "damaged: the lines of its journal do not follow from one another"


@dataclass
class Done:
    """What a journal says.

    Attributes:
        tiles: Numbers of the tiles whose pixels are on the disk.
        sums: By a name, the last that was noted under it.
        frame: Bytes of the map's file before its pixels, and their checksum.
        parts: Windows of it that were written, with checksums.
    """

    tiles: set[int] = field(default_factory=set)
    sums: dict[str, dict[str, Any]] = field(default_factory=dict)
    frame: tuple[int, int] = (0, 0)
    parts: list[Part] = field(default_factory=list)


class MapJournal:
    """The journal of a map; rank 0 keeps it.

    Args:
        path: Path of its file.
        made_of: What the map is made of: plain values.
    """

    def __init__(self, path: str, made_of: dict[str, Any]) -> None:
        self.path = path
        # As they come back from the file: lists for tuples.
        self.made_of: dict[str, Any] = json.loads(json.dumps(made_of))
        self._digest = ""  # of the last line

    def read(self) -> tuple[Done | None, str]:
        """What was done of the same map; else None and why, "" where there was no journal.

        A line that a killed run did not finish is as if it were not there.
        """
        try:
            lines = Path(self.path).read_bytes().split(b"\n")[:-1]
        except FileNotFoundError:
            return None, ""
        except OSError as error:
            return None, f"not said any more: its journal cannot be read ({error.strerror})"
        try:
            entries = list(_entries(lines))
        except NONSENSE:
            return None, DAMAGED
        if len(entries) < 2:
            return None, "not said any more: its journal was not begun"
        before = entries[0]
        # As text: nodata may be NaN, which equals nothing.
        other = [
            name
            for name in {**self.made_of, **before}
            if json.dumps(self.made_of.get(name)) != json.dumps(before.get(name))
        ]
        if other:
            return None, f"of something else: {', '.join(other)}"
        try:
            done = _done(entries[1:])
        except NONSENSE:
            return None, DAMAGED
        self._digest = json.loads(lines[-1])["digest"]
        return done, ""

    def begin(self, frame: tuple[int, int]) -> None:
        """Start over.

        Args:
            frame: See `Done`.
        """
        with open(self.path, "wb"):
            pass
        self._digest = ""
        self._add(self.made_of, {"frame": frame})

    def mend(self) -> None:
        """Take away the line that a killed run did not finish."""
        whole = Path(self.path).read_bytes().rfind(b"\n") + 1
        os.truncate(self.path, whole)

    def add_tiles(self, tiles: Sequence[int], parts: Sequence[Part]) -> None:
        """Note tiles whose pixels are on the disk, and what was written for them."""
        self._add({"tiles": list(tiles), "parts": list(parts)})

    def add_sums(self, name: str, sums: dict[str, Any]) -> None:
        """Note sums; floats come back to the last bit."""
        self._add({"sums": {name: sums}})

    def remove(self) -> None:
        """Delete it."""
        Path(self.path).unlink(missing_ok=True)

    def _add(self, *entries: dict[str, Any]) -> None:
        lines, digest = b"", self._digest
        for entry in entries:
            digest = _digest(digest, entry)
            lines += json.dumps({**entry, "digest": digest}).encode() + b"\n"
        with open(self.path, "ab") as file:
            file.write(lines)
            file.flush()
            os.fsync(file.fileno())
        self._digest = digest


def _digest(before: str, entry: dict[str, Any]) -> str:
    """Digest of a line and all before."""
    text = before + json.dumps(entry)
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def _entries(lines: Iterable[bytes]) -> Iterator[dict[str, Any]]:
    """Those of whole lines.

    Raises:
        Any of `NONSENSE`: One does not follow from those before.
    """
    before = ""
    for line in lines:
        entry = dict(json.loads(line))
        digest = entry.pop("digest", None)
        before = _digest(before, entry)
        if digest != before:
            raise ValueError(digest)
        yield entry


def _done(entries: Sequence[dict[str, Any]]) -> Done:
    """What lines after the first say.

    Raises:
        Any of `NONSENSE`: Something else than what is noted.
    """
    num_bytes, crc = map(int, entries[0]["frame"])
    done = Done(frame=(num_bytes, crc))
    for entry in entries[1:]:
        done.tiles.update(map(int, entry.get("tiles", ())))
        for row, col, height, width, crc in entry.get("parts", ()):
            done.parts.append((int(row), int(col), int(height), int(width), int(crc)))
        done.sums.update(entry.get("sums", {}))
    return done


def file_facts(paths: Iterable[str]) -> list[list[Any]]:
    """Of each file its name, bytes and time of its last change; the name alone of no local file."""
    facts: list[list[Any]] = []
    for path in paths:
        facts.append([os.path.basename(path)])
        with contextlib.suppress(OSError):
            found = os.stat(path)
            facts[-1] += [found.st_size, found.st_mtime_ns]
    return facts


def hash_of(path: Path) -> str:
    """SHA-256 of a file.

    Raises:
        TilenetError: It cannot be read.
    """
    try:
        found = hashlib.sha256()
        with open(path, "rb") as file:
            while part := file.read(1 << 24):
                found.update(part)
    except OSError as error:
        raise TilenetError(
            f"a checkpoint's files must be whole ({path}: {error.strerror}); use another checkpoint"
        ) from error
    return found.hexdigest()
