"""Buildings on real imagery: the same losses and maps as a plain PyTorch loop.

    TILENET_DATA=… python bench/buildings.py [--quick]

`fair_uganda` at 0.3 m: trained on the left two thirds, mapped as a whole, scored on the right
third. The reference is a plain loop in one process that is given the same crops, first weights and
dropout masks and knows nothing of tiles or ranks. First 20 float64 steps of both are compared, then
whole float32 runs over three seeds (quick: 5 steps, one seed, 60 steps).
"""

import argparse
import csv
import os
import resource
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import rasterio
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from report import Claim, at_least, at_most, mpiexec, report

from tilenet.confusion import scores
from tilenet.evaluate import confusion_matrix
from tilenet.files.labels import Labels
from tilenet.files.raster import Raster
from tilenet.geometry.networks import UNetOptions, unet_layers
from tilenet.model.network import build_network
from tilenet.planning.schedule import CropSchedule, crop_places

RANKS, RESOLUTION, CROP_PX, BATCH, LR, STRIDE = 2, 0.3, 192, 4, 1e-3, 16
# The yardstick's instance norm. Each crop is one tile and so is the map, so that the statistics
# of a tile are those of the crop or the image, which is what the plain loop computes.
NETWORK = {"poolings": 4, "base": 16, "dropout": 0.1, "norm": "instance", "norm_scope": "tile"}


@dataclass(frozen=True)
class Data:
    """The image and its labels, split at two thirds of its width."""

    image: str
    train_labels: str
    test_labels: str


def split(source: Path, folder: Path) -> Data:
    """Write two label rasters: each ignores the other's part."""
    with rasterio.open(source / "fair_uganda_z21_buildings.tif") as file:
        labels, profile = file.read(1), {**file.profile, "nodata": None}
    column = labels.shape[1] * 2 // 3
    for name, ignored in (("train", slice(column, None)), ("test", slice(None, column))):
        part = labels.copy()
        part[:, ignored] = 255
        with rasterio.open(folder / f"{name}.tif", "w", **profile) as file:
            file.write(part, 1)
    image = str(source / "fair_uganda_z21_rgb.tif")
    return Data(image, str(folder / "train.tif"), str(folder / "test.tif"))


def with_tilenet(data: Data, folder: Path, seed: int, steps: int, precision: str) -> Path:
    """Train over the ranks; return the run's folder."""
    run = folder / f"run-{precision}-{seed}"
    values = {
        "images": data.image,
        "labels": data.train_labels,
        "classes": 2,
        "resolution": RESOLUTION,
        "crop_px": CROP_PX,
        "batch_size": BATCH,
        "steps": steps,
        "seed": seed,
        "precision": precision,
        "optimizer.lr": LR,
        "output": run,
        "device": "cpu",
        "mesh.replicas": RANKS,
        **{f"network.{name}": value for name, value in NETWORK.items()},
    }
    mpiexec(RANKS, "-m", "tilenet", "train", *(f"--{k}={v}" for k, v in values.items()))
    return run


def plain_loop(
    data: Data, seed: int, steps: int, dtype: torch.dtype
) -> tuple[list[float], NDArray[np.int64]]:
    """The reference: losses, and the class map of the whole image."""
    with Raster(data.image, resolution=RESOLUTION) as raster:
        pixels = raster.read(raster.whole).values.astype(np.float64)
        with Labels(data.train_labels, raster, 255) as file:
            labels = torch.from_numpy(file.read(raster.whole))
    mean, std = pixels.mean(axis=(1, 2)), pixels.std(axis=(1, 2))
    image = torch.from_numpy((pixels - mean[:, None, None]) / std[:, None, None]).to(dtype)
    height, width = labels.shape
    labelled = (labels != 255).numpy()
    cells = np.asarray(
        labelled.reshape(height // STRIDE, STRIDE, width // STRIDE, STRIDE).any(axis=(1, 3))
    )
    places = crop_places(cells, CROP_PX, STRIDE)
    schedule = CropSchedule(seed, BATCH, CROP_PX, ((height, width),), (places,))
    network = build_network(
        unet_layers(UNetOptions(bands=3, classes=2, **NETWORK)),  # type: ignore[arg-type]
        seed,
        dtype,
    )
    optimizer = torch.optim.AdamW(network.parameters(), LR, weight_decay=0.0)
    losses = []
    for step in range(steps):
        crops = [s.region for s in schedule.samples(step)]
        parts = [np.s_[c.row : c.row + c.height, c.col : c.col + c.width] for c in crops]
        network.mask_key.step, network.mask_key.images = step, tuple(range(BATCH))
        optimizer.zero_grad()
        logits = network(torch.stack([image[:, rows, cols] for rows, cols in parts]))
        loss = F.cross_entropy(logits, torch.stack([labels[p] for p in parts]), ignore_index=255)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        losses.append(float(loss.detach()))
    network.eval()
    with torch.no_grad():
        return losses, network(image[None])[0].argmax(dim=0).numpy()


def losses_of(run: Path) -> list[float]:
    """The history's losses."""
    with (run / "history.csv").open() as file:
        return [float(row["loss"]) for row in csv.DictReader(file)]


def building_iou(data: Data, folder: Path, run: Path | None, found: Any = None) -> float:
    """IoU of buildings on the right third: of a run's map, or of a class map in memory."""
    path = str(folder / "map.tif")
    if run is not None:
        more = ("--tile", "1024", "--overwrite")
        mpiexec(RANKS, "-m", "tilenet", "predict", str(run), data.image, path, *more)
    else:
        with Raster(data.image, resolution=RESOLUTION) as raster:
            profile: dict[str, Any] = {"height": raster.height, "width": raster.width, "count": 1}
            profile |= {"driver": "GTiff", "dtype": "uint8", "crs": raster.crs}
            with rasterio.open(path, "w", transform=raster.transform, **profile) as file:
                file.write(found.astype(np.uint8), 1)
    iou = scores(confusion_matrix(path, data.test_labels, 255))["iou"]
    return float(iou[1])


def main() -> None:
    """Compare losses, then maps."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    quick = parser.parse_args().quick
    if "TILENET_DATA" not in os.environ:
        sys.exit("TILENET_DATA must name the folder with fair_uganda_z21_rgb.tif")
    torch.set_num_threads(1)
    compared, seeds, steps = (5, [1], 60) if quick else (20, [1, 2, 3], 200)
    rows = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        data = split(Path(os.environ["TILENET_DATA"]), folder)
        ours = losses_of(with_tilenet(data, folder, 0, compared, "float64"))
        theirs, _ = plain_loop(data, 0, compared, torch.float64)
        difference = max(abs(a - b) for a, b in zip(ours, theirs, strict=True))
        print(f"{compared} float64 steps: losses differ by at most {difference:.1e}")
        for seed in seeds:
            before = _children_seconds()
            run = with_tilenet(data, folder, seed, steps, "float32")
            row: dict[str, Any] = {"seed": seed, "steps": steps}
            row["cpu_minutes"] = (_children_seconds() - before) / 60
            row["iou"] = building_iou(data, folder, run)
            began = time.process_time()
            losses, found = plain_loop(data, seed, steps, torch.float32)
            row["loop_cpu_minutes"] = (time.process_time() - began) / 60
            row["loop_iou"] = building_iou(data, folder, None, found)
            row["loss"], row["loop_loss"] = losses_of(run)[-1], losses[-1]
            rows.append(row)
            print(
                f"seed {seed}: IoU {row['iou']:.3f} ({row['cpu_minutes']:.1f} CPU minutes), "
                f"plain loop {row['loop_iou']:.3f} ({row['loop_cpu_minutes']:.1f})",
                flush=True,
            )
    mean, loop_mean = (float(np.mean([row[key] for row in rows])) for key in ("iou", "loop_iou"))
    claims: list[Claim] = [at_most(f"losses of {compared} steps differ by", difference, 1e-10)]
    if not quick:
        claims += [
            at_most("mean IoU differs from the loop's by", abs(mean - loop_mean), 0.03),
            at_least("mean IoU of buildings", mean, 0.45),
            at_most("CPU minutes of a run", max(row["cpu_minutes"] for row in rows), 10),
        ]
    report("buildings", {"rows": rows, "loss_difference": difference}, claims)


def _children_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


if __name__ == "__main__":
    main()
