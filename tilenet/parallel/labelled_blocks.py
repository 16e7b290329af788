"""Find the blocks of images that hold labels, each rank its share, before some are held out."""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from tilenet.files.label_classes import check_classes
from tilenet.files.label_source import LabelSource
from tilenet.geometry.pieces import pieces_of
from tilenet.geometry.tiles import Window
from tilenet.parallel.mesh import agreed
from tilenet.parallel.watchdog import NEVER, Watchdog

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = ["labelled_blocks"]

PIECE_PX = 1024  # side of what is read at once: a block may be as large as an image


def labelled_blocks(
    labels: Sequence[LabelSource],
    blocks: Iterable[tuple[int, Window]],
    num_classes: int,
    comm: "MPI.Intracomm",
    watchdog: Watchdog = NEVER,
) -> NDArray[np.bool_]:
    """Whether each block holds a labelled pixel, (N,). Collective.

    Only labels are read, no pixels: they are the smaller files by far.

    Args:
        labels: Of each image.
        blocks: The number of an image, and pixels of it.
        num_classes: Labels are 0 to this − 1.
        watchdog: Armed for each piece of a block.

    Raises:
        AgreedError: A file cannot be read there, or a label is no class.
    """
    pieces = [
        (number, image, piece)
        for number, (image, window) in enumerate(blocks)
        for piece in pieces_of(window, PIECE_PX)
    ]
    found = np.zeros(1 + max((number for number, _, _ in pieces), default=-1), np.uint8)
    mine = [one for one in pieces if one[0] % comm.size == comm.rank]
    with agreed(comm):
        for part, (number, image, piece) in enumerate(mine):
            watchdog.arm_part("the labels of blocks", part, len(mine))
            found[number] |= _is_labelled(labels[image], piece, num_classes)
        watchdog.arm_others("the labels of blocks", len(pieces))
    everywhere = np.empty_like(found)
    comm.Allreduce(found, everywhere)
    return everywhere > 0


def _is_labelled(labels: LabelSource, window: Window, num_classes: int) -> bool:
    classes = labels.read(window)
    # Training never sees those that are held out: here, or only when they are scored.
    check_classes(labels, classes, window, num_classes)
    return bool((classes != labels.ignore_index).any())
