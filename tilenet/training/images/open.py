"""The images of a run: opened, partly held out."""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import chain

from tilenet.data.alike import check_bands, check_units
from tilenet.data.collars import share_collars
from tilenet.data.holdout import HeldOut
from tilenet.data.labels.open import check_vectors, open_labels
from tilenet.data.labels.source import LabelSource, ValidationImage
from tilenet.data.labels.values import Values
from tilenet.data.rasters.block_memory import keep_blocks
from tilenet.data.rasters.handles import MOST_OPEN, allow_open_files
from tilenet.data.rasters.raster import Raster
from tilenet.data.rasters.stacked_paths import stacked_paths
from tilenet.data.same_files import SampleFile, check_apart, check_same_files, sample_files
from tilenet.errors import TilenetError
from tilenet.parallel.health.watchdog import Watchdog
from tilenet.parallel.ranks.comm import agreed
from tilenet.parallel.ranks.node import ranks_of_node
from tilenet.parallel.ranks.together import RankControl, together
from tilenet.training.config.run_file import RunFile


@dataclass(frozen=True)
class RunImages:
    """Images and labels; their files are open while they are read.

    Attributes:
        images: Images that are trained on, in the order of the run file.
        labels: Labels of these images; `ignore_index` in held-out blocks and around them.
        validation: Images for validation, then held-out blocks.
        files: Identities of the files.
        held_out: The held-out blocks; None: there are none.
    """

    images: list[Raster]
    labels: list[LabelSource]
    validation: list[ValidationImage]
    files: list[SampleFile]
    held_out: HeldOut | None = None

    @property
    def all_images(self) -> list[Raster]:
        """All images of the run, each once."""
        return self.images + [part.image for part in self.validation if part.windows is None]

    @property
    def all_labels(self) -> list[LabelSource]:
        """Labels of all images, before blocks are held out."""
        return self.labels + [part.labels for part in self.validation if part.windows is None]

    @property
    def shapes(self) -> tuple[tuple[tuple[int, ...], tuple[int, int]], ...]:
        """Bands, and height and width, of each image that is trained on."""
        return tuple((image.bands, image.size) for image in self.images)


def open_images(run: RunFile, stack: ExitStack, control: RankControl) -> RunImages:
    """Open the images and labels of a run whose lists are read; `stack` closes them. Collective.

    Each header is read by one rank of a node, which tells the others.

    Args:
        control: Ranks of the run; the watchdog is armed for a few images at a time.

    Raises:
        AgreedError: A file is missing, broken or does not fit, images differ in bands, their order
            or units, one image is for both training and validation, the run's part lies outside of
            an image, or keys of polygons are given for rasters.
        StopAgreed: A rank was asked to stop.
    """
    comm, watchdog = control.comm, control.watchdog
    node = ranks_of_node(comm)
    keep_blocks(node.size)
    with together(comm, control.stop) as turns:
        pairs = _pairs(run)
        share = pairs[node.rank :: node.size]
        own = _opened(run, pairs, share, stack, watchdog, turns.part_done)
        watchdog.arm_others("opening the images", len(pairs) / node.size)
    opened_files: list[_Opened] = [None] * len(pairs)  # type: ignore[list-item]
    # One rank need not pickle thousands of headers for itself.
    for rank, shared in enumerate(node.allgather(own) if node.size > 1 else [own]):
        opened_files[rank :: node.size] = shared if rank != node.rank else own
    node.Free()
    for file in opened_files:  # files of other ranks are opened when they are read
        stack.callback(file.image.close)
        stack.callback(file.labels.close)
    train = [
        file for file, (split, *_) in zip(opened_files, pairs, strict=True) if split == "train"
    ]
    rest = opened_files[len(train) :]
    opened = RunImages(
        images=[file.image for file in train],
        labels=[file.labels for file in train],
        validation=[ValidationImage(file.image, file.labels, None) for file in rest],
        files=list(chain(*(file.files for file in opened_files))),
    )
    with agreed(comm):
        if comm.rank == 0:  # it resolves the paths
            check_apart(opened.files, once=run.validation.share > 0)
        check_bands(opened.all_images, chosen=run.bands is not None)
        check_vectors(opened.all_labels, run.vectors)
    return opened


def agree_on_files(opened: RunImages, control: RankControl) -> str:
    """Find collars once for all ranks; return a digest of the files. Collective.

    Raises:
        AgreedError: Ranks do not see the same files.
        StopAgreed: A rank was asked to stop.
    """
    digest = check_same_files(opened.files, control.comm)
    share_collars(opened.all_images, control.comm, control.watchdog, control.stop)
    return digest


# Split, path of an image, path of its labels.
_Pair = tuple[str, str, str]


@dataclass(frozen=True)
class _Opened:
    image: Raster
    labels: LabelSource
    files: list[SampleFile]


def _pairs(run: RunFile) -> list[_Pair]:
    """The images to train on, then those for validation."""
    if len(run.image_paths) != len(run.label_paths):
        raise TilenetError(
            f"lists of images are read before a run is trained (images: {run.image_paths[0]}); "
            "call with_listed_images of tilenet/training/config/read.py"
        )
    keys = run.validation
    train = [("train", *pair) for pair in zip(run.image_paths, run.label_paths, strict=True)]
    pairs = zip(keys.image_paths, keys.label_paths, strict=True)
    validation = [("validation", *pair) for pair in pairs]
    if run.window is not None and len(train + validation) > 1:
        raise TilenetError(
            f"window is rows and columns of one image (images: {len(train)}, for validation: "
            f"{len(validation)}); name the part by bbox, in coordinates"
        )
    return train + validation


def _opened(
    run: RunFile,
    pairs: Sequence[_Pair],
    share: Sequence[_Pair],
    stack: ExitStack,
    watchdog: Watchdog,
    part_done: Callable[[], None],
) -> list[_Opened]:
    """Open a share of the images and labels, and read their headers."""
    counts = [len(stacked_paths(name)) for _, *names in pairs for name in names]
    allow_open_files(sum(sorted(counts)[-MOST_OPEN:]))
    if run.resolution is not None:
        # Checked before opening at this resolution: 0.5 m is no multiple of a pixel in degrees.
        with ExitStack() as briefly:
            own = []
            for _, path, _ in dict.fromkeys((pairs[0], *share)):
                own.append(briefly.enter_context(Raster(path)))
                part_done()
            check_units(own, run.resolution)
    images, opened_files = [], []
    keys = run.bands, run.resolution, run.nodata
    for number, (_, path, _) in enumerate(share):
        watchdog.arm_part("opening the images", number, len(share))
        images.append(stack.enter_context(Raster(path, *keys, run.part)))
        part_done()
    for number, ((split, _, path), image) in enumerate(zip(share, images, strict=True)):
        watchdog.arm_part("opening the labels", number, len(share))
        labels: LabelSource
        if run.task == "regression":
            labels = Values(path, image)
        else:
            labels = open_labels(path, image, run.ignore_index, run.vectors)
        stack.enter_context(labels)
        opened_files.append(_Opened(image, labels, sample_files([image], [labels], split)))
        part_done()
    return opened_files
