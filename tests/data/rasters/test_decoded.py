"""Blocks are decoded once where memory holds them: counted in bytes read from files."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import rasterio
from affine import Affine
from mpi4py import MPI
from rasterio._env import get_gdal_config
from rasterio.env import set_gdal_config
from test_read_ahead_runs import a_run

from tilenet.choices import DECODED_SHARE
from tilenet.data.rasters import decoded
from tilenet.data.rasters.decoded import keep_decoded
from tilenet.data.rasters.raster import Raster
from tilenet.geometry.windows import Window
from tilenet.library.whole_run import train
from tilenet.mapping.predict import Prediction, predict

HEIGHT, WIDTH, BLOCK = 512, 1024, 128
ROW_BYTES = BLOCK * WIDTH * 3 * 2
LEAST_BYTES = ROW_BYTES // 4
MEMORY = 44 * ROW_BYTES + 17
SHARE = int(MEMORY * DECODED_SHARE)


@pytest.fixture(autouse=True)
def small_memory(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(decoded, "CHOSEN_BY_USER", False)
    monkeypatch.setattr(decoded, "LEAST_BYTES", LEAST_BYTES)
    monkeypatch.setattr(decoded, "node_memory_bytes", lambda: MEMORY)
    before = get_gdal_config("GDAL_CACHEMAX")
    yield
    set_gdal_config("GDAL_CACHEMAX", before)


def write(path: str, values: np.ndarray) -> None:
    blocks = {"tiled": True, "blockxsize": BLOCK, "blockysize": BLOCK}
    count, height, width = values.shape
    size = {"count": count, "height": height, "width": width, "dtype": "uint16"}
    grid = {"transform": Affine.scale(2)}
    with rasterio.open(path, "w", driver="GTiff", **size, **blocks, **grid) as file:
        file.write(values)


@pytest.fixture
def path(tmp_path: Path) -> str:
    path = str(tmp_path / "image.tif")
    write(path, np.random.default_rng(3).integers(0, 1 << 16, (3, HEIGHT, WIDTH), np.uint16))
    return path


def times_read(path: str, rows: int, passes: int, prepare: Callable[[Raster], object]) -> float:
    """How often the file's bytes are read by passes over it in strips of some rows."""

    def bytes_read() -> int:
        return int(Path("/proc/self/io").read_text().split()[1])

    with Raster(path, nodata="none") as raster:
        prepare(raster)
        before = bytes_read()
        for _ in range(passes):
            for row in range(0, HEIGHT, rows):
                raster.read(Window(row, 0, min(rows, HEIGHT - row), WIDTH))
        return (bytes_read() - before) / Path(path).stat().st_size


@pytest.mark.parametrize(("ranks", "times"), [(1, 1), (2, 3)])
def test_blocks_that_a_ranks_share_of_memory_holds_are_decoded_once(
    path: str, ranks: int, times: int
) -> None:
    """The image has 4 rows of blocks, as many as one rank may keep."""
    assert times_read(path, BLOCK, 3, lambda raster: keep_decoded(ranks)) == pytest.approx(
        times, 0.05
    )


@pytest.mark.parametrize("rows", [32, 100, 192])
def test_strips_of_a_map_decode_each_row_of_blocks_once(path: str, rows: int) -> None:
    def times(passes: int, ranks: int) -> float:
        return times_read(path, rows, passes, lambda raster: raster.keep_block_rows(ranks))

    assert times(1, ranks=1) == pytest.approx(1, 0.05)
    assert times(2, ranks=1) == pytest.approx(2, 0.05)  # no more than two rows are kept
    assert times(1, ranks=100) > 1.2  # nor more than a rank's share


def test_the_users_own_word_holds(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    set_gdal_config("GDAL_CACHEMAX", LEAST_BYTES)
    monkeypatch.setattr(decoded, "CHOSEN_BY_USER", True)
    assert times_read(path, BLOCK, 3, lambda raster: keep_decoded(1)) == pytest.approx(3, 0.05)


THREADS = """
import os, sys
from tilenet.data.rasters.decoded import decode_in_threads
from tilenet.data.rasters.raster import Raster
decode_in_threads(int(sys.argv[2]))
with Raster(sys.argv[1]) as raster:
    before = len(os.listdir("/proc/self/task"))
    raster.read(raster.whole)
    print(len(os.listdir("/proc/self/task")) - before)
"""


@pytest.mark.parametrize(
    ("count", "of_user", "more"), [(1, None, 0), (3, None, 3), (3, "1", 0), (1, "2", 2)]
)
def test_blocks_are_decoded_by_threads(
    path: str, count: int, of_user: str | None, more: int
) -> None:
    environment = {k: v for k, v in os.environ.items() if k != "GDAL_NUM_THREADS"}
    if of_user:
        environment["GDAL_NUM_THREADS"] = of_user
    command = [sys.executable, "-c", THREADS, path, str(count)]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert int(ended.stdout) == more


@pytest.mark.ranks(1, 2)
def test_runs_keep_a_ranks_share(comm: MPI.Intracomm, shared_path: Path) -> None:
    run = a_run(comm, shared_path)
    assert train(run, comm=comm) == 0
    assert get_gdal_config("GDAL_CACHEMAX") == SHARE // comm.size


def test_swept_maps_keep_two_rows_of_blocks(tmp_path: Path) -> None:
    run = a_run(MPI.COMM_SELF, tmp_path)
    assert train(run, comm=MPI.COMM_SELF) == 0
    with Raster(run.image_paths[0]) as raster:
        bands = len(raster.bands)
    image = str(tmp_path / "large.tif")
    write(image, np.random.default_rng(5).integers(1, 99, (bands, 700, 1100), np.uint16))
    prediction = Prediction(run.output, image, str(tmp_path / "map.tif"))
    assert predict(prediction, MPI.COMM_SELF)["method"] == "sweep"
    with Raster(image) as raster:
        rows = 2 * raster.stack.block_row_bytes
    assert LEAST_BYTES < rows < SHARE
    assert get_gdal_config("GDAL_CACHEMAX") == rows
