"""Hold square blocks of the training images out for validation.

Blocks, not pixels: neighbouring pixels are so alike that a network scored on single ones would be
scored on what it was trained on. The choice is a function of the images' sizes, of where labels
are, and of the seed; never of ranks or tiles.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod

import numpy as np
from numpy.typing import NDArray

from tilenet.data.blocks import Blocks
from tilenet.data.labelled_blocks import PIECE_PX
from tilenet.errors import TilenetError
from tilenet.geometry.pieces import pieces_of
from tilenet.geometry.windows import Window
from tilenet.random_keys import uniform

MOST_BLOCKS = 1_000_000


@dataclass(frozen=True)
class HeldOut:
    """Blocks of images that training does not look at.

    Attributes:
        block_px: Side of a block; at the lower and right edges of an image blocks are smaller.
        sizes: Height and width of each image, at the resolution that is read.
        chosen: Whether each block is held out, (rows, columns) of blocks for each image.
    """

    block_px: int
    sizes: tuple[tuple[int, int], ...]
    chosen: tuple[NDArray[np.bool_], ...]

    @property
    def num_chosen(self) -> int:
        """Blocks that are held out, of all images."""
        return sum(int(blocks.sum()) for blocks in self.chosen)

    @property
    def num_blocks(self) -> int:
        """All blocks of all images."""
        return sum(blocks.size for blocks in self.chosen)

    @cached_property
    def _blocks(self) -> Blocks:
        return Blocks(self.sizes, self.block_px)

    def windows(self, image: int) -> tuple[Window, ...]:
        """The held-out blocks of an image, row by row."""
        return tuple(self._block(image, row, col) for row, col in np.argwhere(self.chosen[image]))

    def mask(self, image: int, window: Window, margin_px: int = 0) -> NDArray[np.bool_]:
        """Return a mask of pixels that are held out, or at most `margin_px` away from one, (H, W).

        Rows and columns count alike: a block with its margin is a rectangle, as is the context of a
        pixel. It takes memory of the window's size only.

        Args:
            margin_px: Pixels that are added on each side of a block.
        """
        held_out = np.zeros((window.height, window.width), np.bool_)
        rows, cols = self.chosen[image].shape
        side = self.block_px
        top = max(0, (window.row - margin_px) // side)
        left = max(0, (window.col - margin_px) // side)
        bottom = min(rows, (window.row + window.height - 1 + margin_px) // side + 1)
        right = min(cols, (window.col + window.width - 1 + margin_px) // side + 1)
        near = self.chosen[image][top:bottom, left:right]
        for row, col in np.argwhere(near) + (top, left):
            block = self._block(image, row, col)
            first = block.row - margin_px - window.row, block.col - margin_px - window.col
            last = first[0] + block.height + 2 * margin_px, first[1] + block.width + 2 * margin_px
            held_out[max(0, first[0]) : max(0, last[0]), max(0, first[1]) : max(0, last[1])] = True
        return held_out

    def check_rest(self, margin_px: int, part_done: Callable[[], None] = lambda: None) -> None:
        """Refuse a choice with margins that leave no pixel for training.

        Args:
            part_done: Is called after each part of the work, and may end it.

        Raises:
            TilenetError: No pixel is left.
        """
        for image, blocks in enumerate(self.chosen):
            for row, col in np.argwhere(~blocks):
                for piece in pieces_of(self._block(image, row, col), PIECE_PX):
                    if not self.mask(image, piece, margin_px).all():
                        return
                    part_done()
        raise TilenetError(
            f"pixels within the network's context of a held-out block are not trained on, and no "
            f"others are left (validation.block_px: {self.block_px}, context: {margin_px} px, "
            f"blocks held out: {self.num_chosen} of {self.num_blocks}); choose larger blocks, a "
            "smaller validation.share, or name validation.images instead"
        )

    def num_reached(self, margin_px: int) -> int:
        """Held-out blocks without a pixel that is more than `margin_px` from all that are not."""
        rest = replace(self, chosen=tuple(~blocks for blocks in self.chosen))
        return sum(
            min(block.height, block.width) <= 2 * margin_px
            and all(
                rest.mask(image, piece, margin_px).all() for piece in pieces_of(block, PIECE_PX)
            )
            for image in range(len(self.sizes))
            for block in self.windows(image)
        )

    def _block(self, image: int, row: int, col: int) -> Window:
        return self._blocks.window(image, int(row), int(col))


def blocks_of(sizes: Sequence[tuple[int, int]], block_px: int) -> Blocks:
    """All blocks.

    Raises:
        TilenetError: They are so small that their number alone would fill memory.
    """
    blocks = Blocks(sizes, block_px)
    if len(blocks) > MOST_BLOCKS:
        raise TilenetError(
            f"at most {MOST_BLOCKS:,} blocks are shared out (validation.block_px: {block_px}, "
            f"blocks: {len(blocks):,}); choose larger ones"
        )
    return blocks


def choose_held_out(
    labelled: NDArray[np.bool_],
    sizes: Sequence[tuple[int, int]],
    block_px: int,
    share: float,
    seed: int,
) -> HeldOut:
    """Hold out round(share × number of blocks) blocks of all images together, at least 1.

    Each block gets a random number, and the blocks with the smallest numbers are held out. The same
    share is taken of blocks with labels and of blocks without: with few labels neither training nor
    validation gets all of them.

    Args:
        labelled: Whether each block holds a labelled pixel with data, in the order of `blocks_of`.
        sizes: Height and width of each image.

    Raises:
        TilenetError: Fewer than two blocks hold labels, so that there is nothing to share out.
    """
    grids = Blocks(sizes, block_px).grids
    draws = np.concatenate(
        [uniform(prod(grid), seed, "held out", image) for image, grid in enumerate(grids)]
    )
    total, with_labels = len(labelled), int(labelled.sum())
    if with_labels < 2:
        raise TilenetError(
            f"to hold blocks out, at least two must hold labels (validation.block_px: {block_px}, "
            f"blocks: {total}, with labels: {with_labels}); choose a smaller validation.block_px, "
            "or name validation.images instead"
        )
    count = min(max(round(share * total), 1), total - 1)
    from_labelled = min(max(round(share * with_labels), 1), with_labels - 1)
    from_empty = min(count - from_labelled, total - with_labels)
    from_labelled = count - from_empty  # also what rounding left over
    chosen = np.zeros(total, np.bool_)
    for group, number in ((labelled, from_labelled), (~labelled, from_empty)):
        places = np.flatnonzero(group)
        chosen[places[np.argsort(draws[places], kind="stable")[:number]]] = True
    parts = np.split(chosen, np.cumsum([prod(grid) for grid in grids])[:-1])
    shaped = (part.reshape(grid) for part, grid in zip(parts, grids, strict=True))
    return HeldOut(block_px, tuple(sizes), tuple(shaped))
