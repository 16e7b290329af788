"""Look at every pixel once before training: statistics, labels, and everything that is wrong.

The images are cut into blocks that have nothing to do with tiles or ranks. Ranks take them in turn,
and the blocks' results are merged in the same order everywhere, so statistics are the same to the
last bit on any number of ranks.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from tilenet.errors import TilenetError
from tilenet.files.label_classes import check_classes
from tilenet.files.label_source import LabelSource
from tilenet.files.raster import Raster
from tilenet.geometry.tiles import Window
from tilenet.parallel.mesh import agreed

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = ["Moments", "Survey", "merge", "survey"]

BLOCK_PX = 1024

HeldOutMask = Callable[[int, Window], NDArray[np.bool_]]


@dataclass(frozen=True)
class Moments:
    """Count, mean and sum of squared deviations of the valid pixels, per band."""

    count: int
    mean: NDArray[np.float64]
    squares: NDArray[np.float64]


@dataclass(frozen=True)
class Survey:
    """What the images hold.

    Attributes:
        mean: Per band, over the valid pixels of all images.
        std: Per band.
        class_pixels: Labelled valid pixels of each class.
        labelled: For each image, whether each alignment cell holds a labelled valid pixel.
    """

    mean: tuple[float, ...]
    std: tuple[float, ...]
    class_pixels: tuple[int, ...]
    labelled: tuple[NDArray[np.bool_], ...]


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
    labels: Sequence[LabelSource],
    num_classes: int,
    alignment_px: int,
    comm: "MPI.Intracomm",
    held_out: HeldOutMask | None = None,
) -> Survey:
    """Read all images and labels once, each rank its share. Collective.

    Args:
        held_out: Where pixels of a window of an image enter no statistics, (H, W); None: nowhere.

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
    results: dict[int, tuple[Any, ...]] = {}
    with agreed(comm):
        for number in range(comm.rank, len(blocks), comm.size):
            index, window = blocks[number]
            results[number] = _look(
                images[index],
                labels[index],
                window,
                num_classes,
                alignment_px,
                None if held_out is None else held_out(index, window),
            )
    everywhere: dict[int, tuple[Any, ...]] = {}
    for part in comm.allgather(results):
        everywhere.update(part)

    bands = len(images[0].bands)
    moments = Moments(0, np.zeros(bands), np.zeros(bands))
    class_pixels = np.zeros(num_classes, np.int64)
    labelled = [
        np.zeros((-(-im.height // alignment_px), -(-im.width // alignment_px)), np.bool_)
        for im in images
    ]
    for number, (index, window) in enumerate(blocks):
        block, counts, cells = everywhere[number]
        moments = merge(moments, block)
        class_pixels += counts
        row, col = window.row // alignment_px, window.col // alignment_px
        labelled[index][row : row + cells.shape[0], col : col + cells.shape[1]] = cells
    with agreed(comm):
        _check_something_is_there(images, labels, moments, class_pixels)
    return Survey(
        mean=tuple(moments.mean.tolist()),
        std=tuple(np.sqrt(moments.squares / moments.count).tolist()),
        class_pixels=tuple(class_pixels.tolist()),
        labelled=tuple(labelled),
    )


def _look(
    image: Raster,
    labels: LabelSource,
    window: Window,
    num_classes: int,
    alignment_px: int,
    held_out: NDArray[np.bool_] | None = None,
) -> tuple[Moments, NDArray[np.int64], NDArray[np.bool_]]:
    pixels = image.read(window)
    classes = labels.read(window)
    check_classes(labels, classes, window, num_classes)
    counted = pixels.valid & (classes != labels.ignore_index)
    counts = np.bincount(classes[counted], minlength=num_classes)
    edges = ((0, -window.height % alignment_px), (0, -window.width % alignment_px))
    padded = np.pad(counted, edges)
    height, width = padded.shape[0] // alignment_px, padded.shape[1] // alignment_px
    cells = np.asarray(padded.reshape(height, alignment_px, width, alignment_px).any(axis=(1, 3)))
    entering = pixels.valid if held_out is None else pixels.valid & ~held_out
    return _moments(pixels.values[:, entering].astype(np.float64)), counts, cells


def _moments(values: NDArray[np.float64]) -> Moments:
    """Moments of values (C, N)."""
    if values.shape[1] == 0:
        return Moments(0, np.zeros(len(values)), np.zeros(len(values)))
    mean = values.mean(axis=1)
    return Moments(values.shape[1], mean, ((values - mean[:, None]) ** 2).sum(axis=1))


def _check_something_is_there(
    images: Sequence[Raster],
    labels: Sequence[LabelSource],
    moments: Moments,
    class_pixels: NDArray[np.int64],
) -> None:
    if moments.count == 0:
        raise TilenetError(
            f"an image must hold pixels with data ({', '.join(i.path for i in images)}: all pixels "
            "are nodata); check the nodata tag, the mask or alpha band, or set nodata: none"
        )
    if class_pixels.sum() == 0:
        raise TilenetError(
            f"at least one pixel with data must be labelled ({', '.join(i.path for i in labels)}: "
            f"all labels there are {labels[0].ignore_index} or nodata); check ignore_index"
        )
