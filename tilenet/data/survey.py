"""Look at every pixel once before training: statistics, labels, and errors in either.

The images are cut into blocks that have nothing to do with tiles or ranks. Ranks take them in turn.
Means and deviations are merged block by block, in the same order everywhere. So statistics are the
same to the last bit on any number of ranks.

A rank holds a block, at most `MOST_MOMENTS` moments, and the classes of the cells of all images,
which `data.crops.cell_side` bounds.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import reduce
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tilenet.data.blocks import Blocks
from tilenet.data.labels.source import LabelSource, check_classes
from tilenet.data.rasters.raster import Pixels, Raster
from tilenet.data.survey_record import Survey
from tilenet.errors import AgreedError, TilenetError, and_more
from tilenet.geometry.pieces import strips_of, within
from tilenet.geometry.windows import Window
from tilenet.mpi import Intracomm
from tilenet.parallel.health.progress import progress_bar
from tilenet.parallel.health.watchdog import SLOW
from tilenet.parallel.ranks.comm import agreed
from tilenet.parallel.ranks.together import RankControl, together

BLOCK_PX = 1024
PIECE_BYTES = 1 << 24
STRIP_PX = 1 << 23  # of the file that are read between two looks at whether to stop
MOST_MOMENTS = 1 << 20  # groups of blocks × bands; up to 262 144 blocks of 4 bands each is a group

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
    cell_px: int | None,
    control: RankControl,
    held_out: HeldOutMask | None = None,
) -> Survey:
    """Read all images and labels once, each rank its share. Collective.

    Args:
        labels: One per image; None: pixels only.
        cell_px: Side of the cells; None: places of labels are not kept.
        control: The ranks; the watchdog is armed for each block.
        held_out: Function that says where pixels of a window of an image enter no statistics,
            (H, W); None: all enter.

    Raises:
        AgreedError: A file cannot be read, a label is no class, or no pixel is labelled and valid.
        StopAgreed: A rank was asked to stop.
    """
    comm = control.comm
    look = _Look(images, labels, num_classes, cell_px, held_out)
    blocks = Blocks([image.size for image in images], BLOCK_PX)
    # Groups of one block each, unless their moments would fill memory.
    size = max(1, -(-len(blocks) * look.num_bands // MOST_MOMENTS))
    groups = -(-len(blocks) // size)
    mine = range(comm.rank, groups, comm.size)
    moments = _look_at_share(look, blocks, mine, size, control)
    control.watchdog.arm("the sums of the survey", SLOW)
    look.join(comm)
    every = _moments_of_all(moments, groups, comm)
    with agreed(comm):
        _check_something_is_there(images, labels, every.count, look.class_pixels)
    # The mean of equal numbers may be another one, by rounding.
    varies = look.minimum < look.maximum
    stats = Survey(
        num_valid=every.count,
        mean=tuple(np.where(varies, every.mean, look.minimum).tolist()),
        std=tuple(np.where(varies, np.sqrt(every.squares / every.count), 0.0).tolist()),
        minimum=tuple(look.minimum.tolist()),
        maximum=tuple(look.maximum.tolist()),
        class_pixels=tuple(look.class_pixels.tolist()),
        classes_in_cells=tuple(look.planes),
    )
    _check_finite(images, stats)
    return stats


def _look_at_share(
    look: "_Look", blocks: Blocks, mine: range, size: int, control: RankControl
) -> NDArray[np.float64]:
    """Look at this rank's groups of `size` blocks; count, means and squares of each. Collective."""
    comm, watchdog = control.comm, control.watchdog
    moments = np.zeros((len(mine), 1 + 2 * look.num_bands))
    total = len(mine) * size
    what = "all pixels are looked at"
    with (
        progress_bar(comm, total, "block", brief=True, what=what) as progress,
        together(comm, control.stop) as turns,
    ):
        for place, group in enumerate(mine):
            merged = None
            for number in range(group * size, min((group + 1) * size, len(blocks))):
                watchdog.arm_part("the survey", place * size + number % size, total)
                own = _moments(look.at(*blocks[number], turns.part_done))
                merged = own if merged is None else merge(merged, own)
                progress.update(1)
                turns.part_done()
            if merged is not None:
                moments[place] = merged.count, *merged.mean, *merged.squares
        watchdog.arm_others("the survey", len(blocks) / comm.size)
    return moments


class _Look:
    """Statistics of the blocks that a rank has looked at.

    Attributes:
        minimum: Smallest value of each band; inf: no value was read.
        maximum: Largest value of each band.
        class_pixels: Labelled valid pixels of each class.
        planes: Classes of the cells of each image, see `Survey`; empty without `cell_px`.
    """

    def __init__(
        self,
        images: Sequence[Raster],
        labels: Sequence[LabelSource] | None,
        num_classes: int,
        cell_px: int | None,
        held_out: HeldOutMask | None,
    ) -> None:
        self._images, self._labels, self._held_out = images, labels, held_out
        self._num_classes, self._cell_px = num_classes, cell_px
        self.num_bands = len(images[0].bands)
        self.minimum = np.full(self.num_bands, np.inf)
        self.maximum = np.full(self.num_bands, -np.inf)
        self.class_pixels = np.zeros(num_classes, np.int64)
        shapes: list[tuple[int, ...]] = []
        if cell_px is not None:
            grids = Blocks([image.size for image in images], cell_px).grids
            shapes = [(-(-num_classes // 8), *grid) for grid in grids]
        ends = np.cumsum([prod(shape) for shape in shapes], dtype=np.int64)
        # One array, so that ranks join the cells of all images at once.
        self._cells = np.zeros(ends[-1] if shapes else 0, np.uint8)
        parts = np.split(self._cells, ends[:-1])
        self.planes = [part.reshape(shape) for part, shape in zip(parts, shapes, strict=False)]

    def at(self, index: int, window: Window, part_done: Callable[[], None]) -> list[NDArray[Any]]:
        """Look at a window of an image; returns the values (N,) of each band that enter.

        Args:
            part_done: Is called while a window of many pixels of the file is read, and may end it.

        Raises:
            TilenetError: A file cannot be read there, or a label is no class.
        """
        labels = None if self._labels is None else self._labels[index]
        pixels, classes = _read(self._images[index], labels, window, part_done)
        entering = pixels.valid
        if self._held_out is not None:
            entering = entering & ~self._held_out(index, window)
        every = bool(entering.all())
        inside = [band.ravel() if every else band[entering] for band in pixels.values]
        if inside[0].size:
            # + 0.0: else ranks would find 0.0 or -0.0
            low, high = ([float(end(band)) + 0.0 for band in inside] for end in (np.min, np.max))
            self.minimum = np.minimum(self.minimum, low)
            self.maximum = np.maximum(self.maximum, high)
        if labels is not None and classes is not None:
            check_classes(labels, classes, window, self._num_classes)
            self._look_at_labels(labels, classes, index, window, pixels)
        return inside

    def _look_at_labels(
        self,
        labels: LabelSource,
        classes: NDArray[np.int64],
        index: int,
        window: Window,
        pixels: Pixels,
    ) -> None:
        number = self._num_classes
        counted = pixels.valid & (classes != labels.ignore_index)
        # The class behind the last is that of all pixels that do not count.
        classes = np.where(counted, classes, number)
        counts = np.bincount(classes.ravel(), minlength=number + 1)[:number]
        self.class_pixels += counts
        if self._cell_px is None:
            return
        places = tuple(
            slice(first // self._cell_px, -(-(first + count) // self._cell_px))
            for first, count in ((window.row, window.height), (window.col, window.width))
        )
        for plane_number, plane in enumerate(self.planes[index]):
            own = np.arange(8 * plane_number, min(8 * plane_number + 8, number))
            if counts[own].any():
                bits = np.zeros(number + 1, np.uint8)
                bits[own] = 1 << (own - 8 * plane_number)
                plane[places] |= _joined(np.take(bits, classes), window, self._cell_px)

    def join(self, comm: Intracomm) -> None:
        """Combine the findings of all ranks on every rank. Collective."""
        from mpi4py import MPI

        comm.Allreduce(MPI.IN_PLACE, self.minimum, op=MPI.MIN)
        comm.Allreduce(MPI.IN_PLACE, self.maximum, op=MPI.MAX)
        self.class_pixels = comm.allreduce(self.class_pixels)
        for first in range(0, self._cells.size, PIECE_BYTES):  # MPI counts in 31 bits
            comm.Allreduce(MPI.IN_PLACE, self._cells[first : first + PIECE_BYTES], op=MPI.BOR)


def _read(
    image: Raster, labels: LabelSource | None, window: Window, part_done: Callable[[], None]
) -> tuple[Pixels, NDArray[np.int64] | None]:
    """Read pixels and labels of a window: at once, or in parts where coarse ones read many."""
    factor = max(image.factor, 1 if labels is None else labels.factor)
    if factor == 1:
        return image.read(window), None if labels is None else labels.read(window)
    values = np.empty((len(image.bands), window.height, window.width), image.dtype)
    valid = np.empty((window.height, window.width), np.bool_)
    classes = None if labels is None else np.empty(valid.shape, np.int64)
    for part in strips_of(window, STRIP_PX // factor**2):
        place, pixels = within(part, window), image.read(part)
        values[:, place[0], place[1]], valid[place] = pixels.values, pixels.valid
        if labels is not None and classes is not None:
            classes[place] = labels.read(part)
        part_done()
    return Pixels(values, valid), classes


def _joined(bits: NDArray[np.uint8], window: Window, cell_px: int) -> NDArray[np.uint8]:
    """The bits of all pixels (H, W) of a window that lie in the same cell of the image."""
    top, left = window.row % cell_px, window.col % cell_px
    rows, cols = -(-(top + window.height) // cell_px), -(-(left + window.width) // cell_px)
    if max(rows, cols) <= 2:  # cells may be far larger than the window
        by_row = np.bitwise_or.reduceat(bits, [0, cell_px - top][:rows], axis=0)
        return np.asarray(np.bitwise_or.reduceat(by_row, [0, cell_px - left][:cols], axis=1))
    padded = np.zeros((rows * cell_px, cols * cell_px), np.uint8)
    padded[top : top + window.height, left : left + window.width] = bits
    by_row = np.bitwise_or.reduce(padded.reshape(rows, cell_px, -1), axis=1)
    return np.asarray(np.bitwise_or.reduce(by_row.reshape(rows, cols, cell_px), axis=2))


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


def _moments_of_all(mine: NDArray[np.float64], groups: int, comm: Intracomm) -> Moments:
    """Moments of all groups, merged in the order of the groups.

    Args:
        mine: Count, means and squares of each group of this rank's.
    """
    every = np.empty((groups, mine.shape[1]))
    for rank, part in enumerate(comm.allgather(mine)):
        every[rank :: comm.size] = part
    bands = mine.shape[1] // 2
    with np.errstate(over="ignore", invalid="ignore"):  # _check_finite says it
        return reduce(merge, (Moments(int(r[0]), r[1 : 1 + bands], r[1 + bands :]) for r in every))


def _check_finite(images: Sequence[Raster], stats: Survey) -> None:
    """Refuse bands with a mean or deviation that float64 cannot hold; all ranks know the same.

    Raises:
        AgreedError: The error names the band and its values.
    """
    for place, band in enumerate(images[0].bands):
        if not np.isfinite((stats.mean[place], stats.std[place])).all():
            paths = and_more([image.path for image in images])
            raise AgreedError(
                f"pixels must be small enough for the sum of their squares ({paths}, band {band}: "
                f"{stats.minimum[place]:g} to {stats.maximum[place]:g}); name a value that means "
                "no data with nodata, or scale the file"
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
            f"all labels there are {labels[0].uncounted} or nodata); check "
            + ("ignore_index" if labels[0].uncounted == labels[0].ignore_index else "their nodata")
        )


def nodata_note(images: Sequence[Raster], survey: Survey) -> str | None:
    """A sentence on bands with their value without data in pixels that count; None: there are none.

    A pixel counts where any band has another value. 0 is not spoken of: dark pixels have it.
    """
    per_image = [image.nodata_values for image in images]
    tags = [set(values) - {None, 0} for values in zip(*per_image, strict=True)]
    ends = zip(survey.minimum, survey.maximum, strict=True)
    held = [
        f"{band} ({value:g})"
        for band, values, both in zip(images[0].bands, tags, ends, strict=True)
        for value in values & set(both)
    ]
    if not held:
        return None
    return (
        "a pixel has no data where all bands have their nodata value; where only some have it, it "
        f"counts as a value, in means too, as in band {', '.join(held)}; if it is none, write NaN "
        "there, or give the file a mask"
    )
