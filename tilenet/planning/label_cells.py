"""What the survey's cells of labels say of windows and crops, before anything of them is read."""

import numpy as np
from numpy.typing import NDArray

from tilenet.geometry.symmetry import Symmetry
from tilenet.geometry.tiles import Window

__all__ = ["cells_in_boxes", "classes_in_crops", "has_class", "holds_labels"]


def holds_labels(
    own: Window,
    region: Window,
    symmetry: Symmetry,
    labelled: NDArray[np.bool_],
    alignment_px: int,
) -> bool:
    """Whether a window may hold a labelled pixel; False: it holds none.

    It may where a cell that it touches holds one, of which the pixel may lie outside the window:
    those of turned images need not lie on the grid of cells.

    Args:
        own: What a tile owns of the turned region; it may reach over its edges, where nothing is
            labelled.
        region: Pixels of the image that count as the image.
        symmetry: How they are turned.
        labelled: Whether each cell of the image holds a labelled pixel.
        alignment_px: Side of a cell.
    """
    source = symmetry.source(own, region.height, region.width)
    rows, cols = (
        slice(
            (start + max(first, 0)) // alignment_px,
            -(-(start + min(first + size, most)) // alignment_px),
        )
        for start, first, size, most in (
            (region.row, source.row, source.height, region.height),
            (region.col, source.col, source.width, region.width),
        )
    )
    return bool(labelled[rows, cols].any())


def cells_in_boxes(cells: NDArray[np.bool_], side: int) -> NDArray[np.int64]:
    """How many True cells lie in each square of `side` × `side`, by the square's first cell.

    Squares lie within the cells; where these are fewer than `side` along an axis, the one there is
    holds them all.
    """
    rows, cols = (max(1, count - side + 1) for count in cells.shape)
    # Sums over all windows at once, from the table of sums above and to the left of each cell.
    sums = np.pad(cells.astype(np.int64).cumsum(0).cumsum(1), ((1, 0), (1, 0)))
    below = np.minimum(np.arange(rows) + side, cells.shape[0])
    right = np.minimum(np.arange(cols) + side, cells.shape[1])
    return np.asarray(
        sums[np.ix_(below, right)]
        - sums[:rows][:, right]
        - sums[below][:, :cols]
        + sums[:rows, :cols]
    )


def classes_in_crops(
    classes_in_cells: NDArray[np.uint8],
    places: NDArray[np.int64],
    crop_px: int,
    alignment_px: int,
) -> NDArray[np.uint8]:
    """Which classes the crops at some places hold.

    Args:
        classes_in_cells: Which classes each cell of the image holds, a bit each: (ceil(K / 8),
            rows, columns).
        places: Rows and columns of the crops' origins, (N, 2), multiples of the alignment.

    Returns:
        (ceil(K / 8), N), bits as in the cells.
    """
    rows, cols = (places // alignment_px).T
    found = np.zeros((len(classes_in_cells), len(places)), np.uint8)
    for number in range(8 * len(classes_in_cells)):
        holds = has_class(classes_in_cells, number)
        if holds.any():
            inside = cells_in_boxes(holds, crop_px // alignment_px)[rows, cols] > 0
            found[number // 8] |= inside.astype(np.uint8) << np.uint8(number % 8)
    return found


def has_class(planes: NDArray[np.uint8], number: int) -> NDArray[np.bool_]:
    """Where the bit of a class is set."""
    return np.asarray((planes[number // 8] >> np.uint8(number % 8)) & np.uint8(1), np.bool_)
