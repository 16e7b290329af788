"""What each rank computes, step after step, and what the network sees of it.

A step's images or crops are cut into tiles; a rank takes those of its place in the mesh, reads them
and standardises their pixels.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import chain
from math import prod
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tilenet.data.crop_places import crop_places
from tilenet.data.crops import holds_labels
from tilenet.data.labels.source import LabelSource
from tilenet.data.rasters.raster import Pixels, Raster
from tilenet.data.read_ahead import ReadAhead
from tilenet.data.schedule import CropSchedule, ImageSchedule, Sample
from tilenet.geometry.symmetries import Symmetry
from tilenet.geometry.tiles import Tile, Tiling, owned
from tilenet.geometry.windows import Window
from tilenet.model.choices import parameter_dtype
from tilenet.model.inputs import standardise
from tilenet.model.radiometry import Radiometry
from tilenet.model.upload import pinned
from tilenet.planning.compatibility import stacks
from tilenet.planning.mesh import tiles_of
from tilenet.storage.network_json import NetworkRecord
from tilenet.training.config.run_file import RunFile
from tilenet.training.images.open import RunImages
from tilenet.training.setup import RunPlan
from tilenet.training.swap import Load

__all__ = ["RankWork", "ReadTile", "RunData", "TileReader", "Work", "narrow", "read_turned"]


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
class ReadTile:
    """A tile that was read, a sample of a micro-batch.

    Attributes:
        work: Which tile it is.
        image: Standardised, of what it reads, (1, bands, H, W).
        labels: Of what it owns, (1, h, w), whole numbers of any width; of a regression float64.
    """

    work: Work
    image: Tensor
    labels: Tensor

    @property
    def pinned(self) -> "ReadTile":
        """The same in pinned memory."""
        return replace(self, image=pinned(self.image), labels=pinned(self.labels))


class RankWork:
    """A rank's share of the steps of a run: a function of its place in the mesh and of the step.

    Args:
        plan: How the run is laid out.
        schedule: Which images or crops each step sees.
        sizes: Height and width of each image.
        classes_in_cells: For each image the classes that each grid cell holds, see `Survey`.
        rank: Number of the rank.
    """

    def __init__(
        self,
        plan: RunPlan,
        schedule: ImageSchedule | CropSchedule,
        sizes: tuple[tuple[int, int], ...],
        classes_in_cells: tuple[NDArray[np.uint8], ...],
        rank: int,
    ) -> None:
        self._plan, self._schedule = plan, schedule
        self._sizes, self._classes_in_cells = sizes, classes_in_cells
        self._place = plan.mesh.place(rank)
        self._tiling = lru_cache(maxsize=64)(plan.tiling)

    def samples(self, step: int) -> tuple[Sample, ...]:
        """Those that this rank's replica computes; steps count from 0."""
        return self._schedule.samples(step)[self._place.replica :: self._plan.mesh.replicas]

    def micro_batches(self, step: int) -> list[list[Work]]:
        """This rank's tiles of a step, but for those that hold no labelled pixel."""
        return self._stacks([one for one in self._tiles(self.samples(step)) if self._counts(one)])

    def reads(
        self, reader: "TileReader", first: int, last: int, ahead: int, *, pin: bool = False
    ) -> ReadAhead[tuple[int, list[Work]], list["ReadTile"]]:
        """This rank's micro-batches of the steps from `first` to `last`, one after another.

        Args:
            ahead: Micro-batches that a thread reads while the one before is computed.
            pin: Whether they are for a GPU, to which pinned memory is sent without waiting.
        """
        work = ((step, one) for step in range(first, last) for one in self.micro_batches(step))

        def read(stack: tuple[int, list[Work]]) -> list[ReadTile]:
            found = reader.read(stack)
            return [one.pinned for one in found] if pin else found

        return ReadAhead(read, work, ahead)

    def loads(self) -> list[Load]:
        """What this rank computes at a time, at the most, in a step of images of each size."""
        most = self._plan.crop_px or max(max(size) for size in self._sizes)
        sizes = {(min(most, size[0]), min(most, size[1])) for size in self._sizes}
        # Each in place of those of the first step, which need not be the largest.
        return [
            self._load([replace(one, region=Window(0, 0, *size)) for one in self.samples(0)])
            for size in sorted(sizes)
        ]

    def _load(self, samples: Sequence[Sample]) -> Load:
        # Images that are turned in later steps have tiles of other shapes.
        turns = self._schedule.symmetries
        sizes = {turn.size(*one.size) for one in samples for turn in turns}
        tilings = [self._tiling(*size) for size in sizes]
        tiles = [(max(s.read for s in t.rows), max(s.read for s in t.cols)) for t in tilings]
        together = self._stacks(self._tiles(samples))
        return Load(
            tile=max(tiles, key=prod, default=(1, 1)),
            stacked=max((len(stack) for stack in together), default=1),
            micro_batches=min(max(len(together), 1), self._plan.micro_batches),
        )

    def _tiles(self, samples: Sequence[Sample]) -> list[Work]:
        mesh = self._plan.mesh
        tilings = [(sample, self._tiling(*sample.size)) for sample in samples]
        return [
            Work(sample, tiling, number)
            for sample, tiling in tilings
            for number in tiles_of(self._place, mesh, tiling.grid)
        ]

    def _stacks(self, work: list[Work]) -> list[list[Work]]:
        found = stacks(self._plan.record.layers, work, [one.sample.number for one in work])
        each = self._plan.merged
        return [list(chain(*found[at : at + each])) for at in range(0, len(found), each)]

    def _counts(self, work: Work) -> bool:
        """Whether a tile may hold labelled pixels, or is needed all the same."""
        sample = work.sample
        place = work.tile.own, sample.region, sample.symmetry
        cells = self._classes_in_cells[sample.image]
        return self._plan.needs_all_tiles or holds_labels(*place, cells, self._plan.cell_px)


class TileReader:
    """Reads tiles as a function of the step and the tile alone, so it may do so at any time.

    Args:
        images: Files of the images. Between threads they take turns by themselves.
        labels: Their labels.
        record: The network's: what standardises pixels.
        radiometry: How pixels are altered.
        seed: Seed of these alterations.
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

    def read(self, stack: tuple[int, Sequence[Work]]) -> list[ReadTile]:
        """Pixels and labels of a step's micro-batch; nothing where no own pixel is labelled.

        Args:
            stack: The step's number, from 0, and tiles.

        Raises:
            TilenetError: A file cannot be read there.
        """
        step, work = stack
        return [part for one in work if (part := self._read_tile(step, one)) is not None]

    def _read_tile(self, step: int, work: Work) -> ReadTile | None:
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
    """Whole numbers in the fewest bytes that hold them: so many go to the device."""
    kinds = (np.uint8, np.int16) if labels.dtype.kind == "i" and labels.size else ()
    least, most = (labels.min(), labels.max()) if kinds else (0, 0)
    fits = (one for one in kinds if np.iinfo(one).min <= least and most <= np.iinfo(one).max)
    return labels.astype(next(fits, labels.dtype), copy=False)


def read_turned(
    image: Raster, labels: LabelSource, tile: Tile, region: Window, symmetry: Symmetry
) -> tuple[Pixels, NDArray[Any]]:
    """Pixels of what a tile reads, and labels of what it owns, (H, W).

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


@dataclass(frozen=True)
class RunData:
    """What the steps of a run see.

    Attributes:
        images: Files of images and labels.
        schedule: Images or crops of each step.
        last: Number of steps of the run.
        work: This rank's share of them.
        reader: Reads its tiles.
    """

    images: RunImages
    schedule: ImageSchedule | CropSchedule
    last: int
    work: RankWork
    reader: TileReader

    @classmethod
    def of(
        cls,
        run: RunFile,
        plan: RunPlan,
        opened: RunImages,
        classes_in_cells: tuple[NDArray[np.uint8], ...],
        rank: int,
    ) -> "RunData":
        """The data of a run on one rank.

        Args:
            classes_in_cells: For each image the classes that each grid cell holds, see `Survey`.

        Raises:
            TilenetError: Crops do not fit the network.
        """
        sizes, symmetries = tuple(one.size for one in opened.images), run.augment.symmetries
        schedule: ImageSchedule | CropSchedule
        if plan.crop_px is None:
            schedule = ImageSchedule(run.seed, run.batch_size, sizes, symmetries)
        else:
            places = tuple(
                crop_places(classes, plan.crop_px, plan.cell_px, by_class=run.oversample > 0)
                for classes in classes_in_cells
            )
            crops = run.batch_size, plan.crop_px, sizes, places, symmetries, run.oversample
            schedule = CropSchedule(run.seed, *crops)
        epochs = (run.epochs or 0) * schedule.steps_per_epoch
        reader = TileReader(
            opened.images,
            opened.labels,
            plan.record,
            run.augment.radiometry,
            run.seed,
            keep_unlabelled=plan.needs_all_tiles,
        )
        work = RankWork(plan, schedule, sizes, classes_in_cells, rank)
        return cls(opened, schedule, epochs if run.steps is None else run.steps, work, reader)
