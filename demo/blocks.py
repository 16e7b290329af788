"""Blocks of land between main roads: Voronoi cells of a jittered grid of sites."""

from dataclasses import dataclass

import numpy as np
from noise import Floats, Hashes, byte, hashed
from numpy.typing import NDArray

from tilenet.geometry.windows import Window

__all__ = ["Blocks", "find_blocks"]

JITTER = 0.8  # of the grid's spacing; below 1, blocks keep a decent size


@dataclass(frozen=True)
class Blocks:
    """The block of each pixel of a window.

    Attributes:
        bits: Random bits of each block, by number.
        number: Which block a pixel lies in, (H, W); numbers mean something in this window only.
        edge_px: Distance to the nearest border between blocks, (H, W).
        border: Random bits of that border, the same from both sides, (H, W).
    """

    bits: Hashes
    number: NDArray[np.int32]
    edge_px: Floats
    border: Hashes


def find_blocks(seed: int, window: Window, rows: Floats, cols: Floats, spacing: int) -> Blocks:
    """Find the blocks of a window whose pixels lie at `rows`, `cols` (H, W), warped or not.

    Each site looks at the pixels up to two sites away only, a box that does not depend on the
    window, so windows join seamlessly.
    """
    reach = 2 * spacing
    bits, ys, xs = _sites(seed, window, spacing, reach)
    nearest = np.full(rows.shape, np.inf, np.float32)
    second = nearest.copy()
    number = np.zeros(rows.shape, np.int32)
    other = np.zeros(rows.shape, np.int32)
    for site, (y, x) in enumerate(zip(ys.tolist(), xs.tolist(), strict=True)):
        cell_row, cell_col = int(y // spacing) * spacing, int(x // spacing) * spacing
        top = max(cell_row - reach - window.row, 0)
        left = max(cell_col - reach - window.col, 0)
        bottom = min(cell_row + spacing + reach - window.row, window.height)
        right = min(cell_col + spacing + reach - window.col, window.width)
        if top >= bottom or left >= right:
            continue
        box = slice(top, bottom), slice(left, right)
        distance = (rows[box] - np.float32(y)) ** 2 + (cols[box] - np.float32(x)) ** 2
        first = distance < nearest[box]
        later = ~first & (distance < second[box])
        second[box] = np.where(first, nearest[box], np.where(later, distance, second[box]))
        other[box] = np.where(first, number[box], np.where(later, site, other[box]))
        nearest[box] = np.where(first, distance, nearest[box])
        number[box] = np.where(first, site, number[box])
    apart = np.hypot(ys[number] - ys[other], xs[number] - xs[other])
    edge = (second - nearest) / (2 * np.maximum(apart, 1)).astype(np.float32)
    return Blocks(bits, number, edge, bits[number] ^ bits[other])


def _sites(
    seed: int, window: Window, spacing: int, reach: int
) -> tuple[Hashes, NDArray[np.float64], NDArray[np.float64]]:
    """Random bits, row and column of all sites that a pixel of the window may see."""
    rows = np.arange(
        (window.row - reach) // spacing, (window.row + window.height + reach) // spacing + 1
    )
    cols = np.arange(
        (window.col - reach) // spacing, (window.col + window.width + reach) // spacing + 1
    )
    bits = hashed(seed, rows[:, None], cols[None, :])
    y = (rows[:, None] + 0.5 + JITTER * (byte(bits, 0) - 0.5)) * spacing
    x = (cols[None, :] + 0.5 + JITTER * (byte(bits, 1) - 0.5)) * spacing
    return bits.ravel(), y.ravel(), x.ravel()
