"""A finished map is one file, to the last byte, however many ranks compress it."""

import hashlib
import os
from collections import Counter
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
import rasterio
import rasterio.shutil
from maps_of_tests import (
    CLASSES,
    MANY_CLASSES,
    SCALED,
    SCORES,
    Write,
    like,
    values_of,
    write_map,
    written,
)
from mpi4py import MPI
from pairwise import pairs
from rio_cogeo import cog_validate

from tilenet.data.rasters.raster import Raster
from tilenet.errors import AgreedError
from tilenet.geometry.windows import Window
from tilenet.mapping.writing import cog, tiff_header
from tilenet.mapping.writing import writer as map_writer
from tilenet.mapping.writing.cog import CogJob
from tilenet.mapping.writing.map_kind import MapKind
from tilenet.mapping.writing.writer import MapWriter

BLOCK_PX = 128  # GDAL takes no smaller one
SIZES = [(7, 3), (129, 261), (700, 1101), (4112, 130)]  # 0, 2, 4 and 5 overviews


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (cog, tiff_header, map_writer):
        monkeypatch.setattr(module, "BLOCK_PX", BLOCK_PX)
    monkeypatch.setattr(cog, "BATCH_TILES", 5)


def smooth(kind: MapKind, size: tuple[int, int]) -> np.ndarray:
    """What has classes that many pixels share, and holes as large as pixels of overviews."""
    coarse = values_of(kind, (size[0] // 5 + 1, size[1] // 5 + 1))
    return coarse.repeat(5, 1).repeat(5, 2)[:, : size[0], : size[1]]


def gdals_own(raw: str, path: str, kind: MapKind) -> None:
    options = {
        "driver": "COG",
        "compress": "DEFLATE",
        "predictor": "NO" if kind.of_classes else "YES",
        "overview_resampling": "MODE" if kind.of_classes else "AVERAGE",
        "blocksize": BLOCK_PX,
    }
    rasterio.shutil.copy(raw, path, **options)


def structure(path: str, level: int | None) -> dict[str, object]:
    """All that GDAL says of a file or of an overview of it, but for its pixels."""
    with rasterio.open(path, **({} if level is None else {"overview_level": level})) as file:
        return {
            "profile": {**file.profile, "nodata": str(file.nodata)},
            "overviews": file.overviews(1),
            "tags": [file.tags(band) for band in (0, *file.indexes)],
            "structure": file.tags(ns="IMAGE_STRUCTURE"),
            "bands": (file.descriptions, file.scales, file.units, file.colorinterp),
            "blocks": file.block_shapes,
        }


@pytest.mark.parametrize(
    ("size", "kind", "big"),
    pairs(SIZES, [CLASSES, MANY_CLASSES, SCALED, SCORES], [False, True]),
    ids=str,
)
def test_a_map_is_what_gdals_own_driver_makes_of_it(
    tmp_path: Path,
    write_raster: Write,
    monkeypatch: pytest.MonkeyPatch,
    size: tuple[int, int],
    kind: MapKind,
    big: bool,
) -> None:
    monkeypatch.setattr(cog, "CLASSIC_BYTES", 0 if big else 1 << 30)
    path, own, raw = (str(tmp_path / f"{name}.tif") for name in ("map", "own", "raw"))
    values = smooth(kind, size)
    with like(write_raster, size) as source, MapWriter(path, source, kind) as writer:
        writer.write(source.whole, values)
        with rasterio.open(raw, "w", **writer._profile) as file:
            writer._describe(file)
            file.write(values)
        gdals_own(raw, own, kind)
        writer.finish()
    assert (Path(path).read_bytes()[2] == 43) == big
    valid, errors, warnings = cog_validate(path, strict=True, quiet=True)
    assert (valid, errors, warnings) == (True, [], [])
    with rasterio.open(path) as file:
        assert np.array_equal(file.read(), values, equal_nan=kind is SCORES)
        levels = range(len(file.overviews(1)))
    assert structure(path, None) == structure(own, None)
    for level in levels:
        assert structure(path, level) == structure(own, level)
    if levels:
        with (
            rasterio.open(path, overview_level=0) as file,
            rasterio.open(own, overview_level=0) as other,
        ):
            # A mean of pixels that are cut has other weights in the last bit, tile by tile.
            most = 3e-7 if kind is SCORES else 0
            np.testing.assert_allclose(file.read(), other.read(), rtol=0, atol=most)
    assert_frames(Path(path), [*levels])


def assert_frames(path: Path, levels: list[int]) -> None:
    """GDAL's readers fetch a tile with its size before it, and know it whole by its end."""
    data = path.read_bytes()
    with rasterio.open(path) as file:
        for level in (None, *levels):
            names = [f"{name}_0_0" for name in ("BLOCK_OFFSET", "BLOCK_SIZE")]
            at, size = (int(file.get_tag_item(name, "TIFF", 1, ovr=level)) for name in names)
            assert int.from_bytes(data[at - 4 : at], "little") == size
            assert data[at + size : at + size + 4] == data[at + size - 4 : at + size]


def overviews_of(path: str) -> list[np.ndarray]:
    with rasterio.open(path) as file:
        count = len(file.overviews(1))
    found = []
    for level in range(count):
        with rasterio.open(path, overview_level=level) as file:
            found.append(file.read())
    return found


def in_squares(values: np.ndarray, side: int) -> np.ndarray:
    """(bands, H, W) to (bands, H / side, W / side, side * side)."""
    bands, height, width = values.shape
    shape = bands, height // side, side, width // side, side
    return values.reshape(shape).swapaxes(2, 3).reshape(*shape[:2], shape[3], side * side)


@pytest.mark.parametrize("kind", [CLASSES, MANY_CLASSES, SCALED, SCORES], ids=str)
def test_an_overview_shows_the_pixels_under_it(
    tmp_path: Path, write_raster: Write, kind: MapKind
) -> None:
    """Of two and four pixels' side: of the map itself, or of the second overview before."""
    path, values = str(tmp_path / "map.tif"), smooth(kind, (512, 4096))
    if kind is SCALED:
        values[values == 1] = 250
    with like(write_raster, (512, 4096)) as source:
        write_map(source, path, kind, values)
    found = overviews_of(path)
    assert [level.shape[1:] for level in found] == [(512 >> n, 4096 >> n) for n in range(1, 6)]
    for level, source in zip(found, [values, values, found[1], found[1], found[3]], strict=True):
        squares = in_squares(source, source.shape[1] // level.shape[1])
        there = np.isfinite(squares) if kind is SCORES else squares != kind.nodata
        any_there = there.any(axis=3)
        assert np.array_equal(
            np.isfinite(level) if kind is SCORES else level != kind.nodata, any_there
        )
        if not kind.of_classes:
            total = np.where(there, squares, 0).sum(axis=3, dtype=np.float64)
            means = total / np.maximum(1, there.sum(axis=3))
            most = 1e-6 if kind is SCORES else 0.5  # of whole numbers half a level is rounded
            np.testing.assert_allclose(level[any_there], means[any_there], rtol=0, atol=most)
            continue
        counts = [(squares == one).sum(axis=3) for one in range(3)]
        theirs = np.choose(np.minimum(level, 2), counts)
        assert (theirs == np.max(counts, axis=0))[any_there].all()


def write_strips(writer: MapWriter, values: np.ndarray) -> None:
    """Each rank its own, which end amid the blocks of the finished map."""
    height, width = writer.window.height, writer.window.width
    for number, row in enumerate(range(0, height, 90)):
        if number % writer.comm.size == writer.comm.rank:
            strip = Window(row, 0, min(90, height - row), width)
            writer.write(strip, values[:, row : row + 90])


def written_by(comm: MPI.Intracomm, path: Path, source: Raster, kind: MapKind) -> str:
    """Digest of a map that all these ranks made."""
    with MapWriter(str(path), source, kind, comm=comm) as writer:
        write_strips(writer, smooth(kind, source.size))
        writer.finish()
    if comm.rank:
        return ""
    names = sorted(name for name in os.listdir(path.parent) if not name.startswith("like"))
    assert names == written(kind)
    found = hashlib.sha256(path.read_bytes()).hexdigest()
    for name in names:
        os.remove(path.parent / name)
    return found


@pytest.mark.ranks(2, 3, 4, 6)
@pytest.mark.parametrize("kind", [CLASSES, MANY_CLASSES, SCALED, SCORES], ids=str)
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_a_map_is_the_same_to_the_last_byte_on_any_number_of_ranks(
    comm: MPI.Intracomm,
    shared_path: Path,
    write_raster: Write,
    monkeypatch: pytest.MonkeyPatch,
    size: tuple[int, int],
    kind: MapKind,
) -> None:
    tiles = Counter[int]()
    right = cog._compress

    def counted(values: np.ndarray, job: CogJob) -> list[bytes]:
        found = right(values, job)
        tiles[comm.rank] += len(found)
        return found

    monkeypatch.setattr(cog, "_compress", counted)
    with like(write_raster, size) as source:
        path = shared_path / "map.tif"
        found = written_by(comm, path, source, kind)
        shares = comm.gather(tiles[comm.rank])
        if comm.rank == 0:
            assert max(shares) <= sum(shares) / comm.size + 8
            assert found == written_by(MPI.COMM_SELF, path, source, kind)


@pytest.mark.ranks(3)
def test_a_rank_that_does_not_see_the_folder_is_named_on_all(
    comm: MPI.Intracomm, shared_path: Path, write_raster: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a node's own disk."""
    if comm.rank == 1:
        monkeypatch.setattr(os.path, "exists", lambda path: False)
    said = r"map\.tif: rank 1 does not see what rank 0 writes there\); choose a directory that all"
    with like(write_raster, SIZES[0]) as source, pytest.raises(AgreedError, match=said):
        MapWriter(
            str(shared_path / "map.tif"), source, SCORES, made_of={"weights": "ab12"}, comm=comm
        )
    comm.Barrier()
    assert os.listdir(shared_path) == []


@pytest.mark.ranks(3)
@pytest.mark.parametrize("near", [1, 2])
@pytest.mark.parametrize("page", [64, 1 << 12, 1 << 20])
def test_no_page_of_a_file_is_written_from_two_nodes(
    comm: MPI.Intracomm,
    shared_path: Path,
    write_raster: Write,
    monkeypatch: pytest.MonkeyPatch,
    near: int,
    page: int,
) -> None:
    """Ranks of other nodes write whole pages and hand over what is less, at most two pages."""
    pages, real = set[tuple[str, int]](), os.pwrite

    def noted(file: int, data: memoryview, at: int) -> int:
        path = os.readlink(f"/proc/self/fd/{file}")
        pages.update((path, number) for number in range(at // page, -(-(at + len(data)) // page)))
        assert comm.rank < near or not (at % page or len(data) % page)
        return real(file, data, at)

    class Checked(MPI.Intracomm):
        def Send(self, buf: bytes, *where: int) -> None:
            assert len(buf) < 2 * page
            super().Send(buf, *where)

    monkeypatch.setattr(cog, "_is_near", lambda ranks: comm.rank < near)
    monkeypatch.setattr(cog, "PAGE_BYTES", page)
    monkeypatch.setattr(os, "pwrite", noted)
    with like(write_raster, SIZES[3]) as source:
        path = shared_path / "map.tif"
        found = written_by(Checked(comm), path, source, SCORES)
        nodes = comm.allgather((max(0, comm.rank - near + 1), pages))
        assert bool(pages) == (comm.rank < near or page < 1 << 20)
        for (node, mine), (other, theirs) in combinations(nodes, 2):
            assert node == other or not mine & theirs
        if comm.rank == 0:
            assert found == written_by(MPI.COMM_SELF, path, source, SCORES)


@pytest.mark.ranks(3)
@pytest.mark.parametrize("handed", [False, True])
def test_a_disk_that_is_full_for_another_node_is_full_for_all(
    comm: MPI.Intracomm,
    shared_path: Path,
    write_raster: Write,
    monkeypatch: pytest.MonkeyPatch,
    handed: bool,
) -> None:
    """For a rank there, or for rank 0, of what it is handed."""
    real, calls = os.pwrite, list[int]()

    def full(file: int, data: bytes, at: int) -> int:
        calls.append(at)
        if len(calls) == 2 or not handed:
            raise OSError(28, "No space left on device")
        return real(file, data, at)

    monkeypatch.setattr(cog, "_is_near", lambda ranks: comm.rank == 0)
    if comm.rank == (0 if handed else 1):
        monkeypatch.setattr(os, "pwrite", full)
    with (
        like(write_raster, SIZES[3]) as source,
        pytest.raises(AgreedError, match="No space left"),
    ):
        written_by(comm, shared_path / "map.tif", source, SCORES)


@pytest.mark.ranks(3)
@pytest.mark.parametrize("call", ["pwrite", "fsync"])
@pytest.mark.parametrize("keeps", [False, True])
def test_a_disk_that_is_full_for_one_rank_is_full_for_all(
    comm: MPI.Intracomm,
    shared_path: Path,
    write_raster: Write,
    monkeypatch: pytest.MonkeyPatch,
    no_room: object,
    call: str,
    keeps: bool,
) -> None:
    path, made_of = str(shared_path / "map.tif"), {"weights": "ab12"} if keeps else None
    with (
        like(write_raster, SIZES[3]) as source,
        MapWriter(path, source, SCORES, made_of=made_of, comm=comm) as writer,
    ):
        write_strips(writer, smooth(SCORES, source.size))
        if comm.rank == 1:
            monkeypatch.setattr(os, call, no_room)
        with pytest.raises(AgreedError, match=r"writable to its end .*No space left") as said:
            writer.finish()
        assert ("--resume" in str(said.value)) == keeps
    if comm.rank == 0:
        assert os.listdir(shared_path) == [".map.tif.pieces.part"] * keeps
        assert not list(shared_path.glob(".map.tif.pieces.part/map*"))
