"""Blocks are decoded once where memory holds them: counted in bytes read from files."""

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import rasterio
from affine import Affine
from mpi4py import MPI
from rasterio.env import get_gdal_config, set_gdal_config
from test_read_ahead_runs import a_run

from tilenet.data.rasters import block_memory
from tilenet.data.rasters.block_cache import BLOCKS
from tilenet.data.rasters.block_memory import keep_blocks
from tilenet.data.rasters.raster import Raster
from tilenet.geometry.windows import Window
from tilenet.library.whole_run import train
from tilenet.mapping.predict import predict
from tilenet.mapping.prediction import Prediction
from tilenet.parallel.health.node_memory import BLOCKS_SHARE

HEIGHT, WIDTH, BLOCK = 512, 1024, 128
ROW_BYTES = BLOCK * WIDTH * 3 * 2
LEAST_BYTES = ROW_BYTES // 4
MEMORY = 55 * ROW_BYTES + 17
SHARE = int(MEMORY * BLOCKS_SHARE)


@pytest.fixture(autouse=True)
def small_memory(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(block_memory, "CHOSEN_BY_USER", False)
    monkeypatch.setattr(block_memory, "LEAST_BLOCKS_BYTES", LEAST_BYTES)
    monkeypatch.setattr(block_memory, "node_memory_bytes", lambda: MEMORY)
    monkeypatch.setattr(BLOCKS, "most_bytes", BLOCKS.most_bytes)
    before = get_gdal_config("GDAL_CACHEMAX")
    yield
    set_gdal_config("GDAL_CACHEMAX", before)


def write(path: str, values: np.ndarray, **more: str) -> None:
    blocks = {"tiled": True, "blockxsize": BLOCK, "blockysize": BLOCK}
    count, height, width = values.shape
    size = {"count": count, "height": height, "width": width, "dtype": "uint16"}
    grid = {"transform": Affine.scale(2)}
    with rasterio.open(path, "w", driver="GTiff", **size, **blocks, **grid, **more) as file:
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
        height, before = raster.height, bytes_read()
        for _ in range(passes):
            for row in range(0, height, rows):
                raster.read(Window(row, 0, min(rows, height - row), WIDTH))
        return (bytes_read() - before) / Path(path.partition("+")[0]).stat().st_size


@pytest.mark.parametrize(("ranks", "times"), [(1, 1), (2, 3)])
def test_blocks_that_a_ranks_share_of_memory_holds_are_decoded_once(
    path: str, ranks: int, times: int
) -> None:
    """The image has 4 rows of blocks, as many as one rank may keep."""
    assert times_read(path, BLOCK, 3, lambda raster: keep_blocks(ranks)) == pytest.approx(
        times, 0.05
    )


@pytest.mark.parametrize("interleave", ["pixel", "band"])
@pytest.mark.parametrize("rows", [32, 100, 192, 330])
def test_strips_of_a_map_decode_each_row_of_blocks_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rows: int, interleave: str
) -> None:
    monkeypatch.setattr(block_memory, "node_memory_bytes", lambda: 10 * MEMORY)
    path = str(tmp_path / "image.tif")
    values = np.random.default_rng(3).integers(0, 1 << 16, (3, 8 * BLOCK, WIDTH), np.uint16)
    write(path, values, interleave=interleave)
    both = f"{path}+{path}"  # of a stack bands are read one after another

    def times(path: str, passes: int, ranks: int = 1) -> float:
        set_gdal_config("GDAL_CACHEMAX", LEAST_BYTES)
        return times_read(path, rows, passes, lambda raster: raster.keep_block_rows(rows, ranks))

    assert times(path, 1) == pytest.approx(1, 0.05)
    assert times(path, 2) == pytest.approx(2, 0.05)  # not the whole image is kept
    assert times(both, 1) == pytest.approx(2, 0.05)
    assert times(path, 1, ranks=1000) > 1.1  # nor more than a rank's share


def test_a_map_amid_a_run_leaves_the_runs_blocks(path: str) -> None:
    keep_blocks(1)
    with Raster(path) as raster:
        raster.keep_block_rows(1, 1)
    assert get_gdal_config("GDAL_CACHEMAX") == SHARE - SHARE // 5


def test_the_users_own_word_holds(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    set_gdal_config("GDAL_CACHEMAX", LEAST_BYTES)
    monkeypatch.setattr(block_memory, "CHOSEN_BY_USER", True)
    assert times_read(path, BLOCK, 3, lambda raster: keep_blocks(1)) == pytest.approx(3, 0.05)


@pytest.mark.ranks(1, 2)
def test_runs_keep_a_ranks_share(comm: MPI.Intracomm, shared_path: Path) -> None:
    run = a_run(comm, shared_path)
    assert train(run, comm=comm) == 0
    share = SHARE // comm.size
    assert BLOCKS.most_bytes == share // 5
    assert get_gdal_config("GDAL_CACHEMAX") == share - share // 5


def test_swept_maps_keep_two_rows_of_blocks(tmp_path: Path) -> None:
    run = a_run(MPI.COMM_SELF, tmp_path)
    assert train(run, comm=MPI.COMM_SELF) == 0
    with Raster(run.image_paths[0]) as raster:
        bands = len(raster.bands)
    image = str(tmp_path / "large.tif")
    write(image, np.random.default_rng(5).integers(1, 99, (bands, 700, 1100), np.uint16))
    prediction = Prediction(run.output, image, str(tmp_path / "map.tif"))
    set_gdal_config("GDAL_CACHEMAX", LEAST_BYTES)
    assert predict(prediction, MPI.COMM_SELF)["method"] == "sweep"
    with Raster(image) as raster:
        rows = 2 * BLOCK * raster.stack.row_bytes
    assert rows < get_gdal_config("GDAL_CACHEMAX") < 2 * rows < SHARE
