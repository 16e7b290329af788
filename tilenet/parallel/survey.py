"""Look at every pixel once before training: statistics, labels, and everything that is wrong.

The images are cut into blocks that have nothing to do with tiles or ranks. Ranks take them in turn.
Counts of values are whole numbers, merged in any order; means and deviations of integers of up to
16 bits follow from them. Those of wider numbers are merged block by block, in the same order
everywhere. So statistics are the same to the last bit on any number of ranks.

A rank holds a block, the counts, and the classes of the cells of all images.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from tilenet.errors import AgreedError, TilenetError
from tilenet.files.label_classes import check_classes
from tilenet.files.label_source import LabelSource
from tilenet.files.raster import Pixels, Raster
from tilenet.files.survey_record import PERCENTS, Survey
from tilenet.files.value_counts import ValueCounts, count_values, counts_each, merge_counts
from tilenet.geometry.tiles import Window
from tilenet.parallel.mesh import agreed
from tilenet.parallel.progress import progress_bar
from tilenet.parallel.watchdog import NEVER, SLOW, Watchdog

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = ["Moments", "merge", "survey"]

BLOCK_PX = 1024
PIECE_BYTES = 1 << 28

HeldOutMask = Callable[[int, Window], NDArray[np.bool_]]


@dataclass(frozen=True)
class Moments:
    """Count, mean and sum of squared deviations of the valid pixels, per band."""

    count: int
    mean: NDArray[np.float64]
    squares: NDArray[np.float64]


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
    values = [count_values(np.empty(0, dtype))] * bands
    mine: dict[int, Moments] = {}
    class_pixels = np.zeros(num_classes, np.int64)
    planes = [
        np.zeros((-(-num_classes // 8), *(-(-px // alignment_px) for px in image.size)), np.uint8)
        for image in images
    ]
    turns = range(comm.rank, len(blocks), comm.size)
    what = "all pixels are looked at"
    with progress_bar(comm, len(turns), "block", brief=True, what=what) as progress, agreed(comm):
        for part, number in enumerate(turns):
            watchdog.arm_part("the survey", part, len(turns))
            index, window = blocks[number]
            pixels = images[index].read(window)
            entering = pixels.valid
            if held_out is not None:
                entering = entering & ~held_out(index, window)
            inside = list(_entering(pixels.values, entering, dtype))
            values = [
                merge_counts(known, count_values(band, known.shift))
                for known, band in zip(values, inside, strict=True)
            ]
            if not counts_each(dtype):
                mine[number] = _moments(inside)
            if labels is not None:
                counts, cells = _classes(pixels, labels[index], window, num_classes, alignment_px)
                class_pixels += counts
                row, col = window.row // alignment_px, window.col // alignment_px
                rows, cols = cells.shape[1:]
                planes[index][:, row : row + rows, col : col + cols] = cells
            progress.update(1)
        watchdog.arm_others("the survey", len(blocks) / comm.size)
    watchdog.arm("the sums of the survey", SLOW)
    values = comm.allreduce(values, op=_merged)
    class_pixels = comm.allreduce(class_pixels)
    for cells in planes:
        _join(cells, comm)
    total = values[0].total
    with agreed(comm):
        _check_something_is_there(images, labels, total, class_pixels)
    if counts_each(dtype):
        mean, std = zip(*(band.mean_and_std for band in values), strict=True)
    else:
        mean, std = _everybodys(mine, comm)
        _check_finite(images, mean, std, values)
    return Survey(
        num_valid=total,
        mean=mean,
        std=std,
        minimum=tuple(band.minimum for band in values),
        maximum=tuple(band.maximum for band in values),
        percentiles=tuple(band.percentiles(PERCENTS) for band in values),
        class_pixels=tuple(class_pixels.tolist()),
        classes_in_cells=tuple(planes),
    )


def _merged(first: list[ValueCounts], second: list[ValueCounts]) -> list[ValueCounts]:
    """Band by band."""
    return [merge_counts(*pair) for pair in zip(first, second, strict=True)]


def _entering(
    values: NDArray[Any], entering: NDArray[np.bool_], dtype: np.dtype[Any]
) -> Iterator[NDArray[Any]]:
    """Values (C, H, W) of the pixels that enter, (N,) for each band."""
    every = bool(entering.all())
    for band in values:
        yield (band.ravel() if every else band[entering]).astype(dtype, copy=False)


def _classes(
    pixels: Pixels,
    labels: LabelSource,
    window: Window,
    num_classes: int,
    alignment_px: int,
) -> tuple[NDArray[np.int64], NDArray[np.uint8]]:
    """Labelled valid pixels of each class in a window, and which classes its cells hold."""
    height, width = (-(-px // alignment_px) for px in (window.height, window.width))
    classes = labels.read(window)
    check_classes(labels, classes, window, num_classes)
    counted = pixels.valid & (classes != labels.ignore_index)
    # The class behind the last is that of all pixels that do not count.
    classes = np.where(counted, classes, num_classes)
    counts = np.bincount(classes.ravel(), minlength=num_classes + 1)[:num_classes]
    planes = np.zeros((-(-num_classes // 8), height, width), np.uint8)
    for number, plane in enumerate(planes):
        bits = np.zeros(num_classes + 1, np.uint8)
        own = np.arange(8 * number, min(8 * number + 8, num_classes))
        if not counts[own].any():
            continue
        bits[own] = 1 << (own - 8 * number)
        padded = np.zeros((height * alignment_px, width * alignment_px), np.uint8)
        np.take(bits, classes, out=padded[: window.height, : window.width])
        rows = np.bitwise_or.reduce(padded.reshape(height, alignment_px, -1), axis=1)
        plane[:] = np.bitwise_or.reduce(rows.reshape(height, width, alignment_px), axis=2)
    return counts, planes


def _join(cells: NDArray[np.uint8], comm: "MPI.Intracomm") -> None:
    """Have all ranks hold the bits of all; in pieces, since MPI counts in 31 bits."""
    from mpi4py import MPI

    flat = cells.reshape(-1)
    for first in range(0, flat.size, PIECE_BYTES):
        comm.Allreduce(MPI.IN_PLACE, flat[first : first + PIECE_BYTES], op=MPI.BOR)


def _moments(bands: Sequence[NDArray[Any]]) -> Moments:
    """Moments of values (N,) of each band."""
    count, mean, squares = len(bands[0]), np.zeros(len(bands)), np.zeros(len(bands))
    with np.errstate(over="ignore", invalid="ignore"):  # _check_finite says it
        for number, band in enumerate(bands if count else ()):
            values = band.astype(np.float64)
            mean[number] = values.mean()
            values -= mean[number]
            np.square(values, out=values)
            squares[number] = values.sum()
    return Moments(count, mean, squares)


def _everybodys(
    mine: dict[int, Moments], comm: "MPI.Intracomm"
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Means and deviations of all blocks' bands, merged in the order of the blocks."""
    blocks: dict[int, Moments] = {}
    for part in comm.allgather(mine):
        blocks.update(part)
    with np.errstate(over="ignore", invalid="ignore"):  # _check_finite says it
        found = reduce(merge, (blocks[number] for number in range(len(blocks))))
    return tuple(found.mean.tolist()), tuple(np.sqrt(found.squares / found.count).tolist())


def _check_finite(
    images: Sequence[Raster],
    mean: Sequence[float],
    std: Sequence[float],
    values: Sequence[ValueCounts],
) -> None:
    """Refuse bands whose mean or deviation float64 cannot hold; all ranks know the same.

    Raises:
        AgreedError: With the band and its values.
    """
    for band, *moments, seen in zip(images[0].bands, mean, std, values, strict=True):
        if not np.isfinite(moments).all():
            paths = f"{images[0].path}{f' and {len(images) - 1} more' if len(images) > 1 else ''}"
            raise AgreedError(
                f"pixels must be small enough for the sum of their squares ({paths}, band {band}: "
                f"{seen.minimum:g} to {seen.maximum:g}); name a value that means no data with "
                "nodata, or scale the file"
            )


def _check_something_is_there(
    images: Sequence[Raster],
    labels: Sequence[LabelSource] | None,
    total: int,
    class_pixels: NDArray[np.int64],
) -> None:
    if total == 0:
        raise TilenetError(
            f"an image must hold pixels with data ({', '.join(i.path for i in images)}: all pixels "
            "are nodata); check the nodata tag, the mask or alpha band, or set nodata: none"
        )
    if labels is not None and class_pixels.sum() == 0:
        raise TilenetError(
            f"at least one pixel with data must be labelled ({', '.join(i.path for i in labels)}: "
            f"all labels there are {labels[0].ignore_index} or nodata); check ignore_index"
        )
