"""How fast are pixels read, and how long do steps wait for them?

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

import os
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import rasterio
from rasterio.windows import Window as FileWindow

from bench.report import Claim, Found, at_least, at_most
from bench.scenes import history, train, write_random, write_rows
from tilenet.data.rasters.raster import Raster
from tilenet.geometry.halo_rule import HaloRule
from tilenet.geometry.tiles import Cut, cut
from tilenet.geometry.windows import Window

OWN, HALO, BANDS = 1024, 96, 4
WARM_STEPS = 2
DEFLATE: dict[str, Any] = {"compress": "deflate", "zlevel": 1}


def write_photograph(path: Path, side: int, *, tiled: bool) -> None:
    """Patches of 16 px with some noise, as compressible as a photograph."""
    rng = np.random.default_rng(side)

    def made(rows: int) -> Any:
        coarse = rng.integers(1000, 3000, (BANDS, -(-rows // 16), -(-side // 16)), np.uint16)
        values = coarse.repeat(16, 1).repeat(16, 2)[:, :rows, :side]
        return values + rng.integers(0, 64, values.shape, np.uint16)

    layout = {} if tiled else {"strips": True, "blockysize": 8}
    write_rows(path, (BANDS, side, side), "uint16", made, nodata=0, **DEFLATE, **layout)


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


def with_torchgeo(python: str, path: Path, windows: list[Window]) -> Any:
    """Million pixels per second and its ratio to tilenet's, or why there are none."""
    if not python:
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


def steps_of(folder: Path, steps: int, ahead: int) -> dict[str, float]:
    """Medians over the steps of a run."""
    keys: dict[str, object] = {"images": folder / "train.tif", "labels": folder / "labels.tif"}
    keys |= {"classes": 5, "network.poolings": 1, "network.convolutions": 1, "network.base": 4}
    keys |= {"crop_px": 1024, "batch_size": 2, "steps": steps, "read_ahead": ahead}
    run = train(1, {**keys, "output": folder / "run"})
    seconds, reads = (some[WARM_STEPS:] for some in history(run, "seconds", "read_seconds"))
    waits = (read / whole for read, whole in zip(reads, seconds, strict=True))
    return {"step_s": statistics.median(seconds), "waiting": statistics.median(waits)}


def training(folder: Path, side: int, steps: int, repeats: int) -> dict[str, Any]:
    """Each way to read, one after another, and again."""
    write_photograph(folder / "train.tif", side, tiled=True)
    strips = {"strips": True, **DEFLATE}
    write_random(folder / "labels.tif", (1, side, side), "uint8", (0, 5), **strips)
    ways = {"plain": 0, "ahead": 2}
    found: dict[str, list[dict[str, float]]] = {name: [] for name in ways}
    for _ in range(repeats):
        for name, ahead in ways.items():
            found[name].append(steps_of(folder, steps, ahead))
    figures: dict[str, Any] = {}
    for name, some in found.items():
        ratios = [o["step_s"] / p["step_s"] for o, p in zip(some, found["plain"], strict=True)]
        figures[name] = {
            "step_s": statistics.median(one["step_s"] for one in some),
            "waiting": statistics.median(one["waiting"] for one in some),
            "step ÷ plain": statistics.median(ratios),
        }
    return figures


def bench(quick: bool, torchgeo: str = "") -> Found:
    """Read, and train."""
    side = 4000 if quick else 10_000
    figures: dict[str, Any] = {"side_px": side, "own_px": OWN, "halo_px": HALO}
    claims: list[Claim] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for layout, rows, repeats in (("tiles", 2, 5), ("strips", 1, 3)):
            path = folder / f"{layout}.tif"
            write_photograph(path, side, tiled=layout == "tiles")
            windows = windows_of(side, 1 if quick else rows)
            figures[layout] = reads(path, windows, 3 if quick else repeats)
            pairs = [pair for pair in figures[layout] if "÷" in pair]
            claims += [
                at_least(f"in {layout}: {pair}", figures[layout][pair], 0.9) for pair in pairs
            ]
            if layout == "tiles":
                figures["torchgeo"] = with_torchgeo(torchgeo, path, windows)
            path.unlink()
        made = training(folder, 2000 if quick else 4000, *((6, 1) if quick else (30, 3)))
    figures["training"] = made
    claims += [
        at_most("reading ahead: share of a step that waits", made["ahead"]["waiting"], 0.1),
        at_most("reading ahead: step over step without", made["ahead"]["step ÷ plain"], 1.0),
    ]
    if isinstance(figures["torchgeo"], dict):
        ratio = figures["torchgeo"]["tilenet ÷ torchgeo"]
        claims.append(at_least("in tiles: tilenet ÷ torchgeo", ratio, 1.0))
    return figures, claims
