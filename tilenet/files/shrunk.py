"""Make a picture smaller by less than a half: means of what lies below each of its pixels."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["Cells", "cells_below", "mean_below", "middles"]

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
        rows: Of the pixels that are wanted.
        cols: Likewise.

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
