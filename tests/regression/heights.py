"""Scenes whose labels are numbers, and the reference: plain torch on the whole image."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import rasterio
import torch
import torch.nn.functional as F
from whole_image import Scene, random_scene, run_whole, whole_input

from tilenet.geometry.unet import UNetOptions, unet_layers
from tilenet.model.network import build_network
from tilenet.training.config.keys import NetworkKeys, OptimizerKeys
from tilenet.training.config.run_file import RunFile

SIZE = 157, 211
SEED, STEPS, LR = 5, 3, 0.01
NODATA = -9999.0
LOSSES: dict[str, Callable[..., torch.Tensor]] = {
    "l1": F.l1_loss,
    "l2": F.mse_loss,
    "huber": lambda found, truth: F.huber_loss(found, truth, delta=0.5),
}


@dataclass(frozen=True)
class Heights:
    """A scene and its numbers, (H, W) in float64; NaN where they do not count."""

    scene: Scene
    truth: Any


def heights(folder: Path, *, write: bool, size: tuple[int, int] = SIZE) -> Heights:
    """Random numbers with holes of nodata, NaN and infinity."""
    scene = random_scene(folder, size, 1, write=write)
    values = np.random.default_rng(7).normal(2.0, 3.0, size).astype(np.float32)
    values[scene.classes == 255] = NODATA
    values[10:30, 90:120], values[40, 40:60] = np.nan, np.inf
    if write:
        with rasterio.open(scene.image) as image:
            grid = image.profile | {"count": 1, "dtype": "float32", "nodata": NODATA}
        with rasterio.open(folder / "heights.tif", "w", **grid) as file:
            file.write(values, 1)
    counted = np.isfinite(values) & (values != NODATA) & scene.valid
    return Heights(scene, np.where(counted, values.astype(np.float64), np.nan))


def run_file(folder: Path, scene: Scene, output: str = "run", **more: Any) -> RunFile:
    given: dict[str, Any] = {
        "images": str(scene.image),
        "labels": str(folder / "heights.tif"),
        "task": "regression",
        "classes": ["height"],
        "unit": "m",
        "output": str(folder / output),
        "network": NetworkKeys(poolings=2, base=4),
        "precision": "float64",
        "device": "cpu",
        "seed": SEED,
        "steps": STEPS,
        "optimizer": OptimizerKeys(name="sgd", lr=LR),
    }
    if more.get("loss") == "huber":
        given["huber_delta"] = 0.5
    return RunFile(**(given | more))


def train_whole(of: Heights, loss: str) -> tuple[list[float], dict[str, torch.Tensor], Any]:
    """Losses of the steps, weights afterwards, and the map (H, W)."""
    options = UNetOptions(bands=3, classes=1, poolings=2, base=4)
    network = build_network(unet_layers(options), SEED, torch.float64)
    optimizer = torch.optim.SGD(network.parameters(), LR)
    truth, losses = torch.from_numpy(of.truth), []
    counted, (height, width) = ~truth.isnan(), of.truth.shape
    for _ in range(STEPS):
        optimizer.zero_grad()
        found = network(whole_input(of.scene, options))[0, 0, :height, :width]
        mean = LOSSES[loss](found[counted], truth[counted])
        mean.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        losses.append(float(mean.detach()))
    with torch.no_grad():
        final = run_whole(network, of.scene, options)[0, 0].numpy()
    return losses, network.state_dict(), final
