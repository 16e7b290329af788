"""What each rank computes, step after step: its samples, its tiles of them, its micro-batches."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import prod

import numpy as np
from numpy.typing import NDArray

from tilenet.data.crops import crop_places, holds_labels
from tilenet.data.schedule import CropSchedule, ImageSchedule, Sample
from tilenet.data.survey_record import Survey
from tilenet.geometry.windows import Window
from tilenet.planning.compatibility import needs_all_tiles, stacks
from tilenet.planning.mesh import tiles_of
from tilenet.training.config import RunFile
from tilenet.training.reader import Work
from tilenet.training.setup import RunPlan
from tilenet.training.swap import Load

__all__ = ["Cells", "RankWork", "schedule_of"]


def schedule_of(
    run: RunFile, sizes: tuple[tuple[int, int], ...], found: Survey, cell_px: int
) -> ImageSchedule | CropSchedule:
    """Which images or crops the steps of a run see.

    Args:
        sizes: Height and width of each image.
        found: Where labelled pixels are.
        cell_px: Side of the survey's cells.

    Raises:
        TilenetError: Crops do not fit the network.
    """
    if run.crop_px is None:
        return ImageSchedule(run.seed, run.batch_size, sizes, run.augment.symmetries)
    by_class = run.oversample > 0
    places = tuple(
        crop_places(planes, run.crop_px, cell_px, by_class=by_class)
        for planes in found.classes_in_cells
    )
    return CropSchedule(
        run.seed,
        run.batch_size,
        run.crop_px,
        sizes,
        places,
        run.augment.symmetries,
        run.oversample,
    )


@dataclass(frozen=True)
class Cells:
    """Where labelled pixels are.

    Attributes:
        classes: For each image the classes that each cell holds, see `Survey`.
        side_px: Of a cell.
    """

    classes: tuple[NDArray[np.uint8], ...]
    side_px: int


class RankWork:
    """A rank's share of the steps of a run: a function of its place in the mesh and of the step.

    Args:
        sizes: Height and width of each image.
    """

    def __init__(
        self,
        run: RunFile,
        plan: RunPlan,
        schedule: ImageSchedule | CropSchedule,
        sizes: tuple[tuple[int, int], ...],
        cells: Cells,
        rank: int,
    ) -> None:
        self._run, self._plan, self._schedule = run, plan, schedule
        self._sizes, self._cells = sizes, cells
        self._layers = plan.record.layers
        self._place = plan.mesh.place(rank)
        self._tiling = lru_cache(maxsize=64)(plan.tiling)
        self._all = needs_all_tiles(self._layers, run.halo_mode)

    def samples(self, step: int) -> tuple[Sample, ...]:
        """Those that this rank's replica computes; steps count from 0."""
        return self._schedule.samples(step)[self._place.replica :: self._plan.mesh.replicas]

    def micro_batches(self, step: int) -> list[list[Work]]:
        """This rank's tiles of a step, but for those that hold no labelled pixel."""
        return self._stacks([one for one in self._tiles(self.samples(step)) if self._counts(one)])

    def loads(self) -> list[Load]:
        """What this rank computes at a time, at the most, in a step of images of each size."""
        most = self._run.crop_px or max(max(size) for size in self._sizes)
        sizes = {(min(most, size[0]), min(most, size[1])) for size in self._sizes}
        # Each in place of those of the first step, which need not be the largest.
        return [
            self._load([replace(one, region=Window(0, 0, *size)) for one in self.samples(0)])
            for size in sorted(sizes)
        ]

    def _load(self, samples: Sequence[Sample]) -> Load:
        # Images that are turned in later steps have tiles of other shapes.
        turns = self._run.augment.symmetries
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
        return stacks(self._layers, work, [one.sample.number for one in work])

    def _counts(self, work: Work) -> bool:
        """Whether a tile may hold labelled pixels, or is needed all the same."""
        sample = work.sample
        place = work.tile.own, sample.region, sample.symmetry
        cells = self._cells.classes[sample.image]
        return self._all or holds_labels(*place, cells, self._cells.side_px)
