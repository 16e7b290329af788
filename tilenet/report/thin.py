"""Make curves of any length short: what a column of pixels can show of them."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

__all__ = ["Columns", "thinned"]


@dataclass(frozen=True)
class Columns:
    """Values in columns of a chart, those without values left out.

    Attributes:
        x: Mean place of a column's values.
        low: Smallest of them.
        high: Largest.
        mean: Their mean.
    """

    x: NDArray[np.float64]
    low: NDArray[np.float64]
    high: NDArray[np.float64]
    mean: NDArray[np.float64]


def thinned(x: NDArray[np.float64], y: NDArray[np.float64], most: int) -> Columns:
    """Values in at most `most` columns of equal width; one each where there are no more values.

    Args:
        x: Rising.
        y: Values; what is not finite is left out.
        most: Columns.
    """
    finite = np.isfinite(x) & np.isfinite(y)
    x, y = x[finite], y[finite]
    if len(x) <= most:
        return Columns(x, y, y, y)
    width = (x[-1] - x[0]) / most or 1.0
    place = np.minimum(((x - x[0]) / width).astype(np.int64), most - 1)
    begins = np.flatnonzero(np.diff(place, prepend=-1))
    counts = np.diff(begins, append=len(x))
    return Columns(
        np.add.reduceat(x, begins) / counts,
        np.minimum.reduceat(y, begins),
        np.maximum.reduceat(y, begins),
        np.add.reduceat(y, begins) / counts,
    )
