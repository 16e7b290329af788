"""Images on unlike grids, and what of them is held out."""

from pathlib import Path
from typing import Any

import numpy as np
import rasterio
from mpi4py import MPI
from test_same_as_whole_image import SEED, options_of
from whole_image import IGNORE, Scene, random_scene

from tilenet.data.holdout import HeldOut, choose_held_out
from tilenet.geometry.halo import context_of
from tilenet.geometry.unet import unet_layers
from tilenet.training.config.keys import NetworkKeys
from tilenet.training.config.validation_keys import ValidationKeys

NETWORK = NetworkKeys(poolings=2, convolutions=1, base=4, dropout=0.2)
CONTEXT_PX = context_of(unet_layers(options_of(NETWORK))).context_any_pixel_px
KEYS = ValidationKeys(share=0.15, block_px=33)  # no multiple of the stride: blocks of every phase

GRIDS = [
    ((97, 131), "EPSG:32630", rasterio.Affine(2, 0.1, 5e5, 0.1, -2, 4e6)),
    ((140, 66), "EPSG:4326", rasterio.Affine(3e-6, 0, 8.5, 0, -3e-6, 47.3)),
    ((101, 99), "EPSG:2263", rasterio.Affine(0.5, 0, 9e5, 0, -0.5, 2e5)),
]


def mixed_scenes(folder: Path, comm: MPI.Intracomm) -> list[Scene]:
    """Images on unlike grids, with labels."""
    scenes = []
    for seed, (size, crs, transform) in enumerate(GRIDS):
        scene = random_scene(folder, size, seed, write=False)
        if comm.rank == 0:
            grid = {"crs": crs, "transform": transform, "driver": "GTiff"}
            write(scene.image, scene.pixels, nodata=0, **grid)
            write(scene.labels, scene.classes[None].astype(np.uint8), **grid)
        scenes.append(scene)
    comm.Barrier()
    return scenes


def write(path: Path, values: np.ndarray, **profile: Any) -> None:  # type: ignore[type-arg]
    count, height, width = values.shape
    size = {"count": count, "height": height, "width": width, "dtype": values.dtype}
    with rasterio.open(path, "w", **size, **profile) as file:
        file.write(values)


def held_out(scenes: list[Scene], keys: ValidationKeys) -> HeldOut:
    """The choice, from labels in memory."""
    sizes, side = [scene.valid.shape for scene in scenes], keys.block_px
    labelled = [
        (scene.classes[row : row + side, col : col + side] != IGNORE).any()
        for scene in scenes
        for row in range(0, scene.valid.shape[0], side)
        for col in range(0, scene.valid.shape[1], side)
    ]
    return choose_held_out(np.array(labelled), sizes, side, keys.share, SEED)


def near_blocks(held: HeldOut, image: int, margin: int) -> np.ndarray:  # type: ignore[type-arg]
    """Where an image is held out or near, pixel by pixel."""
    found = np.zeros(held.sizes[image], np.bool_)
    for row, col in np.argwhere(held.chosen[image]) * held.block_px:
        bottom = min(row + held.block_px, found.shape[0]) + margin
        right = min(col + held.block_px, found.shape[1]) + margin
        found[max(0, row - margin) : bottom, max(0, col - margin) : right] = True
    return found
