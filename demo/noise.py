"""Random numbers that belong to places: the same pixel gets the same ones in every window.

Every number is a hash of a seed and whole-numbered coordinates, so a scene that is made window by
window has no seams, whatever the windows, and needs no memory beyond one window.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from tilenet.geometry.windows import Window

__all__ = ["blend", "byte", "fractal_noise", "hashed", "line_noise", "smooth_noise", "uniform"]

Floats = NDArray[np.float32]
Hashes = NDArray[np.uint64]

GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def hashed(seed: int, *parts: Any) -> Hashes:
    """64 random bits for each place (arrays of whole numbers, broadcast); splitmix64's mixer."""
    bits: Hashes = np.full((1,) * max(np.ndim(part) for part in parts), seed, np.uint64)
    for part in parts:
        # Negative coordinates wrap around, as two's complement does.
        bits = bits ^ np.asarray(part).astype(np.uint64)
        bits = bits * GOLDEN + GOLDEN
        bits ^= bits >> np.uint64(30)
        bits *= np.uint64(0xBF58476D1CE4E5B9)
        bits ^= bits >> np.uint64(27)
        bits *= np.uint64(0x94D049BB133111EB)
        bits ^= bits >> np.uint64(31)
    return bits


def uniform(bits: Hashes) -> Floats:
    """Numbers in [0, 1) from the upper 24 bits."""
    return np.asarray((bits >> np.uint64(40)).astype(np.float32) * np.float32(2**-24))


def byte(bits: Hashes, number: int) -> Floats:
    """Numbers in [0, 1] from the byte `number` (0 to 7): eight draws out of one hash."""
    drawn = (bits >> np.uint64(8 * number)).astype(np.uint8)
    return np.asarray(drawn.astype(np.float32) / np.float32(255))


def smooth_noise(seed: int, window: Window, cell: float) -> Floats:
    """Value noise in [0, 1): random nodes `cell` px apart, blended smoothly in between."""
    row, row_share = _nodes(window.row, window.height, cell)
    col, col_share = _nodes(window.col, window.width, cell)
    rows, cols = (np.arange(int(nodes[0]), int(nodes[-1]) + 2) for nodes in (row, col))
    nodes = uniform(hashed(seed, rows[:, None], cols[None, :]))
    above, below = nodes[row - row[0]], nodes[row - row[0] + 1]
    lines = above + (below - above) * row_share[:, None]
    left, right = lines[:, col - col[0]], lines[:, col - col[0] + 1]
    return np.asarray(left + (right - left) * col_share)


def fractal_noise(seed: int, window: Window, cell: float, octaves: int) -> Floats:
    """Value noise of several scales, each half as wide and half as strong as the one before."""
    total = np.zeros((window.height, window.width), np.float32)
    for octave in range(octaves):
        total += smooth_noise(seed + octave, window, cell / 2**octave) * np.float32(0.5**octave)
    return np.asarray(total / np.float32(2 - 0.5 ** (octaves - 1)))


def line_noise(seed: int, start: int, length: int, cell: float) -> Floats:
    """Value noise along one axis."""
    return smooth_noise(seed, Window(start, 0, length, 1), cell)[:, 0]


def blend(values: Floats, low: float, high: float) -> Floats:
    """0 below `low`, 1 above `high`, smooth in between."""
    share = np.clip((values - np.float32(low)) / np.float32(high - low), 0, 1)
    return np.asarray(share * share * (3 - 2 * share))


def _nodes(start: int, length: int, cell: float) -> tuple[NDArray[np.int64], Floats]:
    """The node before each pixel, and how far on towards the next one it lies."""
    place = np.arange(start, start + length) / cell
    node = np.floor(place)
    share = (place - node).astype(np.float32)
    return node.astype(np.int64), share * share * (3 - 2 * share)
