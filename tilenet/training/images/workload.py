"""What each rank computes, step after step, and what the network sees of it.

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
from tilenet.planning.compatibility import stacks
from tilenet.planning.mesh import tiles_of
from tilenet.training.images.tile_reader import TileReader
from tilenet.training.images.work import ReadTile, Work
from tilenet.training.setup import RunPlan
from tilenet.training.swap import Load

__all__ = ["RankWork"]


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
