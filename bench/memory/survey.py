"""How fast does a survey look at all pixels, and does its memory depend on how many there are?

    python -m bench.memory.survey [--quick]

Images of 4 bands of 2500² and 5000² px (quick: 1500² and 3000²) in tiles of 512², uint8, uint16 and
float32, with labels of 5 classes, surveyed by one rank in a process of its own each. Seconds are
those of the processor; memory is the process's largest, less what it had before the survey. GDAL
may keep 8 MiB of blocks.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import rasterio
from rasterio.windows import Window as FileWindow

from bench.report import ROOT, Claim, at_most, report

BANDS, CLASSES, ALIGNMENT_PX = 4, 5, 32
GRID = {"driver": "GTiff", "crs": "EPSG:32630", "tiled": True, "blockxsize": 512}
GRID |= {"blockysize": 512, "transform": rasterio.Affine(1, 0, 5e5, 0, -1, 4e6)}


def main() -> None:
    """Run all cases, or the one that a process of this is to run."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--survey", nargs=2, metavar=("IMAGE", "LABELS"))
    asked = parser.parse_args()
    os.environ["GDAL_CACHEMAX"] = "8"
    if asked.survey:
        print(json.dumps(look(*asked.survey)))
        return
    sides = (1500, 3000) if asked.quick else (2500, 5000)
    figures: dict[str, Any] = {}
    claims: list[Claim] = []
    for dtype in ("uint8", "uint16", "float32"):
        for side in sides:
            with tempfile.TemporaryDirectory() as name:
                files = write_scene(Path(name), side, dtype)
                command = [sys.executable, "-m", "bench.memory.survey", "--survey", *files]
                ended = subprocess.run(
                    command, stdout=subprocess.PIPE, text=True, check=True, cwd=ROOT
                )
            figures[f"{dtype} {side}"] = json.loads(ended.stdout.splitlines()[-1])
            more = figures[f"{dtype} {side}"]["more_bytes"] / 2**20
            claims.append(at_most(f"{dtype}: MiB for a survey of {side}²", more, 128))
    report("survey", figures, claims)


def look(image: str, labels: str) -> dict[str, float]:
    """Survey an image."""
    from mpi4py import MPI

    from tilenet.data.labels.open import open_labels
    from tilenet.data.rasters.raster import Raster
    from tilenet.data.survey import survey
    from tilenet.parallel.health.progress import peak_bytes

    with Raster(image) as raster, open_labels(labels, raster, 255) as source:
        before, began = peak_bytes([]), time.process_time()
        survey([raster], [source], CLASSES, ALIGNMENT_PX, MPI.COMM_SELF)
        seconds = time.process_time() - began
        mpx = raster.height * raster.width / 1e6
    return {
        "seconds": seconds,
        "mpx_per_s": mpx / seconds,
        "more_bytes": peak_bytes([]) - before,
    }


def write_scene(folder: Path, side: int, dtype: str) -> list[str]:
    """An image and its labels, uncompressed, so that what is measured is no decoder."""
    rng = np.random.default_rng(side)
    files = [str(folder / "image.tif"), str(folder / "labels.tif")]
    size = {**GRID, "height": side, "width": side}
    with (
        rasterio.open(files[0], "w", count=BANDS, dtype=dtype, **size) as image,
        rasterio.open(files[1], "w", count=1, dtype="uint8", **size) as labels,
    ):
        for row in range(0, side, 500):
            window = FileWindow(0, row, side, 500)
            values = rng.normal(100, 20, (BANDS, 500, side)).clip(0, 255)
            image.write(values.astype(dtype), window=window)
            labels.write(rng.integers(0, CLASSES, (1, 500, side)).astype("uint8"), window=window)
    return files


if __name__ == "__main__":
    main()
