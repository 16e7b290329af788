"""A folder of a run, written by hand, and one that a run left."""

import csv
import json
from pathlib import Path

import numpy as np
import pytest
from pages import EVIL, Write

from tilenet.__main__ import main


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "run"
    path.mkdir()
    return path


@pytest.fixture
def write_table(folder: Path) -> Write:
    """Write a table of the run."""

    def write(name: str, columns: list[str], rows: list[list[object]]) -> None:
        with (folder / name).open("w", newline="") as file:
            csv.writer(file).writerows([columns, *rows])

    return write


@pytest.fixture(scope="session")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two classes that look different, on 90 × 120 pixels: image.tif and labels.tif."""
    import rasterio

    path = tmp_path_factory.mktemp("scene")
    rng = np.random.default_rng(3)
    labels = np.kron(rng.integers(0, 2, (9, 12)), np.ones((10, 10))).astype(np.uint8)
    image = (labels * 90 + rng.normal(100, 20, (3, 90, 120))).clip(1, 255).astype(np.uint8)
    labels[:20, :30] = 255
    image[:, 80:, 100:] = 0
    grid = {"driver": "GTiff", "height": 90, "width": 120, "crs": "EPSG:32630", "dtype": "uint8"}
    grid["transform"] = rasterio.Affine(2, 0.1, 5e5, 0.1, -2, 4e6)
    with rasterio.open(path / "image.tif", "w", count=3, nodata=0, **grid) as file:
        file.write(image)
    with rasterio.open(path / "labels.tif", "w", count=1, nodata=255, **grid) as file:
        file.write(labels, 1)
    return path


@pytest.fixture(scope="session")
def a_run(scene: Path) -> Path:
    """A run of a few steps, whose names want to be markup."""
    output = scene / "run <b>"
    keys = {
        "images": str(scene / "image.tif"),
        "labels": str(scene / "labels.tif"),
        "classes": ["ground", EVIL],
        "output": str(output),
        "network": {"poolings": 2, "base": 4},
        "tiles": {"rows": 2, "columns": 3},
        "optimizer": {"lr": 0.01},
        "steps": 6,
        "device": "cpu",
    }
    (scene / "run.yaml").write_text(json.dumps(keys))
    assert main(["train", "-c", str(scene / "run.yaml")]) == 0
    return output
