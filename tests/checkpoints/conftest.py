"""An image, and a run on it that nothing disturbed."""

import shutil
from pathlib import Path

import numpy as np
import pytest
import rasterio
from checkpointed_run import train


@pytest.fixture(scope="package")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with two images of random pixels, and labels that their first band tells."""
    folder = tmp_path_factory.mktemp("scene")
    rng = np.random.default_rng(3)
    for name in ("train", "held"):
        pixels = rng.integers(1, 200, (2, 40, 52)).astype(np.uint8)
        for path, values in ((f"{name}.tif", pixels), (f"{name}_labels.tif", pixels[:1] // 70)):
            size = {"count": len(values), "height": 40, "width": 52, "dtype": "uint8"}
            with rasterio.open(folder / path, "w", driver="GTiff", crs="EPSG:32630", **size) as f:
                f.write(values)
    return folder


@pytest.fixture(scope="package")
def whole(scene: Path) -> Path:
    """A run that nothing disturbed."""
    assert train(scene, scene / "whole") == 0
    return scene / "whole"


@pytest.fixture
def copied(whole: Path, tmp_path: Path) -> Path:
    """A copy of it, to be spoilt."""
    return shutil.copytree(whole, tmp_path / "run", symlinks=True)
