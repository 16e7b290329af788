"""The images of a run: opened, partly held out."""

import resource
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tilenet.data.holdout import HeldOut
from tilenet.data.labels.open import open_labels
from tilenet.data.labels.source import LabelSource, ValidationImage
from tilenet.data.labels.values import Values
from tilenet.data.rasters.extent import check_units
from tilenet.data.rasters.handles import MOST_OPEN
from tilenet.data.rasters.raster import Raster
from tilenet.data.rasters.remedies import JOIN
from tilenet.data.rasters.stack import stacked_paths
from tilenet.data.same_files import SampleFile, check_apart, check_same_files, sample_files
from tilenet.data.survey import share_collars
from tilenet.errors import TilenetError
from tilenet.parallel.health.signals import StopRequests
from tilenet.parallel.health.watchdog import NEVER, Watchdog
from tilenet.training.config.run_file import RunFile

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = [
    "RunImages",
    "agree_on_files",
    "allow_open_files",
    "open_images",
]

OTHER_FILES = 64  # libraries, sockets, logs


def allow_open_files(count: int) -> None:
    """Raise this process's limit where it is below what `count` open files need.

    Raises:
        TilenetError: The system's own limit is lower.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    endless = resource.RLIM_INFINITY
    if hard != endless and hard < count + OTHER_FILES:
        raise TilenetError(
            f"a rank holds up to {MOST_OPEN} images and labels open (files: {count}, the system "
            f"allows: {hard}); raise ulimit -Hn, or join images into fewer files with {JOIN}"
        )
    wanted = 4 * count + OTHER_FILES  # a file may be opened several times over
    if soft != endless and soft < wanted:
        limit = wanted if hard == endless else min(wanted, hard)
        with suppress(OSError, ValueError):  # macOS has a lower limit than it names
            resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, limit), hard))


@dataclass(frozen=True)
class RunImages:
    """Open images and labels.

    Attributes:
        images: Images that are trained on, in the order of the run file.
        labels: Theirs; `ignore_index` where training may not look.
        validation: What the network is scored on: images of their own, then held-out blocks.
        held_out: The blocks; None: none are.
    """

    images: list[Raster]
    labels: list[LabelSource]
    validation: list[ValidationImage]
    held_out: HeldOut | None = None

    @property
    def all_images(self) -> list[Raster]:
        """All that are open, each once."""
        return self.images + [part.image for part in self.validation if part.windows is None]

    @property
    def all_labels(self) -> list[LabelSource]:
        """Labels of all images, before blocks are held out."""
        return self.labels + [part.labels for part in self.validation if part.windows is None]

    @property
    def shapes(self) -> tuple[tuple[tuple[int, ...], tuple[int, int]], ...]:
        """Bands of each image that is trained on; its height and width."""
        return tuple((image.bands, image.size) for image in self.images)

    @property
    def files(self) -> list[SampleFile]:
        """What tells the files apart; before blocks are held out."""
        found = sample_files(self.images, self.labels, "train")
        others = [part for part in self.validation if part.windows is None]
        images, labels = [part.image for part in others], [part.labels for part in others]
        return found + sample_files(images, labels, "validation")


def open_images(
    run: RunFile,
    stack: ExitStack,
    watchdog: Watchdog = NEVER,
    part_done: Callable[[], None] = lambda: None,
) -> RunImages:
    """Open the images and labels of a run whose lists are read; `stack` closes them.

    Args:
        watchdog: Armed for each image and its labels.
        part_done: Is called after each of them, and may end the work.

    Raises:
        TilenetError: A file is missing, broken or does not fit, images have other bands or units
            than the first, one is for training and for validation, or the run's part is none of it.
    """
    if len(run.image_paths) != len(run.label_paths):
        raise TilenetError(
            f"lists of images are read before a run is trained (images: {run.image_paths[0]}); "
            "call with_listed_images of tilenet/training/config/read.py"
        )
    train = list(zip(run.image_paths, run.label_paths, strict=True))
    validation = list(zip(run.validation.image_paths, run.validation.label_paths, strict=True))
    if run.window is not None and len(train + validation) > 1:
        raise TilenetError(
            f"window is rows and columns of one image (images: {len(train)}, for validation: "
            f"{len(validation)}); name the part by bbox, in coordinates"
        )
    counts = [len(stacked_paths(name)) for pair in train + validation for name in pair]
    allow_open_files(sum(sorted(counts)[-MOST_OPEN:]))
    if run.resolution is not None:
        # Before they are opened at it: 0.5 m is no multiple of a pixel in degrees, nor need it be.
        with ExitStack() as briefly:
            own = []
            for image, _ in train + validation:
                own.append(briefly.enter_context(Raster(image)))
                part_done()
            check_units(own, run.resolution)
    images, labels = _opened(run, train, stack, watchdog, part_done)
    others = [
        ValidationImage(image, part, None)
        for image, part in zip(*_opened(run, validation, stack, watchdog, part_done), strict=True)
    ]
    watchdog.arm_others("opening the images", len(train) + len(validation))
    opened = RunImages(images, labels, others)
    check_apart(opened.files, once=run.validation.share > 0)
    for other in others:
        if len(other.image.bands) != len(images[0].bands):
            raise TilenetError(
                f"all images need the same number of bands ({images[0].path}: "
                f"{len(images[0].bands)}, {other.image.path}: {len(other.image.bands)}); choose "
                "some with bands"
            )
    return opened


def agree_on_files(
    opened: RunImages,
    comm: "MPI.Intracomm",
    watchdog: Watchdog = NEVER,
    requests: StopRequests | None = None,
) -> str:
    """Look for collars once for all ranks; return a digest of the files. Collective.

    Raises:
        AgreedError: Ranks do not see the same files.
        StopAgreed: A rank was asked to stop.
    """
    digest = check_same_files(opened.files, comm)
    share_collars(opened.all_images, comm, watchdog, requests)
    return digest


def _opened(
    run: RunFile,
    pairs: Sequence[tuple[str, str]],
    stack: ExitStack,
    watchdog: Watchdog,
    part_done: Callable[[], None],
) -> tuple[list[Raster], list[LabelSource]]:
    images, labels = [], []
    keys = run.bands, run.resolution, run.nodata
    for number, (path, _) in enumerate(pairs):
        watchdog.arm_part("opening the images", number, len(pairs))
        images.append(stack.enter_context(Raster(path, *keys, run.part)))
        part_done()
    for number, ((_, path), image) in enumerate(zip(pairs, images, strict=True)):
        watchdog.arm_part("opening the labels", number, len(pairs))
        opened: LabelSource
        if run.task == "regression":
            opened = Values(path, image)
        else:
            opened = open_labels(path, image, run.ignore_index, run.vectors)
        labels.append(stack.enter_context(opened))
        part_done()
    return images, labels
