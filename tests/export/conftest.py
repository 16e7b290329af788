"""Runs to export, trained for two steps in float64."""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import rasterio
import torch
from numpy.typing import NDArray
from scenes import KEYS, Net, write_scene
from torch import nn

import tilenet


class Pooled(Net):
    """With an average of the whole image."""

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        found = super().forward(image)
        mean = nn.functional.adaptive_avg_pool2d(found, 1)
        return found + nn.functional.interpolate(mean, found.shape[2:], mode="bilinear")


class Narrow(Net):
    """Of which an image of 6 px leaves one cell inside."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.deep = nn.Conv2d(2, 6, 2, stride=2), nn.Conv2d(6, 6, 3)
        self.head = nn.ConvTranspose2d(6, 3, 3)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        inside = self.deep(torch.relu(self.stem(image)))
        found: torch.Tensor = nn.functional.interpolate(self.head(inside), scale_factor=2)
        return found


WINDOW = 24
ATTENDING = {"module": "attending:network", "options": {"window_px": WINDOW}}
WAYS: dict[str, dict[str, Any]] = {
    "unet": {"network": {"poolings": 2, "base": 4}},
    "unpadded": {"network": {"poolings": 1, "base": 4, "padding": "valid"}},
    "instance": {"network": {"poolings": 1, "base": 4, "norm": "instance"}},
    "own": {"net": Net},
    "pooled": {"net": Pooled},
    "narrow": {"net": Narrow},
    "windows": {
        "network": ATTENDING,
        "halo_mode": "windows",
        "crop_px": WINDOW,
        "bands": [1, 2, 3],  # of the image twice
    },
}


@pytest.fixture(scope="session")
def run(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of a run of one of `WAYS`; next to it lies its image, i.tif."""
    folder = tmp_path_factory.mktemp("runs")
    write_scene(folder)

    @cache
    def made(way: str) -> Path:
        torch.manual_seed(5)
        keys = {**KEYS, "crop_px": 64, "steps": 2, "validation": None} | WAYS[way]
        image = str(folder / "i.tif")
        image = f"{image}+{image}" if way == "windows" else image
        keys |= {"images": image, "labels": str(folder / "l.tif")}
        net: nn.Module | None = keys.pop("net")() if "net" in keys else None
        tilenet.train(net, output=folder / way, **keys)
        return folder / way

    return made


@pytest.fixture
def pixels(run: Callable[[str], Path]) -> NDArray[Any]:
    """A part of the runs' image, (2, 200, 304) of uint16."""
    with rasterio.open(run("unet").with_name("i.tif")) as file:
        found: NDArray[Any] = file.read()[:, :200, :304]
    return found
