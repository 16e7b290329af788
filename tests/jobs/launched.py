"""Jobs of ranks that a test starts, and what they leave."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import rasterio

__all__ = ["mpiexec", "write_scene"]


def mpiexec(
    ranks: int, *program: str, limit_s: float = 120, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run `python PROGRAM` over ranks to its end, however that is; `limit_s` matters on failure."""
    return subprocess.run(
        ["mpiexec", "-n", str(ranks), sys.executable, *program],
        env=os.environ | variables,
        capture_output=True,
        text=True,
        timeout=limit_s,
        check=False,
    )


def write_scene(folder: Path, size: tuple[int, int], bands: int = 2, **profile: Any) -> None:
    """image.tif with random pixels and labels.tif with three random classes."""
    rng = np.random.default_rng(3)
    grid = {"driver": "GTiff", "height": size[0], "width": size[1], "crs": "EPSG:32630"}
    grid["transform"] = rasterio.Affine(2, 0, 5e5, 0, -2, 4e6)
    for name, values in (
        ("image", rng.integers(1, 4000, (bands, *size)).astype(np.uint16)),
        ("labels", rng.integers(0, 3, (1, *size)).astype(np.uint8)),
    ):
        more = {"count": len(values), "dtype": values.dtype.name, **profile}
        with rasterio.open(folder / f"{name}.tif", "w", **grid, **more) as file:
            file.write(values)
