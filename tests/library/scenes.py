"""A scene, a module and keys, for programs that call the library."""

from pathlib import Path
from typing import Any

import numpy as np
import rasterio
import torch
from torch import nn

SIZE = 203, 317


class Net(nn.Module):
    """Strided, with a skip; looks 4 px around."""

    def __init__(self, bands: int = 2, classes: int = 3) -> None:
        super().__init__()
        self.stem = nn.Conv2d(bands, 6, 5, padding=2, stride=2)
        self.head = nn.Conv2d(6, classes, 3, padding=1)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.stem(image))
        size = image.shape[-2:]
        found: torch.Tensor = nn.functional.interpolate(self.head(x), size, mode="nearest")
        return found


def write_scene(folder: Path) -> None:
    """i.tif, and l.tif with labels in three classes and some that do not count."""
    rng = np.random.default_rng(3)
    grid: dict[str, Any] = {"driver": "GTiff", "height": SIZE[0], "width": SIZE[1]}
    grid |= {"crs": "EPSG:32630", "transform": rasterio.Affine(2, 0, 5e5, 0, -2, 4e6)}
    labels = rng.integers(0, 3, (1, *SIZE)).astype(np.uint8)
    labels[:, 30:50, 60:200] = 255
    for name, values in (
        ("i.tif", rng.integers(1, 4000, (2, *SIZE)).astype(np.uint16)),
        ("l.tif", labels),
    ):
        kind = {"count": len(values), "dtype": values.dtype.name}
        with rasterio.open(folder / name, "w", **grid, **kind) as file:
            file.write(values)


KEYS: dict[str, Any] = {"images": "i.tif", "labels": "l.tif", "classes": 3, "steps": 3}
KEYS |= {"precision": "float64", "optimizer": {"lr": 0.01}}
KEYS |= {"validation": {"share": 0.2, "block_px": 64}}
