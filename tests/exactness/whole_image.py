"""What the reference is given: whole images in one process, without tiles or ranks.

Pixels, statistics and extension are written again; whole_recipe.py trains on them.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import rasterio
import torch

from tilenet.geometry.unet import UNetOptions
from tilenet.model.network import Network

IGNORE = 255


@dataclass(frozen=True)
class Scene:
    """An image of random pixels with labels, on disk and in memory."""

    image: Path
    labels: Path
    pixels: np.ndarray[Any, np.dtype[np.uint16]]
    valid: np.ndarray[Any, np.dtype[np.bool_]]
    classes: np.ndarray[Any, np.dtype[np.int64]]
    statistics: tuple[Any, Any] | None = None  # mean and std per band; None: this scene's own


def random_scene(
    folder: Path, size: tuple[int, int], seed: int, *, write: bool, shares: tuple[float, ...] = ()
) -> Scene:
    """Random pixels with a hole of nodata, random labels with a hole of 255.

    Args:
        shares: Of the classes; left out: as frequent as one another.
    """
    rng = np.random.default_rng(seed)
    height, width = size
    pixels = rng.integers(1, 4000, (3, height, width)).astype(np.uint16)
    pixels[:, height // 5 : height // 3, width // 4 : width // 2] = 0
    classes = rng.choice(3, size, p=shares) if shares else rng.integers(0, 3, size)
    classes = classes.astype(np.int64)
    classes[-height // 4 :, : width // 3] = IGNORE
    image, labels = folder / f"image{seed}.tif", folder / f"labels{seed}.tif"
    if write:
        grid = {"height": height, "width": width, "crs": "EPSG:32630", "driver": "GTiff"}
        grid["transform"] = rasterio.Affine(2, 0.1, 5e5, 0.1, -2, 4e6)
        with rasterio.open(image, "w", count=3, dtype="uint16", nodata=0, **grid) as file:
            file.write(pixels)
        with rasterio.open(labels, "w", count=1, dtype="uint8", **grid) as file:
            file.write(classes.astype(np.uint8), 1)
    return Scene(image, labels, pixels, (pixels != 0).any(axis=0), classes)


def whole_input(scene: Scene, options: UNetOptions) -> torch.Tensor:
    """The standardised image, extended by reflection, (1, bands, H, W) in float64.

    With *same* padding below and right to a multiple of the total stride; for an unpadded network
    by what it loses on each side, and on until every pooling halves an even size.
    """
    return extended(standardised(scene), options)


def standardised(scene: Scene) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Pixels less their mean, in standard deviations, (bands, H, W); 0 without data."""
    inside = scene.pixels[:, scene.valid].astype(np.float64)
    mean, std = scene.statistics or (inside.mean(axis=1), inside.std(axis=1))
    image = (scene.pixels - mean[:, None, None]) / std[:, None, None]
    found: np.ndarray[Any, np.dtype[np.float64]] = np.where(scene.valid, image, 0.0)
    return found


def extended(image: np.ndarray[Any, np.dtype[np.float64]], options: UNetOptions) -> torch.Tensor:
    """An image (bands, H, W), extended as above, (1, bands, H, W)."""
    height, width = image.shape[1:]
    stride = 2**options.poolings
    before, after = 0, [-size % stride for size in (height, width)]
    if options.padding == "valid":
        # the paper's formula, L = poolings + 1
        before = (3 * stride // 2 - 1) * 2 * options.convolutions
        after = [_legal(size + 2 * before, options) - size - before for size in (height, width)]
    edges = ((0, 0), (before, after[0]), (before, after[1]))
    return torch.from_numpy(np.pad(image, edges, mode="reflect"))[None]


def _legal(size: int, options: UNetOptions) -> int:
    """Smallest size from `size` on that an unpadded network takes."""
    rest = size
    for _ in range(options.poolings):
        rest -= 2 * options.convolutions
        if rest % 2 or rest < 2:
            return _legal(size + 1, options)
        rest //= 2
    return size


@dataclass(frozen=True)
class Outcome:
    """Losses of the steps, final weights, and logits of the final network."""

    losses: list[float]
    weights: dict[str, torch.Tensor]
    logits: np.ndarray[Any, np.dtype[np.float64]]


def dice_of(logits: torch.Tensor, target: np.ndarray[Any, np.dtype[np.int64]]) -> torch.Tensor:
    """The mean over classes of 1 − (2·both + 1) / (found + truth + 1), over labelled pixels."""
    counted = torch.from_numpy(target != IGNORE)
    scores = torch.zeros((), dtype=torch.float64)
    for label, found in enumerate(logits.softmax(0)):
        truth = torch.from_numpy(target == label).double()
        both = (found * truth)[counted].sum()
        scores = scores + (2 * both + 1) / (found[counted].sum() + truth[counted].sum() + 1)
    return 1 - scores / len(logits)


def run_whole(network: Network, scene: Scene, options: UNetOptions) -> torch.Tensor:
    height, width = scene.valid.shape
    dtype = next(network.parameters()).dtype
    logits: torch.Tensor = network(whole_input(scene, options).to(dtype))
    return logits[:, :, :height, :width]
