"""The black collar is what a flood from the image's edge finds, whatever strips it is read in."""

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import rasterio

from tilenet.data.rasters import collar as module
from tilenet.data.rasters import raster as raster_module
from tilenet.data.rasters.collar import Collar, collar_strips, strip_runs
from tilenet.data.rasters.raster import Raster
from tilenet.geometry.windows import Window

Patch = pytest.MonkeyPatch
Write = Callable[..., str]


def flooded(black: np.ndarray) -> np.ndarray:
    """Black pixels that reach the edge over sides of black pixels, one step at a time."""
    found = np.zeros(black.shape, bool)
    found[[0, -1]] = found[:, [0, -1]] = True
    found &= black
    while True:
        grown = found.copy()
        grown[1:] |= found[:-1]
        grown[:-1] |= found[1:]
        grown[:, 1:] |= found[:, :-1]
        grown[:, :-1] |= found[:, 1:]
        grown &= black
        if (grown == found).all():
            return found
        found = grown


def by_strips(black: np.ndarray, cuts: list[int]) -> Collar:
    height = len(black)
    rows = [0, *cuts, height]
    parts = [strip_runs(black[first:last], first) for first, last in pairwise(rows)]
    return Collar(parts, black.shape)


@pytest.mark.parametrize("share", [0.2, 0.5, 0.6, 0.7, 0.95])
def test_random_patches_in_random_strips(share: float) -> None:
    rng = np.random.default_rng(int(share * 100))
    inner = 0
    for _ in range(60):
        height, width = (int(n) for n in rng.integers(1, 40, 2))
        black = rng.random((height, width)) < share
        cuts = sorted(set(rng.integers(1, height + 1, rng.integers(0, 6)).tolist()) - {height})
        wanted = flooded(black)
        found = by_strips(black, cuts)
        assert np.array_equal(found.inside(Window(0, 0, height, width)), wanted)
        inner += int((black & ~wanted).sum())
        for _ in range(5):
            row, col = int(rng.integers(height)), int(rng.integers(width))
            rows, cols = (
                int(rng.integers(1, height - row + 1)),
                int(rng.integers(1, width - col + 1)),
            )
            part = found.inside(Window(row, col, rows, cols))
            assert np.array_equal(part, wanted[row : row + rows, col : col + cols])
    assert inner > 0 or share > 0.9, "dark water must be there to be told apart"


def test_dark_water_is_not_kept_beyond_its_strip() -> None:
    rng = np.random.default_rng(4)
    black = np.pad(rng.random((96, 98)) < 0.3, ((2, 2), (1, 1)))
    alone = strip_runs(black, 0)
    assert alone.shape == (2, 0)
    assert strip_runs(black[2:50], 2).shape[1] > 0  # goes on below, perhaps


@pytest.mark.parametrize("block", [1, 7, 64, 5000])
def test_strips_cover_the_image_in_whole_blocks(block: int, monkeypatch: Patch) -> None:
    monkeypatch.setattr(module, "STRIP_PIXELS", 90 * 333)
    strips = collar_strips((1000, 333), block)
    assert [s.row for s in strips] == np.cumsum([0, *(s.height for s in strips[:-1])]).tolist()
    assert sum(s.height for s in strips) == 1000
    assert {(s.col, s.width) for s in strips} == {(0, 333)}
    assert strips[0].height == {1: 90, 7: 84, 64: 64, 5000: 90}[block]


# --- of a raster


def pixels_with_collar(dtype: str = "uint8") -> tuple[np.ndarray, np.ndarray]:
    """(3, 61, 83) pixels with a slanted collar, a lake, and zeros in one band; where data is."""
    rng = np.random.default_rng(6)
    values = rng.integers(1, 120, (3, 61, 83))
    row, col = np.ogrid[:61, :83]
    collar = (col < 15 - row // 4) | (col > 90 - row // 3) | (row > 50 + col // 12)
    values[:, collar] = 0
    values[:, 20:30, 40:55] = 0
    values[1, 20:40, 20:70] = 0
    values[0, 5, 13:25] = 0  # a dark row in one band that touches the collar
    return values.astype(dtype), ~collar


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "int16", "float32", "float64"])
@pytest.mark.parametrize(("rows", "strip_bytes"), [(1024, 1 << 26), (7, 1 << 26), (48, 1000)])
def test_a_raster_s_collar_is_no_data_in_any_window(
    write_raster: Write, dtype: str, rows: int, strip_bytes: int, monkeypatch: Patch
) -> None:
    monkeypatch.setattr(module, "STRIP_ROWS", rows)
    monkeypatch.setattr(raster_module, "STRIP_BYTES", strip_bytes)
    monkeypatch.setattr(raster_module, "LEAST_ROWS", 20)
    values, data = pixels_with_collar(dtype)
    tiled = {"tiled": True, "blockxsize": 16, "blockysize": 16}
    path = write_raster("a.tif", values, nodata=0, **tiled)
    assert np.array_equal(~flooded(~values.any(axis=0)), data)
    with Raster(path, nodata="collar") as raster:
        rng = np.random.default_rng(9)
        for _ in range(30):
            row, col = int(rng.integers(61)), int(rng.integers(83))
            window = Window(
                row, col, int(rng.integers(1, 62 - row)), int(rng.integers(1, 84 - col))
            )
            part = np.s_[row : row + window.height, col : col + window.width]
            assert np.array_equal(raster.read(window).valid, data[part])


def test_only_the_bands_that_are_read_must_be_black(write_raster: Write) -> None:
    values, _ = pixels_with_collar()
    values[2, :4] = 9
    with Raster(write_raster("a.tif", values), (1, 2), nodata="collar") as raster:
        two = raster.read(raster.whole).valid
    with Raster(raster.path, nodata="collar") as raster:
        three = raster.read(raster.whole).valid
    assert np.array_equal(two, ~flooded(~values[:2].any(axis=0)))
    assert np.array_equal(three, ~flooded(~values.any(axis=0)))
    assert not np.array_equal(two, three)


def test_coarse_pixels_leave_the_collar_out(write_raster: Write) -> None:
    values, data = pixels_with_collar()
    path = write_raster("a.tif", values)
    with Raster(path, resolution=3 * np.hypot(2, 0.1), nodata="collar") as raster:
        found = raster.read(raster.whole)
    some = np.pad(data, ((0, 2), (0, 1))).reshape(21, 3, 28, 3).any(axis=(1, 3))
    assert np.array_equal(found.valid, some)
    block = values[:, 27:30, 39:42]  # of the lake's shore: its zeros count
    assert (block == 0).any()
    assert found.values[:, 9, 13] == pytest.approx(block.mean(axis=(1, 2)), rel=6e-8)


@pytest.mark.real
def test_the_collar_of_a_landsat_scene(real: Path, monkeypatch: Patch) -> None:
    monkeypatch.setattr(module, "STRIP_ROWS", 50)
    path = str(real / "rasterio_RGB.byte.tif")
    with rasterio.open(path) as file:
        wanted = flooded(~file.read().any(axis=0))
    with Raster(path, nodata="collar") as raster:
        found = ~raster.read(raster.whole).valid
    assert np.array_equal(found, wanted)
    assert 0.25 < found.mean() < 0.45
