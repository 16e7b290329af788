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

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = ["labelled_blocks"]

PIECE_PX = 1024  # side of what is read at once: a block may be as large as an image


def labelled_blocks(
    labels: Sequence[LabelSource],
    blocks: Iterable[tuple[int, Window]],
    num_classes: int,
    comm: "MPI.Intracomm",
) -> NDArray[np.bool_]:
    """Whether each block holds a labelled pixel, (N,). Collective.

    Only labels are read, no pixels: they are the smaller files by far.

    Args:
        labels: Of each image.
        blocks: The number of an image, and pixels of it.
        num_classes: Labels are 0 to this − 1.

    Raises:
        AgreedError: A file cannot be read there, or a label is no class.
    """
    found = np.empty(0, np.uint8)
    with agreed(comm):
        found = np.fromiter(
            (
                number % comm.size == comm.rank and _is_labelled(labels[image], window, num_classes)
                for number, (image, window) in enumerate(blocks)
            ),
            np.uint8,
        )
    everywhere = np.empty_like(found)
    comm.Allreduce(found, everywhere)
    return everywhere > 0


def _is_labelled(labels: LabelSource, window: Window, num_classes: int) -> bool:
    found = False
    for piece in pieces_of(window, PIECE_PX):
        classes = labels.read(piece)
        # Training never sees those that are held out: here, or only when they are scored.
        check_classes(labels, classes, piece, num_classes)
        found |= bool((classes != labels.ignore_index).any())
    return found
