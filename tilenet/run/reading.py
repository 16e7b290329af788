"""From files to what the network sees: the tiles of a micro-batch, read and standardised."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tilenet.files.label_source import LabelSource
from tilenet.files.network_record import NetworkRecord
from tilenet.files.raster import Raster
from tilenet.files.turned import read_turned
from tilenet.geometry.tiles import Tile, Tiling, owned
from tilenet.model.inputs import standardise
from tilenet.model.radiometry import Radiometry
from tilenet.planning.composition import needs_all_tiles
from tilenet.planning.schedule import Sample
from tilenet.run.file import RunFile

__all__ = ["Part", "TileReader", "Work"]


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
