"""Blocks staged in a folder: the values of the source, whatever is there of them."""

import fcntl
import os
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyogrio
import pytest
import rasterio
import shapely
from polygons import random_polygons

from tilenet.data.labels.open import open_labels
from tilenet.data.labels.source import HeldOutLabels, LabelSource
from tilenet.data.labels.vector_keys import VectorKeys
from tilenet.data.rasters import cache as staged
from tilenet.data.rasters.cache import MARKER, StagingFolder
from tilenet.data.rasters.raster import Raster
from tilenet.errors import TilenetError
from tilenet.geometry.windows import Window

Write = Callable[..., str]
RNG = np.random.default_rng(3)
SIZE = (57, 83)
IMAGE = RNG.integers(1, 4000, (3, *SIZE)).astype(np.uint16)
IMAGE[:, 20:30, 5:40] = 0
WINDOWS = [
    Window(30, 40, 9, 31),
    Window(-7, -5, 40, 30),
    Window(0, 0, *SIZE),
    Window(40, 70, 30, 20),
]


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staged, "BLOCK_PX", 16)


@pytest.fixture
def said() -> list[str]:
    return []


@pytest.fixture
def folder(tmp_path: Path, said: list[str]) -> StagingFolder:
    return StagingFolder.make(tmp_path / "cache", said.append)


def check_same(source: Raster | LabelSource, plain: Raster | LabelSource) -> None:
    """The same arrays in the same dtype, from the source and from what was staged."""
    for window in WINDOWS * 2:
        for region in (None, Window(3, 9, 50, 61)):
            found, wanted = source.read(window, region), plain.read(window, region)
            pairs = [(found, wanted)]
            if not isinstance(found, np.ndarray):
                pairs = [(found.values, wanted.values), (found.valid, wanted.valid)]  # type: ignore[union-attr]
            for ours, theirs in pairs:
                assert ours.dtype == theirs.dtype  # type: ignore[union-attr]
                assert np.array_equal(ours, theirs)  # type: ignore[arg-type]


def blocks(folder: StagingFolder) -> list[Path]:
    return sorted(path for path in folder.path.iterdir() if path.name != MARKER)


class Untouchable:
    """Stands for files that may not be read any more."""

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(f"{name} of the source was used")


@pytest.mark.parametrize("dtype", ["uint8", "int16", "float32", "float64"])
@pytest.mark.parametrize(
    ("keys", "profile"),
    [
        ({}, {"nodata": 0}),
        ({"bands": [3, 1]}, {}),
        ({"resolution": 6}, {"nodata": 0}),
        ({"nodata": "collar"}, {}),
    ],
    ids=["tag", "bands", "coarser", "collar"],
)
def test_pixels_are_those_of_the_file(
    write_raster: Write, folder: StagingFolder, dtype: str, keys: Any, profile: Any
) -> None:
    values = (IMAGE % 250).astype(dtype)
    if dtype.startswith("float"):
        values[1, 11, 13] = np.inf
    if "resolution" in keys:  # three by three pixels make one; the last are two by one
        values = np.pad(values, ((0, 0), (0, 113), (0, 164)), mode="reflect")[:, :170, :247]
    path = write_raster("a.tif", values, **profile)
    with Raster(path, **keys) as plain, Raster(path, **keys) as source:
        source.stage_in(folder)
        check_same(source, plain)
        assert len(blocks(folder)) == np.prod([-(-side // 16) for side in source.size])
        files, source._files = source._files, Untouchable()  # type: ignore[assignment]
        check_same(source, plain)
        source._files = files


@pytest.mark.parametrize("kind", ["pixels", "resampled", "polygons"])
def test_labels_are_those_of_the_file(
    write_raster: Write, tmp_path: Path, folder: StagingFolder, kind: str
) -> None:
    image = Raster(write_raster("a.tif", IMAGE))
    keys = VectorKeys()
    if kind == "polygons":
        path = str(tmp_path / "labels.gpkg")
        shapes = random_polygons(image.transform, SIZE, 9, 5)
        pyogrio.raw.write(
            path, shapely.to_wkb(np.array(shapes)), [], [], geometry_type="Polygon",
            crs="EPSG:32630", driver="GPKG",
        )  # fmt: skip
    else:
        classes = RNG.integers(0, 5, SIZE).astype(np.uint8)
        finer = {"transform": image.transform * rasterio.Affine.scale(1.3)}
        path = write_raster("b.tif", classes, **(finer if kind == "resampled" else {}))
    with open_labels(path, image, 255, keys) as plain, open_labels(path, image, 255, keys) as some:
        some.stage_in(folder)
        check_same(some, plain)
        assert len(np.unique(plain.read(Window(0, 0, *SIZE)))) > 1
        assert len(blocks(folder)) == 4 * 6
        some._read_inside = Untouchable()  # type: ignore[method-assign,assignment]
        check_same(some, plain)
    image.close()


def test_labels_that_a_file_cannot_hold_are_read_again(
    write_raster: Write, folder: StagingFolder
) -> None:
    classes = RNG.integers(0, 5, SIZE).astype(np.int32)
    classes[20, 20] = 40_000
    path, image = write_raster("b.tif", classes), Raster(write_raster("a.tif", IMAGE))
    with open_labels(path, image, 255) as plain, open_labels(path, image, 255) as source:
        source.stage_in(folder)
        check_same(source, plain)
    assert len(blocks(folder)) == 4 * 6 - 1
    image.close()


def test_labels_held_out_are_so_in_front_of_what_is_staged(
    write_raster: Write, folder: StagingFolder
) -> None:
    """Training and validation hide other pixels of the same blocks."""
    path = write_raster("b.tif", RNG.integers(0, 5, SIZE).astype(np.uint8))
    image, hidden = Raster(write_raster("a.tif", IMAGE)), RNG.random(SIZE) > 0.5
    plain, source = (open_labels(path, image, 255) for _ in range(2))
    source.stage_in(folder)
    for mask in (hidden, ~hidden):

        def inside(window: Window, mask: Any = mask) -> Any:
            rows = slice(window.row, window.row + window.height)
            return mask[rows, window.col : window.col + window.width]

        check_same(HeldOutLabels(source, inside), HeldOutLabels(plain, inside))
        own = HeldOutLabels(source, inside)
        own.stage_in(folder)
        check_same(own, HeldOutLabels(plain, inside))
    for file in (image, plain, source):
        file.close()


def test_what_is_staged_is_of_the_same_file_bands_and_keys(
    write_raster: Write, folder: StagingFolder
) -> None:
    """Each of these differs from the first in one thing that values depend on."""
    path = write_raster("a.tif", IMAGE, nodata=0)
    keys: list[dict[str, Any]] = [{}, {"bands": [1, 3, 2]}, {"nodata": 7.0}, {"nodata": "none"}]
    for number, one in enumerate(keys):
        with Raster(path, **one) as plain, Raster(path, **one) as source:
            source.stage_in(folder)
            check_same(source, plain)
        assert len(blocks(folder)) == 24 * (number + 1)
    state = os.stat(path)
    write_raster("a.tif", IMAGE + 1, nodata=0)
    os.utime(path, ns=(state.st_atime_ns, state.st_mtime_ns + 1))
    assert os.stat(path).st_size == state.st_size
    with Raster(path) as plain, Raster(path) as source:
        source.stage_in(folder)
        check_same(source, plain)
    labels = write_raster("b.tif", RNG.integers(0, 5, SIZE).astype(np.uint8), nodata=3)
    with Raster(path) as image:
        for ignore in (255, 254):
            with (
                open_labels(labels, image, ignore) as flat,
                open_labels(labels, image, ignore) as s,
            ):
                s.stage_in(folder)
                check_same(s, flat)


def test_a_mask_beside_the_file_counts_as_the_file(write_raster: Write) -> None:
    path = write_raster("a.tif", IMAGE)
    with Raster(path) as before:
        first = before.identity
    with rasterio.Env(GDAL_TIFF_INTERNAL_MASK=False), rasterio.open(path, "r+") as file:
        file.write_mask(np.arange(SIZE[1])[None].repeat(SIZE[0], 0) > 30)
    assert Path(f"{path}.msk").exists()
    with Raster(path) as after:
        assert str(path) + ".msk" in str(after.identity)
        assert after.identity[1] != first[1]


def test_a_file_that_is_not_whole_is_read_from_its_source_and_written_anew(
    write_raster: Write, folder: StagingFolder
) -> None:
    path = write_raster("a.tif", IMAGE, nodata=0)
    with Raster(path, [2]) as plain, Raster(path, [2]) as source:
        source.stage_in(folder)
        check_same(source, plain)
        whole = {file: file.read_bytes() for file in blocks(folder)}
        for number, file in enumerate(whole):
            file.write_bytes(whole[file][: 50 * number] if number % 2 else whole[file] + b"x")
        check_same(source, plain)
        assert {file: file.read_bytes() for file in blocks(folder)} == whole
        # And what is whole is what is read.
        blocks(folder)[0].write_bytes(bytes(len(whole[blocks(folder)[0]])))
        assert not np.array_equal(source.read(source.whole).values, plain.read(plain.whole).values)


def test_two_ranks_share_what_they_stage(
    write_raster: Write, folder: StagingFolder, said: list[str]
) -> None:
    path = write_raster("a.tif", IMAGE, nodata=0)
    other = StagingFolder(folder.path, said.append)
    with Raster(path) as plain, Raster(path) as one, Raster(path) as two:
        one.stage_in(folder)
        two.stage_in(other)
        one.read(WINDOWS[0])
        made = {file: file.stat().st_ino for file in blocks(folder)}
        assert made
        two.read(WINDOWS[0])
        assert {file: file.stat().st_ino for file in blocks(folder)} == made
        # Both have missed the same blocks before either wrote them.
        found = two._read_source(Window(0, 0, 16, 16))
        one.read(WINDOWS[2])
        assert two.staged is not None
        two.staged._store(0, 0, Window(0, 0, 16, 16), found)
        check_same(one, plain)
        check_same(two, plain)
    other.close()
    assert said == []


@pytest.mark.parametrize("fault", ["full", "gone"])
def test_a_folder_that_cannot_be_written_any_more_is_said_once(
    write_raster: Write, folder: StagingFolder, said: list[str], fault: str
) -> None:
    path = write_raster("a.tif", IMAGE, nodata=0)
    before, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.getsignal(signal.SIGXFSZ)
    with Raster(path) as plain, Raster(path) as source:
        source.stage_in(folder)
        source.read(WINDOWS[0])
        kept = blocks(folder)
        if fault == "gone":
            folder.remove()
        else:
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))  # a block has more
        try:
            check_same(source, plain)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
            signal.signal(signal.SIGXFSZ, handler)
    (sentence,) = said
    assert "cache_dir cannot be written any more" in sentence
    assert ("File too large" if fault == "full" else "No such file") in sentence
    if fault == "full":
        assert blocks(folder) == kept, "nothing more, and no part of a file"


KILLED = """
import os, signal, sys
from pathlib import Path
from tilenet.data.rasters.cache import MARKER, StagingFolder
folder = StagingFolder.make(Path(sys.argv[1]), print)
folder.write("block", [])
(folder.path / ".half.part").touch()
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_what_a_killed_run_left_is_removed_by_the_next_and_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "tilenet-of-mine").mkdir()
    alive = StagingFolder.make(tmp_path, print)
    subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)], check=False)
    (left,) = [p for p in tmp_path.glob("tilenet-cache-*") if p != alive.path]
    assert sorted(file.name for file in left.iterdir()) == [".half.part", MARKER, "block"]
    new = StagingFolder.make(tmp_path, print)
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"mine", "tilenet-of-mine", alive.path.name, new.path.name}
    alive.close()  # as when it is killed
    third = StagingFolder.make(tmp_path, print)
    assert not alive.path.exists()
    assert new.path.exists()
    for folder in (new, third):
        folder.remove()
        folder.close()
    assert {path.name for path in tmp_path.iterdir()} == {"mine", "tilenet-of-mine"}


@pytest.mark.parametrize("inside", ["", "my data", MARKER])
def test_a_folder_that_tilenet_did_not_make_is_never_removed(tmp_path: Path, inside: str) -> None:
    mine = tmp_path / "tilenet-cache-2026"
    mine.mkdir()
    if inside:
        (mine / inside).write_text("of my own")
    folder = StagingFolder.make(tmp_path, print)
    assert sorted(mine.iterdir()) == [mine / inside] * bool(inside)
    folder.remove()
    folder.close()
    assert list(tmp_path.iterdir()) == [mine]


def test_a_lock_of_another_program_on_cache_dir_stops_no_start(tmp_path: Path) -> None:
    program = "import fcntl, os, sys; f = os.open(sys.argv[1], 0); fcntl.flock(f, fcntl.LOCK_EX)"
    program += "; print('held', flush=True); sys.stdin.read()"
    words, pipe = [sys.executable, "-c", program, str(tmp_path)], subprocess.PIPE
    with subprocess.Popen(words, stdin=pipe, stdout=pipe) as other:
        assert other.stdout
        assert other.stdout.readline() == b"held\n"
        made: list[StagingFolder] = []
        start = threading.Thread(
            target=lambda: made.append(StagingFolder.make(tmp_path, print)), daemon=True
        )
        start.start()
        start.join(30)
        assert made
        made[0].remove()
        made[0].close()


def test_where_locks_are_not_known_nothing_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unknown(*_: object) -> None:
        raise OSError(95, "Operation not supported")

    subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)], check=False)
    (left,) = tmp_path.iterdir()
    monkeypatch.setattr(fcntl, "flock", unknown)
    folder = StagingFolder.make(tmp_path, print)
    assert left.exists()
    folder.remove()
    folder.close()
    assert list(tmp_path.iterdir()) == [left]


def test_a_place_that_cannot_be_written_is_refused_in_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for path in (tmp_path / "file", tmp_path / "file" / "below", Path("/proc/tilenet")):
        with pytest.raises(TilenetError, match="cache_dir must be a folder that can be written"):
            StagingFolder.make(path, print)
    with pytest.raises(TilenetError, match=r"by all its ranks .*No such file"):
        StagingFolder(tmp_path / "not" / "here", print)
