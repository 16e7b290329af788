"""Small rasters and vector files written on the spot, small disks, and the real imagery."""

import os
import shutil
import subprocess
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyogrio
import pytest
import rasterio
import shapely
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


@pytest.fixture
def write_vector(tmp_path: Path) -> Callable[..., str]:
    """Write shapes and the values of their field `class`; the ending says in which format."""

    def write(
        name: str,
        shapes: Sequence[Any],
        values: Sequence[Any] | None = None,
        crs: str | None = "EPSG:32630",
        **options: Any,
    ) -> str:
        options = {"geometry_type": "Polygon", "promote_to_multi": False} | options
        if name.endswith("json"):
            options["COORDINATE_PRECISION"] = 15
        columns = [] if values is None else [np.array(values)]
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "'crs' was not provided")
            pyogrio.raw.write(
                tmp_path / name,
                shapely.to_wkb(np.array(shapes, object)),
                columns,
                [] if values is None else ["class"],
                crs=crs,
                **options,
            )
        return str(tmp_path / name)

    return write


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Callable[[int], Path]]:
    """A disk of so many kB; needs root."""
    folder = tmp_path / "disk"
    folder.mkdir()

    def mount(kilobytes: int) -> Path:
        options = ["-t", "tmpfs", "-o", f"size={kilobytes}k", "tmpfs", str(folder)]
        unmount()
        command = ["mount", *options]
        if not shutil.which("mount") or subprocess.run(command, check=False).returncode:
            pytest.skip("a small disk cannot be mounted here: that needs root")
        return folder

    def unmount() -> None:
        if os.path.ismount(folder):
            subprocess.run(["umount", str(folder)], check=True)

    yield mount
    unmount()


@pytest.fixture(scope="session")
def real() -> Path:
    """The imagery that TILENET_DATA points to."""
    if "TILENET_DATA" not in os.environ:
        pytest.skip("needs real imagery: set TILENET_DATA to its folder")
    return Path(os.environ["TILENET_DATA"])
