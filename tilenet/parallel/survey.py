"""Look at every pixel once before training: statistics, labels, and everything that is wrong.

The images are cut into blocks that have nothing to do with tiles or ranks. Ranks take them in turn,
and the blocks' results are merged in the same order everywhere, so statistics are the same to the
last bit on any number of ranks. Counts of values are whole numbers, merged in any order.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from tilenet.errors import TilenetError
from tilenet.files.label_classes import check_classes
from tilenet.files.label_source import LabelSource
from tilenet.files.raster import Pixels, Raster
from tilenet.files.survey_record import PERCENTS, Survey
from tilenet.files.value_counts import ValueCounts, count_values, merge_counts
from tilenet.geometry.tiles import Window
from tilenet.parallel.mesh import agreed
from tilenet.parallel.watchdog import NEVER, SLOW, Watchdog

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = ["Moments", "merge", "survey"]

BLOCK_PX = 1024

HeldOutMask = Callable[[int, Window], NDArray[np.bool_]]


@dataclass(frozen=True)
class Moments:
    """Count, mean and sum of squared deviations of the valid pixels, per band."""

    count: int
    mean: NDArray[np.float64]
    squares: NDArray[np.float64]


@dataclass(frozen=True)
class _Block:
    """What a block holds: statistics, labelled pixels per class, and classes of its cells.

    Classes behind the last that occurs are left out of `counts`: it travels to all ranks.
    """

    moments: Moments
    counts: NDArray[np.int64]
    classes_in_cells: NDArray[np.uint8]


def merge(first: Moments, second: Moments) -> Moments:
    """Moments of both sets together, stable (Chan, Golub, LeVeque 1979)."""
    count = first.count + second.count
    if count == 0:
        return first
    delta = second.mean - first.mean
    share = second.count / count
    return Moments(
        count,
        first.mean + delta * share,
        first.squares + second.squares + delta**2 * first.count * share,
    )


def survey(
    images: Sequence[Raster],
    labels: Sequence[LabelSource] | None,
    num_classes: int,
    alignment_px: int,
    comm: "MPI.Intracomm",
    held_out: HeldOutMask | None = None,
    watchdog: Watchdog = NEVER,
) -> Survey:
    """Read all images and labels once, each rank its share. Collective.

    Args:
        labels: One per image; None: pixels only.
        alignment_px: Side of the cells.
        held_out: Where pixels of a window of an image enter no statistics, (H, W); None: nowhere.
        watchdog: Armed for each block.

    Raises:
        AgreedError: A file cannot be read, a label is no class, or no pixel is labelled and valid.
    """
    side = max(BLOCK_PX // alignment_px, 1) * alignment_px
    blocks = [
        (index, Window(row, col, min(side, image.height - row), min(side, image.width - col)))
        for index, image in enumerate(images)
        for row in range(0, image.height, side)
        for col in range(0, image.width, side)
    ]
    bands = len(images[0].bands)
    dtype = np.result_type(*(image.dtype for image in images))  # holds the values of all
    mine: dict[int, _Block] = {}
    values = [count_values(np.empty(0, dtype))] * bands
    with agreed(comm):
        share = range(comm.rank, len(blocks), comm.size)
        for part, number in enumerate(share):
            watchdog.arm_part("the survey", part, len(share))
            index, window = blocks[number]
            pixels = images[index].read(window)
            entering = pixels.valid
            if held_out is not None:
                entering = entering & ~held_out(index, window)
            inside = pixels.values[:, entering]
            source = None if labels is None else labels[index]
            counts, cells = _classes(pixels, source, window, num_classes, alignment_px)
            mine[number] = _Block(_moments(inside.astype(np.float64)), counts, cells)
            found = [count_values(band) for band in inside.astype(dtype, copy=False)]
            values = _merged(values, found)
        watchdog.arm_others("the survey", len(blocks) / comm.size)
    everywhere: dict[int, _Block] = {}
    for some in comm.allgather(mine):
        everywhere.update(some)
    watchdog.arm("the sums of the survey", SLOW)
    values = comm.allreduce(values, op=_merged)

    moments = Moments(0, np.zeros(bands), np.zeros(bands))
    class_pixels = np.zeros(num_classes, np.int64)
    planes = [
        np.zeros((-(-num_classes // 8), *(-(-px // alignment_px) for px in image.size)), np.uint8)
        for image in images
    ]
    for number, (index, window) in enumerate(blocks):
        block = everywhere[number]
        moments = merge(moments, block.moments)
        class_pixels[: len(block.counts)] += block.counts
        row, col = window.row // alignment_px, window.col // alignment_px
        rows, cols = block.classes_in_cells.shape[1:]
        planes[index][:, row : row + rows, col : col + cols] = block.classes_in_cells
    with agreed(comm):
        _check_something_is_there(images, labels, moments, class_pixels)
    return Survey(
        num_valid=moments.count,
        mean=tuple(moments.mean.tolist()),
        std=tuple(np.sqrt(moments.squares / moments.count).tolist()),
        minimum=tuple(band.minimum for band in values),
        maximum=tuple(band.maximum for band in values),
        percentiles=tuple(band.percentiles(PERCENTS) for band in values),
        class_pixels=tuple(class_pixels.tolist()),
        classes_in_cells=tuple(planes),
    )


def _merged(first: list[ValueCounts], second: list[ValueCounts]) -> list[ValueCounts]:
    """Band by band."""
    return [merge_counts(*pair) for pair in zip(first, second, strict=True)]


def _classes(
    pixels: Pixels,
    labels: LabelSource | None,
    window: Window,
    num_classes: int,
    alignment_px: int,
) -> tuple[NDArray[np.int64], NDArray[np.uint8]]:
    """Labelled valid pixels of each class in a window, and which classes its cells hold."""
    edges = ((0, -window.height % alignment_px), (0, -window.width % alignment_px))
    height, width = (-(-px // alignment_px) for px in (window.height, window.width))
    planes = np.zeros((-(-num_classes // 8), height, width), np.uint8)
    if labels is None:
        return np.zeros(0, np.int64), planes
    classes = labels.read(window)
    check_classes(labels, classes, window, num_classes)
    counted = pixels.valid & (classes != labels.ignore_index)
    counts = np.bincount(classes[counted])
    for label in np.flatnonzero(counts):
        padded = np.pad(counted & (classes == label), edges)
        cells = padded.reshape(height, alignment_px, width, alignment_px).any(axis=(1, 3))
        planes[label // 8] |= cells.astype(np.uint8) << np.uint8(label % 8)
    return counts, planes


def _moments(values: NDArray[np.float64]) -> Moments:
    """Moments of values (C, N)."""
    if values.shape[1] == 0:
        return Moments(0, np.zeros(len(values)), np.zeros(len(values)))
    mean = values.mean(axis=1)
    return Moments(values.shape[1], mean, ((values - mean[:, None]) ** 2).sum(axis=1))


def _check_something_is_there(
    images: Sequence[Raster],
    labels: Sequence[LabelSource] | None,
    moments: Moments,
    class_pixels: NDArray[np.int64],
) -> None:
    if moments.count == 0:
        raise TilenetError(
            f"an image must hold pixels with data ({', '.join(i.path for i in images)}: all pixels "
            "are nodata); check the nodata tag, the mask or alpha band, or set nodata: none"
        )
    if labels is not None and class_pixels.sum() == 0:
        raise TilenetError(
            f"at least one pixel with data must be labelled ({', '.join(i.path for i in labels)}: "
            f"all labels there are {labels[0].ignore_index} or nodata); check ignore_index"
        )
