"""Small rasters written on the spot, and the folder of real imagery where there is one."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import rasterio
from hypothesis import settings

GRID = {"driver": "GTiff", "crs": "EPSG:32630"}
GRID["transform"] = rasterio.Affine(2, 0.1, 5e5, 0.1, -2, 4e6)
settings.register_profile("fixed", derandomize=True, deadline=None, database=None)
settings.register_profile(
    "fuzz",  # make fuzz
    derandomize=False,
    deadline=None,
    database=None,
    print_blob=True,
)
settings.load_profile("fixed")


@pytest.fixture
def write_raster(tmp_path: Path) -> Callable[..., str]:
    """Write (C, H, W) or (H, W) pixels; to a GeoTIFF on a sheared grid unless told otherwise."""

    def write(name: str, values: np.ndarray, **profile: Any) -> str:
        count, height, width = (1, *values.shape)[-3:]
        size = {"count": count, "height": height, "width": width, "dtype": values.dtype.name}
        with rasterio.open(tmp_path / name, "w", **(GRID | size | profile)) as file:
            file.write(values.reshape(count, height, width))
        return str(tmp_path / name)

    return write


@pytest.fixture(scope="session")
def real() -> Path:
    """The imagery that TILENET_DATA points to."""
    if "TILENET_DATA" not in os.environ:
        pytest.skip("needs real imagery: set TILENET_DATA to its folder")
    return Path(os.environ["TILENET_DATA"])
