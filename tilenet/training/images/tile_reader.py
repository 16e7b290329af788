"""Read the pixels and labels of tiles, turned and altered, as functions of step and tile alone."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from tilenet.data.labels.source import LabelSource
from tilenet.data.rasters.raster import Pixels, Raster
from tilenet.geometry.symmetries import Symmetry
from tilenet.geometry.tiles import Tile, owned
from tilenet.geometry.windows import Window
from tilenet.model.dtypes import parameter_dtype
from tilenet.model.inputs import standardise
from tilenet.storage.network_json import NetworkRecord
from tilenet.training.images.radiometry import Radiometry
from tilenet.training.images.tile_task import ReadTile, TileTask


class TileReader:
    """Reads tiles as a function of the step and the tile alone, so it may do so at any time.

    Args:
        images: Files of the images, which several threads may read.
        labels: Labels of the images.
        record: Record of the network, whose statistics standardise pixels.
        radiometry: Random changes of pixel values.
        seed: Seed of these changes.
        keep_unlabelled: Whether tiles without an own labelled pixel are read too.
    """

    def __init__(
        self,
        images: Sequence[Raster],
        labels: Sequence[LabelSource],
        record: NetworkRecord,
        radiometry: Radiometry,
        seed: int,
        *,
        keep_unlabelled: bool,
    ) -> None:
        self.images, self.labels, self.record = images, labels, record
        self.radiometry, self.seed = radiometry, seed
        self.keep_unlabelled = keep_unlabelled
        self.dtype = parameter_dtype(record.precision)

    def read(self, stack: tuple[int, Sequence[TileTask]]) -> list[ReadTile]:
        """Pixels and labels of a step's micro-batch; nothing where no own pixel is labelled.

        Args:
            stack: The step's number, from 0, and tiles.

        Raises:
            TilenetError: A file cannot be read there.
        """
        step, work = stack
        return [part for tile in work if (part := self._read_tile(step, tile)) is not None]

    def _read_tile(self, step: int, work: TileTask) -> ReadTile | None:
        sample, tile = work.sample, work.tile
        files = self.images[sample.image], self.labels[sample.image]
        pixels, labels = read_turned(*files, tile, sample.region, sample.symmetry)
        source = self.labels[sample.image]
        labels[~owned(pixels.valid, tile)] = source.uncounted
        if not (source.counted(labels).any() or self.keep_unlabelled):
            return None
        mean, std = self.record.mean, self.record.std
        image = standardise(pixels.values, pixels.valid, mean, std, self.dtype)
        key = self.seed, step, sample.number
        self.radiometry.alter(image, pixels.valid, tile.read, sample.size, *key)
        return ReadTile(work, image, torch.from_numpy(narrow(labels))[None])


def narrow(labels: NDArray[Any]) -> NDArray[Any]:
    """Integers in the smallest dtype that holds them, to copy fewer bytes to the device."""
    kinds = (np.uint8, np.int16) if labels.dtype.kind == "i" and labels.size else ()
    least, most = (labels.min(), labels.max()) if kinds else (0, 0)
    fits = (kind for kind in kinds if np.iinfo(kind).min <= least and most <= np.iinfo(kind).max)
    return labels.astype(next(fits, labels.dtype), copy=False)


def read_turned(
    image: Raster, labels: LabelSource, tile: Tile, region: Window, symmetry: Symmetry
) -> tuple[Pixels, NDArray[Any]]:
    """Pixels of the window that a tile reads, and labels (H, W) of the window that it owns.

    Args:
        tile: Tile of the turned region.
        region: Pixels of the image that count as the image.
        symmetry: How they are turned.

    Raises:
        TilenetError: A file cannot be read there.
    """
    size = region.height, region.width
    pixels = image.read(symmetry.source(tile.read, *size), region)
    own = labels.targets(symmetry.source(tile.own, *size), region)
    turned = Pixels(symmetry.turn(pixels.values), symmetry.turn(pixels.valid))
    # torch takes no views that run backwards.
    return turned, np.ascontiguousarray(symmetry.turn(own))
