"""From files to what the network sees: the tiles of a micro-batch, read and standardised.

Read what a tile of a turned image shows: pixels and labels.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tilenet.data.labels.source import LabelSource
from tilenet.data.rasters.raster import Pixels, Raster
from tilenet.data.schedule import Sample
from tilenet.geometry.tiles import Tile, Tiling, owned
from tilenet.geometry.windows import Symmetry, Window
from tilenet.model.inputs import Radiometry, standardise
from tilenet.planning.compatibility import needs_all_tiles
from tilenet.storage.network_json import NetworkRecord
from tilenet.training.config import RunFile

__all__ = ["Part", "TileReader", "Work", "read_turned"]


def read_turned(
    image: Raster, labels: LabelSource, tile: Tile, region: Window, symmetry: Symmetry
) -> tuple[Pixels, NDArray[np.int64]]:
    """Pixels of what a tile reads, and labels of what it owns, (H, W).

    Args:
        tile: Of the turned region.
        region: Pixels of the image that count as the image.
        symmetry: How they are turned.

    Raises:
        TilenetError: A file cannot be read there.
    """
    size = region.height, region.width
    pixels = image.read(symmetry.source(tile.read, *size), region)
    own = labels.read(symmetry.source(tile.own, *size), region)
    turned = Pixels(symmetry.turn(pixels.values), symmetry.turn(pixels.valid))
    # torch takes no views that run backwards.
    return turned, np.ascontiguousarray(symmetry.turn(own))


@dataclass(frozen=True)
class Work:
    """A tile to be computed.

    Attributes:
        sample: The image or crop.
        tiling: How that is cut.
        number: The tile's, row by row.
    """

    sample: Sample
    tiling: Tiling
    number: int

    @property
    def tile(self) -> Tile:
        """Its windows."""
        return self.tiling.tiles[self.number]


@dataclass(frozen=True)
class Part:
    """A tile that was read, a sample of a micro-batch."""

    work: Work
    image: Tensor
    labels: Tensor


class TileReader:
    """Reads tiles as a function of the step and the tile alone, so it may do so at any time.

    Args:
        files: Images and their labels. Between threads they take turns by themselves.
        dtype: Of the network's parameters.
    """

    def __init__(
        self,
        run: RunFile,
        record: NetworkRecord,
        files: tuple[Sequence[Raster], Sequence[LabelSource]],
        dtype: torch.dtype,
    ) -> None:
        self.run, self.record, self.dtype = run, record, dtype
        self.images, self.labels = files
        augment = run.augment
        self.radiometry = Radiometry(augment.brightness, augment.contrast, augment.noise)
        self.together = needs_all_tiles(record.layers, run.halo_mode)

    def read(self, stack: tuple[int, Sequence[Work]]) -> list[Part]:
        """Pixels and labels of a step's micro-batch; nothing where no own pixel is labelled.

        Args:
            stack: The step's number, from 0, and tiles.

        Raises:
            TilenetError: A file cannot be read there.
        """
        step, work = stack
        return [part for one in work if (part := self._read_tile(step, one)) is not None]

    def _read_tile(self, step: int, work: Work) -> Part | None:
        sample, tile = work.sample, work.tile
        files = self.images[sample.image], self.labels[sample.image]
        pixels, labels = read_turned(*files, tile, sample.region, sample.symmetry)
        labels[~owned(pixels.valid, tile)] = self.run.ignore_index
        if (labels == self.run.ignore_index).all() and not self.together:
            return None
        mean, std = self.record.mean, self.record.std
        image = standardise(pixels.values, pixels.valid, mean, std, self.dtype)
        key = self.run.seed, step, sample.number
        self.radiometry.alter(image, pixels.valid, tile.read, sample.size, *key)
        return Part(work, image, torch.from_numpy(labels)[None])
