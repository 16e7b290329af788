"""Rasters and polygons that ask for more memory or digits than there are."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import rasterio
from rasterio import Affine

from tilenet.data.labels.vector_keys import VectorKeys
from tilenet.data.rasters.raster import Raster
from tilenet.errors import TilenetError
from tilenet.geometry.windows import Window


def sparse(path: Path, side: int, **profile: Any) -> str:
    """A raster of zeros that takes no room on the disk."""
    grid = {"crs": "EPSG:32630", "transform": Affine(1, 0, 5e5, 0, -1, 4e6), "SPARSE_OK": True}
    size = {"height": side, "width": side, "count": 1, "dtype": "uint8", "compress": "deflate"}
    with rasterio.open(path, "w", driver="GTiff", **(grid | size | profile)):
        return str(path)


def test_blocks_larger_than_memory_are_refused(tmp_path: Path) -> None:
    block = {"tiled": True, "blockxsize": 33_024, "blockysize": 33_024}
    path = sparse(tmp_path / "a.tif", 33_000, **block)
    with pytest.raises(TilenetError, match=r"blocks of 33024 × 33024 px, 1040 MiB\).*TILED=YES"):
        Raster(path)
    small = sparse(tmp_path / "b.tif", 100_000, tiled=True)
    with Raster(small) as image:
        assert image.read(Window(99_000, 99_000, 9, 9)).values.shape == (1, 9, 9)


@pytest.mark.parametrize("a", [float("nan"), float("inf")])
def test_a_transform_without_numbers_is_refused(write_raster: Callable[..., str], a: float) -> None:
    pixels = np.arange(64, dtype="uint8").reshape(8, 8)
    with pytest.raises(TilenetError, match="transform must give pixels a place"):
        Raster(write_raster("a.tif", pixels, transform=Affine(a, 0, 5e5, 0, -1, 4e6)))


def test_a_pixel_larger_than_all_rasters_is_refused(write_raster: Callable[..., str]) -> None:
    path = write_raster("a.tif", np.arange(64, dtype="uint8").reshape(8, 8))
    with pytest.raises(TilenetError, match=r"resolution must be a whole multiple"):
        Raster(path, resolution=2e300)


@pytest.mark.parametrize("value", ["1" * 5000, "9" * 19])
def test_class_numbers_without_end_are_refused(value: str) -> None:
    with pytest.raises(TilenetError, match="must be whole numbers"):
        VectorKeys(field="class").classes_of([value], 255, "a.gpkg")
    assert VectorKeys(field="class").classes_of(["9" * 18], 255, "a.gpkg") == [10**18 - 1]
