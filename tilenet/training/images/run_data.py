"""Data of a run: images, labels, the schedule, and a rank's share of it."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tilenet.data.crop_places import crop_places
from tilenet.data.schedule import CropSchedule, ImageSchedule
from tilenet.training.config.run_file import RunFile
from tilenet.training.images.open import RunImages
from tilenet.training.images.radiometry import Radiometry
from tilenet.training.images.tile_reader import TileReader
from tilenet.training.images.workload import RankWork
from tilenet.training.setup.run_plan import RunPlan


@dataclass(frozen=True)
class RunData:
    """Data of a run on one rank.

    Attributes:
        images: Files of images and labels.
        schedule: Images or crops of each step.
        last: Number of steps of the run.
        work: This rank's share of the steps.
        reader: Reads this rank's tiles.
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
            TilenetError: Crops do not fit the network, or the warm-up or the profile the epochs.
        """
        sizes, symmetries = tuple(image.size for image in opened.images), run.augment.symmetries
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
        num_steps = run.steps or (run.epochs or 0) * schedule.steps_per_epoch
        run.schedule.check(run.optimizer.lr, num_steps)
        run.profile.check(num_steps)
        augment = run.augment
        reader = TileReader(
            opened.images,
            opened.labels,
            plan.record,
            Radiometry(augment.brightness, augment.contrast, augment.noise),
            run.seed,
            keep_unlabelled=plan.needs_all_tiles,
        )
        work = RankWork(plan, schedule, sizes, classes_in_cells, rank)
        return cls(opened, schedule, num_steps, work, reader)
