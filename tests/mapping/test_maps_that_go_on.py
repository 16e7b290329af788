"""Maps that are interrupted: what is done is kept, true, and gone on with, or started over."""

import contextlib
import errno
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import rasterio
from maps_of_tests import CLASSES, SCORES, Write, like, values_of, write_in_tiles, written
from mpi4py import MPI

from tilenet.data.rasters.raster import Raster
from tilenet.errors import AgreedError, TilenetError
from tilenet.geometry.windows import Window
from tilenet.mapping.fingerprint import describe_files
from tilenet.mapping.writing.map_kind import MapKind
from tilenet.mapping.writing.resume import MapResume
from tilenet.mapping.writing.target import lock_target
from tilenet.mapping.writing.writer import MapWriter
from tilenet.parallel.health.signals import StopAgreed, StopRequests

ASIDE = ".map.tif.pieces.part"
HALVES = Window(0, 0, 333, 1101), Window(333, 0, 367, 1101)


def going_on(path: Path, source: Raster, kind: MapKind = CLASSES, **made_of: object) -> MapWriter:
    return MapWriter(str(path), source, kind, made_of={"weights": "ab12", **made_of})


def write(writer: MapWriter, half: Window, values: np.ndarray) -> None:
    writer.write(half, values[:, half.row : half.row + half.height])


@pytest.mark.parametrize("kind", [CLASSES, SCORES])
@pytest.mark.parametrize("error", [ValueError("a bug"), KeyboardInterrupt()])
def test_a_map_goes_on_where_it_was_interrupted(
    tmp_path: Path, write_raster: Write, kind: MapKind, error: BaseException
) -> None:
    size, path = (700, 1101), tmp_path / "out" / "map.tif"
    path.parent.mkdir()
    values, sums = values_of(kind, size), {"mean": [0.1, 1 / 3, 5e-324]}
    with like(write_raster, size) as source:
        for number, half in enumerate(HALVES):
            stops = pytest.raises(type(error)) if number == 0 else contextlib.nullcontext()
            with stops, going_on(path, source, kind) as writer:
                assert [writer.lacks(one) for one in HALVES] == [number == 0, True]
                write(writer, half, values)
                if number == 0:
                    writer.write_sums("7", sums)
                    raise error
                assert (writer.read_sums("7"), writer.read_sums("8")) == (sums, {})
                writer.finish()
            assert sorted(os.listdir(path.parent)) == (written(kind) if number else [ASIDE])
    with rasterio.open(path) as file:
        assert np.array_equal(file.read(), values, equal_nan=kind is SCORES)
        assert file.descriptions == (kind.classes if kind is SCORES else (None,))


def test_the_disk_holds_a_piece_before_it_has_its_name(
    tmp_path: Path, write_raster: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    replace, fsync, synced, named = os.replace, os.fsync, [], []

    def sync(handle: int) -> None:
        synced.append(os.path.realpath(f"/proc/self/fd/{handle}"))
        fsync(handle)

    def name(part: str, path: str) -> None:
        assert synced[-1] == str(part)
        named.append((os.path.basename(path), os.path.getsize(part)))
        replace(part, path)

    monkeypatch.setattr(os, "replace", name)
    monkeypatch.setattr(os, "fsync", sync)
    with (
        like(write_raster, (700, 1101)) as source,
        going_on(tmp_path / "map.tif", source) as writer,
    ):
        write(writer, HALVES[1], values_of(CLASSES, source.size))
    assert [one for one, _ in named] == ["made_of.json", "333_0_367_1101.raw"]
    assert named[1][1] == 367 * 1101
    assert synced[-1] == str(tmp_path / ASIDE)


@pytest.mark.parametrize("text", [b"no JSON", b"\xff\xfe[1]", b"[" * 10**5, b"3", b""])
def test_a_map_that_does_not_say_of_what_it_is_made_is_begun_anew(
    tmp_path: Path, write_raster: Write, text: bytes
) -> None:
    path = tmp_path / "map.tif"
    with like(write_raster, (700, 1101)) as source:
        for spoilt in (True, False):
            with going_on(path, source) as writer:
                said = "" if spoilt else "not said any more: its made_of.json cannot be read"
                assert writer.why_restarted == said
                assert all(map(writer.lacks, HALVES))
                write(writer, HALVES[0], values_of(CLASSES, source.size))
            (tmp_path / ASIDE / "made_of.json").write_bytes(text)


def test_only_whole_pieces_of_the_map_are_done(tmp_path: Path, write_raster: Write) -> None:
    path, aside = tmp_path / "map.tif", tmp_path / ASIDE
    with like(write_raster, (700, 1101)) as source:
        with going_on(path, source) as writer:
            for half in HALVES:
                write(writer, half, values_of(CLASSES, source.size))
        os.truncate(aside / "0_0_333_1101.raw", 333 * 1101 - 1)
        (aside / "333_0_367_1101.raw").rename(aside / "333_0_367_1101.raw.part")
        with going_on(path, source) as writer:
            assert all(map(writer.lacks, HALVES))


def test_a_map_made_of_something_else_is_begun_anew(tmp_path: Path, write_raster: Write) -> None:
    path = tmp_path / "map.tif"
    with like(write_raster, (700, 1101)) as source:
        half, values = HALVES[0], values_of(CLASSES, source.size)
        with going_on(path, source, halo=(1, 2)) as writer:
            write(writer, half, values)
        with going_on(path, source, halo=(1, 2)) as writer:
            assert (writer.lacks(half), writer.why_restarted) == (False, "")
        for made_of, why in ({"halo": (1, 3)}, "halo"), ({}, "halo"), ({"tile": 3}, "tile"):
            with going_on(path, source, **made_of) as writer:
                assert writer.why_restarted == f"of something else: {why}"
                assert writer.lacks(half)
                write(writer, half, values)
            # ({} was begun by halo (1, 3), tile by {})
        # One that cannot be interrupted leaves nothing to go on with.
        with MapWriter(str(path), source, CLASSES) as writer:
            # Not even if it is killed: its pixels are not those that the file speaks of.
            assert os.listdir(tmp_path / ASIDE) == []
            assert writer.lacks(half)
        with going_on(path, source, tile=3) as writer:
            assert (writer.lacks(half), writer.why_restarted) == (True, "")


def test_nodata_that_is_nan_is_the_same_nodata(tmp_path: Path, write_raster: Write) -> None:
    path = tmp_path / "map.tif"
    with like(write_raster, (70, 90)) as source:
        for lacks in (True, False):
            with going_on(path, source, nodata=float("nan")) as writer:
                assert (writer.lacks(source.whole), writer.why_restarted) == (lacks, "")
                writer.write(source.whole, values_of(CLASSES, source.size))


def test_a_map_that_its_job_started_again_writes_is_left_to_that(
    tmp_path: Path, write_raster: Write
) -> None:
    """On other nodes, while this process has not noticed: at the end both write one file."""
    path, theirs = tmp_path / "map.tif", tmp_path / ASIDE / "map.tif"
    with like(write_raster, (700, 1101)) as source, lock_target(str(path)) as lock:
        with MapWriter(str(path), source, CLASSES, made_of={"weights": "1"}, lock=lock) as writer:
            for half in HALVES:
                write(writer, half, values_of(CLASSES, source.size))
            theirs.write_bytes(b"half of it")
            lock.path.write_text('{"process": 7}')
            with pytest.raises(TilenetError, match="one job at a time writes the map"):
                writer.finish()
        assert theirs.read_bytes() == b"half of it"
        assert len(list(theirs.parent.glob("*.raw"))) == 2


# --- full disks


def test_a_full_disk_keeps_what_is_done(
    write_raster: Write, small_disk: Callable[[int], Path]
) -> None:
    """There is room for the pixels, but not for the finished map next to them."""
    kind = SCORES
    values = values_of(kind, (700, 1101))
    with like(write_raster, (700, 1101)) as source:
        path = small_disk(8000) / "map.tif"
        with going_on(path, source, kind) as writer:
            write_in_tiles(writer, values, 240)
            with pytest.raises(TilenetError, match="room there and go on with --resume, or"):
                writer.finish()
        assert os.listdir(path.parent) == [ASIDE]
        subprocess.run(["mount", "-o", "remount,size=40000k", str(path.parent)], check=True)
        with going_on(path, source, kind) as writer:
            assert not writer.lacks(Window(240, 0, 240, 240))
            writer.finish()
        with rasterio.open(path) as file:
            assert np.array_equal(file.read(), values, equal_nan=True)


def test_a_disk_that_is_too_small_is_known_before_the_first_tile(
    write_raster: Write, small_disk: Callable[[int], Path]
) -> None:
    with like(write_raster, (700, 1101)) as source:
        path = small_disk(5000) / "map.tif"
        with pytest.raises(TilenetError, match="make room there or choose"):
            going_on(path, source, SCORES)
        assert os.listdir(path.parent) == []


def test_sums_outlive_a_disk_that_is_too_small_for_the_map(
    write_raster: Write, small_disk: Callable[[int], Path]
) -> None:
    """Passes may take hours before the first piece."""
    with like(write_raster, (700, 1101)) as source:
        path = small_disk(8000) / "map.tif"
        with going_on(path, source, SCORES) as writer:
            writer.write_sums("7", {"tiles": 3, "values": [1.5]})
        other = path.parent / "other"
        other.write_bytes(bytes(4 << 20))
        with pytest.raises(TilenetError, match="room there and go on with --resume, or"):
            going_on(path, source, SCORES)
        other.unlink()
        with going_on(path, source, SCORES) as writer:
            assert writer.read_sums("7") == {"tiles": 3, "values": [1.5]}


def test_what_is_done_outlives_a_disk_that_does_not_answer(
    tmp_path: Path, write_raster: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a network file system that is mounted again."""

    def stale(path: Path) -> bytes:
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))

    path, half = tmp_path / "map.tif", HALVES[0]
    with like(write_raster, (700, 1101)) as source:
        with going_on(path, source) as writer:
            write(writer, half, values_of(CLASSES, source.size))
        with monkeypatch.context() as patch:
            patch.setattr(Path, "read_bytes", stale)
            with pytest.raises(TilenetError, match="Stale file handle"):
                going_on(path, source)
        with going_on(path, source) as writer:
            assert not writer.lacks(half)


def test_a_piece_that_the_disk_does_not_take_is_not_there(
    write_raster: Write, small_disk: Callable[[int], Path]
) -> None:
    """Other files have filled the disk meanwhile."""
    with like(write_raster, (700, 1101)) as source:
        path, values = small_disk(1000) / "map.tif", values_of(CLASSES, (700, 1101))
        with going_on(path, source) as writer:
            write(writer, HALVES[0], values)
            (path.parent / "other").write_bytes(bytes(400_000))
            with pytest.raises(TilenetError, match=r"to its end .*No space left.* with --resume"):
                write(writer, HALVES[1], values)
        assert sorted(os.listdir(path.parent / ASIDE)) == ["0_0_333_1101.raw", "made_of.json"]
        (path.parent / "other").unlink()
        with going_on(path, source) as writer:
            assert [writer.lacks(half) for half in HALVES] == [False, True]


@pytest.mark.ranks(1, 3)
@pytest.mark.parametrize("rounds", [3, 1])
def test_what_one_rank_cannot_write_ends_the_rounds_of_all(
    comm: MPI.Intracomm, shared_path: Path, write_raster: Write, rounds: int
) -> None:
    done = 0
    with like(write_raster, (70, 90)) as source:
        writer = MapWriter(str(shared_path / "map.tif"), source, CLASSES, comm=comm)
        resume = MapResume(comm, writer, StopRequests())
        stops = pytest.raises(StopAgreed) if rounds > 1 else contextlib.nullcontext()
        with writer:
            with stops, resume:
                for number in range(rounds):
                    with resume.attempt():
                        if comm.rank == comm.size - 1:
                            raise TilenetError(f"no room in round {number}")
                    resume.tiles_done(last=number + 1 == rounds)
                    done += 1
            assert done == 1
            with pytest.raises(AgreedError, match="no room in round 0"):
                resume.agree()


def test_files_of_one_name_size_and_time_are_told_apart(tmp_path: Path) -> None:
    paths = [tmp_path / folder / "image.tif" for folder in "ab"]
    for path, end in zip(paths, (b"1", b"2"), strict=True):
        path.parent.mkdir()
        path.write_bytes(bytes(200_000) + end)
        os.utime(path, ns=(10**18, 10**18))
    first, second = (describe_files([str(path)]) for path in paths)
    assert first != second
    assert first == describe_files([str(paths[0])])
    assert describe_files(["https://nowhere/image.tif"]) == [["image.tif"]]
