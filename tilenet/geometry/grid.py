"""Grids: the places of a feature map's cells on the input's pixels."""

from dataclasses import dataclass, field, replace
from fractions import Fraction
from math import ceil

HALF = Fraction(1, 2)


@dataclass(frozen=True)
class Grid:
    """The places of a feature map's cells on the input's pixels.

    Cell i stands for the pixels from `origin + i · stride` on, `stride` of them: cells are placed
    by their number, not by the middle of the pixels they look at, which may lie between pixels.

    Attributes:
        stride: Distance between neighbouring cells, in input pixels; 0: a whole map.
        origin: First input pixel of cell 0.
        centred: Whether maps that lose or gain cells stand in the middle of the image; else their
            first cells stand for its first pixels.
    """

    stride: Fraction = Fraction(1)
    origin: Fraction = Fraction(0)
    centred: bool = field(default=True, compare=False)

    @property
    def whole(self) -> bool:
        """Whether the map is that of a `GlobalPool`: all tiles hold all its cells."""
        return self.stride == 0

    def cells(self, first: int, stop: int) -> tuple[int, int]:
        """First and last cell that stand for the pixels from `first` to the one before `stop`.

        The cell's first pixel decides. With none, the last is the one before the first.
        """
        low, high = ((pixel - self.origin) / self.stride for pixel in (first, stop))
        return ceil(low), ceil(high) - 1

    def first_cell(self, row: int, col: int) -> tuple[int, int]:
        """Row and column of the cell that stands for a pixel; of a whole map its first one."""
        return (0, 0) if self.whole else (int(row / self.stride), int(col / self.stride))

    def scaled(self, stride: Fraction, more: int) -> "Grid":
        """The grid of a map with cells of another stride, and `more` of them than fill this map.

        Half of them lie on each side of a centred one, so that maps of as many cells of one stride
        lie on each other, as sums of them take them.
        """
        shift = stride * more * HALF if self.centred else 0
        return replace(self, stride=stride, origin=self.origin - shift)


WHOLE = Grid(Fraction(0))
