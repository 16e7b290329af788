"""The tiles that each rank computes in each step.

A step's images or crops are cut into tiles; a rank takes those of its place in the mesh, reads them
and standardises their pixels.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import chain
from math import prod

import numpy as np
from numpy.typing import NDArray

from tilenet.data.crops import holds_labels
from tilenet.data.read_ahead import ReadAhead
from tilenet.data.schedule import CropSchedule, ImageSchedule, Sample
from tilenet.geometry.windows import Window
from tilenet.planning.mesh import tiles_of
from tilenet.planning.micro_batches import stacks
from tilenet.training.images.tile_reader import TileReader
from tilenet.training.images.tile_task import ReadTile, TileTask
from tilenet.training.setup.run_plan import RunPlan
from tilenet.training.setup.swap import Load


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
        """The images or crops that this rank's replica computes; steps count from 0."""
        return self._schedule.samples(step)[self._place.replica :: self._plan.mesh.replicas]

    def micro_batches(self, step: int) -> list[list[TileTask]]:
        """This rank's tiles of a step, without those that hold no labelled pixel."""
        return self._stacks(
            [tile for tile in self._tiles(self.samples(step)) if self._counts(tile)]
        )

    def reads(
        self, reader: "TileReader", first: int, last: int, ahead: int, *, pin: bool = False
    ) -> ReadAhead[tuple[int, list[TileTask]], list["ReadTile"]]:
        """This rank's micro-batches of the steps from `first` to `last`, one after another.

        Args:
            ahead: Micro-batches that a thread reads while the one before is computed.
            pin: Whether tiles are put into pinned memory, which is copied to a GPU without waiting.
        """
        work = ((step, tiles) for step in range(first, last) for tiles in self.micro_batches(step))

        def read(stack: tuple[int, list[TileTask]]) -> list[ReadTile]:
            tiles_read = reader.read(stack)
            return [tile.pinned for tile in tiles_read] if pin else tiles_read

        return ReadAhead(read, work, ahead)

    def loads(self) -> list[Load]:
        """The most that this rank computes at a time, in a step of images of each size."""
        most = self._plan.crop_px or max(max(size) for size in self._sizes)
        sizes = {(min(most, size[0]), min(most, size[1])) for size in self._sizes}
        # Each size replaces that of the first step's samples, which need not be the largest.
        return [
            self._load([replace(sample, region=Window(0, 0, *size)) for sample in self.samples(0)])
            for size in sorted(sizes)
        ]

    def _load(self, samples: Sequence[Sample]) -> Load:
        # Images that are turned in later steps have tiles of other shapes.
        turns = self._schedule.symmetries
        sizes = {turn.size(*sample.size) for sample in samples for turn in turns}
        tiles = [self._tiling(*size).largest_read for size in sizes]
        together = self._stacks(self._tiles(samples))
        return Load(
            tile=max(tiles, key=prod, default=(1, 1)),
            stacked=max((len(stack) for stack in together), default=1),
            micro_batches=min(max(len(together), 1), self._plan.micro_batches),
        )

    def _tiles(self, samples: Sequence[Sample]) -> list[TileTask]:
        mesh = self._plan.mesh
        tilings = [(sample, self._tiling(*sample.size)) for sample in samples]
        return [
            TileTask(sample, tiling, number)
            for sample, tiling in tilings
            for number in tiles_of(self._place, mesh, tiling.grid)
        ]

    def _stacks(self, work: list[TileTask]) -> list[list[TileTask]]:
        batches = stacks(self._plan.record.layers, work, [tile.sample.number for tile in work])
        each = self._plan.merged
        return [
            list(chain(*batches[start : start + each])) for start in range(0, len(batches), each)
        ]

    def _counts(self, work: TileTask) -> bool:
        """Whether a tile may hold labelled pixels, or is needed without."""
        sample = work.sample
        place = work.tile.own, sample.region, sample.symmetry
        cells = self._classes_in_cells[sample.image]
        return self._plan.needs_all_tiles or holds_labels(*place, cells, self._plan.cell_px)
