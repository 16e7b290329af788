"""Make coarse pixels of blocks of fine ones; none depends on the window that it is read in.

GDAL's own averaging reads do: on a file with an alpha band GDAL 3.10 gave other values for the same
pixel in 64 of 200 random windows, by up to 240 of 255. So windows are read at the file's resolution
and averaged here; blocks at the lower and right edge may stand for fewer pixels.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from tilenet.errors import TilenetError

MOST_FACTOR = 4096  # a pixel that is read is the mean of its square


def factor_of(resolution: float | None, transform: Any, path: str) -> int:
    """Pixels of a file along a side of one that is read.

    Args:
        resolution: Pixel size to read at; None: the file's own.

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


def dtype_of_means(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """float32 where it holds all values of the dtype, else float64."""
    return np.dtype(np.float32 if np.can_cast(dtype, np.float32) else np.float64)


def block_mean(
    values: NDArray[Any], valid: NDArray[np.bool_], factor: int
) -> tuple[NDArray[Any], NDArray[np.bool_]]:
    """Mean of the valid pixels of each block of `factor` × `factor` pixels.

    Args:
        values: (C, H, W).
        valid: (H, W).

    Returns:
        Means (C, ceil(H / f), ceil(W / f)) in `dtype_of_means`, 0 where no pixel is valid, and
        whether one is.
    """
    dtype = dtype_of_means(values.dtype)
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
