"""Rivers and lakes: where the water is, whatever else the land holds."""

import numpy as np
from noise import Floats, Hashes, byte, hashed, line_noise, smooth_noise
from numpy.typing import NDArray

from tilenet.geometry.windows import Window

__all__ = ["lakes", "rivers"]

Mask = NDArray[np.bool_]

RIVER_PX = 1100  # from one river to the next
LAKE_PX = 420  # of the grid that lakes are drawn on, at most one per cell
LARGEST_PX = 120  # of a lake's radius, bays included


def rivers(seed: int, rows: Floats, cols: Floats, window: Window) -> tuple[Mask, Mask, Hashes]:
    """Rivers that wind from north to south.

    Args:
        rows: Bent row of each pixel, (H, W).
        cols: Bent column of each pixel, (H, W).

    Returns:
        Water, its banks, and the random bits of each pixel's nearest river.
    """
    first = (window.col - 2 * RIVER_PX) // RIVER_PX
    last = (window.col + window.width + 2 * RIVER_PX) // RIVER_PX
    distance = np.full(rows.shape, np.inf, np.float32)
    bits = np.zeros(rows.shape, np.uint64)
    for number in range(first, last + 1):
        own = hashed(seed, np.array([number]))
        middle, slope = _course(seed + 8 * number, number, window)
        # Divided by the slope's length, a river is as wide where it turns east as elsewhere.
        half = 9 + 9 * float(byte(own, 0)[0])
        off = np.abs(cols - middle[:, None]) / np.sqrt(1 + slope**2)[:, None] - np.float32(half)
        bits = np.where(off < distance, own, bits)
        distance = np.minimum(distance, off)
    return distance < 0, (distance >= 0) & (distance < 9), bits


def lakes(seed: int, window: Window) -> tuple[Mask, Hashes]:
    """Lakes and ponds with bays: water, and the random bits of each."""
    water = np.zeros((window.height, window.width), np.bool_)
    bits = np.zeros(water.shape, np.uint64)
    shore = smooth_noise(seed + 1, window, 34)
    rows = np.arange(window.row, window.row + window.height)[:, None]
    cols = np.arange(window.col, window.col + window.width)[None, :]
    reach = LARGEST_PX // LAKE_PX + 1
    for row in range(window.row // LAKE_PX - reach, rows[-1, 0] // LAKE_PX + reach + 1):
        for col in range(window.col // LAKE_PX - reach, cols[0, -1] // LAKE_PX + reach + 1):
            own = hashed(seed, np.array([row]), np.array([col]))
            share = [float(byte(own, number)[0]) for number in range(4)]
            if share[0] > 0.55:
                continue
            radius = 14 + 50 * share[1] ** 2
            y, x = (row + share[2]) * LAKE_PX, (col + share[3]) * LAKE_PX
            down, right = (rows - y) / radius, (cols - x) / radius
            if min(np.abs(down).min(), np.abs(right).min()) * radius > LARGEST_PX:
                continue
            lake = np.hypot(down, right).astype(np.float32) + 0.9 * (shore - 0.5) < 1
            bits[lake] = own
            water |= lake
    return water, bits


def _course(seed: int, number: int, window: Window) -> tuple[Floats, Floats]:
    """Column of a river's middle in each row, and its slope, from one more row at either end."""
    start, length = window.row - 1, window.height + 2
    middle = (
        line_noise(seed, start, length, 700) * 600 + line_noise(seed + 1, start, length, 170) * 130
    )
    middle = middle + np.float32((number + 0.2) * RIVER_PX)
    return middle[1:-1], (middle[2:] - middle[:-2]) / 2
