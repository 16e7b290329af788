"""Make coarse pixels of blocks of fine ones; none depends on the window that it is read in.

GDAL's own averaging reads do: on a file with an alpha band GDAL 3.10 gave other values for the same
pixel in 64 of 200 random windows, by up to 240 of 255. So windows are read at the file's resolution
and averaged here; blocks at the lower and right edge may stand for fewer pixels.

In which parts every n-th pixel of a large window is read.

GDAL takes such pixels band by band, and of files that hold bands pixel by pixel it decodes every
block once for each band that its cache has lost it for. Parts that the cache holds are decoded once
(measured: 10 000² × 4 in blocks of 512² and its labels, 9.4 s as a whole and 4.8 s in parts).

Make a picture smaller by less than a half: means of what lies below each of its pixels.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from tilenet.errors import TilenetError
from tilenet.geometry.windows import Window

__all__ = [
    "Cells",
    "block_mean",
    "block_mode",
    "cells_below",
    "factor_of",
    "mean_below",
    "middles",
    "sample_parts",
]

MOST_FACTOR = 4096  # a pixel that is read is the mean of its square


def factor_of(resolution: float | None, transform: Any, path: str) -> int:
    """Pixels of a file along a side of one that is read.

    Args:
        resolution: Pixel size to read at; None: the file's own.
        transform: Transform of the file.
        path: The file.

    Raises:
        TilenetError: It is no whole multiple of the file's own, within 5 %, or too large.
    """
    if resolution is None:
        return 1
    own = float(np.hypot(transform.a, transform.d))
    usable = resolution > 0 and np.isfinite(resolution)
    factor = max(1, round(resolution / own)) if usable else 0
    if not 0 < factor <= MOST_FACTOR or abs(factor * own / resolution - 1) > 0.05:
        below = min(int(resolution / own), MOST_FACTOR - 1) if usable else 0
        factors = sorted({max(1, below), max(1, below + 1)})
        legal = " or ".join(f"{f * own:.6g}" for f in factors)
        raise TilenetError(
            f"resolution must be a whole multiple of the raster's own, within 5 % (resolution: "
            f"{resolution:g}, {path}: {own:.6g}); nearest: {legal}"
        )
    return factor


def block_mean(
    values: NDArray[Any], valid: NDArray[np.bool_], factor: int
) -> tuple[NDArray[Any], NDArray[np.bool_]]:
    """Mean of the valid pixels of each block of `factor` × `factor` pixels.

    Args:
        values: (C, H, W).
        valid: (H, W).

    Returns:
        Means (C, ceil(H / f), ceil(W / f)) in float32 (float64 for float64), 0 where no pixel is
        valid, and whether one is.
    """
    dtype = np.float64 if values.dtype == np.float64 else np.float32
    # A power of two, so that no digit changes: sums of the largest numbers overflow.
    scale = 2.0 ** -(factor**2).bit_length() if dtype == np.float64 else 1.0
    values, valid = _whole_blocks(values, factor), _whole_blocks(valid, factor)
    shape = valid.shape[0] // factor, valid.shape[1] // factor
    total = np.zeros((values.shape[0], *shape), np.float64)
    count = np.zeros(shape, np.int64)
    # In this order for every block, so that rounding does not depend on the window either.
    for row in range(factor):
        for col in range(factor):
            counted = valid[row::factor, col::factor]
            total += np.where(counted, values[:, row::factor, col::factor], 0) * scale
            count += counted
    return (total / np.maximum(count, 1) / scale).astype(dtype), count > 0


def block_mode(labels: NDArray[Any], factor: int, ignore: int) -> NDArray[Any]:
    """Most frequent value of each block, `ignore` aside; the smallest of several such.

    Args:
        labels: (H, W).

    Returns:
        (ceil(H / f), ceil(W / f)); `ignore` where a block holds nothing else.
    """
    labels = _whole_blocks(labels, factor, ignore)
    shape = labels.shape[0] // factor, labels.shape[1] // factor
    best = np.full(shape, ignore, labels.dtype)
    most = np.zeros(shape, np.int64)
    for value in np.unique(labels[labels != ignore]):
        count = np.zeros(shape, np.int64)
        for row in range(factor):
            for col in range(factor):
                count += labels[row::factor, col::factor] == value
        best = np.where(count > most, value, best)
        most = np.maximum(count, most)
    return best


def _whole_blocks(array: NDArray[Any], factor: int, fill: int = 0) -> NDArray[Any]:
    height, width = array.shape[-2:]
    edges = [(0, 0)] * (array.ndim - 2) + [(0, -height % factor), (0, -width % factor)]
    return np.pad(array, edges, constant_values=fill)


PART_PX = 1 << 21  # of the file: 16 MB of 4 bands of 16 bits, a quarter of the cache


def sample_parts(
    window: Window, size: tuple[int, int], block: tuple[int, int]
) -> list[tuple[slice, slice, Window]]:
    """Rows and columns of the picture, and the part of the window that they are taken from.

    One part where pixels do not divide the window evenly: others would be taken near its edges.

    Args:
        window: Window of the file's pixels.
        size: Rows and columns that are taken of it.
        block: Rows and columns of the file's blocks; no part is narrower, save the last.
    """
    if window.height % size[0] or window.width % size[1]:
        return [(slice(0, size[0]), slice(0, size[1]), window)]
    high, wide = window.height // size[0], window.width // size[1]  # pixels that one is taken of
    rows = max(1, block[0] // high)
    cols = max(PART_PX // (rows * high) // wide, -(-block[1] // wide))
    return [
        (
            slice(row, row + count),
            slice(col, col + across),
            Window(window.row + row * high, window.col + col * wide, count * high, across * wide),
        )
        for row in range(0, size[0], rows)
        for col in range(0, size[1], cols)
        for count in [min(rows, size[0] - row)]
        for across in [min(cols, size[1] - col)]
    ]


LEAST_COVER = 1e-6  # of a pixel's area; less is rounding

Cells = tuple[NDArray[np.int64], NDArray[np.float64]]


def cells_below(length: int, count: int) -> Cells:
    """Which of `length` pixels lie below each of `count` along an axis, and the share of each.

    Returns:
        Places and shares, (count, 3); the shares of a pixel add up to 1.

    Args:
        length: At least `count`, and at most twice that.
        count: Pixels of the picture.
    """
    begins = np.arange(count) * length / count
    cells = np.floor(begins).astype(np.int64)[:, None] + np.arange(3)
    ends = np.minimum(begins[:, None] + length / count, cells + 1)
    covered = np.clip(ends - np.maximum(begins[:, None], cells), 0, None)
    return np.minimum(cells, length - 1), covered / covered.sum(axis=1, keepdims=True)


def middles(length: int, count: int) -> NDArray[np.int64]:
    """Which of `length` pixels lies below the middle of each of `count`."""
    return np.asarray((2 * np.arange(count) + 1) * length // (2 * count), np.int64)


def mean_below(
    values: NDArray[Any], valid: NDArray[np.bool_], rows: Cells, cols: Cells
) -> tuple[NDArray[Any], NDArray[np.bool_]]:
    """Means of the valid pixels below each pixel, by the area that they share with it.

    Args:
        values: (C, H, W).
        valid: (H, W).
        rows: Rows of the pixels that are wanted.
        cols: Columns of the pixels that are wanted.

    Returns:
        Means (C, h, w) in float32 (float64 for float64), 0 where none is valid, and whether one is.
    """
    dtype = np.float64 if values.dtype == np.float64 else np.float32
    planes = np.concatenate([np.where(valid, values, 0), valid[None]], dtype=np.float64)
    (places, shares), (across, widths) = rows, cols
    high = np.zeros((len(planes), len(places), planes.shape[2]))
    for k in range(places.shape[1]):
        high += planes[:, places[:, k]] * shares[:, k, None]
    total = np.zeros((len(planes), len(places), len(across)))
    for k in range(across.shape[1]):
        total += high[:, :, across[:, k]] * widths[:, k]
    cover = total[-1]
    found: NDArray[np.bool_] = cover > LEAST_COVER
    return (total[:-1] / np.where(found, cover, 1)).astype(dtype), found
