"""Maps that are interrupted while all ranks compress them: no tile that the disk holds again."""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from maps_of_tests import CLASSES, SCORES, Write, like, values_of
from mpi4py import MPI

from tilenet.data.rasters.raster import Raster
from tilenet.geometry.windows import Window
from tilenet.mapping.writing import cog, tiff_header
from tilenet.mapping.writing import writer as map_writer
from tilenet.mapping.writing.cog import CogJob
from tilenet.mapping.writing.map_kind import MapKind
from tilenet.mapping.writing.writer import MapWriter

BLOCK_PX, SIZE = 128, (1100, 300)  # 9 × 3 tiles, four overviews; the second has its own file
ASIDE, RECORD = ".map.tif.pieces.part", "compressed.json"
STRIPS = [Window(row, 0, min(90, SIZE[0] - row), SIZE[1]) for row in range(0, SIZE[0], 90)]


class Interruption(Exception):
    """What ends a job."""


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (cog, tiff_header, map_writer):
        monkeypatch.setattr(module, "BLOCK_PX", BLOCK_PX)
    monkeypatch.setattr(cog, "BATCH_TILES", 2)
    monkeypatch.setattr(cog, "KEEP_SECONDS", 0.0)


@pytest.fixture
def tiles(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Tiles of each time that this rank compressed some."""
    counts, right = list[int](), cog._compress

    def counted(values: np.ndarray, job: CogJob) -> list[bytes]:
        found = right(values, job)
        counts.append(len(found))
        return found

    monkeypatch.setattr(cog, "_compress", counted)
    return counts


@pytest.fixture
def source(write_raster: Write) -> Iterator[Raster]:
    with like(write_raster, SIZE) as raster:
        yield raster


def make(
    path: Path,
    source: Raster,
    kind: MapKind,
    comm: MPI.Intracomm,
    seed: int = 2,
    rounds: int | None = None,
) -> bytes:
    """A map of strips that are done or not, of which no more than so many rounds are compressed.

    The next round ends amid rank 0's first tile.
    """
    values = values_of(kind, SIZE, seed)
    right, seen = cog._CogWriter._write_round, list[int]()

    def write_round(self: Any, file: Any, at: int, mine: Any) -> list[int]:
        if len(seen) == rounds:
            if comm.rank == 0:
                os.pwrite(file.fileno(), b"half a tile", at)
            comm.Barrier()
            raise Interruption
        seen.append(len(mine))
        return right(self, file, at, mine)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cog._CogWriter, "_write_round", write_round)
        with MapWriter(str(path), source, kind, made_of={"seed": seed}, comm=comm) as writer:
            for number, strip in enumerate(STRIPS):
                if number % comm.size == comm.rank and writer.lacks(strip):
                    writer.write(strip, values[:, strip.row : strip.row + strip.height])
            writer.finish()
    comm.Barrier()
    return path.read_bytes()


def total(comm: MPI.Intracomm, tiles: list[int]) -> int:
    """Tiles that all ranks compressed since it was last asked for."""
    found = comm.allreduce(sum(tiles))
    tiles.clear()
    return found


@pytest.mark.ranks(2)
@pytest.mark.parametrize("kind", [CLASSES, SCORES], ids=str)
@pytest.mark.parametrize("rounds", [1, 7], ids=str)
@pytest.mark.parametrize("alone", [False, True])
def test_a_finish_goes_on_where_it_was_interrupted(
    comm: MPI.Intracomm,
    shared_path: Path,
    source: Raster,
    tiles: list[int],
    kind: MapKind,
    rounds: int,
    alone: bool,
) -> None:
    """On as many ranks, or on one: each tile is compressed once."""
    folder = shared_path / "out"
    if comm.rank == 0:
        folder.mkdir()
    comm.Barrier()
    whole = make(shared_path / "whole.tif", source, kind, comm)
    every = total(comm, tiles)
    with pytest.raises(Interruption):
        make(folder / "map.tif", source, kind, comm, rounds=rounds)
    done = total(comm, tiles)
    assert 0 < done < every
    found = whole
    if not alone:
        found = make(folder / "map.tif", source, kind, comm)
    elif comm.rank == 0:
        found = make(folder / "map.tif", source, kind, MPI.COMM_SELF)
    assert total(comm, tiles) == every - done
    assert found == whole
    assert sorted(os.listdir(folder)) == (
        ["map.qml", "map.tif", "map.tif.aux.xml"] if kind is CLASSES else ["map.tif"]
    )


def interrupted(path: Path, source: Raster, rounds: int = 9, **more: Any) -> Path:
    with pytest.raises(Interruption):
        make(path, source, SCORES, MPI.COMM_SELF, rounds=rounds, **more)
    return path.parent / ASIDE


def spoil_end(aside: Path) -> None:
    with open(aside / "map.tif", "r+b") as file:
        file.truncate((aside / "map.tif").stat().st_size - 40_000)


def spoil_frame(aside: Path) -> None:
    """Of the last tile of the overview: its size, which stands before it."""
    path = aside / "map.tif.2.part"
    data, record = bytearray(path.read_bytes()), (aside / RECORD).read_text()
    size = int(record.split("map.tif.2.part")[1].split("]")[0].split(",")[-1])
    data[-size - 8] ^= 1
    path.write_bytes(data)


def spoil_key(aside: Path) -> None:
    text = (aside / RECORD).read_text()
    (aside / RECORD).write_text(text.replace('"key": "', '"key": "0'))


def spoil_sizes(aside: Path) -> None:
    text = (aside / RECORD).read_text()
    (aside / RECORD).write_text(text.replace("[", "[1e400, -3, ").replace("1e400", "9" * 30))


def spoil_record(aside: Path) -> None:
    (aside / RECORD).write_text('{"key": 3, "files": [Infinity]}')


@pytest.mark.parametrize(
    "spoil",
    [
        spoil_end,
        spoil_frame,
        spoil_key,
        spoil_sizes,
        spoil_record,
        lambda aside: (aside / "map.tif").unlink(),
    ],
)
def test_what_is_not_whole_is_compressed_again(
    tmp_path: Path, source: Raster, tiles: list[int], spoil: Any
) -> None:
    """Of a file, or all where the record is spoilt."""
    path, comm = tmp_path / "map.tif", MPI.COMM_SELF
    whole = make(tmp_path / "whole.tif", source, SCORES, comm)
    every = total(comm, tiles)
    aside = interrupted(path, source)
    done = total(comm, tiles)
    spoil(aside)
    assert make(path, source, SCORES, comm) == whole
    again = total(comm, tiles)
    if spoil in (spoil_key, spoil_sizes, spoil_record):
        assert again == every
    else:
        assert every - done < again < every


def test_a_piece_that_is_written_again_has_all_compressed_again(
    tmp_path: Path, source: Raster, tiles: list[int]
) -> None:
    """Its job may have ended before it compressed anything."""
    path = tmp_path / "map.tif"
    whole = make(tmp_path / "whole.tif", source, SCORES, MPI.COMM_SELF)
    every = total(MPI.COMM_SELF, tiles)
    aside = interrupted(path, source)
    assert (aside / RECORD).exists()
    next(aside.glob("*.raw")).unlink()
    interrupted(path, source, rounds=0)
    assert not (aside / RECORD).exists()
    assert [*aside.glob("map*")] == []
    tiles.clear()
    assert make(path, source, SCORES, MPI.COMM_SELF) == whole
    assert sum(tiles) == every


def test_another_map_does_not_go_on_with_its_tiles(tmp_path: Path, source: Raster) -> None:
    """Nor what a copy of another map's record says, of the same kind and size."""
    path = tmp_path / "map.tif"
    whole = make(tmp_path / "whole.tif", source, SCORES, MPI.COMM_SELF, seed=3)
    shutil.copytree(interrupted(path, source), tmp_path / "other")
    assert make(path, source, SCORES, MPI.COMM_SELF, seed=3) == whole


@pytest.mark.parametrize("seconds", [0.0, 1e9])
def test_the_disk_holds_tiles_before_the_record_says_so(
    tmp_path: Path, source: Raster, monkeypatch: pytest.MonkeyPatch, seconds: float
) -> None:
    """After so many seconds, not after each round, and at the end of each file."""
    synced, records = list[str](), list[list[str]]()
    fsync, replace = os.fsync, os.replace

    def sync(handle: int) -> None:
        synced.append(os.path.basename(os.path.realpath(f"/proc/self/fd/{handle}")))
        fsync(handle)

    def name(part: str, path: str) -> None:
        if os.path.basename(path) == RECORD:
            records.append(synced[-2:])
        replace(part, path)

    monkeypatch.setattr(os, "fsync", sync)
    monkeypatch.setattr(os, "replace", name)
    monkeypatch.setattr(cog, "KEEP_SECONDS", seconds)
    make(tmp_path / "map.tif", source, SCORES, MPI.COMM_SELF)
    ends = [[name, f"{RECORD}.part"] for name in ("map.tif.2.part", "map.tif")]
    if seconds:
        assert records == ends
    else:
        assert len(records) > 20
        assert sorted({tuple(one) for one in records}) == sorted(map(tuple, ends))
