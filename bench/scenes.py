"""Scenes that benches read: random pixels, and networks that were trained on them for a step."""

import csv
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import rasterio
from numpy.typing import NDArray
from rasterio.windows import Window

from bench.report import mpiexec

__all__ = ["history", "train", "train_a_little", "write_pair", "write_random", "write_rows"]

GRID = {"driver": "GTiff", "crs": "EPSG:32630"}
GRID |= {"transform": rasterio.Affine(2, 0, 5e5, 0, -2, 4e6)}
ROWS = 512  # in memory at once
Size = tuple[int, int, int]  # bands, rows, columns


def write_rows(
    path: Path, size: Size, dtype: str, make: Callable[[int], NDArray[Any]], **profile: Any
) -> Path:
    """Write a raster some rows at a time, which `make` returns as (bands, rows, columns)."""
    bands, height, width = size
    grid = {**GRID, "count": bands, "height": height, "width": width, "dtype": dtype}
    if not profile.pop("strips", False):
        side = 512 if min(height, width) >= 512 else 256 if min(height, width) >= 256 else 16
        grid |= {"tiled": True, "blockxsize": side, "blockysize": side}
    with rasterio.open(path, "w", **{**grid, **profile}) as file:
        for row in range(0, height, ROWS):
            rows = min(ROWS, height - row)
            file.write(make(rows).astype(dtype), window=Window(0, row, width, rows))
    return path


def random_pixels(
    size: Size, dtype: str, values: tuple[int, int], seed: int
) -> Callable[[int], NDArray[Any]]:
    """What makes rows of pixels between two values, all as likely."""
    rng = np.random.default_rng(seed)
    draw: Any = rng.uniform if np.dtype(dtype).kind == "f" else rng.integers
    return lambda rows: draw(*values, (size[0], rows, size[2]))


def write_random(
    path: Path, size: Size, dtype: str = "uint16", values: tuple[int, int] = (1, 4000),
    **profile: Any,
) -> Path:  # fmt: skip
    """Write random pixels, the same for the same size."""
    return write_rows(path, size, dtype, random_pixels(size, dtype, values, size[1]), **profile)


def write_pair(
    folder: Path, size: Size, classes: int, name: str = "image", **more: Any
) -> tuple[str, str]:
    """A random image and random labels, NAME.tif and NAME_labels.tif; their paths."""
    image = write_random(folder / f"{name}.tif", size, **more)
    labels = folder / f"{name}_labels.tif"
    write_random(labels, (1, *size[1:]), "uint8", (0, classes))
    return str(image), str(labels)


def train(ranks: int, keys: dict[str, object]) -> Path:
    """Train as these keys of a run file say; the run's folder."""
    options = (f"--{key}={value}" for key, value in keys.items())
    mpiexec(ranks, "-m", "tilenet", "train", "--overwrite", *options)
    return Path(str(keys["output"]))


def history(run: Path, *columns: str) -> list[list[float]]:
    """Columns of a run's history, a number for each step."""
    with (run / "history.csv").open() as file:
        rows = list(csv.DictReader(file))
    return [[float(row[column]) for row in rows] for column in columns]


def train_a_little(folder: Path, name: str, shape: dict[str, object]) -> None:
    """A checkpoint of a small network for 4 bands and 5 classes, in folder/name."""
    image, labels = write_pair(folder, (4, 256, 256), 5, "train")
    run = {"images": image, "labels": labels, "classes": 5, "output": folder / name, "steps": 1}
    train(1, {**run, **{f"network.{key}": value for key, value in shape.items()}})
