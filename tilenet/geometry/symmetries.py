"""The eight symmetries of the square: a turned image, and where its windows lie in the source.

It is the turned image that is cut into tiles. So the window that a tile reads is mapped back to the
source, read there, and the pixels are turned. Beyond its edges an image is its reflection, and the
reflection of a turned image is the turned reflection: windows may reach over edges, whatever the
size, and each tile sees just what it would see of a whole image that was turned in memory.
"""

from dataclasses import dataclass
from typing import Any, TypeVar

from tilenet.geometry.windows import Window

T = TypeVar("T")  # a numpy array; this room imports none


@dataclass(frozen=True)
class Symmetry:
    """Swap rows with columns, or not; then flip.

    Attributes:
        transposed: Rows and columns are swapped, first.
        flips_rows: The last row becomes the first.
        flips_cols: The last column becomes the first.
    """

    transposed: bool = False
    flips_rows: bool = False
    flips_cols: bool = False

    def size(self, height: int, width: int) -> tuple[int, int]:
        """Height and width of the turned image."""
        return (width, height) if self.transposed else (height, width)

    def source(self, window: Window, height: int, width: int) -> Window:
        """Return the window of the source that a window of the turned image shows.

        Args:
            window: It may reach over the edges; then so does the result.
        """
        rows, cols = self.size(height, width)
        row = rows - window.row - window.height if self.flips_rows else window.row
        col = cols - window.col - window.width if self.flips_cols else window.col
        if self.transposed:
            return Window(col, row, window.width, window.height)
        return Window(row, col, window.height, window.width)

    @property
    def back(self) -> "Symmetry":
        """The symmetry that turns the turned image back."""
        if self.transposed:
            return Symmetry(True, self.flips_cols, self.flips_rows)
        return self

    def turn(self, array: T) -> T:
        """The source's pixels (…, H, W), turned; a view."""
        pixels: Any = array
        if self.transposed:
            pixels = pixels.swapaxes(-1, -2)
        rows = slice(None, None, -1 if self.flips_rows else 1)
        turned: T = pixels[..., rows, :: -1 if self.flips_cols else 1]
        return turned


AS_IS = Symmetry()


_FLIPS = tuple(Symmetry(False, rows, cols) for rows in (False, True) for cols in (False, True))


_QUARTERS = (
    AS_IS,
    Symmetry(True, True, False),
    Symmetry(False, True, True),
    Symmetry(True, False, True),
)


SYMMETRIES = tuple(
    Symmetry(transposed, flip.flips_rows, flip.flips_cols)
    for transposed in (False, True)
    for flip in _FLIPS
)


def symmetries(*, flips: bool, rotations: bool) -> tuple[Symmetry, ...]:
    """Return the symmetries of flips (4, with the half turn), of quarter turns (4), or both (8)."""
    if flips and rotations:
        return SYMMETRIES
    return _FLIPS if flips else _QUARTERS if rotations else (AS_IS,)
