"""Vector files written on the spot; small disks."""

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
import shapely


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
