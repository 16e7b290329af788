"""Find out from the survey's cells of labels whether windows hold labels, before they are read."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from tilenet.data.blocks import Blocks
from tilenet.errors import TilenetError
from tilenet.geometry.symmetries import Symmetry
from tilenet.geometry.windows import Window

# Of the cells of all images, on each rank. With 8 classes that is 185 000² px in cells of 16 px.
MOST_CELL_BYTES = 1 << 27

MOST_UNITS = 1 << 16  # of the alignment that are tried as a cell's side


def cell_side(
    sizes: Sequence[tuple[int, int]], num_classes: int, alignment_px: int, crop_px: int | None
) -> int:
    """Return the side of the cells for which the survey keeps the classes labelled in them.

    It is the alignment, unless all cells together would take more than `MOST_CELL_BYTES`: then it
    is the smallest multiple with which they do not and which divides the crops' side.

    Args:
        sizes: Height and width of each image.
        crop_px: Side of crops, which start on cells; None: whole images are trained on.

    Raises:
        TilenetError: A crop is no multiple of the alignment, or smaller than any such cell.
    """
    if crop_px is not None:
        check_crop(crop_px, alignment_px)
    of_classes = -(-num_classes // 8)
    side = alignment_px
    while (num_bytes := of_classes * len(Blocks(sizes, side))) > MOST_CELL_BYTES:
        if crop_px is None:
            side *= 2
        elif side == crop_px:
            height, width = max(sizes, key=lambda size: size[0] * size[1])
            raise TilenetError(
                f"where crops may lie is kept in at most {MOST_CELL_BYTES >> 20} MiB (crop_px: "
                f"{crop_px}, classes: {num_classes}, images: {len(sizes)}, the largest {height} × "
                f"{width} px: {num_bytes >> 20} MiB); train on a part of the images (bbox, "
                "window), on larger crops, or on fewer classes"
            )
        else:
            side = _next_divisor(crop_px, side, alignment_px)
    return side


def _next_divisor(crop_px: int, side: int, alignment_px: int) -> int:
    """Return the smallest multiple of the alignment above `side` that divides the crops' side."""
    whole = crop_px // alignment_px
    units = range(side // alignment_px + 1, min(whole, MOST_UNITS))
    return next((unit for unit in units if whole % unit == 0), whole) * alignment_px


def check_crop(crop_px: int, alignment_px: int) -> None:
    """Refuse crops that do not fit the network.

    Raises:
        TilenetError: The crop is no multiple of the alignment.
    """
    if crop_px < alignment_px or crop_px % alignment_px:
        raise TilenetError(
            f"crop_px must be a multiple of the network's total stride (crop_px: {crop_px}, "
            f"stride: {alignment_px}); nearest: "
            f"{max(alignment_px, round(crop_px / alignment_px) * alignment_px)}"
        )


def holds_labels(
    own: Window,
    region: Window,
    symmetry: Symmetry,
    cells: NDArray[np.uint8] | NDArray[np.bool_],
    cell_px: int,
) -> bool:
    """Whether a window may hold a labelled pixel; False: it holds none.

    It may where a cell that it touches holds one. That pixel may lie outside the window, since
    windows of turned images need not lie on the grid of cells.

    Args:
        own: A tile's own window of the turned region; it may reach over the region's edges, where
            nothing is labelled.
        region: Pixels of the image that count as the image.
        cells: Cells of the image, not 0 where one holds a labelled pixel, (…, rows, columns).
    """
    source = symmetry.source(own, region.height, region.width)
    rows, cols = (
        slice((start + max(first, 0)) // cell_px, -(-(start + min(first + size, most)) // cell_px))
        for start, first, size, most in (
            (region.row, source.row, source.height, region.height),
            (region.col, source.col, source.width, region.width),
        )
    )
    return bool(cells[..., rows, cols].any())


def has_class(planes: NDArray[np.uint8], number: int) -> NDArray[np.bool_]:
    """Return a mask of the cells in which the bit of a class is set."""
    return np.asarray((planes[number // 8] >> np.uint8(number % 8)) & np.uint8(1), np.bool_)
