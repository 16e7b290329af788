"""Places of crops in an image: each cell from which a crop holds a labelled pixel.

A place takes a byte, or a bit for each class; lists of places would take twenty times as much. So
places are numbered row by row, counted in chunks, and found when they are drawn.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from tilenet.data.crops import check_crop, has_class

CHUNK = 1 << 14  # places that are looked through for the one that is drawn
STRIP_CELLS = 1 << 22  # that are looked at at once


@dataclass(frozen=True, eq=False)
class CropPlaces:
    """The places of an image's crops.

    Attributes:
        classes_in_crops: Classes in the crop that begins at a cell, (planes, rows, columns) as in
            `Survey`: bits of classes, or one plane that is not 0 where anything is labelled.
    """

    classes_in_crops: NDArray[np.uint8]
    cell_px: int
    crop_px: int

    def __len__(self) -> int:
        return int(self._counts.sum())

    def __getitem__(self, number: int) -> tuple[int, int]:
        """Row and column of the crop's first pixel."""
        return self._place(self._counts, number, None)

    @cached_property
    def classes(self) -> dict[int, int]:
        """Number of places that hold a class, by class, for the classes that occur."""
        return {label: int(counts.sum()) for label, counts in self._counts_of.items()}

    def of_class(self, label: int, number: int) -> tuple[int, int]:
        """Return place `number` of those that hold a class, as `[number]` does of all places."""
        return self._place(self._counts_of[label], number, label)

    def reach_px(self) -> int:
        """Pixels that lie in at least one crop; beyond the image's edge too."""
        side = self.crop_px // self.cell_px
        rows, cols = self.classes_in_crops.shape[1:]
        # Along an axis with one place all crops cover the same pixels.
        times = (side if rows == 1 else 1) * (side if cols == 1 else 1)
        row_side, col_side = (1 if count == 1 else side for count in (rows, cols))
        covered, step = 0, max(row_side, STRIP_CELLS // cols)
        for first in range(0, rows + row_side - 1, step):
            last = min(first + step, rows + row_side - 1)
            # A cell is covered by the crops that begin up to `side` before it.
            top, bottom = max(0, first - row_side + 1), min(rows, last)
            places = np.bitwise_or.reduce(self.classes_in_crops[:, top:bottom]) != 0
            above = top - (first - row_side + 1)
            around = (above, last - bottom), (col_side - 1, col_side - 1)
            padded = np.pad(places, around).view(np.uint8)
            covered += int(np.count_nonzero(_in_boxes(padded, row_side, col_side)))
        return covered * times * self.cell_px**2

    @property
    def _flat(self) -> NDArray[np.uint8]:
        return self.classes_in_crops.reshape(len(self.classes_in_crops), -1)

    @cached_property
    def _counts(self) -> NDArray[np.int64]:
        """Places of each chunk."""
        every = self._flat
        firsts = range(0, every.shape[1], CHUNK)
        counts = (np.count_nonzero(np.bitwise_or.reduce(every[:, n : n + CHUNK])) for n in firsts)
        return np.fromiter(counts, np.int64)

    @cached_property
    def _counts_of(self) -> dict[int, NDArray[np.int64]]:
        """Places of each chunk that hold a class, by class."""
        every = self._flat
        occurring = np.bitwise_or.reduce(every, axis=1)[:, None]
        labels = [n for n in range(8 * len(every)) if has_class(occurring, n)]
        firsts = range(0, every.shape[1], CHUNK)
        counts = {label: np.zeros(len(firsts), np.int64) for label in labels}
        for chunk, first in enumerate(firsts):
            part = every[:, first : first + CHUNK]
            for label in labels:
                counts[label][chunk] = np.count_nonzero(has_class(part, label))
        return counts

    def _place(self, counts: NDArray[np.int64], number: int, label: int | None) -> tuple[int, int]:
        ends = np.cumsum(counts)
        if not 0 <= number < ends[-1]:
            raise IndexError(number)
        chunk = int(np.searchsorted(ends, number, side="right"))
        part = self._flat[:, chunk * CHUNK : (chunk + 1) * CHUNK]
        marked = np.bitwise_or.reduce(part) if label is None else has_class(part, label)
        place = np.flatnonzero(marked)[number - int(ends[chunk]) + int(counts[chunk])]
        row, col = divmod(chunk * CHUNK + int(place), self.classes_in_crops.shape[2])
        return row * self.cell_px, col * self.cell_px


def crop_places(
    classes_in_cells: NDArray[np.uint8], crop_px: int, cell_px: int, *, by_class: bool = False
) -> CropPlaces:
    """Places of crops of an image that hold a labelled pixel.

    Crops lie within the image's cells; where these are fewer than a crop's, the one place there is
    holds them all.

    Args:
        classes_in_cells: Cells as in `Survey`, (ceil(K / 8), ceil(H / c), ceil(W / c)).
        by_class: Whether the classes in crops are kept.

    Raises:
        TilenetError: The crop is not a multiple of the cells.
    """
    check_crop(crop_px, cell_px)
    planes, rows, cols = classes_in_cells.shape
    side = crop_px // cell_px
    inside = tuple(max(1, count - side + 1) for count in (rows, cols))
    classes_in_crops = np.empty((planes if by_class else 1, *inside), np.uint8)
    step = max(min(side, rows), STRIP_CELLS // cols)
    for first in range(0, inside[0], step):
        last = min(first + step, inside[0])
        part = classes_in_cells[:, first : min(last + side - 1, rows)]
        if by_class:
            for plane, target in zip(part, classes_in_crops[:, first:last], strict=True):
                target[:] = _in_boxes(plane, side, side)
        else:
            classes_in_crops[0, first:last] = _in_boxes(np.bitwise_or.reduce(part), side, side)
    return CropPlaces(classes_in_crops, cell_px, crop_px)


def _in_boxes(cells: NDArray[np.uint8], rows: int, cols: int) -> NDArray[np.uint8]:
    """The bits of all cells in each box of `rows` × `cols`, by the box's first cell.

    Boxes lie within the cells; where these are fewer along an axis, the one there is holds them
    all.
    """
    return np.asarray(_along_rows(_along_rows(cells, rows).T, cols).T)


def _along_rows(cells: NDArray[np.uint8], side: int) -> NDArray[np.uint8]:
    """The bits of each `side` rows in succession."""
    most, width = min(side, len(cells)), 1
    while width < most:  # from bits of `width` rows to bits of up to twice as many
        step = min(width, most - width)
        cells = cells[:-step] | cells[step:]
        width += step
    return cells
