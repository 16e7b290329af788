"""How fast are pixels read, and how long do steps wait for them?

    python -m bench.speed.reading [--quick] [--torchgeo PYTHON]

Reads the windows of tiles of 1024² with a halo of 96 px from compressed images of 10 000² × 4
uint16 (quick: 4000²), in tiles of 512² and in strips, those of the first rows of tiles: with
tilenet and with rasterio alone, values only and with validity, in turn; and, where `--torchgeo`
names a Python that has it, with TorchGeo's RasterDataset and GridGeoSampler, which read squares of
1216² every 1024 px. Seconds are those of the processor, since one thread decodes and the files are
in memory.

Then trains a small network on one rank of one thread, on crops of an image of 4000² (quick: 2000²,
of which GDAL may keep 8 MiB), with and without reading ahead: how much of a step waits for pixels,
and how long steps are, by the clock. Reading ahead needs a second core: where other work has it,
steps are not shorter. The first steps, in which caches fill, do not count.
"""

import argparse
import csv
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import rasterio
from rasterio.windows import Window as FileWindow

from bench.report import Claim, at_least, at_most, mpiexec, report
from tilenet.data.rasters.raster import Raster
from tilenet.geometry.tiles import Cut, HaloRule, cut
from tilenet.geometry.windows import Window

OWN, HALO, BANDS = 1024, 96, 4
WARM_STEPS = 2
GRID = {"driver": "GTiff", "crs": "EPSG:32630", "compress": "deflate", "zlevel": 1, "nodata": 0}
GRID["transform"] = rasterio.Affine(2, 0, 5e5, 0, -2, 4e6)


def write_image(path: Path, side: int, *, tiled: bool) -> None:
    """Patches of 16 px with some noise, as compressible as a photograph."""
    rng = np.random.default_rng(side)
    profile = {**GRID, "height": side, "width": side, "count": BANDS, "dtype": "uint16"}
    profile |= {"tiled": True, "blockxsize": 512, "blockysize": 512} if tiled else {"blockysize": 8}
    with rasterio.open(path, "w", **profile) as file:
        for row in range(0, side, 512):
            height = min(512, side - row)
            coarse = rng.integers(1000, 3000, (BANDS, -(-height // 16), -(-side // 16)), np.uint16)
            values = coarse.repeat(16, 1).repeat(16, 2)[:, :height, :side]
            values = values + rng.integers(0, 64, values.shape, np.uint16)
            file.write(values, window=FileWindow(0, row, side, height))


def windows_of(side: int, tile_rows: int) -> list[Window]:
    """What the tiles of the first rows read."""
    tiles = cut(side, side, Cut(size_px=OWN), HaloRule(HALO, 32))
    return [tile.read for tile in tiles.tiles[: tile_rows * tiles.grid[1]]]


def with_tilenet(path: Path, windows: list[Window], nodata: str | None) -> None:
    """Values and validity; with nodata "none" everything is valid unseen."""
    with Raster(str(path), nodata=nodata) as raster:
        for window in windows:
            raster.read(window)


def with_rasterio(path: Path, windows: list[Window], *, mask: bool) -> None:
    """Values, and GDAL's mask of the file."""
    with rasterio.open(path) as file:
        for w in windows:
            place = FileWindow(w.col, w.row, w.width, w.height)
            file.read(window=place)
            if mask:
                file.dataset_mask(window=place)


def reads(path: Path, windows: list[Window], repeats: int) -> dict[str, float]:
    """Million pixels (of all bands) per second of each way, medians of runs in turn."""
    ways: dict[str, Callable[[], None]] = {
        "rasterio": lambda: with_rasterio(path, windows, mask=False),
        "tilenet": lambda: with_tilenet(path, windows, "none"),
        "rasterio with mask": lambda: with_rasterio(path, windows, mask=True),
        "tilenet with validity": lambda: with_tilenet(path, windows, None),
    }
    pixels = sum(window.height * window.width for window in windows)
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(repeats):
        for name, run in ways.items():
            began = time.process_time()
            run()
            seconds[name].append(time.process_time() - began)
    rates = {name: pixels / statistics.median(some) / 1e6 for name, some in seconds.items()}
    for first, second in (("tilenet", "rasterio"), ("tilenet with validity", "rasterio with mask")):
        # Pairs that ran beside one another: other work on the machine slows both alike.
        pairs = zip(seconds[first], seconds[second], strict=True)
        rates[f"{first} ÷ {second}"] = statistics.median(theirs / ours for ours, theirs in pairs)
    return rates


TORCHGEO = """
import json, sys, time
import torch
from torchgeo.datasets import RasterDataset
from torchgeo.samplers import GridGeoSampler, Units
torch.set_num_threads(1)
path, size, stride, most = sys.argv[1], *map(int, sys.argv[2:])
dataset = RasterDataset(path)
sampler = GridGeoSampler(dataset, size=size, stride=stride, units=Units.PIXELS)
began, pixels = time.process_time(), 0
for number, query in enumerate(sampler):
    if number == most:
        break
    image = dataset[query]["image"]
    pixels += image.shape[-1] * image.shape[-2]
print(json.dumps(pixels / (time.process_time() - began) / 1e6))
"""


def with_torchgeo(python: str | None, path: Path, windows: list[Window]) -> Any:
    """Million pixels per second and its ratio to tilenet's, or why there are none."""
    if python is None:
        return "not measured: --torchgeo was not given"
    arguments = [str(path), str(OWN + 2 * HALO), str(OWN), str(len(windows))]
    rates, ratios = [], []
    pixels = sum(window.height * window.width for window in windows)
    for _ in range(3):
        env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        ended = subprocess.run(
            [python, "-c", TORCHGEO, *arguments],
            capture_output=True,
            text=True,
            env=env,
            check=False,
        )
        if ended.returncode:
            return f"not measured: {ended.stderr.strip().splitlines()[-1]}"
        rates.append(float(ended.stdout.splitlines()[-1]))
        began = time.process_time()
        with_tilenet(path, windows, None)
        ratios.append(pixels / (time.process_time() - began) / 1e6 / rates[-1])
    return {"mpx_per_s": statistics.median(rates), "tilenet ÷ torchgeo": statistics.median(ratios)}


def train(folder: Path, name: str, steps: int, *keys: str) -> dict[str, float]:
    """Medians over the steps of a run."""
    run = ("--images", folder / "train.tif", "--labels", folder / "labels.tif", "--classes", 5)
    network = ("--network.poolings", 1, "--network.convolutions", 1, "--network.base", 4)
    rest = ("--crop_px", 1024, "--batch_size", 2, "--steps", steps, "--output", folder / name)
    arguments = (*run, *network, *rest, "--overwrite", *keys)
    mpiexec(1, "-m", "tilenet", "train", *(str(part) for part in arguments))
    with (folder / name / "history.csv").open() as file:
        rows = list(csv.DictReader(file))[WARM_STEPS:]
    return {
        "step_s": statistics.median(float(row["seconds"]) for row in rows),
        "waiting": statistics.median(
            float(row["read_seconds"]) / float(row["seconds"]) for row in rows
        ),
    }


def training(folder: Path, side: int, steps: int, repeats: int) -> dict[str, Any]:
    """Each way to read, one after another, and again."""
    write_image(folder / "train.tif", side, tiled=True)
    labels = {**GRID, "height": side, "width": side, "count": 1, "dtype": "uint8", "nodata": None}
    with rasterio.open(folder / "labels.tif", "w", **labels) as file:
        file.write(np.random.default_rng(0).integers(0, 5, (1, side, side)).astype(np.uint8))
    ways = {
        "plain": ("--read_ahead", "0"),
        "ahead": ("--read_ahead", "2"),
    }
    found: dict[str, list[dict[str, float]]] = {name: [] for name in ways}
    for _ in range(repeats):
        for name, keys in ways.items():
            found[name].append(train(folder, "run", steps, *keys))
    figures: dict[str, Any] = {}
    for name, some in found.items():
        ratios = [o["step_s"] / p["step_s"] for o, p in zip(some, found["plain"], strict=True)]
        figures[name] = {
            "step_s": statistics.median(one["step_s"] for one in some),
            "waiting": statistics.median(one["waiting"] for one in some),
            "step ÷ plain": statistics.median(ratios),
        }
    return figures


def main() -> None:
    """Measure all and print the report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--torchgeo", metavar="PYTHON", help="a Python with torchgeo")
    given = parser.parse_args()
    side = 4000 if given.quick else 10_000
    figures: dict[str, Any] = {"side_px": side, "own_px": OWN, "halo_px": HALO}
    claims: list[Claim] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for layout, rows, repeats in (("tiles", 2, 5), ("strips", 1, 3)):
            path = folder / f"{layout}.tif"
            write_image(path, side, tiled=layout == "tiles")
            windows = windows_of(side, 1 if given.quick else rows)
            figures[layout] = reads(path, windows, 3 if given.quick else repeats)
            print(layout, figures[layout], file=sys.stderr)
            pairs = [pair for pair in figures[layout] if "÷" in pair]
            claims += [
                at_least(f"in {layout}: {pair}", figures[layout][pair], 0.9) for pair in pairs
            ]
            if layout == "tiles":
                figures["torchgeo"] = with_torchgeo(given.torchgeo, path, windows)
            path.unlink()
        made = training(
            folder, 2000 if given.quick else 4000, *((6, 1) if given.quick else (30, 3))
        )
    figures["training"] = made
    claims += [
        at_most("reading ahead: share of a step that waits", made["ahead"]["waiting"], 0.1),
        at_most("reading ahead: step over step without", made["ahead"]["step ÷ plain"], 1.0),
    ]
    if isinstance(figures["torchgeo"], dict):
        ratio = figures["torchgeo"]["tilenet ÷ torchgeo"]
        claims.append(at_least("in tiles: tilenet ÷ torchgeo", ratio, 1.0))
    report("reading", figures, claims)


if __name__ == "__main__":
    main()
