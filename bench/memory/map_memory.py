"""Does the memory of `tilenet predict` depend on the image?

Maps images of side N and N/2 (10 000, 4 bands of uint16; quick: 3 000) with a small network on two
ranks, and compares the ranks' peak resident memory, torch and all. Then with a smaller network with
instance norm over the whole image, whose statistics take a pass over the tiles for each norm, on
images of half those sides.
"""

import json
import os
import tempfile
import time
from pathlib import Path
from typing import Any

from bench.report import Claim, Found, at_most, mpiexec
from bench.scenes import train_a_little, write_random

RANKS = 2


def map_image(folder: Path, name: str, pixels: int, *options: str) -> dict[str, Any]:
    """Map an image of that side and say what it took."""
    image, out = folder / "image.tif", folder / f"{name}{pixels}.tif"
    write_random(image, (4, pixels, pixels))
    began = time.perf_counter()
    arguments = (folder / name, image, out, *options)
    said = mpiexec(RANKS, "-m", "tilenet", "predict", *arguments, "--json")
    return {
        **json.loads(said.splitlines()[-1]),
        "seconds": time.perf_counter() - began,
        "map_bytes": out.stat().st_size,
    }


def bench(quick: bool) -> Found:
    """Map both sizes."""
    side = 3000 if quick else 10_000
    if quick:
        # Small enough that the smaller image fills it too.
        os.environ["GDAL_CACHEMAX"] = "8"
    tile = ("--tile", "512") if quick else ()
    sides = side // 2, side
    figures = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        train_a_little(folder, "plain", {"poolings": 4, "base": 8})
        for pixels in sides:
            figures[str(pixels)] = map_image(folder, "plain", pixels, *tile)
        small = {"poolings": 2, "convolutions": 1, "base": 8, "norm": "instance"}
        os.environ["GDAL_CACHEMAX"] = "4"
        # Of the largest tiles that cut both images alike.
        tiled = ("--tile", "376" if quick else "836")
        train_a_little(folder, "norms", small)
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
    return figures, claims
