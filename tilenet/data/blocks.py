"""Square blocks of images, for work that is done block by block."""

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate

from tilenet.geometry.windows import Window


class Blocks:
    """(Number of the image, window) of each block by its number: image by image, row by row.

    A window is computed when it is read: an image of 10¹² pixels has a million of them.

    Args:
        sizes: Height and width of each image.
        side_px: Side of a block; those at the lower and right edges of an image are smaller.
    """

    def __init__(self, sizes: Sequence[tuple[int, int]], side_px: int) -> None:
        self.sizes, self.side_px = tuple(sizes), side_px
        self.grids = tuple((-(-height // side_px), -(-width // side_px)) for height, width in sizes)
        self._ends = list(accumulate(rows * cols for rows, cols in self.grids))

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def __getitem__(self, number: int) -> tuple[int, Window]:
        number = range(len(self))[number]
        image = bisect_right(self._ends, number)
        first = self._ends[image - 1] if image else 0
        return image, self.window(image, *divmod(number - first, self.grids[image][1]))

    def window(self, image: int, row: int, col: int) -> Window:
        """Window of the block at a row and a column of an image's blocks."""
        top, left, side = row * self.side_px, col * self.side_px, self.side_px
        height, width = self.sizes[image]
        return Window(top, left, min(side, height - top), min(side, width - left))
