"""Does the memory of `tilenet predict` depend on the image?

    python -m bench.memory.map_memory [--quick]

Maps images of side N and N/2 (10 000, 4 bands of uint16; quick: 3 000) with a small network on two
ranks, and compares the ranks' peak resident memory, torch and all. Then with a smaller network with
instance norm over the whole image, whose statistics take a pass over the tiles for each norm, on
images of half those sides.
"""

import argparse
import json
import os
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import rasterio
from rasterio.windows import Window

from bench.report import Claim, at_most, mpiexec, report

RANKS = 2


def write_image(path: Path, side: int) -> None:
    """Random pixels, written by rows of blocks."""
    rng = np.random.default_rng(side)
    profile = {"driver": "GTiff", "height": side, "width": side, "count": 4, "dtype": "uint16"}
    profile |= {"tiled": True, "blockxsize": 512, "blockysize": 512, "crs": "EPSG:32630"}
    transform = rasterio.Affine(2, 0, 5e5, 0, -2, 4e6)
    with rasterio.open(path, "w", transform=transform, **profile) as file:
        for row in range(0, side, 512):
            height = min(512, side - row)
            values = rng.integers(1, 4000, (4, height, side), dtype=np.uint16)
            file.write(values, window=Window(0, row, side, height))


def train_a_little(folder: Path, name: str, *shape: str) -> None:
    """A checkpoint of a small network."""
    image, labels = folder / "train.tif", folder / "labels.tif"
    write_image(image, 256)
    with rasterio.open(image) as file:
        profile = {**file.profile, "count": 1, "dtype": "uint8", "blockxsize": 256}
    with rasterio.open(labels, "w", **{**profile, "blockysize": 256}) as file:
        file.write(np.random.default_rng(0).integers(0, 5, (256, 256)).astype(np.uint8), 1)
    run = ("--images", image, "--labels", labels, "--classes", 5, "--output", folder / name)
    mpiexec(1, "-m", "tilenet", "train", *(str(part) for part in run), "--steps", "1", *shape)


def map_image(folder: Path, name: str, pixels: int, *options: str) -> dict[str, Any]:
    """Map an image of that side and say what it took."""
    image, out = folder / "image.tif", folder / f"{name}{pixels}.tif"
    write_image(image, pixels)
    began = time.perf_counter()
    arguments = (str(folder / name), str(image), str(out), *options)
    said = mpiexec(RANKS, "-m", "tilenet", "predict", *arguments, "--json")
    found: dict[str, Any] = {
        **json.loads(said.splitlines()[-1]),
        "seconds": time.perf_counter() - began,
        "map_bytes": out.stat().st_size,
    }
    peaks = " and ".join(f"{p / 2**20:.0f} MiB" for p in found["peak_bytes"])
    print(f"{name}, {pixels}²: {found['passes']} passes, {peaks}, {found['seconds']:.0f} s")
    return found


def main() -> None:
    """Map both sizes and compare."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    quick = parser.parse_args().quick
    side = 3000 if quick else 10_000
    if quick:
        # Small enough that the smaller image fills it too.
        os.environ["GDAL_CACHEMAX"] = "8"
    tile = ("--tile", "512") if quick else ()
    sides = side // 2, side
    figures = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        train_a_little(folder, "plain", "--network.poolings", "4", "--network.base", "8")
        for pixels in sides:
            figures[str(pixels)] = map_image(folder, "plain", pixels, *tile)
        small = ("--network.poolings", "2", "--network.convolutions", "1", "--network.base", "8")
        os.environ["GDAL_CACHEMAX"] = "4"
        # Of the largest tiles that cut both images alike.
        tiled = ("--tile", "376" if quick else "836")
        train_a_little(folder, "norms", *small, "--network.norm", "instance")
        for pixels in sides:
            figures[f"norms {pixels // 2}"] = map_image(folder, "norms", pixels // 2, *tiled)
    peaks = [max(one["peak_bytes"]) for one in figures.values()]
    claims: list[Claim] = [
        at_most("GiB on the rank with most", peaks[1] / 2**30, 1.5),
        at_most(f"peak at {side}² over peak at {side // 2}²", peaks[1] / peaks[0], 1.05),
        at_most(
            f"in passes for norms, peak at {side // 2}² over peak at {side // 4}²",
            peaks[3] / peaks[2],
            1.05,
        ),
    ]
    report("map_memory", figures, claims)


if __name__ == "__main__":
    main()
