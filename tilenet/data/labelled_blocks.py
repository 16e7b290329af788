"""Find blocks of images with labels on data, each rank its share, before some are held out."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from tilenet.data.blocks import Blocks
from tilenet.data.labels.source import LabelSource, check_classes
from tilenet.data.rasters.raster import Raster
from tilenet.geometry.pieces import pieces_of
from tilenet.geometry.windows import Window
from tilenet.parallel.ranks.together import RankControl, together

PIECE_PX = 1024  # side of the pieces that are read at once: a block may be as large as an image


def labelled_blocks(
    images: Sequence[Raster],
    labels: Sequence[LabelSource],
    blocks: Blocks,
    num_classes: int,
    control: RankControl,
) -> NDArray[np.bool_]:
    """Whether each block holds a labelled pixel with data, (N,). Collective.

    Images are the larger files by far: they are read only where labels are, and of each block no
    further than to the first piece with such a pixel.

    Args:
        num_classes: Labels are 0 to this − 1.
        control: The ranks; the watchdog is armed for each piece of a block.

    Raises:
        AgreedError: A file cannot be read there, or a label is no class.
        StopAgreed: A rank was asked to stop.
    """
    comm, watchdog = control.comm, control.watchdog
    labelled = np.zeros(len(blocks), np.uint8)
    share = range(comm.rank, len(blocks), comm.size)
    with together(comm, control.stop) as turns:
        for part, number in enumerate(share):
            image, window = blocks[number]
            for piece in pieces_of(window, max(1, PIECE_PX // labels[image].factor)):
                watchdog.arm_part("the labels of blocks", part, len(share))
                counted = _counted(labels[image], piece, num_classes)
                if not labelled[number] and counted.any():
                    labelled[number] = (counted & images[image].read(piece).valid).any()
                turns.part_done()
        factor = max(source.factor for source in labels)
        most = len(blocks) * (blocks.side_px * factor // PIECE_PX + 2) ** 2
        watchdog.arm_others("the labels of blocks", most / comm.size)
    everywhere = np.empty_like(labelled)
    comm.Allreduce(labelled, everywhere)
    return everywhere > 0


def _counted(labels: LabelSource, window: Window, num_classes: int) -> NDArray[np.bool_]:
    classes = labels.read(window)
    # Training never sees those that are held out: here, or only when they are scored.
    check_classes(labels, classes, window, num_classes)
    return np.asarray(classes != labels.ignore_index)
