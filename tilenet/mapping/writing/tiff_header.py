"""The header of a cloud-optimised GeoTIFF: that of GDAL's file for a small map, with other sizes.

Every tag but sizes and places of tiles is copied from a file that GDAL's own driver made: names,
colours, where the map lies.
"""

import os
import struct
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import accumulate, chain

BLOCK_PX = 512  # rows and columns of a tile
# GDAL's driver has the bytes of a tile before it, and its last four once more behind it.
LEADER_BYTES = TRAILER_BYTES = 4
FRAME_BYTES = LEADER_BYTES + TRAILER_BYTES

WIDTH, HEIGHT, OFFSETS, SIZES = 256, 257, 324, 325  # tags
PREDICTOR = 317
TYPE_BYTES = {1: 1, 2: 1, 3: 2, 4: 4, 5: 8, 6: 1, 7: 1, 8: 2, 9: 4, 10: 8, 11: 4, 12: 8, 16: 8}
LONG, LONG8 = 4, 16  # types


@dataclass(frozen=True)
class Entry:
    """A tag: its number, the type of its values, how many there are, and their bytes."""

    tag: int
    type: int
    count: int
    data: bytes


@dataclass(frozen=True)
class Template:
    """The parts of a header that all maps of one kind share.

    Attributes:
        ghost: GDAL's lines on how tiles lie in the file.
        image: Tags of the map.
        overview: Tags of each of its overviews.
        predictor: Number of the compression's predictor in TIFF.
    """

    ghost: bytes
    image: tuple[Entry, ...]
    overview: tuple[Entry, ...]
    predictor: int


@dataclass
class Level:
    """A map or one of its overviews.

    Attributes:
        places: First byte in the file and number of bytes of each tile, row by row.
    """

    height: int
    width: int
    places: list[tuple[int, int]] = field(default_factory=list)

    @property
    def across(self) -> int:
        """Tiles in a row."""
        return -(-self.width // BLOCK_PX)

    @property
    def tiles(self) -> range:
        """Numbers of its tiles, row by row."""
        return range(self.across * -(-self.height // BLOCK_PX))


def template_of(file: bytes) -> Template:
    """Read the template from a small map, which has an overview and is no BigTIFF."""
    (first,) = struct.unpack_from("<I", file, 4)
    image, second = _read_directory(file, first)
    overview, _ = _read_directory(file, second)
    predictor = next((entry.data[0] for entry in image if entry.tag == PREDICTOR), 1)
    return Template(file[8:first], image, overview, predictor)


def tiles_in(file: bytes) -> list[memoryview]:
    """Return the compressed tiles of a TIFF, which is no BigTIFF, row by row."""
    entries, _ = _read_directory(file, *struct.unpack_from("<I", file, 4))
    by_tag = {entry.tag: entry for entry in entries}
    offsets, sizes = (
        struct.unpack(f"<{entry.count}{'H' if entry.type == 3 else 'I'}", entry.data)
        for entry in (by_tag[OFFSETS], by_tag[SIZES])
    )
    view = memoryview(file)
    return [view[at : at + size] for at, size in zip(offsets, sizes, strict=True)]


def framed(tiles: Iterable[memoryview]) -> bytes:
    """Return tiles one after another, each in the frame that it has in a file."""
    parts = ((struct.pack("<I", len(tile)), tile, tile[-TRAILER_BYTES:]) for tile in tiles)
    return b"".join(chain.from_iterable(parts))


def frames_fit(path: str, begin: int, sizes: list[int], tiles: Iterable[int]) -> bool:
    """Whether a file has these tiles in their places, by the frames before and behind them.

    Args:
        begin: Place of the first tile of the file.
        sizes: Bytes of all its tiles.
    """
    places = list(accumulate((size + FRAME_BYTES for size in sizes), initial=begin))
    try:
        with open(path, "rb", buffering=0) as file:
            for tile in tiles:
                at, size = places[tile], sizes[tile]
                leader = os.pread(file.fileno(), LEADER_BYTES, at)
                # The last bytes of the tile, twice.
                end = os.pread(file.fileno(), 2 * TRAILER_BYTES, at + size)
                if leader != struct.pack("<I", size) or len(end) != 2 * TRAILER_BYTES:
                    return False
                if end[:TRAILER_BYTES] != end[TRAILER_BYTES:]:
                    return False
    except (OSError, OverflowError, struct.error):
        return False
    return True


def _read_directory(file: bytes, at: int) -> tuple[tuple[Entry, ...], int]:
    """Tags of a directory, and where the next one is."""
    (count,) = struct.unpack_from("<H", file, at)
    entries = []
    for place in range(at + 2, at + 2 + 12 * count, 12):
        tag, kind, number, where = struct.unpack_from("<HHII", file, place)
        num_bytes = number * TYPE_BYTES[kind]
        begin = where if num_bytes > 4 else place + 8
        entries.append(Entry(tag, kind, number, file[begin : begin + num_bytes]))
    return tuple(entries), struct.unpack_from("<I", file, at + 2 + 12 * count)[0]


def header_of(template: Template, levels: list[Level], *, big: bool) -> bytes:
    """Return all bytes before the first tile; their number does not depend on the tiles' places.

    Args:
        levels: The map, and its overviews from the largest on.
        big: Write a BigTIFF, in which tiles may lie anywhere.
    """
    begin = 16 if big else 8
    pieces, at = [template.ghost], begin + len(template.ghost)
    magic = (
        struct.pack("<2sHHHQ", b"II", 43, 8, 0, at) if big else struct.pack("<2sHI", b"II", 42, at)
    )
    for number, level in enumerate(levels):
        entries = template.overview if number else template.image
        piece = _pack(_resize(entries, level, big), at, big, last=number + 1 == len(levels))
        pieces.append(piece)
        at += len(piece)
    return magic + b"".join(pieces)


def _resize(entries: tuple[Entry, ...], level: Level, big: bool) -> list[Entry]:
    kind, letter = (LONG8, "Q") if big else (LONG, "I")
    count = len(level.tiles)
    offsets, sizes = zip(*(level.places or [(0, 0)] * count), strict=True)
    new = {
        WIDTH: Entry(WIDTH, LONG, 1, struct.pack("<I", level.width)),
        HEIGHT: Entry(HEIGHT, LONG, 1, struct.pack("<I", level.height)),
        OFFSETS: Entry(OFFSETS, kind, count, struct.pack(f"<{count}{letter}", *offsets)),
        SIZES: Entry(SIZES, LONG, count, struct.pack(f"<{count}I", *sizes)),
    }
    return [new.get(entry.tag, entry) for entry in entries]


def _pack(entries: list[Entry], at: int, big: bool, *, last: bool) -> bytes:
    """A directory that stands at a place of the file, its values behind it, on even places."""
    head, entry_format, link, inline = ("<Q", "<HHQ", "<Q", 8) if big else ("<H", "<HHI", "<I", 4)
    own = struct.calcsize(head) + len(entries) * (struct.calcsize(entry_format) + inline)
    own += struct.calcsize(link)
    own += -(at + own) % 8
    table, values = struct.pack(head, len(entries)), b""
    for entry in entries:
        table += struct.pack(entry_format, entry.tag, entry.type, entry.count)
        if len(entry.data) <= inline:
            table += entry.data.ljust(inline, b"\0")
        else:
            table += struct.pack(link, at + own + len(values))
            values += entry.data + b"\0" * (-len(entry.data) % 8)
    table += struct.pack(link, 0 if last else at + own + len(values))
    return table.ljust(own, b"\0") + values
