"""A cloud-optimised GeoTIFF from pieces, by all ranks: each compresses its share of the tiles.

Ranks compress in rounds, tell each other how many bytes their tiles take, and each writes its own
to their places in the one file. Nothing is compressed twice, no rank needs another's pixels. Where
two nodes write to one page of a file, NFS may silently lose the bytes of one of them: a rank on
another node than rank 0 writes the whole pages of its part, and hands the rest to rank 0.

Of a map that goes on when interrupted, a record says how many tiles the disk holds: the order of
tiles is that of any number of ranks, so that another job goes on behind them.

The first two overviews are made from the map; the next two from the second, which then lies in a
file of its own, and so on: every pixel is looked at a few times, however many overviews there are.
"""

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from io import FileIO
from itertools import accumulate, groupby, pairwise
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import rasterio
import rasterio.shutil
from numpy.typing import NDArray
from rasterio.enums import Resampling
from rasterio.io import MemoryFile
from rasterio.windows import Window as FileWindow

from tilenet.data.rasters.opening import GDAL_ERRORS, quiet
from tilenet.errors import TilenetError
from tilenet.mapping.writing.compressed_tiles import CompressedTiles
from tilenet.mapping.writing.map_pieces import Pieces
from tilenet.mapping.writing.tiff_header import (
    BLOCK_PX,
    FRAME_BYTES,
    LEADER_BYTES,
    Level,
    Template,
    framed,
    frames_fit,
    header_of,
    template_of,
    tiles_in,
)
from tilenet.mapping.writing.tile_shares import share_tiles, tile_cost
from tilenet.mpi import Comm, Intracomm
from tilenet.parallel.ranks.comm import agreed
from tilenet.parallel.ranks.node import ranks_of_node

# Pixels, before they are compressed, that a rank has in memory at once, and tiles of them.
BATCH_BYTES, BATCH_TILES = 32 << 20, 16
# More of them before they are compressed need a BigTIFF, to be safe: as GDAL decides.
CLASSIC_BYTES = 2_000_000_000
# The largest page of memory, and so of a file, that Linux has on the machines of clusters.
PAGE_BYTES = 64 << 10
# Seconds of work that an interrupted job may lose; the disk is waited for as often.
KEEP_SECONDS = 10.0


@dataclass(frozen=True)
class CogJob:
    """A map to write as a cloud-optimised GeoTIFF.

    Attributes:
        path: The map's name, for errors.
        pieces: All pieces of the map.
        cog: Path of the file, which is overwritten.
        template: Template of the file's header.
        classes: Whether overviews hold the most frequent class of their pixels; else they hold the
            mean of pixels with data.
        resumable: Whether pieces and compressed tiles stay where the map cannot be written.
    """

    path: str
    pieces: Pieces
    cog: str
    template: Template
    classes: bool
    resumable: bool = False


def template_like(small: str, *, classes: bool) -> Template:
    """Have GDAL's driver write a small map, and return the template of its header.

    Args:
        small: A GeoTIFF that has all but the map's size, just large enough for an overview.
    """
    with MemoryFile(ext=".tif") as cog:
        rasterio.shutil.copy(
            small,
            cog.name,
            driver="COG",
            compress="DEFLATE",
            predictor="NO" if classes else "YES",
            bigtiff="NO",
            blocksize=BLOCK_PX,
            sparse_ok=True,
        )
        return template_of(bytes(cog.getbuffer()))


def cannot_write(path: str, error: BaseException, *, resumable: bool) -> TilenetError:
    """Return the error of a map that the disk does not take."""
    reason = " ".join(str(error.__cause__ or error).split())
    resuming = " and go on with --resume," if resumable else ""
    return TilenetError(
        f"a map must be writable to its end ({path}: {reason}); make room there{resuming} "
        "or choose another directory"
    )


def write_cog(job: CogJob | None, comm: Intracomm) -> None:
    """Write the map. Collective.

    Args:
        job: The job on rank 0; not used on other ranks.

    Raises:
        AgreedError: On all ranks: a rank could not read, or not write.
    """
    job = comm.bcast(job)
    assert job is not None
    with ExitStack() as stack, quiet():
        _CogWriter(job, comm, stack).run()


def list_level_sizes(height: int, width: int) -> list[tuple[int, int]]:
    """Rows and columns of a map and of its overviews, down to one that is a block: as GDAL's."""
    sizes = [(height, width)]
    while max(sizes[-1]) > BLOCK_PX:
        factor = 2 ** len(sizes)
        sizes.append((max(1, height // factor), max(1, width // factor)))
    return sizes


class _CogWriter:
    """The work of the ranks that write.

    Attributes:
        near: Whether each rank is on rank 0's node, by rank.
        sources: Pixels by level: those of level 0 are in pieces, the others in files.
        sizes: Rows and columns of all levels.
        files: Path and places of tiles of each level that has a file of its own, by level.
        record: On rank 0, record of the number of tiles of files that the disk holds.
        record_at: On rank 0, monotonic time at which the record is due again.
    """

    def __init__(self, job: CogJob, comm: Comm, stack: ExitStack) -> None:
        self.job, self.comm, self.stack = job, comm, stack
        self.near = comm.allgather(_is_near(comm))
        self.sources: dict[int, Any] = {0: job.pieces}
        self.sizes = list_level_sizes(job.pieces.height, job.pieces.width)
        self.files: dict[int, tuple[str, Level]] = {}
        made_of = job.template, job.classes, self.sizes, rasterio.__gdal_version__
        folder = Path(job.cog).parent
        self.record = CompressedTiles(folder, "")
        if comm.rank == 0 and job.resumable:
            self.record = CompressedTiles.load(folder, made_of)
        self.record_at = time.monotonic() + KEEP_SECONDS

    def run(self) -> None:
        job = self.job
        for number in range(2, len(self.sizes) - 1, 2):
            path, level = f"{job.cog}.{number}.part", Level(*self.sizes[number])
            self._write(path, {number: level})
            with self._guarded():
                self.files[number] = path, level
                self.sources[number] = self.stack.enter_context(rasterio.open(path))
        self._write(job.cog, {n: Level(*size) for n, size in enumerate(self.sizes)})

    @contextmanager
    def _guarded(self) -> Iterator[None]:
        """Raise an error of one rank's writing on all ranks. Collective at the block's end."""
        with agreed(self.comm):
            try:
                yield
            except GDAL_ERRORS as error:
                raise cannot_write(self.job.path, error, resumable=self.job.resumable) from error

    def _write(self, path: str, levels: dict[int, Level]) -> None:
        """Write levels to a file: the smallest first, as programs that read a part of it expect."""
        comm, pieces = self.comm, self.job.pieces
        tile_bytes = pieces.count * np.dtype(pieces.dtype).itemsize * BLOCK_PX**2
        order = [(number, tile) for number in sorted(levels)[::-1] for tile in levels[number].tiles]
        big = len(order) * tile_bytes > CLASSIC_BYTES
        at = len(header_of(self.job.template, [*levels.values()], big=big))
        sizes = self._find_whole(path, at, len(order))
        at = _set_places(levels, order, sizes, at)
        with self._guarded():
            if comm.rank == 0:
                with open(path, "ab") as begun:
                    begun.truncate(at)
        with ExitStack() as stack:
            with self._guarded():
                # Unbuffered: closing it has nothing left to write, and nothing to say.
                file = stack.enter_context(open(path, "r+b", buffering=0))
            most = max(1, min(BATCH_TILES, BATCH_BYTES // tile_bytes))
            rest = order[len(sizes) :]
            for firsts in share_tiles([self._cost(n) for n, _ in rest], comm.size, most):
                mine = rest[slice(*firsts[comm.rank : comm.rank + 2])]
                round_sizes = self._write_round(file, at, mine)
                at = _set_places(levels, rest[firsts[0] : firsts[-1]], round_sizes, at)
                sizes += round_sizes
                self._record_sizes(file, path, sizes, last=len(sizes) == len(order))
            with self._guarded():
                if comm.rank == 0:
                    _write_at(file, 0, header_of(self.job.template, [*levels.values()], big=big))
                os.fsync(file.fileno())

    def _find_whole(self, path: str, begin: int, most: int) -> list[int]:
        """Bytes of the tiles that a file has from an interrupted job; []: none. Collective."""
        comm, name = self.comm, os.path.basename(path)
        sizes: list[int] = comm.bcast(self.record.files.get(name, []))
        if not sizes:
            return []
        mine = range(comm.rank, len(sizes), comm.size)
        fits = len(sizes) <= most and frames_fit(path, begin, sizes, mine)
        if all(comm.allgather(fits)):
            return sizes
        with self._guarded():
            if comm.rank == 0:
                self.record.put(name, [])
        return []

    def _record_sizes(self, file: FileIO, path: str, sizes: list[int], *, last: bool) -> None:
        """Record the tiles of a file if that is due or none follows. Collective."""
        if not self.job.resumable:
            return
        if not self.comm.bcast(last or time.monotonic() >= self.record_at):
            return
        with self._guarded():
            os.fsync(file.fileno())
        with self._guarded():
            if self.comm.rank == 0:
                self.record.put(os.path.basename(path), sizes)
        self.record_at = time.monotonic() + KEEP_SECONDS

    def _write_round(self, file: FileIO, at: int, mine: list[tuple[int, int]]) -> list[int]:
        """Compress this rank's tiles of a round and write them to their places. Collective.

        Args:
            at: Place of the round's first tile in the file.

        Returns:
            Bytes of the tiles of all ranks.
        """
        rank, tiles = self.comm.rank, list[memoryview]()
        with self._guarded():
            for (number, _), run in groupby(mine, self._row_of):
                tiles += self._make_tiles(number, [tile for _, tile in run])
        shares = self.comm.allgather([len(tile) for tile in tiles])
        whole = (sum(share) + FRAME_BYTES * len(share) for share in shares)
        ends, data = list(accumulate(whole, initial=at)), memoryview(framed(tiles))
        first, last = self._own_part(ends, rank)
        with self._guarded():
            _write_at(file, ends[rank] + first, data[first:last])
        with self._guarded():
            if not self.near[rank]:
                self.comm.Send(b"".join((data[:first], data[last:])), 0)
            elif rank == 0:
                self._receive(file, ends)
        return [size for share in shares for size in share]

    def _own_part(self, ends: Sequence[int], rank: int) -> tuple[int, int]:
        """Return the range, within a rank's bytes, that the rank writes itself."""
        begin, end = ends[rank : rank + 2]
        if self.near[rank]:
            return 0, end - begin
        first, last = -(-begin // PAGE_BYTES) * PAGE_BYTES, end // PAGE_BYTES * PAGE_BYTES
        return (first - begin, last - begin) if first < last else (0, 0)

    def _receive(self, file: FileIO, ends: Sequence[int]) -> None:
        """Write the pages that ranks of other nodes share with others, and do not write."""
        failed: OSError | None = None
        for rank, (begin, end) in enumerate(pairwise(ends)):
            if self.near[rank]:
                continue
            first, last = self._own_part(ends, rank)
            data = bytearray(end - begin - (last - first))
            self.comm.Recv(data, rank)
            try:
                _write_at(file, begin, data[:first])
                _write_at(file, begin + last, data[first:])
            except OSError as error:  # the others still send
                failed = error
        if failed:
            raise failed

    def _cost(self, number: int) -> float:
        """Work of a tile of a level; those of a level that has a file are only copied."""
        halved = number - max(level for level in self.sources if level <= number)
        return tile_cost(halved, classes=self.job.classes)

    def _row_of(self, tile: tuple[int, int]) -> tuple[int, int]:
        number, index = tile
        return number, index // Level(*self.sizes[number]).across

    def _make_tiles(self, number: int, tiles: list[int]) -> list[memoryview]:
        """Compressed tiles of a level that are next to each other."""
        if number in self.files:
            path, level = self.files[number]
            with open(path, "rb") as file:
                return [_read_at(file, *level.places[tile]) for tile in tiles]
        # Tile by tile, so that no bit depends on the tiles that are read together.
        return _compress(np.dstack([self._read_pixels(number, tile) for tile in tiles]), self.job)

    def _read_pixels(self, number: int, tile: int) -> NDArray[Any]:
        height, width = self.sizes[number]
        row, col = (BLOCK_PX * n for n in divmod(tile, Level(height, width).across))
        rows, cols = min(BLOCK_PX, height - row), min(BLOCK_PX, width - col)
        source = self.sources[max(level for level in self.sources if level <= number)]
        down, across = source.height / height, source.width / width
        values: NDArray[Any] = source.read(
            window=FileWindow(col * across, row * down, cols * across, rows * down),
            out_shape=(source.count, rows, cols),
            resampling=Resampling.mode if self.job.classes else Resampling.average,
        )
        return values


def _set_places(
    levels: dict[int, Level], tiles: list[tuple[int, int]], sizes: list[int], at: int
) -> int:
    """Note the places of tiles of these sizes, one after another; return where the last ends."""
    for (number, _), size in zip(tiles, sizes, strict=False):
        levels[number].places.append((at + LEADER_BYTES, size))
        at += size + FRAME_BYTES
    return at


def _is_near(comm: Comm) -> bool:
    """Whether this rank is on the node of rank 0. Collective."""
    from mpi4py import MPI

    node = ranks_of_node(comm)
    near: bool = node.allreduce(comm.rank == 0, MPI.LOR)
    node.Free()
    return near


def _write_at(file: FileIO, at: int, data: bytes | bytearray | memoryview) -> None:
    """Write all of it: a disk that is nearly full takes a part first."""
    rest = memoryview(data)
    while rest:
        written = os.pwrite(file.fileno(), rest, at)
        at, rest = at + written, rest[written:]


def _read_at(file: BinaryIO, at: int, size: int) -> memoryview:
    file.seek(at)
    return memoryview(file.read(size))


def _compress(values: NDArray[Any], job: CogJob) -> list[memoryview]:
    """Tiles of pixels (bands, H, W), H at most a tile's, from left to right."""
    bands, height, width = values.shape
    with MemoryFile(ext=".tif") as memory:
        with memory.open(
            driver="GTiff",
            count=bands,
            height=height,
            width=width,
            dtype=values.dtype,
            tiled=True,
            blockxsize=BLOCK_PX,
            blockysize=BLOCK_PX,
            interleave="pixel",
            compress="DEFLATE",
            predictor=job.template.predictor,
            # After the predictor hardly anything is left to find: of float probabilities the
            # lowest level takes 0.74 of the CPU time of the usual one, for 1.3 % more bytes.
            zlevel=6 if job.classes else 1,
            num_threads=len(os.sched_getaffinity(0)),  # a launcher may give a rank few cores
            bigtiff="NO",
        ) as dataset:
            dataset.write(values)
        return tiles_in(bytes(memory.getbuffer()))
