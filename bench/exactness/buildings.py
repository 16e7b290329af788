"""Buildings on real imagery: the same losses and maps as a plain PyTorch loop.

TILENET_DATA names their folder. `fair_uganda` and `fair_set1` at 0.3 m: trained on the left two
thirds, mapped as a whole, scored on the right third. The reference is a plain loop in one process
that is given the same crops, turned alike, first weights and dropout masks, and knows nothing of
tiles or ranks. First 20 float64 steps of both are compared, then whole float32 runs, whose rounding
grows with the steps: their IoU should differ by less than that of different seeds. Quick:
fair_uganda, 5 steps, one seed, 60 steps.
"""

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

from bench.report import Claim, Found, at_least, at_most, mpiexec
from bench.scenes import history, train
from tilenet.data.crops import crop_places
from tilenet.data.labels.raster import Labels
from tilenet.data.rasters.raster import Raster
from tilenet.data.schedule import CropSchedule
from tilenet.geometry.unet import UNetOptions, unet_layers
from tilenet.mapping.evaluate import confusion_matrix
from tilenet.model.network import build_network
from tilenet.random_keys import key
from tilenet.scores import scores

RANKS, RESOLUTION, CROP_PX, BATCH, LR, STRIDE = 2, 0.3, 192, 4, 1e-3, 16
FILE_STRIDE = 4 * STRIDE  # in pixels of the files, which are four times finer
NETWORK = {"poolings": 4, "base": 16, "norm": "instance"}
# Masks are compared where losses are; runs of a few hundred steps learn less with them (0.44
# instead of 0.53 on fair_uganda), and the yardstick has none.
DROPOUT = {"float64": 0.1, "float32": 0.0}
IMAGES = ("fair_uganda", "fair_set1")
# Another plain loop, one seed, on fair_uganda: 0.48 to 0.60 after 100 to 600 steps.
YARDSTICK = 0.48


@dataclass(frozen=True)
class Data:
    """The image and its labels, split at two thirds of its width."""

    image: str
    train_labels: str
    test_labels: str


def split(source: Path, name: str, folder: Path) -> Data:
    """Write two label rasters: each ignores the other's part."""
    image = str(source / f"{name}_z21_rgb.tif")
    with rasterio.open(source / f"{name}_z21_buildings.tif") as file:
        labels, profile = file.read(1), {**file.profile, "nodata": None}
    column = labels.shape[1] * 2 // 3 // FILE_STRIDE * FILE_STRIDE
    for name, ignored in (("train", slice(column, None)), ("test", slice(None, column))):
        part = labels.copy()
        part[:, ignored] = 255
        with rasterio.open(folder / f"{name}.tif", "w", **profile) as file:
            file.write(part, 1)
    return Data(image, str(folder / "train.tif"), str(folder / "test.tif"))


def with_tilenet(data: Data, folder: Path, seed: int, steps: int, precision: str) -> Path:
    """Train over the ranks; return the run's folder."""
    keys: dict[str, object] = {"images": data.image, "labels": data.train_labels, "classes": 2}
    keys |= {"resolution": RESOLUTION, "crop_px": CROP_PX, "batch_size": BATCH, "steps": steps}
    keys |= {"seed": seed, "precision": precision, "optimizer.lr": LR, "device": "cpu"}
    keys |= {"augment.flips": True, "augment.rotations": True, "mesh.replicas": RANKS}
    keys |= {f"network.{name}": value for name, value in NETWORK.items()}
    keys |= {"network.dropout": DROPOUT[precision]}
    return train(RANKS, {**keys, "output": folder / f"run-{precision}-{seed}"})


def plain_loop(
    data: Data, seed: int, steps: int, precision: str
) -> tuple[list[float], NDArray[np.int64]]:
    """The reference: losses, and the class map of the whole image."""
    dtype, dropout = getattr(torch, precision), DROPOUT[precision]
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
    places = crop_places(cells[None].view(np.uint8), CROP_PX, STRIDE)
    schedule = CropSchedule(seed, BATCH, CROP_PX, ((height, width),), (places,))
    network = build_network(
        unet_layers(UNetOptions(bands=3, classes=2, dropout=dropout, **NETWORK)),  # type: ignore[arg-type]
        seed,
        dtype,
    )
    optimizer = torch.optim.AdamW(network.parameters(), LR, weight_decay=0.0)
    losses = []
    for step in range(steps):
        pixels_of, labels_of = [], []
        for sample in schedule.samples(step):
            at, drawn = sample.region, key(seed, "symmetry", step, sample.number) % 8
            rows, cols = slice(at.row, at.row + CROP_PX), slice(at.col, at.col + CROP_PX)
            pixels_of.append(turned(image[:, rows, cols], drawn))
            labels_of.append(turned(labels[rows, cols], drawn))
        network.mask_key.step, network.mask_key.images = step, tuple(range(BATCH))
        optimizer.zero_grad()
        logits = network(torch.stack(pixels_of))
        loss = F.cross_entropy(logits, torch.stack(labels_of), ignore_index=255)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        losses.append(float(loss.detach()))
    network.eval()
    with torch.no_grad():
        return losses, network(image[None])[0].argmax(dim=0).numpy()


def turned(pixels: torch.Tensor, drawn: int) -> torch.Tensor:
    """One of the square's 8 symmetries of (…, H, W), counted as docs/run-file.md does."""
    pixels = pixels.transpose(-2, -1) if drawn >= 4 else pixels
    return pixels.flip([dim for dim, bit in ((-2, 2), (-1, 1)) if drawn & bit])


def building_iou(data: Data, folder: Path, run: Path | None, found: Any = None) -> float:
    """IoU of buildings on the right third: of a run's map, or of a class map in memory."""
    path = str(folder / "map.tif")
    if run is not None:
        mpiexec(RANKS, "-m", "tilenet", "predict", str(run), data.image, path, "--overwrite")
    else:
        with Raster(data.image, resolution=RESOLUTION) as raster:
            profile: dict[str, Any] = {"height": raster.height, "width": raster.width, "count": 1}
            profile |= {"driver": "GTiff", "dtype": "uint8", "crs": raster.crs}
            with rasterio.open(path, "w", transform=raster.transform, **profile) as file:
                file.write(found.astype(np.uint8), 1)
    iou = scores(confusion_matrix(path, data.test_labels, 255))["iou"]
    return float(iou[1])


def compare(data: Data, folder: Path, seed: int, steps: int) -> dict[str, Any]:
    """A whole float32 run of both; IoU, last loss and CPU minutes."""
    before = _children_seconds()
    run = with_tilenet(data, folder, seed, steps, "float32")
    row: dict[str, Any] = {"seed": seed, "steps": steps}
    row["cpu_minutes"] = (_children_seconds() - before) / 60
    row["iou"] = building_iou(data, folder, run)
    began = time.process_time()
    losses, found = plain_loop(data, seed, steps, "float32")
    row["loop_cpu_minutes"] = (time.process_time() - began) / 60
    row["loop_iou"] = building_iou(data, folder, None, found)
    row["loss"], row["loop_loss"] = history(run, "loss")[0][-1], losses[-1]
    return row


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Means over the seeds, and by how much seeds differ: the standard deviation, of both alike."""
    ious = np.array([[row["iou"], row["loop_iou"]] for row in rows])
    mean, loop_mean = ious.mean(axis=0)
    spread = float(np.sqrt(ious.var(axis=0, ddof=1).mean())) if len(rows) > 1 else None
    return {"mean_iou": float(mean), "mean_loop_iou": float(loop_mean), "spread": spread}


def bench(
    quick: bool, image: str = "both", seeds: tuple[int, ...] = (1, 2, 3), steps: int = 200
) -> Found:
    """Compare losses, then maps, of each image."""
    if "TILENET_DATA" not in os.environ:
        sys.exit("TILENET_DATA must name the folder with fair_uganda_z21_rgb.tif")
    torch.set_num_threads(1)
    compared, names = 20, IMAGES if image == "both" else (image,)
    if quick:
        compared, seeds, steps, names = 5, (1,), 60, IMAGES[:1]
    figures: dict[str, Any] = {}
    claims: list[Claim] = []
    for name in names:
        with tempfile.TemporaryDirectory() as temporary:
            folder = Path(temporary)
            data = split(Path(os.environ["TILENET_DATA"]), name, folder)
            ours = history(with_tilenet(data, folder, 0, compared, "float64"), "loss")[0]
            theirs, _ = plain_loop(data, 0, compared, "float64")
            difference = max(abs(a - b) for a, b in zip(ours, theirs, strict=True))
            rows = [compare(data, folder, seed, steps) for seed in seeds]
        found = summary(rows)
        figures[name] = {"rows": rows, "loss_difference": difference, **found}
        claims.append(at_most(f"{name}: losses of {compared} steps differ by", difference, 1e-10))
        if len(seeds) > 1:
            apart = abs(found["mean_iou"] - found["mean_loop_iou"]) / found["spread"]
            claim = f"{name}: mean IoU differs from the loop's by, in the spread over seeds"
            claims.append(at_most(claim, apart, 1))
        if not quick:
            most = max(row["cpu_minutes"] for row in rows)
            claims.append(at_most(f"{name}: CPU minutes of a run", most, 10))
            if name == "fair_uganda":
                claim = f"{name}: mean IoU of buildings"
                claims.append(at_least(claim, found["mean_iou"], YARDSTICK))
    return figures, claims


def _children_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime
